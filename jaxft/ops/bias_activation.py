"""bias_activation: activation(x + bias)."""

from __future__ import annotations

import functools
import math

import jax

from jaxft import dispatch, reference, tuning
from jaxft.kernels.triton import bias_activation as triton
from jaxft.ops import common

Array = jax.Array

ACTIVATIONS = tuple(reference.ACTIVATIONS)


def bias_activation(
    x: Array, bias: Array | None, *, activation: str = "gelu", implementation: str | None = None
) -> Array:
    """Adds a bias and applies an activation, in one pass over memory.

    Equivalent to::

      jax.nn.gelu(x + bias, approximate=False)  # activation="gelu"

    Args:
      x: `[..., D]`, float32, float16 or bfloat16; the sum and the activation are computed in float32.
      bias: `[D]` of any float dtype, or None.
      activation: "gelu" (BERT's, by the error function), "gelu_tanh" (FasterTransformer's), "relu", "silu" or "tanh".
      implementation: None for the fastest, "triton" or "xla".

    Returns:
      An array of the shape and dtype of `x`.

    Raises:
      TypeError: an array is not of floats.
      ValueError: `bias` is not `[D]`, or an unknown activation or implementation.
      NotImplementedError: the named implementation cannot do this; the message says why.

    Gradients: of x and bias. Deterministic. Before it is rounded to 16 bits, the kernel's GELU has a relative error of
    at most 3e-4.
    Source: `add_bias_act` of FasterTransformer v1.0.
    """
    op = "bias_activation"
    x = common.as_float(op, "x", x)
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar")
    bias = common.as_vector(op, "bias", bias, x.shape[-1])
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be one of {ACTIVATIONS}, got {activation!r}")
    choice = dispatch.choose(op, implementation, {"triton": triton.unsupported(x, bias)})
    if choice.name == "xla" or x.size == 0:
        return _reference(x, bias, activation)
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    config = tuning.bias_activation(rows, width, x.dtype.itemsize, dispatch.device_kind())
    return _triton_jit(x.reshape(rows, width), bias, activation, config, choice.interpret).reshape(x.shape)


@functools.partial(jax.jit, static_argnames="activation")
def _reference(x: Array, bias: Array | None, activation: str) -> Array:
    return reference.bias_activation(x, bias, activation=activation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _triton(x, bias, activation, config, interpret):
    return triton.forward(x, bias, activation=activation, config=config, interpret=interpret)


def _fwd(x, bias, activation, config, interpret):
    return _triton(x, bias, activation, config, interpret), (x, bias)


def _bwd(activation, config, interpret, saved, dy):
    _, vjp = jax.vjp(functools.partial(reference.bias_activation, activation=activation), *saved)
    return vjp(dy)


_triton.defvjp(_fwd, _bwd)
_triton_jit = jax.jit(_triton, static_argnums=(2, 3, 4))
