"""The arrays of a model that may change between calls, as few as `jaxft.bundle` makes them."""

import weakref
from typing import Any

import jax
from flax import nnx

from jaxft.ops.bundle import Rebuild, bundle


class Bundled:
    """Calls `bundle`, but keeps the joined vectors, until an array of the model is another one."""

    def __init__(self, implementation: str | None) -> None:
        self._implementation = "xla" if implementation == "xla" else None
        # The model's structure, its arrays, the joined ones of them, and what rebuilds it. In one object, since several
        # threads may compute embeddings; without holding arrays that the model does not have any more.
        self._last: tuple[Any, list[weakref.ref[jax.Array]], list[jax.Array], Rebuild] | None = None

    def __call__(self, model: nnx.Module) -> tuple[list[Any], Rebuild]:
        leaves, structure = jax.tree.flatten(model)
        if last := self._last:
            before, seen, joined, rebuild = last
            same = len(leaves) == len(seen) and all(ref() is x for ref, x in zip(seen, leaves, strict=True))
            if same and structure == before:
                return [*(leaves[i] for i in rebuild.order[: rebuild.whole]), *joined], rebuild
        arrays, rebuild = bundle(jax.tree.unflatten(structure, leaves), implementation=self._implementation)
        if last and last[3] == rebuild:
            rebuild = last[3]  # programs compiled for the same object are found faster
        self._last = structure, [weakref.ref(x) for x in leaves], arrays[rebuild.whole :], rebuild
        return arrays, rebuild
