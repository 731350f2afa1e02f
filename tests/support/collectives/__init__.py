"""Random programs of collectives, and the ranks that run them."""
