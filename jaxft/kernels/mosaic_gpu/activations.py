"""Activations of the Mosaic GPU kernels, float32 in and out, and the derivatives that are kept for a gradient.

An exp2, tanh or rsqrt takes as long as eight other instructions. Mosaic's minimum and maximum keep a NaN. Mosaic's
division is slow, so 1 / a is computed as rsqrt(a)^2.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jaxft.reference import FLOAT8

_LINEAR, _CUBIC = math.sqrt(2.0 / math.pi), math.sqrt(2.0 / math.pi) * 0.044715  # For "gelu_tanh".

# Derivatives lie between -0.13 and 1.13. The byte b stands for the derivative (b - 27) / 200.
_STEPS, _BELOW = 200.0, 27.0
# A float16 between 1024 and 2048 is an integer, and the last byte of its bits is the last byte of that integer. One
# instruction rounds two numbers to float16. A conversion to integers would take one slow instruction for each number,
# and two more to clamp numbers that do not fit into a byte.
_TO_LAST_BYTE = 1024.0 + _BELOW


def _sigmoid(x: Array) -> Array:
    inverse_root = lax.rsqrt(1.0 + jnp.exp2(x * -math.log2(math.e)))
    return inverse_root * inverse_root


def _tanh(x: Array) -> Array:
    """Computes tanh with a relative error of 1e-6. The documented error of the hardware's tanh is 5e-4."""
    square = x * x
    near_zero = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return jnp.where(square < 0.04, near_zero, 2.0 * _sigmoid(2.0 * x) - 1.0)


def _normal_tail(x: Array, dtype: Any) -> Array:
    """Computes Phi(-|x|), the lower tail of the normal distribution: exp(-x^2 / 2) times a minimax fit."""
    wide = dtype == jnp.float32
    inverse_root = lax.rsqrt(1.0 + (0.3275911 / math.sqrt(2.0) if wide else 0.49) * jnp.abs(x))
    t = inverse_root * inverse_root
    if wide:  # Abramowitz and Stegun, 7.1.26: absolute error 8e-8.
        p = ((0.5307027145 * t - 0.7265760135) * t + 0.7107068705) * t - 0.142248368
        p = p * t + 0.127414796
    else:  # The fit of the Triton kernels: relative error 3e-4.
        p = ((-0.12037462 * t + 0.25018403) * t + 0.17322216) * t + 0.1970786
    return jnp.exp2(x * x * (-0.5 * math.log2(math.e))) * (t * p)


def _half_argument(name: str, x: Array, dtype: Any) -> Any:
    """Returns the y for which the activation is x / (1 + e^-2y), or None if it has no such form."""
    match name:
        case "gelu" if dtype == FLOAT8:  # A minimax fit: the activation has an absolute error of 2.8e-4.
            return x * (0.80015532 + 0.0347017 * (x * x))
        case "gelu":  # A minimax fit: 1 / (1 + e^-2y) has an absolute error of 2.6e-5.
            square = jnp.minimum(x * x, 16.0)  # For larger x the polynomial decreases; tanh(y) is 1 there.
            return x * (0.79750916 + square * (0.037004681 - 0.00035134242 * square))
        case "gelu_tanh":
            return x * (_LINEAR + _CUBIC * (x * x))
        case "silu":
            return 0.5 * x
    return None


def _by_tanh(x: Array, t: Array) -> Array:
    """Computes x / (1 + e^-2y) from t = tanh(y)."""
    half = 0.5 * x
    return half * t + half


def activation(name: str, x: Array, dtype: Any) -> Array:
    """Computes an activation of float32 `x`, in float32, as accurately as results that are rounded to `dtype` need.

    For float32 the absolute error is 2e-6; near 0 this is also the relative error. For bfloat16 and float8, small
    negative results may have the wrong sign. This error is smaller than the rounding errors of the larger results.
    """
    y = _half_argument(name, x, dtype)
    if dtype in (jnp.bfloat16, FLOAT8) and y is not None:
        # By the documentation of the hardware's tanh, the error is up to |x| / 4096, too much for float16.
        return _by_tanh(x, jnp.tanh(y))
    match name:
        case "gelu":
            tail = _normal_tail(x, dtype)
            return x * jnp.where(x < 0.0, tail, 1.0 - tail)
        case "gelu_tanh" | "silu":
            return x * _sigmoid(2.0 * y)
        case "relu":
            return jnp.maximum(x, 0.0)
        case "tanh":
            return _tanh(x) if dtype == jnp.float32 else jnp.tanh(x)
    raise ValueError(f"no kernel has the activation {name!r}")


# --- Derivatives ---------------------------------------------------------------------------------------------------


def activation_and_derivative(name: str, x: Array, dtype: Any) -> tuple[Array, Array]:
    """Computes an activation (float32) of float32 `x`, and its derivative in `support.derivative_dtype(dtype)`.

    `dtype` is the dtype of the results, float16 or bfloat16. The absolute error of the derivative is 3e-3 for bfloat16,
    mostly from the rounding to 8 bits. For float16 it is 2e-4 before the derivative is rounded.
    """
    if dtype == jnp.bfloat16:
        values, steps = _activation_and_steps(name, x)
        return values, lax.bitcast_convert_type(steps.astype(jnp.float16), jnp.uint16).astype(jnp.uint8)
    match name:
        case "gelu":
            tail = _normal_tail(x, dtype)
            derivative = jnp.where(x < 0.0, tail, 1.0 - tail) + x * _times_density(x, 1.0)
            values = activation(name, x, dtype)
        case "gelu_tanh":
            a = jnp.maximum(jnp.minimum(x, 11.0), -11.0)
            values, derivative = _times_sigmoid(
                x, 2.0 * _half_argument(name, a, dtype), 2.0 * _LINEAR + 6.0 * _CUBIC * (a * a)
            )
        case "silu":
            values, derivative = _times_sigmoid(x, x, 1.0)
        case "relu":
            values, derivative = activation(name, x, dtype), jnp.where(x > 0.0, 1.0, 0.0)
        case "tanh":
            s = _sigmoid(2.0 * x)
            values, derivative = activation(name, x, dtype), 4.0 * s * (1.0 - s)
        case _:
            raise ValueError(f"no kernel has the activation {name!r}")
    return values, derivative.astype(dtype)


def kept_derivative(kept: Array) -> Array:
    """Converts derivatives that `activation_and_derivative` has returned to float32."""
    values = kept.astype(jnp.float32)
    return (values - _BELOW) * (1.0 / _STEPS) if kept.dtype == jnp.uint8 else values


def _activation_and_steps(name: str, x: Array) -> tuple[Array, Array]:
    """Computes an activation for bfloat16, and its derivative in steps of 1 / `_STEPS`, where 0 is `_TO_LAST_BYTE`.

    One warp group finishes its tile while the other one multiplies. It issues an instruction every four cycles, so that
    finishing a tile takes longer than the matmul. Only the hardware's tanh is fast enough. Its documented relative
    error of 1/2048 would be an error of 0.01 in a derivative. The measured error is smaller.
    """
    # H200, tanh of a million numbers: relative error 1e-5 (documented 5e-4), and exactly 1 from 8.25 on, 2026-11-26
    # See docs/performance-notes.md, "Dense layers with activation derivatives (Mosaic GPU)".
    y = _half_argument(name, x, jnp.bfloat16)
    if y is None:
        values = activation(name, x, jnp.bfloat16)
        one = _STEPS + _TO_LAST_BYTE
        return values, jnp.where(x > 0.0, one, _TO_LAST_BYTE) if name == "relu" else one - _STEPS * (values * values)
    t = jnp.tanh(y)
    values, below = _by_tanh(x, t), 0.5 * _STEPS * t + (0.5 * _STEPS + _TO_LAST_BYTE)
    if name == "gelu":
        return values, x * _times_density(x, _STEPS) + below
    derivative_of_y: Any = 0.5 * _STEPS
    if name == "gelu_tanh":  # Clamped to stay finite where 1 - t * t is 0.
        derivative_of_y = _STEPS * _LINEAR + (3.0 * _STEPS * _CUBIC) * jnp.minimum(x * x, 121.0)
    return values, (0.5 * x) * (derivative_of_y * (1.0 - t * t)) + below


def _times_density(x: Array, number: float) -> Array:
    """Computes the density of the normal distribution at `x`, times `number`."""
    return jnp.exp2(x * x * (-0.5 * math.log2(math.e)) + math.log2(number / math.sqrt(2.0 * math.pi)))


def _times_sigmoid(x: Array, y: Array, dy_dx: Array | float) -> tuple[Array, Array]:
    """Computes x * sigmoid(y) and its derivative. The hardware's tanh is too inaccurate here."""
    s = _sigmoid(y)
    result = x * s
    return result, s + result * (dy_dx - s * dy_dx)
