"""softmax and log_softmax with scale, additive bias and boolean mask."""

from __future__ import annotations

import functools
from typing import Any

import jax

from jaxft import dispatch, reference
from jaxft.ops import common

Array = jax.Array


def softmax(
    x: Array,
    *,
    scale: float | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    implementation: str | None = None,
) -> Array:
    """Softmax over the last axis of x * scale + bias, where `mask` is True; a row without a True gives 0.

    Equivalent, where every row has a True, to::

      jax.nn.softmax(x * scale + bias, where=mask)

    Args:
      x: `[..., S]`, float32, float16 or bfloat16, of any width; computed in float32.
      scale: a Python number, None for 1.
      bias: floats that broadcast to the shape of `x` (`[B, 1, T, S]`, say).
      mask: booleans that broadcast to the shape of `x`, True = attend. What is masked (NaN and Inf included) reaches no
        output and no gradient.
      implementation: None for the fastest, or "xla".

    Returns:
      An array of the shape and dtype of `x`.

    Raises:
      TypeError: x or bias is not of floats, mask is not boolean, or scale is not a number.
      ValueError: bias or mask does not broadcast, or an unknown implementation.
      NotImplementedError: the named implementation cannot do this; the message says why.

    Gradients: of x and bias. Deterministic.
    Source: FasterTransformer v1.0's `softmax_kernel` (with `scale` and `mask`); OneFlow's fused softmax.
    """
    return _run("softmax", reference.softmax, x, scale, bias, mask, implementation)


def log_softmax(
    x: Array,
    *,
    scale: float | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    implementation: str | None = None,
) -> Array:
    """The logarithm of `softmax(x, scale=, bias=, mask=)`, -inf where `mask` is False. Arguments as there."""
    return _run("log_softmax", reference.log_softmax, x, scale, bias, mask, implementation)


def _run(op, function, x, scale, bias, mask, implementation):
    x = common.as_float(op, "x", x)
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar")
    if scale is not None:
        scale = common.check_number(op, "scale", scale)
    if bias is not None:
        bias = common.as_float(op, "bias", bias)
        common.check_broadcasts(op, "bias", bias, x.shape)
    if mask is not None:
        mask = common.as_mask(op, "mask", mask)
        common.check_broadcasts(op, "mask", mask, x.shape)
    dispatch.choose(op, implementation, {})
    return _reference(function, x, scale, bias, mask)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _reference(function: Any, x: Array, scale: float | None, bias: Array | None, mask: Array | None) -> Array:
    return function(x, scale=scale, bias=bias, mask=mask)
