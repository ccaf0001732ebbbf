"""Kernels written in Pallas for its Triton backend."""
