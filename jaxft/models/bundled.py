"""The arrays of a model that may change between calls, as few as `jaxft.bundle` makes them."""

import operator

import jax
from flax import nnx

from jaxft.ops.bundle import Rebuild, bundle


class Bundled:
    """Calls `bundle`; but if no array of the model is another one than the time before, it has kept the result."""

    def __init__(self, implementation: str | None) -> None:
        self._implementation = "xla" if implementation == "xla" else None
        # One object, since several threads may compute embeddings.
        self._last: tuple[list[jax.Array], list[jax.Array], Rebuild] | None = None

    def __call__(self, model: nnx.Module) -> tuple[list[jax.Array], Rebuild]:
        leaves, last = jax.tree.leaves(model), self._last
        if last is None or len(last[0]) != len(leaves) or not all(map(operator.is_, last[0], leaves)):
            arrays, rebuild = bundle(model, implementation=self._implementation)
            # The same object, if it is equal: programs compiled for it are found faster.
            last = self._last = leaves, arrays, last[2] if last is not None and last[2] == rebuild else rebuild
        return last[1:]
