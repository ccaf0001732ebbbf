"""Cached `jaxft.bundle` of a model whose arrays may be replaced between calls."""

import weakref
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxft.ops.bundle import Rebuild, bundle_with


def _concatenated(vectors: list[jax.Array]) -> jax.Array:
    """Concatenates vectors on the host. On the device, XLA would compile a program for it, which takes longer."""
    is_committed = any(x.committed for x in vectors)
    return jax.device_put(np.concatenate(jax.device_get(vectors)), vectors[0].sharding if is_committed else None)


class Bundled:
    """Callable that bundles a model and keeps the joined vectors until an array of the model is replaced."""

    def __init__(self, implementation: str | None) -> None:
        self.implementation = "xla" if implementation == "xla" else None
        # Structure of the model, references to its arrays, the joined arrays, and the function that rebuilds the model.
        # A single attribute, because several threads may compute embeddings. The references are weak, so that arrays
        # that the model no longer has are freed.
        self._last: tuple[Any, list[weakref.ref[jax.Array]], list[jax.Array], Rebuild] | None = None
        # By device: references to the arrays, and their copies there.
        self._copies: dict[jax.Device, tuple[list[weakref.ref[jax.Array]], list[jax.Array]]] = {}

    def __call__(self, model: nnx.Module) -> tuple[list[Any], Rebuild]:
        """Returns the arrays of `model` and the function that rebuilds the model from them, as `jaxft.bundle` does."""
        leaves, structure = jax.tree.flatten(model)
        if last := self._last:
            before, seen, joined, rebuild = last
            same = len(leaves) == len(seen) and all(ref() is x for ref, x in zip(seen, leaves, strict=True))
            if same and structure == before:
                return [*(leaves[i] for i in rebuild.order[: rebuild.whole]), *joined], rebuild
        arrays, rebuild = bundle_with(jax.tree.unflatten(structure, leaves), self.implementation, _concatenated)
        if last and last[3] == rebuild:
            rebuild = last[3]  # JAX finds a compiled program faster by the same object
        self._last = structure, [weakref.ref(x) for x in leaves], arrays[rebuild.whole :], rebuild
        return arrays, rebuild

    def on(self, device: jax.Device, arrays: list[Any]) -> list[Any]:
        """Returns the copies of arrays on a device. They are kept until other arrays are copied there."""
        seen, copies = self._copies.get(device, ([], []))
        if len(seen) != len(arrays) or not all(ref() is x for ref, x in zip(seen, arrays, strict=True)):
            self._copies.pop(device, None)  # frees the memory first
            copies = jax.device_put(arrays, device)
            self._copies[device] = [weakref.ref(x) for x in arrays], copies
        return copies
