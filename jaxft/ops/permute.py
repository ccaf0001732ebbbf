"""qkv_bias_split_heads, merge_heads and permute: the layout changes of an encoder, and any other."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxft import dispatch, reference
from jaxft.kernels.triton import permute as triton
from jaxft.ops import checks, transforms
from jaxft.tuning import layouts as tuning_layouts

Array = jax.Array


def qkv_bias_split_heads(
    qkv: Array, bias: Array | None, num_heads: int, *, implementation: str | None = None
) -> tuple[Array, Array, Array]:
    """Adds the bias of the packed projection and brings queries, keys and values into [B, N, T, H] each.

    Equivalent to::

      q, k, v = jnp.transpose((qkv + bias).reshape(B, T, 3, N, H), (2, 0, 3, 1, 4))

    Args:
      qkv: `[B, T, 3*N*H]`, float32, float16 or bfloat16; for the kernel of up to 2**31 elements.
      bias: `[3*N*H]` of any float dtype, or None.
      num_heads: N.
      implementation: None for the fastest, "triton" or "xla".

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
    qkv = checks.as_float(op, "qkv", qkv)
    if qkv.ndim != 3:
        raise ValueError(f"{op}: qkv must have shape [B, T, 3*N*H], got {qkv.shape}")
    if not checks.is_natural(num_heads) or num_heads < 1:
        raise ValueError(f"{op}: num_heads must be a positive Python integer, got {num_heads!r}")
    if qkv.shape[-1] % (3 * num_heads):
        raise ValueError(
            f"{op}: the last axis of qkv must be a multiple of 3 * num_heads = {3 * num_heads}, got {qkv.shape}"
        )
    bias = checks.as_vector(op, "bias", bias, qkv.shape[-1])
    choice = dispatch.choose(op, implementation, {"triton": triton.split_unsupported(qkv, bias)})
    if choice.name == "xla" or qkv.size == 0:
        return _split_heads(qkv, bias, num_heads)
    return _split_triton_jit(*transforms.vary_alike(qkv, bias), num_heads, dispatch.device(), choice.interpret)


def merge_heads(x: Array, *, implementation: str | None = None) -> Array:
    """[B, N, T, H] -> [B, T, N*H], the inverse of splitting heads.

    Equivalent to::

      jnp.transpose(x, (0, 2, 1, 3)).reshape(B, T, N * H)

    Args:
      x: `[B, N, T, H]` of any dtype; for the kernel as in `permute`.
      implementation: None for the fastest, "triton" or "xla".

    Raises:
      ValueError: x does not have four dimensions, or an unknown implementation.
      NotImplementedError: the named implementation cannot do this; the message says why.

    Gradients: of x. Deterministic. Source: `transpose` of FasterTransformer v1.0.
    """
    op = "merge_heads"
    x = checks.as_array(op, "x", x)
    if x.ndim != 4:
        raise ValueError(f"{op}: x must have shape [B, N, T, H], got {x.shape}")
    batch, heads, length, size = x.shape
    return _move(op, x, (0, 2, 1, 3), (batch, length, heads * size), implementation)


def permute(x: Array, axes: Sequence[int], *, implementation: str | None = None) -> Array:
    """Reorders the axes of an array of any rank and dtype.

    Equivalent to::

      jnp.transpose(x, axes)

    Args:
      x: an array of any rank and dtype. The kernel takes those of 1, 2, 4 or 8 bytes and up to 2**31 elements, and
        moves the bits as they are.
      axes: a permutation of the axes of `x`; negative numbers count from the end.
      implementation: None for the fastest, "triton" or "xla".

    Raises:
      TypeError: axes is not a sequence of integers.
      ValueError: axes is not a permutation, or an unknown implementation.
      NotImplementedError: the named implementation cannot do this; the message says why.

    Gradients: of x (the inverse permutation, by the same kernel). Deterministic. Source: OneFlow's permute kernel.
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


def _move(op, x, axes, result, implementation):
    """x with its axes in this order, as an array of the shape `result`."""
    shape, order = triton.reduce(x.shape, axes)
    moves = len(shape) > 1
    choice = dispatch.choose(op, implementation, {"triton": triton.unsupported(x) if moves else None})
    if choice.name == "xla" or x.size == 0 or not moves:  # XLA only changes the shape where nothing moves
        return _transpose(x, axes, result)
    return _triton_jit(x, shape, order, result, dispatch.device(), choice.interpret)


_split_heads = jax.jit(reference.qkv_bias_split_heads, static_argnums=2)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _transpose(x, axes, result):
    return reference.permute(x, axes).reshape(result)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _triton_jit(x, shape, order, result, device, interpret):
    return _triton(x.reshape(shape), order, device, interpret).reshape(result)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _triton(x, axes, device, interpret):
    result = tuple(x.shape[axis] for axis in axes)
    kept = x.shape[-1] if axes[-1] == x.ndim - 1 else 1
    aligned = math.gcd(x.shape[-1], result[-1], 16 // x.dtype.itemsize)
    config = tuning_layouts.permute(x.size, kept, aligned, x.dtype.itemsize, device)
    return triton.forward(x, axes, config=config, interpret=interpret)


def _fwd(x, axes, device, interpret):
    return _triton(x, axes, device, interpret), None


def _bwd(axes, device, interpret, _, dy):
    if dy.dtype == jax.dtypes.float0:  # of integers, which have no gradient
        return (None,)
    inverse = tuple(sorted(range(len(axes)), key=axes.__getitem__))
    return (_triton(dy, inverse, device, interpret),)


_triton.defvjp(_fwd, _bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _split_triton(qkv, bias, num_heads, device, interpret):
    batch, length, width = qkv.shape
    size = width // (3 * num_heads)
    config = tuning_layouts.qkv_bias_split_heads(batch * num_heads, length, size, qkv.dtype.itemsize, device)
    return tuple(triton.split_heads(qkv, bias, num_heads, config=config, interpret=interpret))


def _split_fwd(qkv, bias, num_heads, device, interpret):
    return _split_triton(qkv, bias, num_heads, device, interpret), bias


def _split_bwd(num_heads, device, interpret, bias, dy):
    dqkv, total = _join_triton(dy, bias is not None, num_heads, device, interpret)
    return dqkv, None if bias is None else total.astype(bias.dtype)


_split_triton.defvjp(_split_fwd, _split_bwd)
_split_triton_jit = jax.jit(_split_triton, static_argnums=(2, 3, 4))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _join_triton(parts, with_sum, num_heads, device, interpret):
    """The transpose of `_split_triton`: qkv, and its sum over B and T in float32 or None."""
    batch, _, length, size = parts[0].shape
    itemsize = parts[0].dtype.itemsize
    config = tuning_layouts.qkv_bias_split_heads_backward(batch, length, num_heads, size, itemsize, device)
    qkv, *sums = triton.join_heads(parts, with_sums=with_sum, config=config, interpret=interpret)
    return qkv, jnp.sum(sums[0], axis=0) if with_sum else None


def _join_fwd(parts, with_sum, num_heads, device, interpret):
    return _join_triton(parts, with_sum, num_heads, device, interpret), None


def _join_bwd(with_sum, num_heads, device, interpret, _, dy):
    return (_split_triton(*dy, num_heads, device, interpret),)


_join_triton.defvjp(_join_fwd, _join_bwd)
