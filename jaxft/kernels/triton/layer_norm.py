"""layer_norm(x + bias + residual) in one pass: FasterTransformer's `add_bias_input_layernorm` kernel.

Bias and residual are optional, so plain layer normalisation is the same kernel. It moves 2 * M * D elements (3 with a
residual). Rows that fit in `block_width` are read once and stay in registers; longer ones are read twice in chunks, the
second time from the L2 cache where the row fits there.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxft.kernels.triton import common
from jaxft.tuning import RowConfig

Array = jax.Array


def unsupported(**arrays: Array | None) -> str | None:
    return common.unsupported_dtype(**arrays)


def _merge_moments(a: tuple[Array, Array, Array], b: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """(count, mean, sum of squared deviations) of two sets together (Chan, Golub and LeVeque, 1979)."""
    count = a[0] + b[0]
    delta = b[1] - a[1]
    return count, a[1] + delta * (b[0] / count), a[2] + b[2] + delta * delta * (a[0] * b[0] / count)


def _fwd_kernel(
    x_ref, bias_ref, residual_ref, gamma_ref, beta_ref, y_ref, sum_ref=None,
    *, epsilon: float, block_rows: int, block_width: int,
):  # fmt: skip
    rows, width = x_ref.shape
    row = pl.program_id(0) * block_rows
    in_rows = common.positions(row, block_rows) < rows

    def chunk(column):
        """Where one chunk of the rows lies, and x + bias + residual there."""
        columns = common.span(column, block_width)
        in_width = common.positions(column, block_width) < width
        inside = in_rows[:, None] & in_width[None, :]
        tile = (common.span(row, block_rows), columns)
        total = common.load(x_ref.at[tile], mask=inside, other=0.0).astype(jnp.float32)  # [block_rows, block_width]
        if bias_ref is not None:
            total = total + _vector(bias_ref, columns, in_width)
        if residual_ref is not None:
            total = total + common.load(residual_ref.at[tile], mask=inside, other=0.0).astype(jnp.float32)
        return tile, columns, in_width, inside, total

    def moments(chunk):
        _, _, in_width, _, total = chunk
        count = jnp.sum(in_width.astype(jnp.float32))
        mean = jnp.sum(jnp.where(in_width[None, :], total, 0.0), axis=1) / count
        centered = jnp.where(in_width[None, :], total - mean[:, None], 0.0)
        return count, mean, jnp.sum(centered * centered, axis=1)

    def write(chunk, mean, scale):
        tile, columns, in_width, inside, total = chunk
        y = (total - mean[:, None]) * scale[:, None]
        if gamma_ref is not None:
            y = y * _vector(gamma_ref, columns, in_width)
        if beta_ref is not None:
            y = y + _vector(beta_ref, columns, in_width)
        common.store(y_ref.at[tile], y.astype(y_ref.dtype), mask=inside)
        if sum_ref is not None:
            common.store(sum_ref.at[tile], total.astype(sum_ref.dtype), mask=inside)

    first = chunk(0)
    chunks = pl.cdiv(width, block_width)
    _, mean, square = lax.fori_loop(
        1, chunks, lambda i, found: _merge_moments(found, moments(chunk(jnp.int32(i) * block_width))), moments(first)
    )
    scale = lax.rsqrt(square / width + epsilon)
    if chunks == 1:
        write(first, mean, scale)
    else:
        lax.fori_loop(0, chunks, lambda i, _: write(chunk(jnp.int32(i) * block_width), mean, scale), None)


def _vector(ref, columns, in_width):
    return common.load(ref.at[columns], mask=in_width, other=0.0).astype(jnp.float32)[None, :]


def forward(
    x: Array,
    bias: Array | None,
    residual: Array | None,
    gamma: Array | None,
    beta: Array | None,
    *,
    epsilon: float,
    return_sum: bool,
    config: RowConfig,
    interpret: bool,
) -> list[Array]:
    """x and residual [M, D], bias, gamma and beta [D] -> [y [M, D]], and the sum [M, D] if asked for."""
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    kernel = functools.partial(
        _fwd_kernel, epsilon=epsilon, block_rows=config.block_rows, block_width=config.block_width
    )
    return common.launch(
        kernel,
        (pl.cdiv(x.shape[0], config.block_rows),),
        [x, bias, residual, gamma, beta],
        [out, out] if return_sum else [out],
        name="layer_norm_fwd",
        num_warps=config.num_warps,
        interpret=interpret,
    )
