"""Arrays of any library (torch, NumPy, CuPy, DLPack) as address, shape, dtype, device and stream."""
