"""Helpers of the ops: gradients of any order, sums over mapped axes, and the varying types of `jax.shard_map`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero

from jaxft import reference
from jaxft.ops import sharding
from jaxft.ops.plans import Plan
from jaxft.ops.sharding import Rule

# --- Gradients ---------------------------------------------------------------------------------------------------


def with_plain_gradient(
    kernel: Callable[..., Any], plain: Callable[..., Any], plan: Plan, rule: Rule, *, saves: int = 0
) -> Callable[..., Any]:
    """Returns a function of arrays that runs a kernel and has the gradient of `plain(*arrays)`.

    Kernels have no derivative rule of their own. The ops use this function around kernels in their forward and backward
    passes, so that second and higher derivatives exist. The last `saves` results of the kernel are kept for a gradient
    that is defined elsewhere. `plain` does not compute them, and they have no gradient. `kernel` and `rule` are as in
    `mappable`.
    """
    run = jax.custom_vjp(mappable(kernel, plain, plan, rule, saves=saves))
    run.defvjp(
        lambda *arrays: (run(*arrays), arrays),
        lambda arrays, d: jax.vjp(plain, *arrays)[1](d[: len(d) - saves] if saves else d),
    )
    return run


def implementations(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    plain: Callable[..., Any],
    gradients: int,
    rule: Callable[..., tuple[Rule, str]],
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns two jitted functions of a plan and the arrays of an op: plain jnp, and the kernels with their gradient.

    `forward(plan, save, *arrays)` computes the result by kernels. With `save`, it returns a pair: the result, and what
    `backward` needs besides the arrays. `backward(plan, dtypes, d, saved, *arrays)` computes the gradients of the first
    arrays, `gradients` in number, in these dtypes. `plain(plan, *arrays)` computes the result in plain jnp.
    `rule(plan, *arrays)` returns the rule of the forward pass for sharded arrays, and the names of the axes of what
    `backward` needs. The second function also takes the carriers of the first arrays, None for new ones.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def kernels(plan, carriers, *arrays):
        del carriers
        return mappable(
            lambda _, *arrays: forward(plan, False, *arrays), functools.partial(plain, plan), plan,
            rule(plan, *arrays)[0],
        )(*arrays)  # fmt: skip

    def fwd(plan, carriers, *arrays):
        del carriers
        own, of_saved = rule(plan, *arrays)
        own = dataclasses.replace(own, results=f"{own.results}, {of_saved}")
        run = with_plain_gradient(
            lambda _, *arrays: forward(plan, True, *arrays), lambda *arrays: (plain(plan, *arrays),), plan, own, saves=1
        )
        result, saved = run(*arrays)
        return result, (saved, arrays)

    def bwd(plan, kept, d):
        def plain_gradients(d, saved, *arrays):
            found = jax.vjp(functools.partial(plain, plan), *arrays)[1](d)[:gradients]
            return jax.tree.map(reference.wide, found)

        def by_kernels(shared, d, saved, *arrays):
            dtypes = [gradient_dtype(x, shared[2 + i]) for i, x in enumerate(arrays[:gradients])]
            return jax.tree.map(reference.wide, tuple(backward(plan, dtypes, d, saved, *arrays)))

        saved, arrays = kept
        own, of_saved = rule(plan, *arrays)
        # A gradient has the axes of its array.
        own = dataclasses.replace(
            own, arguments=f"{own.results}, {of_saved}, {own.arguments}",
            results=",".join(own.arguments.split(",")[:gradients]),
        )  # fmt: skip
        found = with_plain_gradient(by_kernels, plain_gradients, plan, own)(d, saved, *arrays)
        return found, *[None] * len(arrays)

    kernels.defvjp(fwd, bwd)

    def run(plan, *arrays, carriers=None):
        every = vary_alike(*(carriers or wide_carriers(*arrays[:gradients])), *arrays)
        return kernels(plan, tuple(every[:gradients]), *every[gradients:])

    return jax.jit(plain, static_argnums=0), jax.jit(run, static_argnums=0)


# --- Sums of the gradients of shared arrays ----------------------------------------------------------------------


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def carrier(multilinear: Callable[..., Array], *xs: Array) -> Array:
    """Returns zeros like `multilinear(*xs)`, with the derivative of `multilinear`.

    A `custom_vjp` takes a carrier as an argument that it does not use, and gives a gradient to it instead of to `xs`.
    JAX then derives the gradients of `xs`. If the examples of a `vmap` or the devices of a `shard_map` share an array,
    JAX sums its gradient before the transpose of `multilinear` rounds it to the dtype of the array.
    """
    return _zeros(jax.eval_shape(multilinear, *xs), *xs)


def _zeros(out: Any, *xs: Array) -> Array:
    """Returns zeros that are mapped or vary where one of the `xs` does: the derivative of a carrier is so too."""

    @jax.custom_batching.custom_vmap
    def zeros(*xs):
        return vary_over(jnp.zeros(out.shape, out.dtype), varying(*xs))

    @zeros.def_vmap
    def _(size, batched, *xs):
        return _zeros(jax.ShapeDtypeStruct((size, *out.shape), out.dtype), *xs), True

    return zeros(*xs)


@functools.partial(carrier.defjvp, symbolic_zeros=True)
def _(multilinear: Callable[..., Array], xs: tuple[Array, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    moving = [i for i, dx in enumerate(tangents) if not isinstance(dx, SymbolicZero)]
    terms = [multilinear(*xs[:i], tangents[i], *xs[i + 1 :]) for i in moving]
    zeros = carrier(multilinear, *xs)
    return zeros, functools.reduce(jnp.add, terms) if terms else jnp.zeros_like(zeros)


def wide_carriers(*arrays: Array | None) -> list[Array | None]:
    """Returns a carrier of each array, to which a float32 gradient can be given."""
    return [None if x is None else carrier(reference.wide, x) for x in arrays]


def gradient_dtype(x: Array | None, shared: bool) -> Any:
    """Returns the dtype in which a kernel gives the gradient of `x`: float32 if JAX adds up gradients of examples."""
    return None if x is None else reference.wide_dtype(x) if shared else x.dtype


def mappable(
    kernel: Callable[..., Any], plain: Callable[..., Any], plan: Plan, rule: Rule, *, saves: int = 0,
    shared: Any = None, mapped: Any = (),
) -> Callable[..., Any]:  # fmt: skip
    """Returns a function of arrays that computes `kernel(shared, *arrays)`, also under `vmap` and on sharded arrays.

    `shared` tells of each argument whether a `vmap` around the call maps others, but not this one, or whether others
    are divided among devices, but not this one. `rule` and `mapped` are as in `sharding.partitioned`. Over an axis of
    symbolic size, for which kernels cannot be compiled, the function computes `plain(*arrays)` instead, and 0 for the
    last `saves` results, which `plain` lacks. If the user has named the kernel, it raises a NotImplementedError.
    """

    @jax.custom_batching.custom_vmap
    def run(*arrays):
        return sharding.partitioned(kernel, rule, shared or (False,) * len(arrays), mapped)(*arrays)

    @run.def_vmap
    def _(size, batched, *arrays):
        axes = [jax.tree.map(lambda own: 0 if own else None, of_one) for of_one in batched]

        def of_all(function):
            return lambda *arrays: jax.vmap(function, in_axes=axes)(*arrays)

        if isinstance(size, int):
            alone = [not any(jax.tree.leaves(of_one)) for of_one in batched]
            known = [a or b for a, b in zip(alone, shared or alone, strict=True)]
            again = mappable(
                lambda shared, *arrays: of_all(functools.partial(kernel, shared))(*arrays), of_all(plain), plan, rule,
                saves=saves, shared=known, mapped=(*mapped, jax.tree.leaves(batched)),
            )  # fmt: skip
            out = again(*arrays)
        else:
            if plan.by_name:
                name = plan.forward.backend
                raise NotImplementedError(f"implementation {name!r} cannot be used: a vmap has a symbolic size, {size}")
            out = of_all(plain)(*arrays)
            if saves:
                one = jax.tree.map(_without_axis, arrays, tuple(batched))
                kept = jax.eval_shape(run, *one)[-saves:]
                out = *out, *jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), kept)
        return out, jax.tree.map(lambda _: True, out)

    return run


def _without_axis(x: Array, mapped: bool) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[1:] if mapped else x.shape, x.dtype)


# --- Varying types of shard_map ----------------------------------------------------------------------------------


def vary_alike(*arrays: Array | None) -> list[Any]:
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
    return jax.lax.pcast(x, tuple(axes - varying(x)), to="varying")
