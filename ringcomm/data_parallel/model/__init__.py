"""A wrapped module: its parameters in buckets, when the parameters are gathered and their gradients reduced, and how
the parameters look to the user."""
