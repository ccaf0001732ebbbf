"""bundle: the parameters of a call in few arrays, so that a small one does not wait for the host."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxft import dispatch
from jaxft.kernels.triton import split as triton
from jaxft.ops import checks, plans
from jaxft.ops.plans import Pass

_LONGEST = 2**16  # elements of a vector: with a longer one the host's time counts for nothing, and the copy does


def bundle(tree: Any, *, implementation: str | None = None) -> tuple[list[Any], Rebuild]:
    """The arrays of a tree, such as a module, its vectors joined to one, and the function that makes the tree of them.

    Each array of a call takes the host about a microsecond, on slow ones 1.5, and BERT-base has 151 of them, which is
    longer than the GPU needs for a short text. 99 of them are vectors. One kernel cuts those apart again::

      arrays, rebuild = jaxft.bundle(model)  # 53 arrays on an NVIDIA GPU

      @jax.jit
      def forward(arrays, input_ids, attention_mask):
          return rebuild(arrays)(input_ids, attention_mask)

    Equivalent, but for the number of arrays, to::

      arrays, structure = jax.tree.flatten(tree)
      rebuild = functools.partial(jax.tree.unflatten, structure)

    so that a change of the module afterwards is not seen, and to donate the arrays is to delete the module's.

    Args:
      tree: any pytree. Its JAX arrays of one dimension, of float32, float16 or bfloat16 and of at most 65,536 elements,
        are joined, those of each dtype and sharding to one array. The others stay as they are, and so do arrays that
        are divided among devices or traced.
      implementation: None for the fastest; "triton" joins them, "xla", which would have a kernel for each, does not.

    Returns:
      The tuple (arrays, rebuild). `rebuild(arrays)` makes the tree, of these arrays or of others like them (trained,
      averaged, cast). It can be compared and hashed, as what is static in a `jax.jit`.

    Raises:
      TypeError: by `rebuild`, something is no array.
      ValueError: an unknown implementation; by `rebuild`, another number of arrays or one of another shape.
      NotImplementedError: the named implementation cannot do this; the message says why.

    Gradients: of all arrays through `rebuild`. Nothing is computed, so that nothing is rounded.
    """
    leaves, structure = jax.tree.flatten(tree)
    alike: dict[Any, list[int]] = {}
    if dispatch.choose("bundle", implementation, {"triton": None}).name == "triton":
        for i, leaf in enumerate(leaves):
            if _joins(leaf):
                alike.setdefault((leaf.dtype, leaf.sharding), []).append(i)
    groups = [group for group in alike.values() if len(group) > 1]
    joined = {i for group in groups for i in group}
    rest = [i for i in range(len(leaves)) if i not in joined]
    arrays = [leaves[i] for i in rest] + [jnp.concatenate([leaves[i] for i in group]) for group in groups]
    sizes = tuple(tuple(leaves[i].size for i in group) for group in groups)
    order = [*rest, *(i for group in groups for i in group)]
    return arrays, Rebuild(structure, tuple(order), tuple(map(np.shape, arrays)), sizes, implementation)


def _joins(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer) or leaf.ndim != 1:
        return False
    return 0 < leaf.size <= _LONGEST and triton.unsupported(leaf) is None and leaf.sharding.is_fully_replicated


@dataclasses.dataclass(frozen=True)
class Rebuild:
    """What `bundle` returns beside the arrays."""

    structure: Any = dataclasses.field(hash=False)  # that of a module takes long
    order: tuple[int, ...]  # of each array, and then of each part of those that are joined, the place in the tree
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...]  # of the parts of each joined array; these come last
    implementation: str | None

    @property
    def whole(self) -> int:
        """How many arrays, the first ones, are not joined."""
        return len(self.shapes) - len(self.sizes)

    def __call__(self, arrays: Sequence[Any]) -> Any:
        if not isinstance(arrays, list | tuple) or len(arrays) != len(self.shapes):
            got = len(arrays) if isinstance(arrays, list | tuple) else type(arrays).__name__
            raise ValueError(f"bundle: arrays must be the list of {len(self.shapes)} that bundle gave, got {got}")
        for i, (x, shape) in enumerate(zip(arrays, self.shapes, strict=True)):
            if np.shape(x) != shape:
                raise ValueError(f"bundle: arrays[{i}] must have shape {shape}, got {np.shape(x)}")
        parts = [*arrays[: self.whole]]
        for i, sizes in enumerate(self.sizes, self.whole):
            x = checks.as_array("bundle", f"arrays[{i}]", arrays[i])
            # Here may be another device than where the arrays were joined, and the array another one.
            choice = dispatch.choose("bundle", self.implementation, {"triton": triton.unsupported(x)})
            plan = Plan(forward=Pass(choice.name), interpret=choice.interpret, why=choice.why, sizes=sizes)
            plans.record("bundle", (x,), plan)
            parts += _split(x, plan)
        leaves = [part for _, part in sorted(zip(self.order, parts, strict=True), key=lambda pair: pair[0])]
        return jax.tree.unflatten(self.structure, leaves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.Plan):
    """How a joined array is split into parts of these `sizes`."""

    sizes: tuple[int, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _split(x, plan):
    if plan.forward.backend == "xla":
        return jnp.split(x, list(itertools.accumulate(plan.sizes[:-1])))
    return triton.split(x, plan.sizes, interpret=plan.interpret)


_split.defvjp(
    lambda x, plan: (_split(x, plan), None),
    lambda plan, _, parts: (jnp.concatenate(parts),),
)
