"""Activations and their derivatives inside the Triton kernels: float32 in, float32 out.

gelu, gelu_tanh and silu satisfy g(a) = a + g(-a). Each is computed from its value at -|x|, which is e^-y times a smooth
function. The derivatives satisfy g'(a) = 1 - g'(-a) and are computed in the same way.

For 16-bit results the hardware's exp2 is accurate enough. For float32 results neither exp2 nor a y that is rounded to
float32 is accurate enough: the relative error of y appears in e^-y multiplied by y.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxft.kernels.triton import common


def _leading(x: Array, bits: int) -> Array:
    """Truncates the significand of `x` to `bits` bits. Two numbers of 12 bits multiply exactly in float32."""
    mask = jnp.uint32(0xFFFFFFFF << (24 - bits) & 0xFFFFFFFF)
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.uint32) & mask, jnp.float32)


def _polynomial(x: Array, *coefficients: float) -> Array:
    """Evaluates a polynomial in `x`, with the coefficient of the highest power first."""
    value = common.fma(x, coefficients[0], coefficients[1])
    for c in coefficients[2:]:
        value = common.fma(value, x, c)
    return value


def _nearest(x: Array) -> tuple[Array, Array]:
    """Returns the integer nearest to x, |x| < 2^22, as a float and as an int32."""
    if common.interpreting.get():  # XLA would simplify (x + large) - large to x.
        return jnp.round(x), jnp.round(x).astype(jnp.int32)
    # The last bit of numbers near `large` is worth 1, so that the sum is rounded to an integer. This takes two
    # additions; a conversion takes as long as eight.
    large = 1.5 * 2.0**23
    total = x + large
    return total - large, jax.lax.bitcast_convert_type(total, jnp.int32) - 0x4B400000


def _exp_minus(high: Array, low: Array | float, rate: float) -> tuple[Array, Array]:
    """Computes e^(-rate * (high + low)) as a pair (p, scale), whose value is (1 + p) * scale * 2^-24.

    The error of p is about 2^-25. `high` must be at most 151.4 * ln(2) / rate, where the result is 0. The factor 2^24
    keeps `scale` a normal number.
    """
    step = math.log(2.0) / rate
    unit = 2.0 ** (math.frexp(step)[1] - 15)
    coarse = round(step / unit) * unit  # 15 bits, so that n * coarse is exact (Cody and Waite).
    n, whole = _nearest((high + low) * (1.0 / step))
    y = common.fma(n, -coarse, high) + common.fma(n, coarse - step, low)  # |y| <= step / 2
    minimax = (0.00138145599, -0.00836873556, 0.0416683899, -0.166665205, 0.499999934, -1.0)
    p = y * _polynomial(y, *(c * rate ** (6 - i) for i, c in enumerate(minimax)))
    return p, jax.lax.bitcast_convert_type((127 + 24 - whole) << 23, jnp.float32)


def _exp(p: Array, scale: Array) -> Array:
    """Returns the value of a pair (p, scale) that `_exp_minus` has computed."""
    return (1.0 + p) * (scale * 2.0**-24)


def _half_square(a: Array) -> tuple[Array, Array, float]:
    """Returns the arguments of `_exp_minus` for e^(-a^2 / 2)."""
    leading = _leading(a, 12)
    return leading * leading, (a - leading) * (a + leading), 0.5


def _tanh_form(a: Array) -> tuple[Array, Array, float]:
    """Returns the arguments of `_exp_minus` for e^-y, where gelu_tanh(a) = a / (1 + e^-y)."""
    # y = rate * a * (a^2 + 1 / 0.044715). The leading bits of the two factors multiply exactly, and the rest is small.
    leading = _leading(a, 10)
    rest = a - leading
    square = common.fma(leading, leading, 22.36383056640625)
    tail = common.fma(rest, a + leading, 1.0 / 0.044715 - 22.36383056640625)
    factor = _leading(square, 12)
    tail = (square - factor) + tail
    return (
        leading * factor,
        common.fma(leading, tail, rest * (factor + tail)),
        2.0 * math.sqrt(2.0 / math.pi) * 0.044715,
    )


def _from_below(x: Array, below: Array) -> Array:
    """Computes g(x) from `below` = g(-|x|). -inf gives NaN, as in plain jnp; so does a NaN in x that `below` lost."""
    return jnp.where(x < 0.0, 0.0 * x, x) + below


def _gelu_erf(x: Array) -> Array:
    """Computes GELU (erf) within 2 ulp: -g(-a) = a * e^(-a^2 / 2) * (1 + h) / (2 * (1 + a)), h a minimax fit."""
    a = jnp.minimum(jnp.abs(x), 14.468)
    p, scale = _exp_minus(*_half_square(a))
    first, second = 1.0 + a, common.fma(a, 0.2, 1.0)
    inverse = common.reciprocal(first * second)
    t = inverse * second
    h = _polynomial(
        common.fma(a, inverse * first, -2.0),
        4.22832175e-08, -2.3719324e-07, -1.65883813e-06, 2.95508011e-05, -0.000214032262, 0.00100260732,
        -0.00317696627, 0.00560132124, 0.0052220035, -0.0813526398, -0.0381273386,
    )  # fmt: skip
    # q + rest is a / (1 + a). q has 12 bits, so that the remainder of the division is exact. The factor 2^24 keeps
    # `rest` from underflowing for the smallest inputs.
    large = a * 2.0**24
    q, leading = _leading(large * t, 12), _leading(a, 12)
    rest = common.fma(q, leading - a, common.fma(q, -leading, large - q)) * t
    c = p + common.fma(h, p, h)  # 1 + c = (1 + p) * (1 + h)
    return _from_below(x, (q + common.fma(q, c, common.fma(rest, c, rest))) * scale * -(2.0**-49))


def _gelu_erf_16bit(x: Array) -> Array:
    """Computes GELU (erf) with a relative error of 3e-4, in a third of the work of `_gelu_erf`.

    The error is a fraction of the rounding error of the 16-bit types. erfc(|x| / sqrt(2)) / 2 is computed as
    exp(-x^2 / 2) * t * P(t) with t = 1 / (1 + 0.49 |x|), where P is a minimax fit of the relative error.
    """
    t = common.reciprocal(common.fma(jnp.abs(x), 0.49, 1.0))
    p = _polynomial(t, -0.12037462, 0.25018403, 0.17322216, 0.1970786)
    half = common.exp2(x * x * (-0.5 * math.log2(math.e))) * (t * p)
    return x * jnp.where(x < 0.0, half, 1.0 - half)


def _inverse(e: Array) -> tuple[Array, Array]:
    """Computes 1 / (1 + e), 0 <= e <= 1, as a pair (t, s) for t * (1 + s). s corrects the errors of 1 + e and t."""
    t = common.reciprocal(1.0 + e)
    return t, common.fma(t, -e, 1.0 - t)


def _times_sigmoid(x: Array, a: Array, p: Array, scale: Array) -> Array:
    """Computes x / (1 + e^-y) from a = |x| and e^-|y| as (p, scale), by -g(-a) = a * e^-|y| / (1 + e^-|y|)."""
    t, s = _inverse(_exp(p, scale))
    q = a * t
    return _from_below(x, common.fma(q, p + s, q) * scale * -(2.0**-24))


def _sigmoid(x: Array) -> Array:
    """Computes 1 / (1 + e^-x) with the hardware's exp2 and reciprocal."""
    return common.reciprocal(1.0 + common.exp2(x * -math.log2(math.e)))


def _derivative_of_times_sigmoid(e: Array, y_derivative: Array) -> Array:
    """Computes the derivative of x / (1 + e^-y) at -a, a >= 0, from `e` = e^-|y| and `y_derivative` = a * y'(a)."""
    t, s = _inverse(e)
    t = common.fma(t, s, t)
    return e * (t * common.fma(y_derivative, -t, 1.0))


def activation(name: str, x: Array, dtype: Any) -> Array:
    """Computes an activation of `x`, float32, as accurately as results that are rounded to `dtype` need."""
    exact = dtype == jnp.float32
    match name:
        case "gelu":
            return _gelu_erf(x) if exact else _gelu_erf_16bit(x)
        case "gelu_tanh":
            if exact:
                a = jnp.minimum(jnp.abs(x), 10.705)
                return _times_sigmoid(x, a, *_exp_minus(*_tanh_form(a)))
            linear = 2.0 * math.sqrt(2.0 / math.pi)
            return x * _sigmoid(x * common.fma(x * x, linear * 0.044715, linear))
        case "silu":
            if exact:
                a = jnp.minimum(jnp.abs(x), 104.66)
                return _times_sigmoid(x, a, *_exp_minus(a, 0.0, 1.0))
            return x * _sigmoid(x)
        case "relu":
            return jnp.where(x < 0.0, 0.0, x)  # Triton's maximum would turn NaN into 0.
        case "tanh":
            return jnp.tanh(x)
    raise ValueError(f"no kernel has the activation {name!r}")


def activation_gradient(name: str, x: Array, dy: Array, dtype: Any) -> Array:
    """Computes `dy` times the derivative of an activation at `x`, where `x` was read from an array of `dtype`.

    The derivatives for 16-bit dtypes are as accurate as the derivatives for float32, except far in the negative tails:
    the gradient of a bias may be float32 even where x has 16 bits.
    """
    if name == "relu":
        return jnp.where(x > 0.0, dy, 0.0)
    exact = dtype == jnp.float32
    a = jnp.abs(x)
    match name:
        case "tanh":
            a = jnp.where(a > 52.33, 52.33, a)  # A minimum that keeps NaN.
            e = _exp(*_exp_minus(a, 0.0, 2.0)) if exact else common.exp2(a * (-2.0 * math.log2(math.e)))
            t, s = _inverse(e)
            derivative = 4.0 * (t * t) * e
            return dy * common.fma(derivative, 2.0 * s, derivative)
        case "gelu":
            a = jnp.minimum(a, 14.468)
            e = _exp(*_exp_minus(*_half_square(a))) if exact else common.exp2(a * a * (-0.5 * math.log2(math.e)))
            # The derivative at -a is 0 for a = 0.7517915. The polynomial is a minimax fit of the relative error.
            below = e * (0.7517915246935643 - a) * _polynomial(
                a * common.reciprocal(common.fma(a, 0.25, 1.0)),
                1.22685106e-06, -2.0015146e-05, 8.15572273e-05, 0.000636503189, -0.00934950055, 0.0533910039,
                -0.176652334, 0.665077969,
            )  # fmt: skip
        case "gelu_tanh":
            a = jnp.minimum(a, 10.705)
            linear, cubic = 2.0 * math.sqrt(2.0 / math.pi), 2.0 * math.sqrt(2.0 / math.pi) * 0.044715
            square = a * a
            if exact:
                e = _exp(*_exp_minus(*_tanh_form(a)))
            else:
                e = common.exp2(a * common.fma(square, -cubic * math.log2(math.e), -linear * math.log2(math.e)))
            below = _derivative_of_times_sigmoid(e, a * common.fma(square, 3.0 * cubic, linear))
        case "silu":
            a = jnp.minimum(a, 104.66)
            e = _exp(*_exp_minus(a, 0.0, 1.0)) if exact else common.exp2(a * -math.log2(math.e))
            below = _derivative_of_times_sigmoid(e, a)
        case _:
            raise ValueError(f"no kernel has the activation {name!r}")
    # The fma makes infinities give NaN, as in plain jnp.
    return dy * common.fma(x, 0.0, jnp.where(x < 0.0, below, 1.0 - below))
