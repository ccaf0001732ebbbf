"""MLIR dialects that jaxlib has no Python module for. `jaxft.kernels.triton.common` adds this package to the search."""
