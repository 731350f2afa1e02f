"""A user's module in buckets: how its parameters are divided, when they are gathered and their gradients reduced, and
what the user sees of them."""
