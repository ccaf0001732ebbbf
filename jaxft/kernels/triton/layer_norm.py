"""layer_norm(dropout(x + bias) + residual) in one pass: FasterTransformer's `add_bias_input_layernorm` kernel.

Bias, residual and dropout are optional, so plain layer normalisation is the same kernel. Forward it moves 2 * M * D
elements (3 with a residual), backward 3 * M * D (4 with a residual, and 5 with dropout). Rows that fit in `block_width`
are read once and stay in registers; longer ones are read twice in chunks, the second time from the L2 cache where the
row fits there. The backward kernel saves no statistics, it recomputes them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxft.kernels.triton import common
from jaxft.tuning import GradientConfig, RowConfig

Array = jax.Array
Ref = Any


def unsupported(**arrays: Array | None) -> str | None:
    return common.unsupported_dtype(**arrays)


class _Chunk(NamedTuple):
    """Some rows and columns of the arrays, and what is normalised there."""

    tile: tuple[Any, Any]
    columns: Any
    in_width: Array  # [block_width]
    inside: Array  # [block_rows, block_width]
    keep: Array | None  # by dropout
    total: Array  # dropout(x + bias) + residual, in float32


def _chunk(
    row: Array, column: Array | int, x_ref: Ref, bias_ref: Ref, residual_ref: Ref, seed_ref: Ref,
    *, dropout_rate: float, block_rows: int, block_width: int,
) -> _Chunk:  # fmt: skip
    rows, width = x_ref.shape
    row_indices, column_indices = common.positions(row, block_rows), common.positions(column, block_width)
    in_width = column_indices < width
    inside = (row_indices < rows)[:, None] & in_width[None, :]
    columns = common.span(column, block_width)
    tile = (common.span(row, block_rows), columns)
    total, keep = _load(x_ref, tile, inside), None
    if bias_ref is not None:
        total = total + _vector(bias_ref, columns, in_width)
    if seed_ref is not None:
        keep = common.keep(seed_ref, dropout_rate, row_indices[:, None], column_indices[None, :])
        total = jnp.where(keep, total * (1.0 / (1.0 - dropout_rate)), 0.0)
    if residual_ref is not None:
        total = total + _load(residual_ref, tile, inside)
    return _Chunk(tile, columns, in_width, inside, keep, total)


def _load(ref: Ref, tile: Any, inside: Array) -> Array:
    return common.load(ref.at[tile], mask=inside, other=0.0).astype(jnp.float32)


def _vector(ref: Ref, columns: Any, in_width: Array) -> Array:
    return _load(ref, columns, in_width)[None, :]


def _sum_of_rows(chunk: _Chunk, values: Array) -> Array:
    return jnp.sum(jnp.where(chunk.in_width[None, :], values, 0.0), axis=1)


# --- Forward -----------------------------------------------------------------------------------------------------


def _moments(chunk: _Chunk) -> tuple[Array, Array, Array]:
    """Count, mean and sum of squared deviations of the rows."""
    count = jnp.sum(chunk.in_width.astype(jnp.float32))
    mean = _sum_of_rows(chunk, chunk.total) / count
    centered = chunk.total - mean[:, None]
    return count, mean, _sum_of_rows(chunk, centered * centered)


def _merge_moments(a: tuple[Array, Array, Array], b: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """The moments of two sets together (Chan, Golub and LeVeque, 1979)."""
    count = a[0] + b[0]
    delta = b[1] - a[1]
    return count, a[1] + delta * (b[0] / count), a[2] + b[2] + delta * delta * (a[0] * b[0] / count)


def _fwd_kernel(
    x_ref, bias_ref, residual_ref, gamma_ref, beta_ref, seed_ref, y_ref, sum_ref=None,
    *, epsilon: float, dropout_rate: float, block_rows: int, block_width: int,
):  # fmt: skip
    width = x_ref.shape[1]
    row = pl.program_id(0) * block_rows
    load = functools.partial(
        _chunk, x_ref=x_ref, bias_ref=bias_ref, residual_ref=residual_ref, seed_ref=seed_ref,
        dropout_rate=dropout_rate, block_rows=block_rows, block_width=block_width,
    )  # fmt: skip

    def write(chunk, mean, scale):
        y = (chunk.total - mean[:, None]) * scale[:, None]
        if gamma_ref is not None:
            y = y * _vector(gamma_ref, chunk.columns, chunk.in_width)
        if beta_ref is not None:
            y = y + _vector(beta_ref, chunk.columns, chunk.in_width)
        common.store(y_ref.at[chunk.tile], y.astype(y_ref.dtype), mask=chunk.inside)
        if sum_ref is not None:
            common.store(sum_ref.at[chunk.tile], chunk.total.astype(sum_ref.dtype), mask=chunk.inside)

    first = load(row, 0)
    chunks = pl.cdiv(width, block_width)
    _, mean, square = lax.fori_loop(
        1, chunks, lambda i, found: _merge_moments(found, _moments(load(row, i * block_width))), _moments(first)
    )
    scale = lax.rsqrt(square / width + epsilon)
    if chunks == 1:
        write(first, mean, scale)
    else:
        lax.fori_loop(0, chunks, lambda i, _: write(load(row, i * block_width), mean, scale), None)


def forward(
    x: Array,
    bias: Array | None,
    residual: Array | None,
    gamma: Array | None,
    beta: Array | None,
    seed: Array | None,
    *,
    epsilon: float,
    dropout_rate: float,
    return_sum: bool,
    in_place: bool,
    config: RowConfig,
    interpret: bool,
) -> list[Array]:
    """x and residual [M, D], bias, gamma and beta [D], and the seed of dropout [2] -> [y, and the sum if asked for].

    `in_place`, y takes the memory of x, and the sum that of the residual.
    """
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    kernel = functools.partial(
        _fwd_kernel,
        epsilon=epsilon,
        dropout_rate=dropout_rate,
        block_rows=config.block_rows,
        block_width=config.block_width,
    )
    return common.launch(
        kernel,
        (pl.cdiv(x.shape[0], config.block_rows),),
        [x, bias, residual, gamma, beta, seed],
        [out, out] if return_sum else [out],
        name="layer_norm_fwd",
        num_warps=config.num_warps,
        aliases=({0: 0, 2: 1} if return_sum else {0: 0}) if in_place else {},
        interpret=interpret,
    )


# --- Backward ----------------------------------------------------------------------------------------------------


class _Statistics(NamedTuple):
    """Of rows of t, what is normalised, and g, the gradient of the result before gamma and beta."""

    size: Array
    mean: Array
    square: Array  # the sum of (t - mean)^2
    mean_g: Array
    product: Array  # the sum of (t - mean) * (g - mean_g)


def _statistics(chunk: _Chunk, g: Array) -> _Statistics:
    size, mean, square = _moments(chunk)
    mean_g = _sum_of_rows(chunk, g) / size
    product = _sum_of_rows(chunk, (chunk.total - mean[:, None]) * (g - mean_g[:, None]))
    return _Statistics(size, mean, square, mean_g, product)


def _merge_statistics(a: _Statistics, b: _Statistics) -> _Statistics:
    size, mean, square = _merge_moments(a[:3], b[:3])
    delta = b.mean_g - a.mean_g
    product = a.product + b.product + delta * (b.mean - a.mean) * (a.size * b.size / size)
    return _Statistics(size, mean, square, a.mean_g + delta * (b.size / size), product)


def _bwd_kernel(
    dy_ref, dsum_ref, x_ref, bias_ref, residual_ref, gamma_ref, seed_ref, dx_ref, *more_refs,
    epsilon: float, dropout_rate: float, vectors: tuple[str, ...], programs: int, block_rows: int, block_width: int,
):  # fmt: skip
    rows, width = x_ref.shape
    chunks = pl.cdiv(width, block_width)
    program = pl.program_id(0)  # JAX's interpreter knows it outside of loops only
    dresidual_ref = more_refs[0] if residual_ref is not None and seed_ref is not None else None
    sums_ref: Ref = more_refs[-1] if vectors else None  # [programs, vectors, D]

    def load(row, column):
        """A chunk, its dy, and g = dy * gamma."""
        chunk = _chunk(
            row, column, x_ref, bias_ref, residual_ref, seed_ref,
            dropout_rate=dropout_rate, block_rows=block_rows, block_width=block_width,
        )  # fmt: skip
        dy = _load(dy_ref, chunk.tile, chunk.inside)
        return chunk, dy, dy if gamma_ref is None else dy * _vector(gamma_ref, chunk.columns, chunk.in_width)

    def write(loaded, found):
        """Writes the gradients of x and the residual; returns the terms of those of the vectors."""
        chunk, dy, g = loaded
        scale = lax.rsqrt(found.square / width + epsilon)[:, None]
        normal = (chunk.total - found.mean[:, None]) * scale
        d = (g - found.mean_g[:, None] - normal * (found.product[:, None] * scale / width)) * scale
        if dsum_ref is not None:
            d = d + _load(dsum_ref, chunk.tile, chunk.inside)
        if dresidual_ref is not None:
            common.store(dresidual_ref.at[chunk.tile], d.astype(dresidual_ref.dtype), mask=chunk.inside)
        if chunk.keep is not None:
            d = jnp.where(chunk.keep, d * (1.0 / (1.0 - dropout_rate)), 0.0)
        common.store(dx_ref.at[chunk.tile], d.astype(dx_ref.dtype), mask=chunk.inside)
        terms = {"bias": d, "gamma": dy * normal, "beta": dy}
        return tuple(jnp.where(chunk.inside, terms[name], 0.0) for name in vectors)

    def save(column, terms):
        in_width = common.positions(column, block_width) < width
        for n, term in enumerate(terms):
            place = sums_ref.at[program, jnp.int32(n), common.span(column, block_width)]
            common.store(place, jnp.sum(term, axis=0), mask=in_width)

    if chunks == 1:  # every so many rows; the sums stay in registers

        def visit(i, sums):
            loaded = load((program + i * programs) * block_rows, 0)
            terms = write(loaded, _statistics(loaded[0], loaded[2]))
            return tuple(a + b for a, b in zip(sums, terms, strict=True))

        blocks = lax.div(pl.cdiv(rows, block_rows) - 1 - program, jnp.int32(programs)) + 1
        zeros = jnp.zeros((block_rows, block_width), jnp.float32)
        save(0, lax.fori_loop(0, blocks, visit, (zeros,) * len(vectors)))
    else:  # one block of rows a program
        row = program * block_rows

        def statistics(column):
            chunk, _, g = load(row, column)
            return _statistics(chunk, g)

        found = lax.fori_loop(
            1, chunks, lambda i, found: _merge_statistics(found, statistics(i * block_width)), statistics(0)
        )
        lax.fori_loop(0, chunks, lambda i, _: save(i * block_width, write(load(row, i * block_width), found)), None)


def backward(
    dy: Array,
    dsum: Array | None,
    x: Array,
    bias: Array | None,
    residual: Array | None,
    gamma: Array | None,
    seed: Array | None,
    *,
    epsilon: float,
    dropout_rate: float,
    vectors: tuple[str, ...],
    config: GradientConfig,
    interpret: bool,
) -> tuple[Array, Array | None, Array]:
    """The gradients of x and the residual [M, D], and of the `vectors` ("bias", "gamma", "beta") [vectors, D], float32.

    Each program sums over its rows, in an order of its own that never changes, and XLA over the programs.
    """
    rows, width = x.shape
    blocks = pl.cdiv(rows, config.block_rows)
    programs = min(config.programs, blocks) if width <= config.block_width else blocks
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    outputs = [out, out] if residual is not None and seed is not None else [out]
    if vectors:
        outputs.append(jax.ShapeDtypeStruct((programs, len(vectors), width), jnp.float32))
    kernel = functools.partial(
        _bwd_kernel,
        epsilon=epsilon,
        dropout_rate=dropout_rate,
        vectors=vectors,
        programs=programs,
        block_rows=config.block_rows,
        block_width=config.block_width,
    )
    found = common.launch(
        kernel,
        (programs,),
        [dy, dsum, x, bias, residual, gamma, seed],
        outputs,
        name="layer_norm_bwd",
        num_warps=config.num_warps,
        interpret=interpret,
    )
    dresidual = None if residual is None else found[0] if seed is None else found[1]
    return found[0], dresidual, jnp.sum(found[-1], axis=0) if vectors else jnp.zeros((0, width), jnp.float32)
