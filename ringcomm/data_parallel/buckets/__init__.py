"""Flat buffers of parameters and gradients, and the collectives of the ranks that share them."""
