"""The op `bundle`: concatenates small parameters, so that a small call does not wait for the host."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxft import dispatch
from jaxft.kernels.triton import split as triton
from jaxft.ops import checks, plans, sharding, transforms
from jaxft.ops.plans import Pass
from jaxft.ops.sharding import Rule

# Most elements of an array that is concatenated. The copy of a longer array costs more than the host's time for it.
_LONGEST = 2**16


def bundle(tree: Any, *, implementation: str | None = None) -> tuple[list[Any], "Rebuild"]:
    """Concatenates the one-dimensional arrays of a tree, such as a module, so that a call has fewer arguments.

    Passing an array to a compiled function costs the host about 1 us (1.5 us on slow machines). BERT-base has 151
    arrays, so that a short text takes the host longer than the GPU. 99 of these arrays are one-dimensional. `bundle`
    concatenates them, and one kernel splits them again on the GPU::

        arrays, rebuild = jaxft.bundle(model)  # 53 arrays on an NVIDIA GPU

        @jax.jit
        def forward(arrays, input_ids, attention_mask):
            return rebuild(arrays)(input_ids, attention_mask)

    Equivalent, except for the number of arrays, to::

        arrays, structure = jax.tree.flatten(tree)
        rebuild = functools.partial(jax.tree.unflatten, structure)

    Call `bundle` again after you change the module: `rebuild` does not see the change. Arrays that are not concatenated
    are the module's own, so that donating `arrays` deletes them in the module.

    Args:
      tree: any pytree. Its one-dimensional JAX arrays of float32, float16 or bfloat16 with 1 to 65,536 elements are
        concatenated, to one array for each dtype and sharding. Other arrays stay as they are, and so do arrays that are
        divided among devices or traced.
      implementation: `None` picks the fastest implementation for the device. `"triton"` concatenates arrays. `"xla"`
        does not, because XLA would launch a kernel for each part. docs/kernels.md has the selection table.

    Returns:
      The tuple (arrays, rebuild). `rebuild(arrays)` makes the tree from these arrays, or from other arrays of the same
      shapes (trained, averaged, cast). `rebuild` can be compared and hashed, so that it can be a static argument of
      `jax.jit`.

    Raises:
      TypeError: raised by `rebuild` if the value for a concatenated array is not an array.
      ValueError: the implementation is unknown. Also raised by `rebuild` if the number of arrays or a shape is another.
      NotImplementedError: the named implementation does not support the call. The message says why.

    Gradients: for all arrays, through `rebuild`. Nothing is computed, so nothing is rounded.
    """
    return bundle_with(tree, implementation, jnp.concatenate)


def bundle_with(
    tree: Any, implementation: str | None, concatenate: Callable[[list[Array]], Array]
) -> tuple[list[Any], "Rebuild"]:
    """Returns what `bundle` returns. `concatenate` concatenates vectors of the same dtype and sharding."""
    leaves, structure = jax.tree.flatten(tree)
    alike: dict[Any, list[int]] = {}
    if dispatch.choose("bundle", implementation, {"triton": None}).name == "triton":
        for i, leaf in enumerate(leaves):
            if _joins(leaf):
                alike.setdefault((leaf.dtype, leaf.sharding), []).append(i)
    groups = [group for group in alike.values() if len(group) > 1]
    joined = {i for group in groups for i in group}
    rest = [i for i in range(len(leaves)) if i not in joined]
    arrays = [leaves[i] for i in rest] + [concatenate([leaves[i] for i in group]) for group in groups]
    sizes = tuple(tuple(leaves[i].size for i in group) for group in groups)
    order = [*rest, *(i for group in groups for i in group)]
    return arrays, Rebuild(structure, tuple(order), tuple(map(np.shape, arrays)), sizes, implementation)


def _joins(leaf: Any) -> bool:
    """Returns whether `bundle` concatenates the leaf with others."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer) or leaf.ndim != 1:
        return False
    return 0 < leaf.size <= _LONGEST and triton.unsupported(leaf) is None and leaf.sharding.is_fully_replicated


@dataclasses.dataclass(frozen=True)
class Rebuild:
    """Function that rebuilds the tree of `bundle` from its arrays.

    Attributes:
      structure: structure of the tree. It is not part of the hash, because hashing the structure of a module is slow.
      order: place in the tree of each array that is not concatenated, then of each part of the concatenated arrays.
      shapes: shape of each array. The concatenated arrays come last.
      sizes: sizes of the parts of each concatenated array.
      implementation: the argument of `bundle`.
    """

    structure: Any = dataclasses.field(hash=False)
    order: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    implementation: str | None

    @property
    def whole(self) -> int:
        """Number of the arrays that are not concatenated. They come first."""
        return len(self.shapes) - len(self.sizes)

    def __call__(self, arrays: Sequence[Any]) -> Any:
        """Makes the tree from the arrays that `bundle` returned, or from other arrays of the same shapes."""
        if not isinstance(arrays, list | tuple) or len(arrays) != len(self.shapes):
            got = len(arrays) if isinstance(arrays, list | tuple) else type(arrays).__name__
            raise ValueError(f"bundle: arrays must be the list of {len(self.shapes)} that bundle gave, got {got}")
        for i, (x, shape) in enumerate(zip(arrays, self.shapes, strict=True)):
            if np.shape(x) != shape:
                raise ValueError(f"bundle: arrays[{i}] must have shape {shape}, got {np.shape(x)}")
        parts = [*arrays[: self.whole]]
        for i, sizes in enumerate(self.sizes, self.whole):
            name = f"arrays[{i}]"
            parts += _parts(checks.as_array("bundle", name, arrays[i]), name, sizes, implementation=self.implementation)
        leaves = [part for _, part in sorted(zip(self.order, parts, strict=True), key=lambda pair: pair[0])]
        return jax.tree.unflatten(self.structure, leaves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.Plan):
    """Plan of the split of a concatenated array into parts of these `sizes`."""

    sizes: tuple[int, ...]


@sharding.over_explicit_axes("x: X -> ")
def _parts(x: Array, name: str, sizes: tuple[int, ...], *, implementation: str | None) -> Any:
    # The device and the array may be others than in the call of `bundle`.
    choice = dispatch.choose("bundle", implementation, {"triton": triton.unsupported(x, name)})
    plan = Plan(forward=Pass(choice.name), **plans.of_choice(choice), sizes=sizes)
    plans.record("bundle", (x,), plan)
    return _split(x, plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _split(x, plan):
    if plan.forward.backend == "xla":
        return _plain(plan, x)
    return transforms.mappable(
        lambda _, x: triton.split(x, plan.sizes, interpret=plan.interpret),
        functools.partial(_plain, plan),
        plan,
        Rule("bundle", "X", ", ".join("X" for _ in plan.sizes)),
    )(x)


def _plain(plan, x):
    return jnp.split(x, list(itertools.accumulate(plan.sizes[:-1])))


_split.defvjp(
    lambda x, plan: (_split(x, plan), None),
    lambda plan, _, parts: (jnp.concatenate(parts),),
)
