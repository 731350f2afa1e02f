"""What runs on the emulated CUDA engine, and the reader of the kernels' machine code."""
