"""Helpers of the ops: gradients of any order, and the varying types of `jax.shard_map`."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array


def with_plain_gradient(kernel: Callable[..., Any], plain: Callable[..., Any], *, saves: int = 0) -> Callable[..., Any]:
    """Returns a function that computes `kernel(*arrays)` and has the gradient of `plain(*arrays)`.

    Kernels have no derivative rule of their own. The ops use this function around kernels in their forward and backward
    passes, so that second and higher derivatives exist.

    Args:
      kernel: computes an array or a tuple of arrays.
      plain: computes the same results in plain jnp, without the last `saves`.
      saves: number of the last results of `kernel` that are kept for a gradient that is defined elsewhere. They have no
        gradient, because second derivatives are computed without them.

    Returns:
      The function of the arrays.
    """
    run = jax.custom_vjp(kernel)
    run.defvjp(
        lambda *arrays: (run(*arrays), arrays),
        lambda arrays, d: jax.vjp(plain, *arrays)[1](d[: len(d) - saves] if saves else d),
    )
    return run


def vary_alike(*arrays: Array | None) -> list[Array | None]:
    """Returns the arrays. Inside a shard_map, all of them then vary over the mesh axes that any of them varies over.

    The gradient of each array then has the type that JAX requires, and JAX itself sums the gradients of arrays that did
    not vary.
    """
    every = varying(*arrays)
    return [None if x is None else vary_over(x, every) for x in arrays]


def varying(*arrays: Array | None) -> frozenset[Any]:
    """Returns the mesh axes that any of the arrays varies over, inside a shard_map. Elsewhere there are none."""
    axes = (jax.typeof(x).manual_axis_type.varying for x in arrays if x is not None)
    return frozenset[Any]().union(*axes)


def vary_over(x: Array, axes: frozenset[Any]) -> Array:
    """Returns `x`, which then also varies over the given mesh axes."""
    missing = tuple(axes - varying(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x
