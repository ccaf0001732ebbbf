"""A kernel for activation(x @ kernel + bias) + residual: a matmul with an epilogue.

With a gate, a program computes the same columns of both halves of x @ kernel + bias, and multiplies the activation of
one half by the other half.

With few rows, the time to read the weights is the lower bound, and enough programs must read them at the same time.
cuBLAS starts too few thread blocks for that. With many rows cuBLAS is faster, except mostly where an activation needs a
second kernel after it. `jaxft.tuning.dense` makes the choice.

See docs/performance-notes.md, "Dense layers with few rows (Triton)".
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jaxft import reference
from jaxft.kernels.triton import activations, common
from jaxft.kernels.triton.gated_activation import halves_of
from jaxft.tuning.dense import DenseConfig

unsupported = common.unsupported_rows


BAND = 16  # The height of a band in tiles, see `_tile`.


def _tile(rows: int, block_m: int) -> tuple[Any, Any]:
    """Returns the index of the tile of this program along the rows and along the columns.

    Consecutive programs compute one band of `BAND` rows of tiles, column by column. Programs that run at the same time
    therefore share much of what they read. With few rows, each block of the weights is read from memory once.
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
    x_ref, kernel_ref, scale_ref, bias_ref, residual_ref, y_ref, product_ref=None,
    *, activation: str | None, gate: str | None, splits: int, precision: str, x_scale: float,
    float8_scale: float | None, first_row: int, config: DenseConfig,
):  # fmt: skip
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    rows, depth = x_ref.shape
    width = y_ref.shape[-1]
    (m, n), split = _tile(rows, block_m), pl.program_id(2)
    row, column = m * block_m, n * block_n
    # First columns of the tile in the kernel. With a gate, there is a tile of the gate and a tile of the other half.
    columns = [column] if gate is None else [column + half * width for half in halves_of(gate)]
    in_rows = (common.positions(row, block_m) < rows)[:, None]
    in_width = common.positions(column, block_n) < width
    in_columns = in_width[None, :]

    in_full = precision == "float32" and x_ref.dtype == jnp.float32
    transposed = scale_ref is not None  # a kernel of float8 is stored as [F, K]
    multiply = functools.partial(
        common.dot_in_short_chains if in_full and min(rows, width) == 1 else common.dot,
        trans_b=transposed,
        precision=lax.Precision.HIGHEST if precision == "float32" else None,
    )

    def load_weights(at, start, mask):
        if not transposed:
            rows = common.span(first_row + start, block_k)
            return common.load(kernel_ref.at[rows, common.span(at, block_n)], mask=mask)
        return common.load(kernel_ref.at[common.span(at, block_n), common.span(start, block_k)], mask=mask.T)

    def add_block(k, accs, *, masked):
        start = jnp.int32(k) * block_k
        in_x, in_kernel = (
            jnp.broadcast_to(in_rows, (block_m, block_k)),
            jnp.broadcast_to(in_columns, (block_k, block_n)),
        )
        if masked:
            in_depth = (common.positions(start, block_k) < depth) & (split == splits - 1)
            in_x, in_kernel = in_x & in_depth[None, :], in_kernel & in_depth[:, None]
        # Loads the weights first. They take longest, because they come from memory; x is still in the L2 cache.
        # See docs/performance-notes.md, "Order of loads in dense layers with few rows".
        weights = [load_weights(at, start, in_kernel) for at in columns]
        a = common.load(x_ref.at[common.span(row, block_m), common.span(start, block_k)], mask=in_x, other=0.0)
        return [acc + multiply(a, b) for acc, b in zip(accs, weights, strict=True)]  # [block_m, block_n] each

    biases, scale = [], None  # Loaded before the loop: these loads overlap with the loads of the matmul.
    if bias_ref is not None:
        biases = [common.load(bias_ref.at[common.span(at, block_n)], mask=in_width, other=0.0) for at in columns]
    if scale_ref is not None:
        scale = common.load(scale_ref.at[common.span(column, block_n)], mask=in_width, other=0.0)
    zeros = [jnp.zeros((block_m, block_n), jnp.float32)] * len(columns)
    whole = depth // block_k
    share = pl.cdiv(whole, splits)
    begin, end = (split * share, jnp.minimum((split + 1) * share, whole)) if splits > 1 else (0, whole)
    add = functools.partial(add_block, masked=False)
    if not in_full:
        accs = lax.fori_loop(begin, end, add, zeros)
    else:  # Sums groups of 128 terms, then the groups: one long chain of additions would be less accurate than cuBLAS.
        group = pl.cdiv(128, block_k)

        def add_group(i, accs):
            first = begin + i * group
            sums = lax.fori_loop(first, jnp.minimum(first + group, end), add, zeros)
            return [acc + part for acc, part in zip(accs, sums, strict=True)]

        accs = lax.fori_loop(0, lax.div(jnp.int32(end - begin + (group - 1)), jnp.int32(group)), add_group, zeros)
    if depth % block_k:
        accs = add_block(whole, accs, masked=True)
    inside = in_rows & in_columns
    tile: tuple[Any, ...] = common.span(row, block_m), common.span(column, block_n)
    if splits > 1:
        tile = (split, *tile)
    if product_ref is not None:
        for at, acc in zip(columns, accs, strict=True):
            where = (*tile[:-1], common.span(at, block_n))
            common.store(product_ref.at[where], acc.astype(product_ref.dtype), mask=inside)
    if scale is not None:
        accs = [acc * (scale.astype(jnp.float32) * x_scale)[None, :] for acc in accs]
    if bias_ref is not None:
        accs = [acc + bias.astype(jnp.float32)[None, :] for acc, bias in zip(accs, biases, strict=True)]
    acc, *other = accs
    if activation is not None:
        acc = activations.activation(activation, acc, y_ref.dtype if float8_scale is None else jnp.bfloat16)
    if other:
        acc = acc * other[0]
    if residual_ref is not None:
        acc = acc + common.load(residual_ref.at[tile], mask=inside, other=0.0).astype(jnp.float32)
    acc = acc if float8_scale is None else common.to_float8(acc, float8_scale)
    common.store(y_ref.at[tile], acc.astype(y_ref.dtype), mask=inside)


def forward(
    x: Array,
    kernel: Array,
    bias: Array | None,
    residual: Array | None,
    *,
    activation: str | None,
    gate: str | None = None,
    precision: str,
    config: DenseConfig,
    interpret: bool,
    splits: int = 1,
    also_product: bool = False,
    kernel_scale: Array | None = None,
    x_scale: float = 1.0,
    dtype: Any = None,
    float8_scale: float | None = None,
    first_row: int = 0,
) -> list[Array]:
    """Computes activation(x @ kernel + bias) + residual, `[M, F]`, from x `[M, K]` and kernel `[K, F]`; returns a list.

    With a `gate`, "first" or "second", the result is activation(gate) * other + residual, `[M, F // 2]`. With
    `also_product`, x @ kernel follows the result. With `splits` above 1 (split-K) the result is the partial sums
    of x @ kernel, float32 `[splits, M, F]`. The caller passes no bias, activation or residual then, and the kernel that
    reads the partial sums adds them up. With `first_row`, `kernel` has more rows, and its K rows from that one on are
    multiplied. See `jaxft.kernels.mosaic_gpu.dense.forward` for the arguments of float8.
    """
    rows, width = x.shape[0], kernel.shape[1]
    product = jax.ShapeDtypeStruct((rows, width), x.dtype)
    if gate is not None:  # two blocks of columns instead of one that is twice as wide
        width, config = width // 2, dataclasses.replace(config, block_n=max(16, config.block_n // 2))
    dtype = x.dtype if dtype is None else dtype
    y = jax.ShapeDtypeStruct((rows, width), dtype if float8_scale is None else reference.FLOAT8)
    kernel = kernel if kernel_scale is None else kernel.T
    if splits > 1:
        y = jax.ShapeDtypeStruct((splits, rows, width), jnp.float32)
    return common.launch(
        functools.partial(
            _fwd_kernel,
            activation=activation,
            gate=gate,
            splits=splits,
            precision=precision,
            x_scale=x_scale,
            float8_scale=float8_scale,
            first_row=first_row,
            config=config,
        ),
        (pl.cdiv(rows, config.block_m), pl.cdiv(width, config.block_n), splits),
        [x, kernel, kernel_scale, bias, residual],
        [y, product] if also_product else [y],
        name="dense_fwd",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
