"""Changes of layout: the ops `qkv_bias_split_heads`, `merge_heads` and `permute`."""

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxft import dispatch, reference
from jaxft.kernels.triton import permute as triton
from jaxft.ops import checks, plans, sharding, transforms
from jaxft.ops.sharding import Rule
from jaxft.tuning import layouts as tuning


@sharding.over_explicit_axes("qkv: b T E, bias: E -> b")
def qkv_bias_split_heads(
    qkv: Array, bias: Array | None, num_heads: int, *, implementation: str | None = None
) -> tuple[Array, Array, Array]:
    """Adds the bias of the packed projection and splits the sum into queries, keys and values, `[B, N, T, H]` each.

    Equivalent to::

        q, k, v = jnp.transpose((qkv + bias).reshape(B, T, 3, N, H), (2, 0, 3, 1, 4))

    `qkv_attention` reads the packed projection itself and does not need this op.

    Args:
      qkv: `[B, T, 3*N*H]`, float32, float16 or bfloat16. The kernel takes up to 2**31 elements.
      bias: `[3*N*H]` of any float dtype, or None.
      num_heads: N, a Python integer.
      implementation: None, "triton" or "xla" (see `jaxft.ops`).

    Gradients: for qkv and bias.

    Determinism and errors: as for all ops (see `jaxft.ops`).

    Source: `add_QKV_bias` of FasterTransformer v1.0.
    """
    op = "qkv_bias_split_heads"
    qkv = checks.as_float(op, "qkv", qkv)
    if qkv.ndim != 3:
        raise ValueError(f"{op}: qkv must have shape [B, T, 3*N*H], got {qkv.shape}")
    num_heads = checks.as_size(op, "num_heads", num_heads, positive=True)
    if qkv.shape[-1] % (3 * num_heads):
        raise ValueError(
            f"{op}: the last axis of qkv must be a multiple of 3 * num_heads = {3 * num_heads}, got {qkv.shape}"
        )
    bias = checks.as_vector(op, "bias", bias, qkv.shape[-1])
    plan = split_plan_of(op, qkv, bias, num_heads, implementation)
    plans.record(op, (qkv, bias), plan)
    if plan.forward.backend == "xla":
        return _split_reference(qkv, bias, num_heads)
    return _split_jit(qkv, bias, plan)


@sharding.over_explicit_axes("x: b n t H -> b t n")
def merge_heads(x: Array, *, implementation: str | None = None) -> Array:
    """Merges the heads, `[B, N, T, H]` -> `[B, T, N*H]`, which is the inverse of splitting them.

    Equivalent to::

        jnp.transpose(x, (0, 2, 1, 3)).reshape(B, T, N * H)

    Args:
      x: `[B, N, T, H]` of any dtype. The kernel takes the dtypes and sizes that it takes in `permute`.
      implementation: None, "triton" or "xla" (see `jaxft.ops`).

    Gradients: for x.

    Determinism and errors: as for all ops (see `jaxft.ops`).

    Source: `transpose` of FasterTransformer v1.0.
    """
    op = "merge_heads"
    x = checks.as_array(op, "x", x)
    if x.ndim != 4:
        raise ValueError(f"{op}: x must have shape [B, N, T, H], got {x.shape}")
    batch, heads, length, size = x.shape
    return _move(op, x, (0, 2, 1, 3), (batch, length, heads * size), implementation)


def _axes(given: dict[str, Any]) -> str:
    """Returns the axes of a call of `permute` (see `sharding.over_explicit_axes`)."""
    ndim = given["x"].ndim
    order = [axis for axis in np.ravel(given["axes"]) if -ndim <= axis < ndim]  # others raise in the op
    return f"x: {' '.join(f'a{axis}' for axis in range(ndim))} -> {' '.join(f'a{axis % ndim}' for axis in order)}"


@sharding.over_explicit_axes(_axes)
def permute(x: Array, axes: Sequence[int], *, implementation: str | None = None) -> Array:
    """Reorders the axes of an array.

    Equivalent to::

        jnp.transpose(x, axes)

    Args:
      x: an array of any rank and dtype. The kernel takes dtypes of 1, 2, 4 or 8 bytes and up to 2**31 elements, and
        moves their bits unchanged.
      axes: a permutation of the axes of `x`. Negative numbers count from the end.
      implementation: None, "triton" or "xla" (see `jaxft.ops`).

    Raises:
      ValueError: axes is not a permutation. See `jaxft.ops` for the other errors.

    Gradients: for x. The gradient is the inverse permutation, by the same kernel.

    Determinism: the result and the gradients are deterministic.

    Source: OneFlow's permute kernel.
    """
    op = "permute"
    x = checks.as_array(op, "x", x)
    try:
        order = tuple(operator.index(a) + (x.ndim if operator.index(a) < 0 else 0) for a in axes)
    except TypeError as error:
        raise TypeError(f"{op}: axes must be a sequence of integers, got {axes!r}") from error
    if sorted(order) != list(range(x.ndim)):
        raise ValueError(f"{op}: axes must be a permutation of the {x.ndim} axes of x, got {tuple(axes)}")
    return _move(op, x, order, tuple(x.shape[axis] for axis in order), implementation)


# --- Any order of axes -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.Plan):
    """Plan of a permutation.

    Attributes:
      shape: the smallest shape whose permutation by `axes` moves the same elements.
      axes: the order of the axes of `shape`.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]


def plan_of(op: str, x: Array, axes: tuple[int, ...], implementation: str | None) -> Plan:
    """Chooses backend and configurations for an array of this shape and dtype."""
    shape, order = triton.reduce(x.shape, axes)
    moves = len(shape) > 1
    choice = dispatch.choose(op, implementation, {"triton": triton.unsupported(x) if moves else None})
    if choice.name == "xla" or x.size == 0 or not moves:  # if no element moves, XLA only reshapes
        return Plan(shape=shape, axes=order, why=choice.why if moves else "no element moves")
    innermost = shape[order[-1]]
    kept = innermost if order[-1] == len(order) - 1 else 1
    aligned = math.gcd(shape[-1], innermost, 16 // x.dtype.itemsize)
    config = tuning.permute(x.size, kept, aligned, x.dtype.itemsize, dispatch.device())
    return Plan(**plans.by_triton(choice, config, config), shape=shape, axes=order)


def _move(op, x, axes, result, implementation):
    """Permutes the axes of `x`, then reshapes it to `result`."""
    plan = plan_of(op, x, axes, implementation)
    plans.record(op, (x,), plan)
    return _reference(x, axes, result) if plan.forward.backend == "xla" else _permute_jit(x, plan, result)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _reference(x, axes, result):
    return reference.permute(x, axes).reshape(result)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _permute_jit(x, plan, result):
    return _permute(x.reshape(plan.shape), plan).reshape(result)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _permute(x, plan):
    return transforms.mappable(
        lambda _, x: triton.forward(x, plan.axes, config=plan.forward.config, interpret=plan.interpret),
        functools.partial(reference.permute, axes=plan.axes), plan, _rule(plan.axes),
    )(x)  # fmt: skip


def _rule(axes):
    # The launch configuration depends on the last axes, which are moved in pieces.
    names = [f"A{i}" if i in (len(axes) - 1, axes[-1]) else f"a{i}" for i in range(len(axes))]
    return Rule("permute", " ".join(names), " ".join(names[axis] for axis in axes))


def _fwd(x, plan):
    return _permute(x, plan), None


def _bwd(plan, _, dy):
    if dy.dtype == jax.dtypes.float0:  # integers have no gradient
        return (None,)
    inverse = tuple(sorted(range(len(plan.axes)), key=plan.axes.__getitem__))
    return (_permute(dy, dataclasses.replace(plan, axes=inverse)),)


_permute.defvjp(_fwd, _bwd)


# --- Split heads -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitPlan(plans.Plan):
    """Plan of a call of `qkv_bias_split_heads`."""

    num_heads: int
    has_bias: bool


def split_plan_of(op, qkv, bias, num_heads, implementation):
    """Chooses backend and configurations for arrays of these shapes and dtypes."""
    options = {"num_heads": num_heads, "has_bias": bias is not None}
    choice = dispatch.choose(op, implementation, {"triton": triton.split_unsupported(qkv, bias)})
    if choice.name == "xla" or qkv.size == 0:
        return SplitPlan(**options, why=choice.why)
    batch, length, width = qkv.shape
    size, itemsize, device = width // (3 * num_heads), qkv.dtype.itemsize, dispatch.device()
    forward = tuning.qkv_bias_split_heads(batch * num_heads, length, size, itemsize, device)
    backward = tuning.qkv_bias_split_heads_backward(batch, length, num_heads, size, itemsize, device)
    return SplitPlan(**plans.by_triton(choice, forward, backward), **options)


_split_reference = jax.jit(reference.qkv_bias_split_heads, static_argnums=2)


_SPLIT = "qkv_bias_split_heads"


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _split(qkv, bias, bias_carrier, plan):
    def kernel(_, qkv, bias):
        config = plan.forward.config
        return tuple(triton.split_heads(qkv, bias, plan.num_heads, config=config, interpret=plan.interpret))

    plain = functools.partial(reference.qkv_bias_split_heads, num_heads=plan.num_heads)
    return transforms.mappable(kernel, plain, plan, Rule(_SPLIT, "b T E, E", ", ".join(["b N T H"] * 3)))(qkv, bias)


def _split_fwd(qkv, bias, bias_carrier, plan):
    return _split(qkv, bias, bias_carrier, plan), None


def _split_bwd(plan, _, dy):
    dqkv, total = _join(dy, plan)
    return dqkv, None, total


def _split_run(qkv, bias, plan):
    return _split(*transforms.vary_alike(qkv, bias, *transforms.wide_carriers(bias)), plan)


_split.defvjp(_split_fwd, _split_bwd)
_split_jit = jax.jit(_split_run, static_argnums=2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _join(parts, plan):
    """Computes qkv, the transpose of `_split`, and its sum over B and T in float32 (None without a bias)."""

    def kernel(_, *parts):
        config = plan.backward.config
        qkv, *sums = triton.join_heads(parts, with_sums=plan.has_bias, config=config, interpret=plan.interpret)
        return qkv, jnp.sum(sums[0], axis=0) if plan.has_bias else None

    def plain(*parts):
        qkv = jnp.stack(parts).transpose(1, 3, 0, 2, 4)
        qkv = qkv.reshape(*qkv.shape[:2], -1)
        return qkv, jnp.sum(qkv, axis=(0, 1), dtype=jnp.float32) if plan.has_bias else None

    return transforms.mappable(kernel, plain, plan, Rule(_SPLIT, ", ".join(["b N T H"] * 3), "b T E, E"))(*parts)


def _join_fwd(parts, plan):
    return _join(parts, plan), None


def _join_bwd(plan, _, dy):
    dqkv, total = dy
    return (_split_run(dqkv, total, plan),)


_join.defvjp(_join_fwd, _join_bwd)
