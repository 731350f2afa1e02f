"""Wrong arguments for everything public, and how each must be refused."""
