"""remove_padding and restore_padding: tokens in a padded batch, and the same tokens back to back."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np

from jaxft import dispatch, reference
from jaxft.kernels.triton import padding as triton
from jaxft.ops import checks, plans, transforms
from jaxft.ops.plans import Pass

Array = jax.Array


class PackedTokens(NamedTuple):
    """What `remove_padding` returns."""

    x: Array  # [capacity, ...]
    indices: Array  # int32 [capacity]
    cu_seqlens: Array  # int32 [B + 1]


def remove_padding(x: Array, mask: Array, *, capacity: int, implementation: str | None = None) -> PackedTokens:
    """Puts the tokens of a padded batch back to back, in an array of a static number of rows.

    Equivalent, where all tokens fit, to::

      indices = jnp.nonzero(mask.reshape(-1), size=capacity, fill_value=B * T)[0]
      x.reshape(B * T, ...).at[indices].get(mode="fill", fill_value=0), indices, [0, *jnp.cumsum(jnp.sum(mask, axis=1))]

    Args:
      x: `[B, T, ...]` of any dtype: hidden states, but also token ids.
      mask: bool `[B, T]`, True for tokens, which need not come first.
      capacity: a Python integer, the number of rows of the result. B * T is always enough; every other one is compiled
        anew.
      implementation: None for the fastest, "triton" (floats of 16 and 32 bits, 32 bytes a token or more) or "xla".

    Returns:
      The tuple (x, indices, cu_seqlens): x `[capacity, ...]`, the tokens in order and then rows of 0; indices int32
      `[capacity]`, a token's place b * T + t, in unused rows B * T; cu_seqlens int32 `[B + 1]`, as
      `varlen_qkv_attention` takes it: sequence b is rows cu_seqlens[b] to cu_seqlens[b + 1].

      No token is ever dropped. More of them than `capacity` are an error; where `mask` is traced (an argument of a
      `jax.jit`, say), and nothing can be raised, every element of x is NaN then: -1 for signed integers (an id that no
      embedding table has, so that NaN comes of it), the largest number for unsigned ones, True for booleans. All
      indices are -1, of which `restore_padding` makes the same, and cu_seqlens ends above `capacity`.

    Raises:
      TypeError: mask is not boolean, or an argument is not an array.
      ValueError: a shape does not fit, capacity is not a positive Python integer, mask has more tokens than that, or an
        unknown implementation.
      NotImplementedError: the named implementation cannot do this; the message says why.

    Gradients: of x, as a gather (reverse mode only); 0 for what is no token. Deterministic.
    Source: `remove_padding` and `rebuild_padding` of FasterTransformer, after the Effective Transformer of ByteDance.
    """
    op = "remove_padding"
    if not checks.is_natural(capacity) or capacity < 1:
        raise ValueError(f"{op}: capacity must be a positive Python integer, got {capacity!r}")
    x, given, mask = checks.as_array(op, "x", x), mask, checks.as_mask(op, "mask", mask, "a token")
    if mask.ndim != 2:
        raise ValueError(f"{op}: mask must have shape [B, T], got {mask.shape}")
    if x.shape[:2] != mask.shape:
        raise ValueError(f"{op}: x must have shape [B, T, ...] with the [B, T] of mask, {mask.shape}, got {x.shape}")
    if capacity < mask.size and not isinstance(given, jax.core.Tracer):
        tokens = np.count_nonzero(given)
        if tokens > capacity:
            raise ValueError(f"{op}: mask must have at most as many tokens as capacity, {capacity}, got {tokens}")
    plan = _plan(op, x.reshape(mask.size, *x.shape[2:]), capacity, *mask.shape, implementation)
    plans.record(op, (x, mask), plan)
    return PackedTokens(*_remove(*transforms.vary_alike(x, mask), capacity, plan))


def restore_padding(x: Array, indices: Array, *, batch: int, length: int, implementation: str | None = None) -> Array:
    """Puts packed rows back to where `remove_padding` took them from.

    Equivalent to::

      jnp.zeros((B * T, ...), x.dtype).at[indices].set(x, mode="drop").reshape(B, T, ...)

    Args:
      x: `[M, ...]` of any dtype.
      indices: integers `[M]`, the places b * T + t of the rows, no place twice; a row from B * T on goes nowhere.
        Where any is negative, as `remove_padding` says that its capacity was too small, the whole result is NaN (of
        other dtypes as there).
      batch, length: B and T, Python integers.
      implementation: as for `remove_padding`.

    Returns:
      `[B, T, ...]` of the dtype of `x`, 0 where no row belongs.

    Raises:
      TypeError: indices are not integers, or an argument is not an array.
      ValueError: a shape does not fit, indices beyond int32, batch or length is not a Python integer >= 0, or an
        unknown implementation.
      NotImplementedError: the named implementation cannot do this; the message says why.

    Gradients: of x, as a gather (reverse mode only). Deterministic.
    """
    op = "restore_padding"
    x, indices = checks.as_array(op, "x", x), checks.as_integers(op, "indices", indices)
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have shape [M, ...], got a scalar")
    checks.check_shape(op, "indices", indices, x.shape[:1])
    for name, size in (("batch", batch), ("length", length)):
        if not checks.is_natural(size):
            raise ValueError(f"{op}: {name} must be a Python integer >= 0, got {size!r}")
    plan = _plan(op, x, batch * length, batch, length, implementation)
    plans.record(op, (x, indices), plan)
    return _restore(*transforms.vary_alike(x, indices), plan)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.Plan):
    """How rows move between a padded batch `[batch, length]` and packed rows."""

    batch: int
    length: int


def _plan(op, x, places, batch, length, implementation) -> Plan:
    """Chooses the backend for x `[rows, ...]`, whose rows move to `places` rows."""
    reason = triton.unsupported(x, places)
    if implementation is None and reason is not None:  # for few bytes a row, such as ids, XLA's gather is as fast
        choice = dispatch.choose(op, "xla", {})._replace(why=f"triton: {reason}")
    else:
        choice = dispatch.choose(op, implementation, {"triton": reason})
    kernel = Pass(choice.name) if x.size and places else plans.XLA
    return Plan(
        forward=kernel, backward=kernel, interpret=choice.interpret, why=choice.why, batch=batch, length=length
    )  # fmt: skip


@functools.partial(jax.jit, static_argnums=(2, 3))
def _remove(x, mask, capacity, plan):
    indices, cu_seqlens = reference.padding_indices(mask, capacity=capacity)
    return _pack(x, indices, plan), indices, cu_seqlens


# `_pack` and `_unpack` are each other's gradient: no place has two rows, so one moves back what the other moves.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _pack(x, indices, plan):
    if plan.forward.backend == "xla":
        return reference.take_tokens(x, indices)
    y = triton.take_rows(x.reshape(plan.batch * plan.length, -1), indices, interpret=plan.interpret)
    return y.reshape(-1, *x.shape[2:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _unpack(x, indices, plan):
    if plan.forward.backend == "xla":
        return reference.restore_padding(x, indices, batch=plan.batch, length=plan.length)
    source = reference.source_rows(indices, places=plan.batch * plan.length)
    y = triton.take_rows(x.reshape(x.shape[0], -1), source, interpret=plan.interpret)
    return y.reshape(plan.batch, plan.length, *x.shape[1:])


def _with_gradient(move, back):
    def fwd(x, indices, plan):
        return move(x, indices, plan), indices

    def bwd(plan, indices, d):
        return back(d, indices, plan), None

    move.defvjp(fwd, bwd)


_with_gradient(_pack, _unpack)
_with_gradient(_unpack, _pack)
_restore = jax.jit(_unpack, static_argnums=2)
