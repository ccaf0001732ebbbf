"""qkv_bias_split_heads, merge_heads and permute: the layout changes of an encoder, and any other."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import jax

from jaxft import dispatch, reference
from jaxft.ops import common

Array = jax.Array


def qkv_bias_split_heads(
    qkv: Array, bias: Array | None, num_heads: int, *, implementation: str | None = None
) -> tuple[Array, Array, Array]:
    """Adds the bias of the packed projection and brings queries, keys and values into [B, N, T, H] each.

    Equivalent to::

      q, k, v = jnp.transpose((qkv + bias).reshape(B, T, 3, N, H), (2, 0, 3, 1, 4))

    Args:
      qkv: `[B, T, 3*N*H]`, float32, float16 or bfloat16.
      bias: `[3*N*H]` of any float dtype, or None.
      num_heads: N.
      implementation: None for the fastest, or "xla".

    Returns:
      Three arrays `[B, N, T, H]` of the dtype of `qkv`.

    Raises:
      TypeError: an array is not of floats.
      ValueError: a shape does not fit, or an unknown implementation.
      NotImplementedError: the named implementation cannot do this; the message says why.

    Gradients: of qkv and bias. Deterministic.
    Source: `add_QKV_bias` of FasterTransformer v1.0. (`qkv_attention` needs no such pass.)
    """
    op = "qkv_bias_split_heads"
    qkv = common.as_float(op, "qkv", qkv)
    if qkv.ndim != 3:
        raise ValueError(f"{op}: qkv must have shape [B, T, 3*N*H], got {qkv.shape}")
    if isinstance(num_heads, bool) or not isinstance(num_heads, int) or num_heads < 1:
        raise ValueError(f"{op}: num_heads must be a positive Python integer, got {num_heads!r}")
    if qkv.shape[-1] % (3 * num_heads):
        raise ValueError(
            f"{op}: the last axis of qkv must be a multiple of 3 * num_heads = {3 * num_heads}, got {qkv.shape}"
        )
    bias = common.as_vector(op, "bias", bias, qkv.shape[-1])
    dispatch.choose(op, implementation, {})
    return _split_heads(qkv, bias, num_heads)


def merge_heads(x: Array, *, implementation: str | None = None) -> Array:
    """[B, N, T, H] -> [B, T, N*H], the inverse of splitting heads.

    Equivalent to::

      jnp.transpose(x, (0, 2, 1, 3)).reshape(B, T, N * H)

    Args:
      x: `[B, N, T, H]` of any dtype.
      implementation: None for the fastest, or "xla".

    Raises:
      ValueError: x does not have four dimensions, or an unknown implementation.
      NotImplementedError: the named implementation cannot do this; the message says why.

    Gradients: of x. Source: `transpose` of FasterTransformer v1.0.
    """
    op = "merge_heads"
    x = common.as_array(op, "x", x)
    if x.ndim != 4:
        raise ValueError(f"{op}: x must have shape [B, N, T, H], got {x.shape}")
    dispatch.choose(op, implementation, {})
    return _merge_heads(x)


def permute(x: Array, axes: Sequence[int], *, implementation: str | None = None) -> Array:
    """Reorders the axes of an array of any rank and dtype.

    Equivalent to::

      jnp.transpose(x, axes)

    Args:
      x: an array.
      axes: a permutation of the axes of `x`; negative numbers count from the end.
      implementation: None for the fastest, or "xla".

    Raises:
      TypeError: axes is not a sequence of integers.
      ValueError: axes is not a permutation, or an unknown implementation.
      NotImplementedError: the named implementation cannot do this; the message says why.

    Gradients: of x (the inverse permutation). Source: OneFlow's permute kernel.
    """
    op = "permute"
    x = common.as_array(op, "x", x)
    try:
        order = tuple(operator.index(a) + (x.ndim if operator.index(a) < 0 else 0) for a in axes)
    except TypeError as error:
        raise TypeError(f"{op}: axes must be a sequence of integers, got {axes!r}") from error
    if sorted(order) != list(range(x.ndim)):
        raise ValueError(f"{op}: axes must be a permutation of the {x.ndim} axes of x, got {tuple(axes)}")
    dispatch.choose(op, implementation, {})
    return _permute(x, order)


_split_heads = jax.jit(reference.qkv_bias_split_heads, static_argnums=2)
_merge_heads = jax.jit(reference.merge_heads)
_permute = jax.jit(reference.permute, static_argnums=1)
