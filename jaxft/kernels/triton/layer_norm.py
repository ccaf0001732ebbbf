"""Kernels for layer_norm(dropout(x + bias) + residual) in one pass, forward and backward, and the same for RMSNorm.

Bias, residual and dropout are optional, so plain layer normalisation is the same kernel. The forward pass moves
2 * M * D elements (3 * M * D with a residual). The backward pass moves 3 * M * D elements (4 * M * D with a residual,
5 * M * D with a residual and dropout). `return_sum` adds M * D to each pass.

Rows that fit in `block_width` are read once and stay in registers. Longer rows are read twice in chunks, the second
time from the L2 cache if the row fits there, and their backward pass writes float32 partial sums for every `block_rows`
rows. The forward pass saves the mean and 1 / sqrt(variance + epsilon) of each row for the backward pass.

Source: FasterTransformer's `add_bias_input_layernorm` kernel.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jaxft import reference
from jaxft.kernels.triton import common
from jaxft.kernels.triton.normalize import drop, normalize
from jaxft.tuning.table import GradientConfig, RowConfig, next_power_of_2

Ref = Any

# The largest block of partial sums that a program of `_sum_kernel` reads at a time.
# H200, float32, 792x3x768: 3 us (7.5 in two rounds of 512 rows), 2026-11-23
_SUM_ROWS, _SUM_COLUMNS = 1024, 32


unsupported = common.unsupported_rows


def _add(
    tile: common.Tile, x: Array, bias_ref: Ref, residual: Array | None, seed_ref: Ref, rate: float
) -> tuple[Array, Array | None]:
    """Returns dropout(x + bias) + residual in float32, and the mask of what dropout keeps (None without dropout)."""
    total, keep = x.astype(jnp.float32), None
    if bias_ref is not None:
        total = total + tile.load_vector(bias_ref)
    if seed_ref is not None:
        total, keep = drop(tile, total, seed_ref, rate)
    return total if residual is None else total + residual.astype(jnp.float32), keep


# --- Forward -----------------------------------------------------------------------------------------------------


def _fwd_kernel(
    x_ref, bias_ref, residual_ref, gamma_ref, beta_ref, seed_ref, y_ref, *more_refs,
    epsilon: float, dropout_rate: float, return_sum: bool, save: bool, center: bool, float8_scale: float | None,
    config: RowConfig,
):  # fmt: skip
    block_rows, block_width = config.block_rows, config.block_width
    *splits, rows, width = x_ref.shape
    # Not inside the loops: JAX's interpreter has no program ids there.
    row = common.program_id_from_the_end(0) * block_rows

    def read(i):
        tile = common.tile((rows, width), row, i * block_width, (block_rows, block_width))
        residual = None if residual_ref is None else tile.load(residual_ref)
        places = [(jnp.int32(n), *tile.place) for n in range(splits[0])] if splits else [tile.place]
        x, *more = (common.load(x_ref.at[place], mask=tile.inside) for place in places)
        for partial in more:
            x = x + partial
        return tile, _add(tile, x, bias_ref, residual, seed_ref, dropout_rate)[0]

    total_ref, saved_ref = more_refs[0] if return_sum else None, more_refs[-1] if save else None
    normalize(
        read, block_width, epsilon, gamma_ref, beta_ref, y_ref, total_ref, saved_ref, center=center,
        vectors_first=bool(splits), float8_ref=None if float8_scale is None else more_refs[int(return_sum)],
        float8_scale=float8_scale or 1.0,
    )  # fmt: skip


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
    save: bool,
    in_place: bool,
    center: bool = True,
    float8_scale: float | None = None,
    config: RowConfig,
    interpret: bool,
) -> list[Array]:
    """Computes layer_norm(dropout(x + bias) + residual), `[M, D]`. Returns a list.

    x is `[M, D]`, or partial sums `[splits, M, D]` in float32, which the kernel adds up; the result then has the dtype
    of `residual` if there is one. With `return_sum` dropout(x + bias) + residual follows. With `float8_scale`, the
    result divided by that number follows in float8_e4m3fn, clipped to 448. With `save` a float32 array `[2, M]`
    follows: the mean and 1 / sqrt(variance + epsilon) of each row of the sum. With `in_place`, the result takes the
    memory of `x`, and the sum takes the memory of `residual`. Without `center`, the mean is taken to be 0.
    """
    rows, width = x.shape[-2:]
    out = jax.ShapeDtypeStruct((rows, width), x.dtype if x.ndim == 2 or residual is None else residual.dtype)
    outputs = [out, out] if return_sum else [out]
    if float8_scale is not None:
        outputs.append(jax.ShapeDtypeStruct((rows, width), reference.FLOAT8))
    if save:
        outputs.append(jax.ShapeDtypeStruct((2, rows), jnp.float32))
    kernel = functools.partial(
        _fwd_kernel, epsilon=epsilon, dropout_rate=dropout_rate, return_sum=return_sum, save=save, center=center,
        float8_scale=float8_scale, config=config,
    )  # fmt: skip
    return common.launch(
        kernel,
        (pl.cdiv(rows, config.block_rows),),
        [x, bias, residual, gamma, beta, seed],
        outputs,
        name="layer_norm_fwd",
        num_warps=config.num_warps,
        aliases=({0: 0, 2: 1} if return_sum else {0: 0}) if in_place else {},
        interpret=interpret,
    )


# --- Backward ----------------------------------------------------------------------------------------------------


def _bwd_kernel(
    dy_ref, dsum_ref, x_ref, bias_ref, residual_ref, gamma_ref, seed_ref, saved_ref, dx_ref, *more_refs,
    dropout_rate: float, drops_result: bool, center: bool, vectors: tuple[str, ...], programs: int,
    config: GradientConfig,
):  # fmt: skip
    block_rows, block_width = config.block_rows, config.block_width
    rows, width = x_ref.shape
    chunks, blocks = pl.cdiv(width, block_width), pl.cdiv(rows, block_rows)
    program = pl.program_id(0)  # Not inside the loops: JAX's interpreter has no program ids there.
    dresidual_ref = more_refs[0] if residual_ref is not None and seed_ref is not None else None
    sums_ref: Ref = more_refs[-1] if vectors else None  # [programs, vectors, D]

    def tile_of(block, column):
        row = common.block_from_the_end(block, blocks) * block_rows
        shape = block_rows, block_width
        return common.tile(x_ref.shape, row, column, shape, may_be_beyond=programs < blocks)

    def read(block, column):
        """Reads the inputs of a block of rows and does not convert them."""
        tile = tile_of(block, column)
        inputs = {"x": x_ref, "residual": residual_ref, "dy": dy_ref, "dsum": dsum_ref}
        values = {name: tile.load(ref) for name, ref in inputs.items() if ref is not None}
        for n, name in enumerate(("mean", "scale")):
            where = saved_ref.at[jnp.int32(n), tile.place[0]]
            values[name] = common.load(where, mask=tile.in_rows)[:, None]
        return values

    def prepare(block, column, values):
        """Returns the tile, what dropout keeps, dy, the normalised rows before gamma and beta, and their gradient."""
        tile = tile_of(block, column)
        of_x = None if drops_result else seed_ref
        total, keep = _add(tile, values["x"], bias_ref, values.get("residual"), of_x, dropout_rate)
        if rows % block_rows:  # Beyond the last row the total is the bias, which may be infinite.
            total = jnp.where(tile.in_rows[:, None], total, 0.0)
        dy = values["dy"].astype(jnp.float32)
        if drops_result:
            dy, _ = drop(tile, dy, seed_ref, dropout_rate)
        g = dy if gamma_ref is None else dy * tile.load_vector(gamma_ref)
        return tile, keep, dy, (total - values["mean"]) * values["scale"], g

    def sums_of_rows(prepared):
        *_, normal, g = prepared
        return jnp.sum(g, axis=1), jnp.sum(g * normal, axis=1)

    def write(values, prepared, sums):
        """Writes the gradients of x and the residual; returns the terms of the gradients of the vectors."""
        tile, keep, dy, normal, g = prepared
        mean, projection = (s[:, None] / width for s in sums)
        d = common.fma(normal, -projection, g - mean if center else g) * values["scale"]
        if dsum_ref is not None:
            d = d + values["dsum"].astype(jnp.float32)
        if dresidual_ref is not None:
            tile.store(dresidual_ref, d)
        if keep is not None:
            d = jnp.where(keep, d * (1.0 / (1.0 - dropout_rate)), 0.0)
        tile.store(dx_ref, d)
        terms = {"bias": d, "gamma": dy * normal, "beta": dy}
        return [terms[name] for name in vectors]

    def save(column, terms):
        tile = tile_of(program, column)
        for n, term in enumerate(terms):
            where = sums_ref.at[program, jnp.int32(n), tile.place[1]]
            common.store(where, jnp.sum(term, axis=0), mask=tile.in_width)

    if chunks == 1:  # A program visits every `programs`-th block of rows, and its sums stay in registers.

        def visit(block, values, terms):
            prepared = prepare(block, 0, values)
            more = write(values, prepared, sums_of_rows(prepared))
            return [a + b for a, b in zip(terms, more, strict=True)]

        zeros = [jnp.zeros((block_rows, block_width), jnp.float32) for _ in vectors]
        save(0, common.read_ahead(program, programs, blocks, lambda block: read(block, 0), visit, zeros))
    else:  # Each program has one block of rows, in several chunks of columns.

        def chunk(i):
            values = read(program, i * block_width)
            return values, prepare(program, i * block_width, values)

        def look(i, sums):
            return tuple(a + b for a, b in zip(sums, sums_of_rows(chunk(i)[1]), strict=True))

        def finish(i, _):
            values, prepared = chunk(i)
            save(i * block_width, write(values, prepared, sums))

        zero = jnp.zeros((block_rows,), jnp.float32)
        sums = lax.fori_loop(0, chunks, look, (zero, zero))
        lax.fori_loop(0, chunks, finish, None)


def backward(
    dy: Array,
    dsum: Array | None,
    x: Array,
    bias: Array | None,
    residual: Array | None,
    gamma: Array | None,
    seed: Array | None,
    saved: Array,
    *,
    dropout_rate: float,
    drops_result: bool = False,
    center: bool = True,
    vectors: Mapping[str, Any],
    config: GradientConfig,
    interpret: bool,
    dtype: Any = None,
) -> tuple[Array, Array | None, dict[str, Array]]:
    """Computes the gradients of x and residual, `[M, D]` or None, and of the `vectors` by name, each `[D]`.

    `dsum` is the gradient of the returned sum, and `vectors` maps "bias", "gamma" and "beta", as far as they need a
    gradient, to the dtypes of the gradients. `dtype` is the dtype of the others, None for the dtype of x. With
    `drops_result`, dropout applies to the result instead of x + bias, and there is no residual. Without `center`, the
    forward pass had none. Each program sums over its rows in a fixed order, and a second kernel sums over the programs.
    """
    rows, width = x.shape
    blocks = pl.cdiv(rows, config.block_rows)
    programs = common.share(config.programs, blocks) if width <= config.block_width else blocks
    out = jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)
    outputs = [out, out] if residual is not None and seed is not None else [out]
    if vectors:
        outputs.append(jax.ShapeDtypeStruct((programs, len(vectors), width), jnp.float32))
    kernel = functools.partial(
        _bwd_kernel,
        dropout_rate=dropout_rate,
        drops_result=drops_result,
        center=center,
        vectors=tuple(vectors),
        programs=programs,
        config=config,
    )
    found = common.launch(
        kernel,
        (programs,),
        [dy, dsum, x, bias, residual, gamma, seed, saved],
        outputs,
        name="layer_norm_bwd",
        num_warps=config.num_warps,
        interpret=interpret,
    )
    sums = _sum_over_programs(found[-1], list(vectors.values()), interpret) if vectors else []
    dresidual = None if residual is None else found[0] if seed is None else found[1]
    return found[0], dresidual, dict(zip(vectors, sums, strict=True))


def _sum_kernel(partial_ref, *sum_refs, block_rows: int):
    column, vector = pl.program_id(0) * _SUM_COLUMNS, pl.program_id(1)
    columns = common.positions(column, _SUM_COLUMNS)
    in_width = columns < partial_ref.shape[2]

    def add(i, total):
        rows = common.positions(i * block_rows, block_rows)
        inside = (rows < partial_ref.shape[0])[:, None] & in_width[None, :]
        where = common.span(i * block_rows, block_rows), vector, common.span(column, _SUM_COLUMNS)
        return total + common.load(partial_ref.at[where], mask=inside)

    zeros = jnp.zeros((block_rows, _SUM_COLUMNS), jnp.float32)
    total = jnp.sum(lax.fori_loop(0, pl.cdiv(partial_ref.shape[0], block_rows), add, zeros), axis=0)
    for n, ref in enumerate(sum_refs):
        where = ref.at[common.span(column, _SUM_COLUMNS)]
        common.store(where, total.astype(ref.dtype), mask=in_width & (vector == n))


def _sum_over_programs(partial: Array, dtypes: Sequence[Any], interpret: bool) -> list[Array]:
    """Sums float32 `[programs, vectors, D]` over the programs. XLA would sum and then copy each vector."""
    programs, vectors, width = partial.shape
    block_rows = min(_SUM_ROWS, next_power_of_2(programs))
    return common.launch(
        functools.partial(_sum_kernel, block_rows=block_rows),
        (pl.cdiv(width, _SUM_COLUMNS), vectors),
        [partial],
        [jax.ShapeDtypeStruct((width,), dtype) for dtype in dtypes],
        name="layer_norm_bwd_sums",
        num_warps=max(8, block_rows // 64),
        interpret=interpret,
    )
