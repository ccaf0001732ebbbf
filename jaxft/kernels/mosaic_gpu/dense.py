"""activation(x @ kernel + bias) + residual in one kernel for Hopper: all of it meets the product in registers.

2 * M * K * F floating-point operations. Those of float32 are TF32's: what x has beyond its 10 bits is cut off, kernel
is rounded to them. Hopper multiplies 32-bit blocks only as they lie for x @ kernel^T, so XLA transposes kernel first.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxft.kernels.mosaic_gpu import dense_common
from jaxft.kernels.mosaic_gpu.dense_common import PIECE, place_of, store_piece
from jaxft.tuning_dense import MosaicDenseConfig

Array = jax.Array


def unsupported(x: Array, kernel: Array, bias: Array | None, residual: Array | None = None) -> str | None:
    """Why the kernel cannot take these arrays, if it cannot."""
    if x.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        return f"x is {x.dtype}, the kernel takes float32, float16 and bfloat16"
    if bias is not None and bias.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        return f"bias is {bias.dtype}, the kernel takes float32, float16 and bfloat16"
    if residual is not None and x.dtype == jnp.float32:
        return "it adds no residual in float32"  # there is no shared memory left for it
    (rows, depth), width = x.shape, kernel.shape[1]
    if 0 in (rows, depth, width):
        return "an array is empty"
    if max(rows, depth, width) > 2**30:
        return f"a product of {rows}x{depth} and {depth}x{width} has a size above 2^30"
    if rows < PIECE or width <= PIECE:
        # What lies beyond the edge of an array of one line of tiles is stored at its beginning (JAX 0.11.2).
        return f"M is {rows} and F is {width}: they must be at least {PIECE} and above {PIECE}"
    if not dense_common.line(x.dtype, depth, width):
        least = 32 // x.dtype.itemsize
        return f"K is {depth} and F is {width}: above {4 * least} they must be multiples of {least}, below of 8"
    return None


# --- Activations: float32 in, float32 out ------------------------------------------------------------------------
#
# Each exp2, tanh or rsqrt takes as long as eight other instructions. Mosaic's minimum and maximum keep a NaN, and its
# division is slow: 1 / a is rsqrt(a)^2.


def _sigmoid(x: Array) -> Array:
    inverse_root = lax.rsqrt(1.0 + jnp.exp2(x * -math.log2(math.e)))
    return inverse_root * inverse_root


def _tanh(x: Array) -> Array:
    """With a relative error of 1e-6, where the hardware's is 5e-4."""
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


def _gelu_argument(x: Array) -> Array:
    """y for which (1 + tanh(y)) / 2 is Phi(x), with an absolute error of 2.6e-5: minimax."""
    square = jnp.minimum(x * x, 16.0)  # beyond, the polynomial bends down; tanh is 1 by then
    return x * (0.79750916 + square * (0.037004681 - 0.00035134242 * square))


def _by_tanh(x: Array, y: Array) -> Array:
    """x / (1 + e^-2y). The hardware's tanh gives it an absolute error of up to |x| / 4096: it is not for float16."""
    half = 0.5 * x
    return half * jnp.tanh(y) + half


def activation(name: str, x: Array, dtype: Any) -> Array:
    """The activation of float32 `x`, as accurate as an array of results that are rounded to `dtype` needs.

    For float32 that is an absolute error of 2e-6, and a relative one near 0.
    In bfloat16 small negative results may have the wrong sign, which the rounding of the larger ones hides.
    """
    coarse = dtype == jnp.bfloat16
    match name:
        case "gelu":
            if coarse:
                return _by_tanh(x, _gelu_argument(x))
            tail = _normal_tail(x, dtype)
            return x * jnp.where(x < 0.0, tail, 1.0 - tail)
        case "gelu_tanh":
            y = x * (math.sqrt(2.0 / math.pi) + (math.sqrt(2.0 / math.pi) * 0.044715) * (x * x))
            return _by_tanh(x, y) if coarse else x * _sigmoid(2.0 * y)
        case "silu":
            return _by_tanh(x, 0.5 * x) if coarse else x * _sigmoid(x)
        case "relu":
            return jnp.maximum(x, 0.0)
        case "tanh":
            return _tanh(x) if dtype == jnp.float32 else jnp.tanh(x)
    raise ValueError(f"no kernel has the activation {name!r}")


def activation_and_slope(name: str, x: Array, dtype: Any) -> tuple[Array, Array]:
    """The same and its derivative, with an absolute error of 3e-4 in bfloat16 and 2e-4 in float16; not for float32."""
    match name:
        case "gelu":
            if dtype == jnp.bfloat16:
                below = 0.5 * jnp.tanh(_gelu_argument(x)) + 0.5
            else:
                tail = _normal_tail(x, dtype)
                below = jnp.where(x < 0.0, tail, 1.0 - tail)
            density = jnp.exp2(x * x * (-0.5 * math.log2(math.e))) * (1.0 / math.sqrt(2.0 * math.pi))
            return activation(name, x, dtype), below + x * density
        case "gelu_tanh":
            a = jnp.maximum(jnp.minimum(x, 11.0), -11.0)
            linear, cubic = 2.0 * math.sqrt(2.0 / math.pi), 2.0 * math.sqrt(2.0 / math.pi) * 0.044715
            return _times_sigmoid(x, a * (linear + cubic * (a * a)), linear + 3.0 * cubic * (a * a))
        case "silu":
            return _times_sigmoid(x, x, 1.0)
        case "relu":
            return activation(name, x, dtype), jnp.where(x > 0.0, 1.0, 0.0)
        case "tanh":
            s = _sigmoid(2.0 * x)
            return activation(name, x, dtype), 4.0 * s * (1.0 - s)
    raise ValueError(f"no kernel has the activation {name!r}")


def _times_sigmoid(x: Array, y: Array, slope: Array | float) -> tuple[Array, Array]:
    """x * sigmoid(y) and its derivative, `slope` being that of y: the hardware's tanh is too coarse for it."""
    s = _sigmoid(y)
    result = x * s
    return result, s + result * (slope - s * slope)


# --- The kernel --------------------------------------------------------------------------------------------------


def _fwd_kernel(
    x_ref, kernel_ref, bias_ref, residual_ref, y_ref, also_ref, *, name: Any, also: Any, config: MosaicDenseConfig
):
    tile_m, tile_n = config.tile_m, config.tile_n
    pieces = [(m, n) for m in range(0, tile_m, PIECE) for n in range(0, tile_n, PIECE)]

    def body(y_smem, bias_smem, bias_there, residual_smem, residual_there):
        def copy_residual(i, warps, row, column):
            if residual_ref is not None and i < len(pieces):
                here = residual_ref.at[place_of(pieces[i], row, column)]
                plgpu.copy_gmem_to_smem(here, residual_smem.at[warps, i % 2], residual_there.at[2 * warps + i % 2])

        def begin(warps, row, column):  # what comes while the warps multiply
            if bias_ref is not None:
                here = bias_ref.at[pl.ds(column, tile_n)]
                plgpu.copy_gmem_to_smem(here, bias_smem.at[warps], bias_there.at[warps])
            copy_residual(0, warps, row, column)
            copy_residual(1, warps, row, column)

        def finish(warps, row, column, acc):
            if bias_ref is not None:
                plgpu.barrier_wait(bias_there.at[warps])
            stored = 0
            for i, (m, n) in enumerate(pieces):
                values = acc[m : m + PIECE, n : n + PIECE]
                if bias_ref is not None:
                    bias = plgpu.layout_cast(bias_smem[warps, n : n + PIECE], plgpu.Layout.WGMMA.reduce(0))
                    values += lax.broadcast_in_dim(bias.astype(jnp.float32), values.shape, (1,))
                here, other = place_of((m, n), row, column), values
                if also == "slope":
                    values, other = activation_and_slope(name, values, y_ref.dtype)
                elif name is not None:
                    values = activation(name, values, y_ref.dtype)
                if residual_ref is not None:
                    plgpu.barrier_wait(residual_there.at[2 * warps + i % 2])
                    values += residual_smem[warps, i % 2].astype(jnp.float32)
                if also_ref is not None:
                    store_piece(y_smem.at[warps], stored, other, also_ref.at[here])
                    stored += 1
                store_piece(y_smem.at[warps], stored, values, y_ref.at[here])
                stored += 1
                copy_residual(i + 2, warps, row, column)  # where piece i lay, which all warps have read now

        dense_common.multiply_tiles(
            x_ref, kernel_ref, config, begin, finish,
            transposed=x_ref.dtype == jnp.float32,  # see `forward`
            backwards=name is not None,  # usually another dense layer comes next
        )  # fmt: skip

    pl.run_scoped(
        body,
        y_smem=dense_common.pieces_smem(y_ref.dtype, y_ref.shape[1]),
        bias_smem=None if bias_ref is None else plgpu.SMEM((2, tile_n), bias_ref.dtype),
        bias_there=None if bias_ref is None else plgpu.Barrier(num_barriers=2),
        residual_smem=None if residual_ref is None else dense_common.pieces_smem(y_ref.dtype, y_ref.shape[1]),
        residual_there=None if residual_ref is None else plgpu.Barrier(num_barriers=4),
        collective_axes="warps",
    )


def forward(
    x: Array,
    kernel: Array,
    bias: Array | None,
    residual: Array | None = None,
    *,
    activation: str | None,
    config: MosaicDenseConfig,
    also: str | None = None,
) -> list[Array]:
    """x [M, K], kernel [K, F], bias [F], residual [M, F] (16 bits) -> a list of [M, F], of the dtype of x.

    A second one where `also` is "sum": x @ kernel + bias, or (16 bits) "slope": the activation's derivatives there.
    """
    rows, width = x.shape[0], kernel.shape[1]
    beyond = -rows % 8
    if beyond:  # see `dense_common.line`; rows are copied by eights
        x = jnp.pad(x, ((0, beyond), (0, 0)))
        residual = None if residual is None else jnp.pad(residual, ((0, beyond), (0, 0)))
    y = jax.ShapeDtypeStruct((rows + beyond, width), x.dtype)
    if x.dtype == jnp.float32:
        kernel = lax.reduce_precision(kernel, exponent_bits=8, mantissa_bits=10).T

    def body(*refs):  # type: ignore[no-untyped-def]
        given = iter(refs)
        x_ref, kernel_ref = next(given), next(given)
        bias_ref = None if bias is None else next(given)
        residual_ref = None if residual is None else next(given)
        y_ref, also_ref = next(given), next(given, None)
        _fwd_kernel(
            x_ref, kernel_ref, bias_ref, residual_ref, y_ref, also_ref, name=activation, also=also, config=config
        )

    inputs = [a for a in (x, kernel, bias, residual) if a is not None]
    results = dense_common.launch(body, inputs, [y] * (1 if also is None else 2), config)
    return [r[:rows] if beyond else r for r in results]
