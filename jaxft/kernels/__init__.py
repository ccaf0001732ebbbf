"""GPU kernels of jaxft, one subpackage for each backend."""
