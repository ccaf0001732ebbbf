"""The cuDNN backend, through `jax.nn`."""
