"""What every kind of parallel training knows about a user's module, its parameters and its arguments."""
