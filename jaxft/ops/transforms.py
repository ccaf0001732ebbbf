"""What the ops share around their kernels: gradients of any order, and the types that shard_map asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

Array = jax.Array


def with_plain_gradient(kernel: Callable[..., Any], plain: Callable[..., Any], *, saves: int = 0) -> Callable[..., Any]:
    """`kernel(*arrays)`, whose own gradient is that of `plain(*arrays)`: for second derivatives, and those of them.

    The last `saves` of the kernel's results are for a gradient that is defined elsewhere. They have none, since that
    one is found without them, and `plain` does not give them.
    """
    run = jax.custom_vjp(kernel)
    run.defvjp(
        lambda *arrays: (run(*arrays), arrays),
        lambda arrays, d: jax.vjp(plain, *arrays)[1](d[: len(d) - saves] if saves else d),
    )
    return run


def vary_alike(*arrays: Array | None) -> list[Array | None]:
    """The same arrays; inside a shard_map, all of them vary over the axes of the mesh that any of them varies over.

    Then a gradient of each has the type that JAX asks for, and JAX adds up those of what does not vary by itself.
    """
    every = varying(*arrays)
    return [None if x is None else vary_over(x, every) for x in arrays]


def varying(*arrays: Array | None) -> frozenset[Any]:
    """The axes of the mesh that any of them varies over, inside a shard_map; else none."""
    axes = (jax.typeof(x).manual_axis_type.varying for x in arrays if x is not None)
    return frozenset[Any]().union(*axes)


def vary_over(x: Array, axes: frozenset[Any]) -> Array:
    """The same array, which also varies over those axes."""
    missing = tuple(axes - varying(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x
