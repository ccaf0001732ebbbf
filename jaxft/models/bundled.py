"""Cached `jaxft.bundle` of a model whose arrays may be replaced between calls."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jaxft.ops.bundle import Rebuild, bundle_with


def _concatenated(vectors: list[jax.Array]) -> jax.Array:
    """Concatenates vectors on the host. On the device, XLA would compile a program for it, which takes longer."""
    is_committed = any(x.committed for x in vectors)
    return jax.device_put(np.concatenate(jax.device_get(vectors)), vectors[0].sharding if is_committed else None)


def _are(arrays: list[Any], seen: list[weakref.ref[Any]]) -> bool:
    """Returns whether the references point to exactly these arrays."""
    return len(arrays) == len(seen) and all(ref() is x for ref, x in zip(seen, arrays, strict=True))


class _Part(NamedTuple):
    """A module of a model, and what it consisted of. No array is kept alive.

    An identity stands for its object only while the object lives. A dead array or module is a change, and other
    attributes are kept alive. If a new variable has the identity of a freed one, either its array differs, which is
    noticed, or the result is the same.
    """

    module: weakref.ref[nnx.Pytree]
    names: list[str]  # of all attributes
    identities: list[int]  # of all attributes
    arrays: list[tuple[str, weakref.ref[Any]]]  # the attributes that are variables, and their arrays
    others: list[Any]  # the attributes that are neither variables nor modules

    def is_unchanged(self) -> bool:
        """Returns whether the module is the same and has the same attributes and arrays."""
        if (module := self.module()) is None:
            return False
        attributes = vars(module)
        return (
            [*attributes] == self.names
            and [*map(id, attributes.values())] == self.identities
            and all((x := ref()) is not None and attributes[name].get_raw_value() is x for name, ref in self.arrays)
        )


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


def _parts(model: nnx.Module) -> list[_Part]:
    """Returns the modules of a model, the model first. Empty if anything but an array in a variable may change."""
    found: list[_Part] = []
    waiting: list[Any] = [model]
    for module in waiting:
        attributes = vars(module)
        part = _Part(weakref.ref(module), [*attributes], [*map(id, attributes.values())], [], [])
        for name, value in attributes.items():
            array = value.get_raw_value() if isinstance(value, nnx.Variable) else None
            if _is_array(array):
                part.arrays.append((name, weakref.ref(array)))
            elif isinstance(value, nnx.Pytree):
                if not any(value is other for other in waiting):
                    waiting.append(value)
            elif isinstance(value, nnx.Variable | list | dict | set) or any(map(_is_array, jax.tree.leaves(value))):
                return []
            else:
                part.others.append(value)
        found.append(part)
    return found


def _are_unchanged(parts: list[_Part]) -> bool:
    return all(map(_Part.is_unchanged, parts))


class _Last(NamedTuple):
    """The arrays that a call of `Bundled` found, as weak references, so that a replaced array is freed."""

    structure: Any
    leaves: list[weakref.ref[Any]]
    joined: list[jax.Array]
    rebuild: Rebuild
    parts: list[_Part]

    def is_of(self, model: nnx.Module) -> bool:
        """Returns whether the arrays are of this model, if that can be told without flattening the model."""
        return bool(self.parts) and self.parts[0].module() is model

    def is_current(self) -> bool:
        """Returns whether the model still has these arrays."""
        return _are_unchanged(self.parts)

    def arrays(self) -> list[Any]:
        """Returns what `bundle` returned, unless an array is freed by now."""
        return [*(self.leaves[i]() for i in self.rebuild.order[: self.rebuild.whole]), *self.joined]


class Bundled:
    """Callable that bundles a model and keeps the joined vectors until an array of the model is replaced."""

    def __init__(self, implementation: str | None) -> None:
        self.implementation = "xla" if implementation == "xla" else None
        self._last: _Last | None = None  # a single attribute, because several threads may compute embeddings
        self._confirmed: _Last | None = None  # what a call found unchanged
        # By device: references to the arrays, and their copies there.
        self._copies: dict[jax.Device, tuple[list[weakref.ref[jax.Array]], list[jax.Array]]] = {}

    def __call__(self, model: nnx.Module) -> tuple[list[Any], Rebuild]:
        """Returns the arrays of `model` and the function that rebuilds the model from them, as `jaxft.bundle` does."""
        last = self._last
        if last and last.is_of(model):
            arrays = last.arrays()  # before the comparison, so that none of them is freed after it
            if last.is_current():
                self._confirmed = last
                return arrays, last.rebuild
        parts = _parts(model) if last is None or last.parts else []
        leaves, structure = jax.tree.flatten(model)
        if not _are_unchanged(parts):  # another thread has replaced something
            return self(model)
        refs = [weakref.ref(x) for x in leaves]
        if last and structure == last.structure and _are(leaves, last.leaves):
            self._last = last._replace(parts=parts)
            return last.arrays(), last.rebuild
        arrays, rebuild = bundle_with(jax.tree.unflatten(structure, leaves), self.implementation, _concatenated)
        if last and last.rebuild == rebuild:
            rebuild = last.rebuild  # JAX finds a compiled program faster by the same object
        self._last = _Last(structure, refs, arrays[rebuild.whole :], rebuild, parts)
        return arrays, rebuild

    def assumed(self, model: nnx.Module) -> tuple[list[Any], Rebuild, Callable[[], bool]] | None:
        """Returns the arrays and the `Rebuild` of the last call without comparing the model, and a function.

        The function compares the model. It returns whether the model still has these arrays.

        Returns None if the last two calls were not for this model, or if the model changed between them. So a model in
        training is compared first.
        """
        last = self._last
        if last is None or last is not self._confirmed or not last.is_of(model):
            return None
        arrays = last.arrays()
        return None if any(x is None for x in arrays) else (arrays, last.rebuild, last.is_current)

    def on(self, device: jax.Device, arrays: list[Any]) -> list[Any]:
        """Returns the copies of arrays on a device. They are kept until other arrays are copied there.

        If a NumPy array is among them, each call copies all arrays again, because NumPy arrays may change in place.
        """
        seen, copies = self._copies.get(device, ([], []))
        if not _are(arrays, seen) or any(isinstance(x, np.ndarray) for x in arrays):
            self._copies.pop(device, None)  # frees the memory first
            # JAX leaves an Explicit mesh in the types of the copies, but not in the types of their shards.
            copies = [x.addressable_data(0) for x in jax.device_put(arrays, device)]
            self._copies[device] = [weakref.ref(x) for x in arrays], copies
        return copies
