"""A user's module, its parameters and training arguments, as all kinds of parallel training use them."""
