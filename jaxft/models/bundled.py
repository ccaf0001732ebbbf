"""The arrays of a model that may change between calls, as few as `jaxft.bundle` makes them."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

from jaxft.ops.bundle import Rebuild, bundle

Bundle = tuple[list[Any], Rebuild]


class _Last(NamedTuple):
    """What a model had: its structure, its arrays, the joined ones of them, and what rebuilds it."""

    structure: Any
    leaves: list[weakref.ref[Any]]
    joined: list[jax.Array]
    rebuild: Rebuild

    def bundle(self) -> Bundle | None:
        """None where an array is gone."""
        leaves = [ref() for ref in self.leaves]
        if any(x is None or (isinstance(x, jax.Array) and x.is_deleted()) for x in leaves):
            return None
        whole = self.rebuild.order[: self.rebuild.whole]
        return [*(leaves[i] for i in whole), *self.joined], self.rebuild


class Bundled:
    """Calls `bundle`, but keeps the joined vectors, until an array of the model is another one."""

    def __init__(self, implementation: str | None) -> None:
        self._implementation = "xla" if implementation == "xla" else None
        # In one object, since several threads may compute embeddings; without holding arrays that the model does not
        # have any more.
        self._last: _Last | None = None

    def __call__(self, model: nnx.Module) -> Bundle:
        leaves, structure = jax.tree.flatten(model)
        last = self._last
        if last and structure == last.structure:
            same = all(ref() is x for ref, x in zip(last.leaves, leaves, strict=True))
            if same and (found := last.bundle()):
                return found
        arrays, rebuild = bundle(jax.tree.unflatten(structure, leaves), implementation=self._implementation)
        if last and last.rebuild == rebuild:
            rebuild = last.rebuild  # programs compiled for the same object are found faster
        self._last = _Last(structure, [weakref.ref(x) for x in leaves], arrays[rebuild.whole :], rebuild)
        return arrays, rebuild

    def calling(self, model: nnx.Module) -> Callable[[Callable[[list[Any], Rebuild], jax.Array]], jax.Array]:
        """Returns what calls `f(arrays, rebuild)` with the arrays that `model` has now.

        The first call is with those that it had last. Only then, while the device computes, the model is looked at,
        which takes the host up to half a millisecond; and `f` is called again if it has another array.
        """
        found: Bundle | None = None

        def call(f: Callable[[list[Any], Rebuild], jax.Array]) -> jax.Array:
            nonlocal found
            if found:
                return f(*found)
            last = self._last
            guess = last and last.bundle()
            result = f(*guess) if guess else None
            found = self(model)
            return f(*found) if result is None or self._last is not last else result

        return call
