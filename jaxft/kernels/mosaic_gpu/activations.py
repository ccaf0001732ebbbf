"""Activations of the Mosaic GPU kernels, float32 in and out, and their derivatives as they are kept for a gradient.

Each exp2, tanh or rsqrt takes as long as eight other instructions. Mosaic's minimum and maximum keep a NaN, and its
division is slow: 1 / a is rsqrt(a)^2.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

_LINEAR, _CUBIC = math.sqrt(2.0 / math.pi), math.sqrt(2.0 / math.pi) * 0.044715  # of "gelu_tanh"

# In 8 bits, derivatives are kept in steps of 1/200, beginning 27 steps below 0: they are within -0.13 and 1.13.
_STEPS, _BELOW = 200.0, 27.0
# Between 1024 and 2048 a float16 is an integer, and the last byte of its bits is that of the integer: to round two
# numbers is one instruction. A conversion to integers would be a slow one for each, and two more for what a byte cannot
# hold.
_TO_LAST_BYTE = 1024.0 + _BELOW


def _sigmoid(x: Array) -> Array:
    inverse_root = lax.rsqrt(1.0 + jnp.exp2(x * -math.log2(math.e)))
    return inverse_root * inverse_root


def _tanh(x: Array) -> Array:
    """With a relative error of 1e-6, where the hardware's is documented to be 5e-4."""
    square = jnp.minimum(x * x, 0.04)
    near_zero = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return jnp.where(x * x < 0.04, near_zero, 2.0 * _sigmoid(2.0 * x) - 1.0)


def _normal_tail(x: Array, dtype: Any) -> Array:
    """Phi(-|x|) of the normal distribution, with a relative error of 3e-4, as for the Triton kernels.

    It is exp(-x^2 / 2) times a minimax fit; for float32 one with an absolute error of 8e-8, of Abramowitz and Stegun
    (7.1.26).
    """
    wide = dtype == jnp.float32
    inverse_root = lax.rsqrt(1.0 + (0.3275911 / math.sqrt(2.0) if wide else 0.49) * jnp.abs(x))
    t = inverse_root * inverse_root
    if wide:
        p = ((0.5307027145 * t - 0.7265760135) * t + 0.7107068705) * t - 0.142248368
        p = p * t + 0.127414796
    else:
        p = ((-0.12037462 * t + 0.25018403) * t + 0.17322216) * t + 0.1970786
    return jnp.exp2(x * x * (-0.5 * math.log2(math.e))) * (t * p)


def _half_argument(name: str, x: Array) -> Any:
    """y for which the activation is x / (1 + e^-2y), None where there is none.

    For "gelu" with an absolute error of 2.6e-5 of 1 / (1 + e^-2y), minimax.
    """
    match name:
        case "gelu":
            square = jnp.minimum(x * x, 16.0)  # beyond, the polynomial bends down; tanh is 1 by then
            return x * (0.79750916 + square * (0.037004681 - 0.00035134242 * square))
        case "gelu_tanh":
            return x * (_LINEAR + _CUBIC * (x * x))
        case "silu":
            return 0.5 * x
    return None


def _by_tanh(x: Array, t: Array) -> Array:
    """x / (1 + e^-2y), from t = tanh(y)."""
    half = 0.5 * x
    return half * t + half


def activation(name: str, x: Array, dtype: Any) -> Array:
    """The activation of float32 `x`, as accurate as an array of results that are rounded to `dtype` needs.

    For float32 that is an absolute error of 2e-6, and a relative one near 0.
    In bfloat16 small negative results may have the wrong sign, which the rounding of the larger ones hides.
    """
    y = _half_argument(name, x)
    if dtype == jnp.bfloat16 and y is not None:
        return _by_tanh(x, jnp.tanh(y))  # by its documentation with an error of |x| / 4096: it is not for float16
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


def slope_dtype(dtype: Any) -> Any:
    """What the derivatives beside results of `dtype` are kept in: 8 bits beside bfloat16.

    Their error is 1/400, that of bfloat16 1/256 above 1, 1/512 from 1/2 on, and less below; 0 and 1 are exact, and what
    is below 1/400 is 0. In the layers of a real checkpoint (MiniLM-L6, sums of -1 to -0.4 +- 1) the gradient of the
    kernel errs by 3.6 to 4.6e-3, that of plain jnp in bfloat16 by 4.1 to 4.5e-3, with derivatives in bfloat16 by
    2.9e-3; that of a unit whose sums are all far in a tail by up to 18 %, in plain jnp by 2 %.

    Beside a sum that is no number they are numbers: the result is NaN or infinite, and so is what follows it.
    """
    return jnp.dtype(jnp.uint8 if dtype == jnp.bfloat16 else dtype)


def activation_and_slope(name: str, x: Array, dtype: Any) -> tuple[Array, Array]:
    """`activation` and its derivative, which is of `slope_dtype`; not for float32.

    The derivative's absolute error is 3e-3 in bfloat16, most of it of the rounding to 8 bits, and 2e-4 in float16
    before it is rounded.
    """
    if dtype == jnp.bfloat16:
        values, steps = _activation_and_steps(name, x)
        return values, lax.bitcast_convert_type(steps.astype(jnp.float16), jnp.uint16).astype(jnp.uint8)
    match name:
        case "gelu":
            tail = _normal_tail(x, dtype)
            slope = jnp.where(x < 0.0, tail, 1.0 - tail) + x * _times_density(x, 1.0)
            values = activation(name, x, dtype)
        case "gelu_tanh":
            a = jnp.maximum(jnp.minimum(x, 11.0), -11.0)
            values, slope = _times_sigmoid(x, 2.0 * _half_argument(name, a), 2.0 * _LINEAR + 6.0 * _CUBIC * (a * a))
        case "silu":
            values, slope = _times_sigmoid(x, x, 1.0)
        case "relu":
            values, slope = activation(name, x, dtype), jnp.where(x > 0.0, 1.0, 0.0)
        case "tanh":
            s = _sigmoid(2.0 * x)
            values, slope = activation(name, x, dtype), 4.0 * s * (1.0 - s)
        case _:
            raise ValueError(f"no kernel has the activation {name!r}")
    return values, slope.astype(dtype)


def kept_slope(kept: Array) -> Array:
    """The float32 that was kept."""
    values = kept.astype(jnp.float32)
    return (values - _BELOW) * (1.0 / _STEPS) if kept.dtype == jnp.uint8 else values


def _activation_and_steps(name: str, x: Array) -> tuple[Array, Array]:
    """In bfloat16, with the derivative in steps, from `_TO_LAST_BYTE` on.

    A warp group finishes its tile while the other multiplies one, but with an instruction in four cycles takes longer
    than the product (see `tuning_dense.dense_mosaic_gradient`). So the hardware's tanh has to do. It is documented to
    err by 1/2048 of itself, which would be 0.01 of a derivative; with a million numbers it did by 1e-5 of itself (H200,
    2026-11-26), and from 8.25 on it was 1.
    """
    y = _half_argument(name, x)
    if y is None:
        values = activation(name, x, jnp.bfloat16)
        one = _STEPS + _TO_LAST_BYTE
        return values, jnp.where(x > 0.0, one, _TO_LAST_BYTE) if name == "relu" else one - _STEPS * (values * values)
    t = jnp.tanh(y)
    values, below = _by_tanh(x, t), 0.5 * _STEPS * t + (0.5 * _STEPS + _TO_LAST_BYTE)
    if name == "gelu":
        return values, x * _times_density(x, _STEPS) + below
    slope_of_y: Any = 0.5 * _STEPS
    if name == "gelu_tanh":  # finite, to be multiplied by 0
        slope_of_y = _STEPS * _LINEAR + (3.0 * _STEPS * _CUBIC) * jnp.minimum(x * x, 121.0)
    return values, (0.5 * x) * (slope_of_y * (1.0 - t * t)) + below


def _times_density(x: Array, number: float) -> Array:
    """The density of the normal distribution times a number."""
    return jnp.exp2(x * x * (-0.5 * math.log2(math.e)) + math.log2(number / math.sqrt(2.0 * math.pi)))


def _times_sigmoid(x: Array, y: Array, slope: Array | float) -> tuple[Array, Array]:
    """x * sigmoid(y) and its derivative, `slope` being that of y: as documented, the hardware's tanh is too coarse."""
    s = _sigmoid(y)
    result = x * s
    return result, s + result * (slope - s * slope)
