"""Optimizers over shards of parameters, the norm and clipping of gradients, and the gradient scaler."""
