"""bundle: the parameters of a call in few arrays, so that a small one does not wait for the host."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxft import dispatch
from jaxft.kernels.triton import split as triton
from jaxft.ops import common

Array = jax.Array


def bundle(tree: Any, *, implementation: str | None = None) -> tuple[list[Array], Rebuild]:
    """The arrays of a tree, such as a module, its vectors joined to one, and the function that makes the tree of them.

    Each array of a call takes the host about a microsecond, on slow ones 1.5, and BERT-base has 151 of them, which is
    longer than the GPU needs for a short text. 99 of them are vectors. One kernel cuts those apart again::

      arrays, rebuild = jaxft.bundle(model)  # 53 arrays

      @jax.jit
      def forward(arrays, input_ids, attention_mask):
          return rebuild(arrays)(input_ids, attention_mask)

    Equivalent, but for the number of arrays, to::

      arrays, structure = jax.tree.flatten(tree)
      rebuild = functools.partial(jax.tree.unflatten, structure)

    Args:
      tree: any pytree of arrays. Those of one dimension, of float32, float16 or bfloat16, are joined, those of each
        dtype and sharding to one array. The others stay as they are, and so do those that are divided among devices.
      implementation: None for the fastest; "triton" joins them, "xla", which would have a kernel for each, does not.

    Returns:
      The tuple (arrays, rebuild). `rebuild(arrays)` makes the tree, of these arrays or of others like them (trained,
      averaged, cast). It can be compared and hashed, as what is static in a `jax.jit`.

    Raises:
      TypeError: the tree has a leaf that is no array.
      ValueError: an unknown implementation; by `rebuild`, another number of arrays or one of another shape.
      NotImplementedError: the named implementation cannot do this; the message says why.

    Gradients: of all arrays through `rebuild`. Nothing is computed, so that nothing is rounded.
    """
    leaves, structure = jax.tree.flatten(tree)
    leaves = [common.as_array("bundle", f"leaf {i}", leaf) for i, leaf in enumerate(leaves)]
    alike: dict[Any, list[int]] = {}
    if _choice(implementation).name == "triton":
        for i, leaf in enumerate(leaves):
            sharding = None if isinstance(leaf, jax.core.Tracer) else leaf.sharding
            whole = sharding is None or sharding.is_fully_replicated
            if whole and leaf.ndim == 1 and leaf.size and triton.unsupported(leaf) is None:
                alike.setdefault((leaf.dtype, sharding), []).append(i)
    groups = [group for group in alike.values() if len(group) > 1]
    joined = {i for group in groups for i in group}
    rest = [i for i in range(len(leaves)) if i not in joined]
    arrays = [leaves[i] for i in rest] + [jnp.concatenate([leaves[i] for i in group]) for group in groups]
    sizes = [tuple(leaves[i].size for i in group) for group in groups]
    order = [*rest, *(i for group in groups for i in group)]
    return arrays, Rebuild(structure, tuple(order), tuple(x.shape for x in arrays), tuple(sizes), implementation)


@dataclasses.dataclass(frozen=True)
class Rebuild:
    """What `bundle` returns beside the arrays."""

    structure: Any = dataclasses.field(hash=False)  # that of a module takes long
    order: tuple[int, ...]  # of each array, and then of each part of those that are joined, the place in the tree
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...]  # of the parts of each joined array; these come last
    implementation: str | None

    def __call__(self, arrays: Sequence[Array]) -> Any:
        if len(arrays) != len(self.shapes):
            raise ValueError(f"bundle: arrays must be {len(self.shapes)}, as bundle gave them, got {len(arrays)}")
        arrays = [common.as_array("bundle", f"arrays[{i}]", x) for i, x in enumerate(arrays)]
        for i, (x, shape) in enumerate(zip(arrays, self.shapes, strict=True)):
            common.check_shape("bundle", f"arrays[{i}]", x, shape)
        by = _choice(self.implementation)  # here may be another device than where the arrays were joined
        whole = len(arrays) - len(self.sizes)
        parts = arrays[:whole]
        for x, sizes in zip(arrays[whole:], self.sizes, strict=True):
            parts += _split(x, sizes, by)
        leaves = [part for _, part in sorted(zip(self.order, parts, strict=True), key=lambda pair: pair[0])]
        return jax.tree.unflatten(self.structure, leaves)


def _choice(implementation):
    return dispatch.choose("bundle", implementation, {"triton": None})


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _split(x, sizes, by):
    if by.name == "xla":
        return jnp.split(x, list(itertools.accumulate(sizes[:-1])))
    return triton.split(x, sizes, interpret=by.interpret)


_split.defvjp(
    lambda x, sizes, by: (_split(x, sizes, by), None),
    lambda sizes, by, _, parts: (jnp.concatenate(parts),),
)
