"""activation(x @ kernel + bias) + residual in one kernel.

2 * M * K * F floating-point operations. With few rows the weights' bytes are the floor, and what counts is that enough
programs read them at once: cuBLAS starts too few (128x768x768 on an H200: 12 of 132 multiprocessors, 5 us). For many
rows cuBLAS is faster, but mostly not where an activation needs a kernel after it; `jaxft.tuning_dense` says where.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxft.kernels.triton import activations, common
from jaxft.tuning.dense import DenseConfig

Array = jax.Array


def unsupported(x: Array, **vectors: Array | None) -> str | None:
    return common.unsupported_dtype(x=x, **vectors) or common.unsupported_size(x)


BAND = 16  # rows of tiles


def _tile(rows: int, block_m: int) -> tuple[Any, Any]:
    """Which tile the program computes: its place among the rows, and among the columns.

    Those of a band of rows are next to each other, so that programs that run at once share what they read: of few rows
    the blocks of the weights, which come from memory once.
    """
    m, n = pl.program_id(0), pl.program_id(1)
    tiles = pl.cdiv(rows, block_m)
    if tiles <= BAND:
        return m, n
    place, of_band = n * tiles + m, jnp.int32(BAND * pl.num_programs(1))
    first, place = lax.div(place, of_band) * BAND, lax.rem(place, of_band)
    height = jnp.minimum(BAND, tiles - first)
    return first + lax.rem(place, height), lax.div(place, height)


def _fwd_kernel(
    x_ref, kernel_ref, bias_ref, residual_ref, y_ref, product_ref=None,
    *, activation: str | None, splits: int, block_m: int, block_n: int, block_k: int, precision,
):  # fmt: skip
    rows, depth = x_ref.shape
    width = kernel_ref.shape[1]
    (m, n), split = _tile(rows, block_m), pl.program_id(2)
    row, column = m * block_m, n * block_n
    in_rows = (common.positions(row, block_m) < rows)[:, None]
    in_width = common.positions(column, block_n) < width
    in_columns = in_width[None, :]

    in_full = precision is not None and x_ref.dtype == jnp.float32
    multiply = common.dot_in_short_chains if in_full and min(rows, width) == 1 else common.dot

    def add_block(k, acc, *, masked):
        start = jnp.int32(k) * block_k
        in_x, in_kernel = (
            jnp.broadcast_to(in_rows, (block_m, block_k)),
            jnp.broadcast_to(in_columns, (block_k, block_n)),
        )
        if masked:
            in_depth = (common.positions(start, block_k) < depth) & (split == splits - 1)
            in_x, in_kernel = in_x & in_depth[None, :], in_kernel & in_depth[:, None]
        # First what takes longest to come: kernel is in memory, x still in the L2 cache. With the bias (below) and the
        # vectors of the LayerNorm that adds up partial sums, BERT-base of 1x16 takes 224 us on the device for 244, of
        # 1x128 283 for 304 (H100, 2026-11-24). Of weights that are in the L2 cache already it would be 247 for 281, but
        # kernels that read the next ones' weights ahead take longer than those save: 287 to 320 (H100, 2026-11-25).
        b = common.load(
            kernel_ref.at[common.span(start, block_k), common.span(column, block_n)], mask=in_kernel, other=0.0
        )
        a = common.load(x_ref.at[common.span(row, block_m), common.span(start, block_k)], mask=in_x, other=0.0)
        return acc + multiply(a, b, precision=precision)  # [block_m, block_n]

    bias = None  # read here, so that it comes from memory while blocks of the product do
    if bias_ref is not None:
        bias = common.load(bias_ref.at[common.span(column, block_n)], mask=in_width, other=0.0)
    zeros = jnp.zeros((block_m, block_n), jnp.float32)
    whole = depth // block_k
    share = pl.cdiv(whole, splits)
    begin, end = (split * share, jnp.minimum((split + 1) * share, whole)) if splits > 1 else (0, whole)
    add = functools.partial(add_block, masked=False)
    if not in_full:
        acc = lax.fori_loop(begin, end, add, zeros)
    else:  # sums of 128 products, and their sum: all in a row would lose more digits than cuBLAS does
        group = pl.cdiv(128, block_k)

        def add_group(i, acc):
            first = begin + i * group
            return acc + lax.fori_loop(first, jnp.minimum(first + group, end), add, zeros)

        acc = lax.fori_loop(0, lax.div(jnp.int32(end - begin + (group - 1)), jnp.int32(group)), add_group, zeros)
    if depth % block_k:
        acc = add_block(whole, acc, masked=True)
    inside = in_rows & in_columns
    tile: tuple[Any, ...] = common.span(row, block_m), common.span(column, block_n)
    if splits > 1:
        tile = (split, *tile)
    if product_ref is not None:
        common.store(product_ref.at[tile], acc.astype(product_ref.dtype), mask=inside)
    if bias is not None:
        acc = acc + bias.astype(jnp.float32)[None, :]
    if activation is not None:
        acc = activations.activation(activation, acc, y_ref.dtype)
    if residual_ref is not None:
        acc = acc + common.load(residual_ref.at[tile], mask=inside, other=0.0).astype(jnp.float32)
    common.store(y_ref.at[tile], acc.astype(y_ref.dtype), mask=inside)


def forward(
    x: Array,
    kernel: Array,
    bias: Array | None,
    residual: Array | None,
    *,
    activation: str | None,
    precision: str,
    config: DenseConfig,
    interpret: bool,
    splits: int = 1,
    also_product: bool = False,
) -> list[Array]:
    """x [M, K], kernel [K, F], bias [F], residual [M, F] -> a list of [M, F], of the dtype of x.

    A second one, with `also_product`, is x @ kernel. `precision` of float32: "tf32" or "float32". With `splits`
    above 1, partial sums [splits, M, F] in float32, without bias, activation and residual: whoever reads them next adds
    them up.
    """
    rows, width = x.shape[0], kernel.shape[1]
    y = jax.ShapeDtypeStruct((rows, width), x.dtype)
    if splits > 1:
        y = jax.ShapeDtypeStruct((splits, rows, width), jnp.float32)
    body = functools.partial(
        _fwd_kernel,
        activation=activation,
        splits=splits,
        block_m=config.block_m,
        block_n=config.block_n,
        block_k=config.block_k,
        precision=lax.Precision.HIGHEST if precision == "float32" else None,
    )
    return common.launch(
        body,
        (pl.cdiv(rows, config.block_m), pl.cdiv(width, config.block_n), splits),
        [x, kernel, bias, residual],
        [y, y] if also_product else [y],
        name="dense_fwd",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
