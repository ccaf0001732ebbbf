"""Helpers of the ops: gradients of any order, and the varying types of `jax.shard_map`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import Array


def with_plain_gradient(kernel: Callable[..., Any], plain: Callable[..., Any], *, saves: int = 0) -> Callable[..., Any]:
    """Returns a function that computes `kernel(*arrays)` and has the gradient of `plain(*arrays)`.

    Kernels have no derivative rule of their own. The ops use this function around kernels in their forward and backward
    passes, so that second and higher derivatives exist. The last `saves` results of `kernel` are kept for a gradient
    that is defined elsewhere. `plain` does not compute them, and they have no gradient.
    """
    run = jax.custom_vjp(kernel)
    run.defvjp(
        lambda *arrays: (run(*arrays), arrays),
        lambda arrays, d: jax.vjp(plain, *arrays)[1](d[: len(d) - saves] if saves else d),
    )
    return run


def implementations(
    forward: Callable[..., Any], backward: Callable[..., Any], plain: Callable[..., Any], gradients: int
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns two jitted functions of a plan and the arrays of an op: plain jnp, and the kernels with their gradient.

    `forward(plan, save, *arrays)` computes the result by kernels. With `save`, it returns a pair: the result, and what
    `backward` needs besides the arrays. `backward(plan, d, saved, *arrays)` computes the gradients of the first arrays,
    `gradients` in number. `plain(plan, *arrays)` computes the result in plain jnp.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def kernels(plan, *arrays):
        return forward(plan, False, *arrays)

    def fwd(plan, *arrays):
        run = with_plain_gradient(
            functools.partial(forward, plan, True), lambda *arrays: (plain(plan, *arrays),), saves=1
        )
        result, saved = run(*arrays)
        return result, (saved, arrays)

    def bwd(plan, kept, d):
        def plain_gradients(d, saved, *arrays):
            return jax.vjp(functools.partial(plain, plan), *arrays)[1](d)[:gradients]

        saved, arrays = kept
        found = with_plain_gradient(functools.partial(backward, plan), plain_gradients)(d, saved, *arrays)
        return *found, *[None] * (len(arrays) - gradients)

    kernels.defvjp(fwd, bwd)
    return jax.jit(plain, static_argnums=0), jax.jit(kernels, static_argnums=0)


def vary_alike(*arrays: Array | None) -> list[Array | None]:
    """Returns the arrays. Inside a shard_map, all of them then vary over the mesh axes that any of them varies over.

    Each gradient then has the type that JAX requires, and JAX itself sums the gradients of arrays that did not vary.
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
