"""layer_norm, and bias_residual_layer_norm: LN(dropout(x + bias) + residual)."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax

from jaxft import dispatch, reference
from jaxft.dropout import dropout_seed
from jaxft.kernels.triton import layer_norm as triton
from jaxft.ops import checks, transforms
from jaxft.tuning import rows as tuning_rows
from jaxft.tuning import table as tuning_table

Array = jax.Array


def layer_norm(
    x: Array,
    gamma: Array | None = None,
    beta: Array | None = None,
    *,
    epsilon: float = 1e-6,
    in_place: bool = False,
    implementation: str | None = None,
) -> Array:
    """Normalises the last axis to mean 0 and variance 1, then scales and shifts it, in one pass over memory.

    Equivalent to::

      mean, variance = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
      (x - mean) * lax.rsqrt(variance + epsilon) * gamma + beta

    Args:
      x: `[..., D]`, float32, float16 or bfloat16. Statistics are float32, in two passes (never E[x^2] - E[x]^2).
      gamma, beta: `[D]` of any float dtype, or None for 1 and 0.
      epsilon: added to the variance.
      in_place: the kernel writes the result into the memory of `x`. That saves a buffer where nothing else needs `x`,
        which is donated or was made in the same jit; where something does, XLA copies `x` first. Without effect where
        a gradient is taken, which needs `x`, and with "xla", which reuses buffers as it finds best.
      implementation: None for the fastest, "triton" or "xla".

    Returns:
      An array of the shape and dtype of `x`.

    Raises:
      TypeError: an array is not of floats, or epsilon is not a number.
      ValueError: gamma or beta is not `[D]`, epsilon is not positive, or an unknown implementation.
      NotImplementedError: the named implementation cannot do this; the message says why.

    Gradients: of x, gamma and beta. Deterministic.
    """
    op = "layer_norm"
    x, gamma, beta, epsilon = _check(op, x, gamma, beta, epsilon)
    checks.check_flag(op, "in_place", in_place)
    reason = triton.unsupported(x, gamma=gamma, beta=beta)
    return _run(op, x, None, None, gamma, beta, None, reason, epsilon, 0.0, False, in_place, implementation)[0]


def bias_residual_layer_norm(
    x: Array,
    bias: Array | None,
    residual: Array,
    gamma: Array | None,
    beta: Array | None,
    *,
    epsilon: float = 1e-6,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_sum: bool = False,
    in_place: bool = False,
    implementation: str | None = None,
) -> Any:
    """Adds a bias and a residual and normalises the sum (see `layer_norm`), in one pass over memory.

    Equivalent to::

      layer_norm(dropout(x + bias) + residual, gamma, beta, epsilon=epsilon)

    Args:
      x: `[..., D]`, float32, float16 or bfloat16; the sum and the statistics are float32.
      bias: `[D]` of any float dtype, or None.
      residual: the shape and dtype of `x`.
      gamma, beta: `[D]` of any float dtype, or None for 1 and 0.
      epsilon: added to the variance (FasterTransformer's default; BERT's is 1e-12).
      dropout_rate: in [0, 1). What is kept is a pure function of the key and the element's index.
      dropout_rng: a JAX random key, needed where the rate is not 0.
      return_sum: also return the sum before the normalisation, for pre-norm models.
      in_place: the kernel writes the result into the memory of `x` (see `layer_norm`), and the sum into that of
        `residual`.
      implementation: None for the fastest, "triton" or "xla".

    Returns:
      An array of the shape and dtype of `x`, or with `return_sum` a pair of them: (normalised, sum).

    Raises:
      TypeError: an array is not of floats, residual has another dtype than x, or a number is not one.
      ValueError: a shape does not fit, a number is out of its range, or an unknown implementation.
      NotImplementedError: the named implementation cannot do this; the message says why.

    Gradients: of x, bias, residual, gamma and beta. Deterministic.
    Source: `add_bias_input_layernorm` of FasterTransformer v1.0.
    """
    op = "bias_residual_layer_norm"
    x, gamma, beta, epsilon = _check(op, x, gamma, beta, epsilon)
    bias = checks.as_vector(op, "bias", bias, x.shape[-1])
    residual = checks.as_float(op, "residual", residual)
    checks.check_shape(op, "residual", residual, x.shape)
    checks.check_same_dtype(op, "residual", residual, "x", x)
    rate = checks.check_dropout(op, dropout_rate, dropout_rng)
    checks.check_flag(op, "return_sum", return_sum)
    checks.check_flag(op, "in_place", in_place)
    reason = triton.unsupported(x, bias=bias, gamma=gamma, beta=beta)
    rng = dropout_rng if rate > 0.0 else None
    out = _run(op, x, bias, residual, gamma, beta, rng, reason, epsilon, rate, return_sum, in_place, implementation)
    return out if return_sum else out[0]


def _check(op, x, gamma, beta, epsilon):
    x = checks.as_float(op, "x", x)
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar")
    gamma = checks.as_vector(op, "gamma", gamma, x.shape[-1])
    beta = checks.as_vector(op, "beta", beta, x.shape[-1])
    return x, gamma, beta, checks.check_number(op, "epsilon", epsilon, positive=True)


class _Static(NamedTuple):
    """What is compiled into the kernels."""

    epsilon: float
    dropout_rate: float
    return_sum: bool
    in_place: bool
    forward: tuning_table.RowConfig
    backward: tuning_table.GradientConfig
    interpret: bool


def _run(op, x, bias, residual, gamma, beta, rng, reason, epsilon, rate, return_sum, in_place, implementation):
    """A tuple: the normalised array, and the sum if asked for."""
    choice = dispatch.choose(op, implementation, {"triton": reason})
    if choice.name == "xla" or x.size == 0:
        return _reference(x, bias, residual, gamma, beta, rng, epsilon, rate, return_sum)
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    sizes = (rows, width, x.dtype.itemsize, dispatch.device())
    wide = any(vector is not None and vector.dtype.itemsize > x.dtype.itemsize for vector in (bias, gamma))
    forward = tuning_rows.layer_norm(*sizes)
    backward = tuning_rows.layer_norm_backward(*sizes, "", wide and rate > 0.0)
    static = _Static(epsilon, rate, return_sum, in_place, forward, backward, choice.interpret)
    flat = None if residual is None else residual.reshape(rows, width)
    out = _triton_jit(*transforms.vary_alike(x.reshape(rows, width), bias, flat, gamma, beta, rng), static)
    return tuple(y.reshape(x.shape) for y in out)


@functools.partial(jax.jit, static_argnums=(6, 7, 8))
def _reference(x, bias, residual, gamma, beta, rng, epsilon, rate, return_sum):
    if residual is None:
        return (reference.layer_norm(x, gamma, beta, epsilon=epsilon),)
    out = reference.bias_residual_layer_norm(
        x, bias, residual, gamma, beta, epsilon=epsilon, dropout_rate=rate, dropout_rng=rng, return_sum=return_sum
    )
    return out if return_sum else (out,)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _triton(x, bias, residual, gamma, beta, rng, static):
    return _forward(static, False, x, bias, residual, gamma, beta, rng)


def _forward(static, save, x, bias, residual, gamma, beta, rng):
    return tuple(
        triton.forward(
            x,
            bias,
            residual,
            gamma,
            beta,
            None if rng is None else dropout_seed(rng),
            epsilon=static.epsilon,
            dropout_rate=static.dropout_rate,
            return_sum=static.return_sum,
            save=save,
            in_place=static.in_place and not save,
            config=static.forward,
            interpret=static.interpret,
        )
    )


def _fwd(*arguments):
    *arrays, static = arguments

    run = transforms.with_plain_gradient(functools.partial(_forward, static, True), _plain(static), saves=1)
    *out, saved = run(*arrays)
    return tuple(out), (saved, *arrays)


def _bwd(static, saved, dy):
    def kernel(dy, saved, x, bias, residual, gamma, beta, rng):
        vectors = {"bias": bias, "gamma": gamma, "beta": beta}
        dx, dresidual, found = triton.backward(
            dy[0],
            dy[1] if static.return_sum else None,
            x,
            bias,
            residual,
            gamma,
            None if rng is None else dropout_seed(rng),
            saved,
            dropout_rate=static.dropout_rate,
            vectors={name: vector.dtype for name, vector in vectors.items() if vector is not None},
            config=static.backward,
            interpret=static.interpret,
        )
        return dx, found.get("bias"), dresidual, found.get("gamma"), found.get("beta"), None

    def plain(dy, saved, *arrays):
        return *jax.vjp(_plain(static), *arrays)[1](dy)[:-1], None

    return transforms.with_plain_gradient(kernel, plain)(dy, *saved)


def _plain(static):
    return functools.partial(_reference, epsilon=static.epsilon, rate=static.dropout_rate, return_sum=static.return_sum)


_triton.defvjp(_fwd, _bwd)
_triton_jit = jax.jit(_triton, static_argnums=6)
