"""bias_activation: activation(x + bias)."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax

from jaxft import dispatch, reference
from jaxft.kernels.triton import bias_activation as triton
from jaxft.ops import checks, transforms
from jaxft.tuning import rows as tuning_rows
from jaxft.tuning import table as tuning_table

Array = jax.Array


def bias_activation(
    x: Array,
    bias: Array | None,
    *,
    activation: str = "gelu",
    in_place: bool = False,
    implementation: str | None = None,
) -> Array:
    """Adds a bias and applies an activation, in one pass over memory.

    Equivalent to::

      jax.nn.gelu(x + bias, approximate=False)  # activation="gelu"

    Args:
      x: `[..., D]`, float32, float16 or bfloat16; the sum and the activation are computed in float32.
      bias: `[D]` of any float dtype, or None.
      activation: "gelu" (BERT's, by the error function), "gelu_tanh" (FasterTransformer's), "relu", "silu" or "tanh".
      in_place: the kernel writes the result into the memory of `x`. That saves a buffer where nothing else needs `x`,
        which is donated or was made in the same jit; where something does, XLA copies `x` first. Without effect where
        a gradient is taken, which needs `x`, and with "xla", which reuses buffers as it finds best.
      implementation: None for the fastest, "triton" or "xla".

    Returns:
      An array of the shape and dtype of `x`.

    Raises:
      TypeError: an array is not of floats.
      ValueError: `bias` is not `[D]`, or an unknown activation or implementation.
      NotImplementedError: the named implementation cannot do this; the message says why.

    Gradients: of x and bias, in one pass too, from x and bias again instead of stored results. Deterministic.
    Accuracy: the kernel's float32 GELU is within 2 ulp; before it is rounded to 16 bits, it has a relative error of at
    most 3e-4.
    Source: `add_bias_act` of FasterTransformer v1.0.
    """
    op = "bias_activation"
    x = checks.as_float(op, "x", x)
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar")
    bias = checks.as_vector(op, "bias", bias, x.shape[-1])
    checks.check_activation(op, activation)
    checks.check_flag(op, "in_place", in_place)
    choice = dispatch.choose(op, implementation, {"triton": triton.unsupported(x, bias)})
    if choice.name == "xla" or x.size == 0:
        return _reference(x, bias, activation)
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    sizes = (rows, width, x.dtype.itemsize, dispatch.device())
    forward, backward = tuning_rows.bias_activation(*sizes), tuning_rows.bias_activation_backward(*sizes)
    static = _Static(activation, in_place, forward, backward, choice.interpret)
    return _triton_jit(*transforms.vary_alike(x.reshape(rows, width), bias), static).reshape(x.shape)


class _Static(NamedTuple):
    """What is compiled into the kernels."""

    activation: str
    in_place: bool
    forward: tuning_table.ElementwiseConfig
    backward: tuning_table.GradientConfig
    interpret: bool


@functools.partial(jax.jit, static_argnames="activation")
def _reference(x: Array, bias: Array | None, activation: str) -> Array:
    return reference.bias_activation(x, bias, activation=activation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _triton(x, bias, static):
    return triton.forward(
        x, bias, activation=static.activation, config=static.forward, in_place=static.in_place,
        interpret=static.interpret,
    )  # fmt: skip


def _fwd(x, bias, static):
    return _triton(x, bias, static._replace(in_place=False)), (x, bias)


def _bwd(static, saved, dy):
    def kernel(dy, x, bias):
        return triton.backward(
            dy, x, bias, activation=static.activation, config=static.backward, interpret=static.interpret
        )

    def plain(dy, *arrays):
        return jax.vjp(functools.partial(_reference, activation=static.activation), *arrays)[1](dy)

    return transforms.with_plain_gradient(kernel, plain)(dy, *saved)


_triton.defvjp(_fwd, _bwd)
_triton_jit = jax.jit(_triton, static_argnums=2)
