"""Tensor and sequence parallel: layers cut over the ranks of a communicator."""
