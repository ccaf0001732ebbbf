"""Conversion between padded batches and packed sequences: the ops `remove_padding` and `restore_padding`."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np
from jax import Array

from jaxft import dispatch, reference
from jaxft.kernels.triton import padding as triton
from jaxft.ops import checks, plans, sharding, transforms
from jaxft.ops.plans import Pass
from jaxft.ops.sharding import Rule


class PackedTokens(NamedTuple):
    """Result of `remove_padding`.

    Attributes:
      x: the packed rows, `[capacity, ...]`.
      indices: the place of each row in the padded batch, int32 `[capacity]`.
      cu_seqlens: the limits of the sequences, int32 `[B + 1]`.
    """

    x: Array
    indices: Array
    cu_seqlens: Array


@sharding.over_explicit_axes(lambda given: f"x: {'X ' * given['x'].ndim}, mask: B T -> ")
def remove_padding(x: Array, mask: Array, *, capacity: int, implementation: str | None = None) -> PackedTokens:
    """Packs the tokens of a padded batch into an array with a static number of rows.

    Equivalent, if all tokens fit, to::

        indices = jnp.nonzero(mask.reshape(-1), size=capacity, fill_value=B * T)[0]
        packed = x.reshape(B * T, ...).at[indices].get(mode="fill", fill_value=0)
        packed, indices, [0, *jnp.cumsum(jnp.sum(mask, axis=1))]

    Args:
      x: `[B, T, ...]` of any dtype: hidden states, but also token ids.
      mask: bool `[B, T]`, True for tokens. The tokens of a sequence need not come first.
      capacity: the number of rows of the result, a positive Python integer. B * T is always enough. Each capacity is
        compiled separately.
      implementation: None, "triton" or "xla" (see `jaxft.ops`). The kernel takes float32, float16 and bfloat16, with
        32 bytes per token or more.

    Returns:
      The tuple (x, indices, cu_seqlens).

      x, `[capacity, ...]`, has the tokens in order, and then rows of 0.

      indices, int32 `[capacity]`, has the place b * T + t of each token, and B * T in unused rows.

      cu_seqlens, int32 `[B + 1]`, is what `varlen_qkv_attention` takes: sequence b is rows `cu_seqlens[b]` to
      `cu_seqlens[b + 1]`.

      No token is ever dropped. More tokens than `capacity` are an error. If `mask` is traced (an argument of a
      `jax.jit`, for example), nothing can be raised. Every element of x is then NaN: for signed integers -1 (an id
      outside of every embedding table, which gives NaN), for unsigned integers the largest number, and for booleans
      True. All indices are then -1, which makes `restore_padding` return the same values, and cu_seqlens ends above
      `capacity`.

    Raises:
      ValueError: capacity is not a positive Python integer, or mask has more tokens than capacity. See `jaxft.ops` for
        the other errors.

    Gradients: for x, by a gather (reverse mode only). They are 0 at places without a token.

    Determinism: the result and the gradients are deterministic.

    Source: `remove_padding` and `rebuild_padding` of FasterTransformer, after the Effective Transformer of ByteDance.
    """
    op = "remove_padding"
    capacity = checks.as_size(op, "capacity", capacity, positive=True)
    x, given, mask = checks.as_array(op, "x", x), mask, checks.as_mask(op, "mask", mask, "a token")
    if mask.ndim != 2:
        raise ValueError(f"{op}: mask must have shape [B, T], got {mask.shape}")
    if x.shape[:2] != mask.shape:
        raise ValueError(f"{op}: x must have shape [B, T, ...] with the [B, T] of mask, {mask.shape}, got {x.shape}")
    if not isinstance(given, jax.core.Tracer):
        tokens = np.count_nonzero(given)
        if checks.exceeds(tokens, capacity):
            raise ValueError(f"{op}: mask must have at most as many tokens as capacity, {capacity}, got {tokens}")
    batch, length = mask.shape
    plan = plan_of(op, x.reshape(mask.size, *x.shape[2:]), capacity, batch, length, implementation, mask=mask)
    plans.record(op, (x, mask), plan)
    return PackedTokens(*_remove(*transforms.vary_alike(x, mask), capacity, plan))


@sharding.over_explicit_axes(lambda given: f"x: {'X ' * given['x'].ndim}, indices: M -> ")
def restore_padding(x: Array, indices: Array, *, batch: int, length: int, implementation: str | None = None) -> Array:
    """Puts packed rows back to the places from which `remove_padding` took them.

    Equivalent to::

        jnp.zeros((B * T, ...), x.dtype).at[indices].set(x, mode="drop").reshape(B, T, ...)

    Args:
      x: `[M, ...]` of any dtype.
      indices: integers `[M]`, the place b * T + t of each row. No place may occur twice. A row with an index of B * T
        or more is dropped. If any index is negative, which is how `remove_padding` reports a capacity that was too
        small, the whole result is NaN (or what `remove_padding` gives for other dtypes).
      batch: B, a Python integer.
      length: T, a Python integer.
      implementation: as for `remove_padding`.

    Returns:
      `[B, T, ...]` of the dtype of `x`, with 0 at places without a row.

    Raises:
      ValueError: indices do not fit int32, or batch or length is not a Python integer >= 0. See `jaxft.ops` for the
        other errors.

    Gradients: for x, by a gather (reverse mode only).

    Determinism: the result and the gradients are deterministic.
    """
    op = "restore_padding"
    x, indices = checks.as_array(op, "x", x), checks.as_integers(op, "indices", indices)
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have shape [M, ...], got a scalar")
    checks.check_shape(op, "indices", indices, x.shape[:1])
    batch, length = checks.as_size(op, "batch", batch), checks.as_size(op, "length", length)
    places = checks.as_size(op, "batch * length", batch * length)
    plan = plan_of(op, x, places, batch, length, implementation, indices=indices)
    plans.record(op, (x, indices), plan)
    return _restore(*transforms.vary_alike(x, indices), plan)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.Plan):
    """Plan of the moves of rows between a padded batch `[batch, length]` and packed rows."""

    batch: int
    length: int


def plan_of(op, x, places, batch, length, implementation, **others):
    """Chooses the backend for `x`, `[rows, ...]`, whose rows move to `places` rows."""
    reason = triton.unsupported(x, places, **others)
    # With few bytes per row, as of ids, XLA's gather is as fast: this choice is not logged as a fallback.
    if implementation is None and reason is not None:
        choice = dispatch.choose(op, "xla", {})._replace(why=f"triton: {reason}")
    else:
        choice = dispatch.choose(op, implementation, {"triton": reason})
    kernel = plans.XLA if 0 in (x.size, places) else Pass(choice.name)
    return Plan(forward=kernel, backward=kernel, **plans.of_choice(choice), batch=batch, length=length)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _remove(x, mask, capacity, plan):
    indices, cu_seqlens = reference.padding_indices(mask, capacity=capacity)
    return _pack(x, indices, plan), indices, cu_seqlens


def _rule(op, x, axes):
    # Any row may move to any place.
    return Rule(op, "X " * x.ndim + ", X", "X " * axes)


# `_pack` and `_unpack` are each other's gradient: no place has two rows, so each moves back what the other moves.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _pack(x, indices, plan):
    if plan.forward.backend == "xla":
        return reference.take_tokens(x, indices)

    def kernel(_, x, indices):
        y = triton.take_rows(x.reshape(plan.batch * plan.length, -1), indices, interpret=plan.interpret)
        return y.reshape(-1, *x.shape[2:])

    return transforms.mappable(kernel, reference.take_tokens, plan, _rule("remove_padding", x, x.ndim - 1))(x, indices)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _unpack(x, indices, plan):
    plain = functools.partial(reference.restore_padding, batch=plan.batch, length=plan.length)
    if plan.forward.backend == "xla":
        return plain(x, indices)

    def kernel(_, x, indices):
        source = reference.source_rows(indices, places=plan.batch * plan.length)
        y = triton.take_rows(x.reshape(x.shape[0], -1), source, interpret=plan.interpret)
        return y.reshape(plan.batch, plan.length, *x.shape[1:])

    return transforms.mappable(kernel, plain, plan, _rule("restore_padding", x, x.ndim + 1))(x, indices)


def _with_gradient(move, back):
    def fwd(x, indices, plan):
        return move(x, indices, plan), indices

    def bwd(plan, indices, d):
        return back(d, indices, plan), None

    move.defvjp(fwd, bwd)


_with_gradient(_pack, _unpack)
_with_gradient(_unpack, _pack)
_restore = jax.jit(_unpack, static_argnums=2)
