"""Kernels for the normalised sum of word, position and token type embeddings, and for the gradients of the tables.

Forward: a program looks up the ids of `block_rows` tokens, adds their rows of the tables, normalises the sum as
`layer_norm` does, and applies dropout. It reads and writes M * D elements; the rows of the position and token type
tables come from the caches. For the backward pass of `layer_norm`, the kernel also writes the sum in float32.

Gradients of the tables: the gradient of a row is the sum of the gradients of the tokens with its id. A scatter would
add them with atomics, in a different order each time. Here the tokens are sorted by id, so that the tokens of a row are
adjacent and form a run. One program adds up the run of its row, or writes zeros if the run is empty.

Long runs, such as the run of the padding id: the sorted tokens are divided into chunks, so that no program adds up a
long run alone. A first kernel computes the sum of the first run in each chunk, up to the end of the chunk. The sum of a
run is then the sum of its tokens in the chunk where it begins, plus the sums of the later chunks that it reaches into.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jaxft.kernels.triton import common
from jaxft.kernels.triton.normalize import drop, normalize
from jaxft.tuning.table import RowConfig

Ref = Any

# Tokens in a chunk: about the square root of 16,384. A run of 16,384 tokens then has 128 chunks of 128 tokens.
CHUNK = 128


def unsupported(
    dtype: Any, ids: dict[str, Array | None], tables: dict[str, Array | None], **vectors: Array | None
) -> str | None:
    """Returns the reason why the kernels cannot take these arrays and this dtype of the result, or None."""
    reason = common.unsupported_array(**ids) or common.unsupported_dtype(**tables, **vectors)
    if reason is not None:
        return reason
    if dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        return f"dtype is {dtype}, the kernels take float32, float16 and bfloat16"
    sizes = {name: x.size for name, x in ids.items() if x is not None}
    sizes |= {name: max(x.shape) for name, x in tables.items() if x is not None}
    for name, size in sizes.items():
        if size > 2**30:
            return f"{name} has {size} rows or columns, the kernels take at most 2^30"
    return None


# --- Forward -----------------------------------------------------------------------------------------------------


def _fwd_kernel(
    word_ref, position_ref, token_type_ref, gamma_ref, beta_ref, ids_ref, position_ids_ref, token_type_ids_ref,
    seed_ref, y_ref, total_ref=None, saved_ref=None, *,
    length: int, epsilon: float, dropout_rate: float, config: RowConfig,
):  # fmt: skip
    block_rows, block_width = config.block_rows, config.block_width
    row = pl.program_id(0) * block_rows  # Not inside the loops: JAX's interpreter has no program ids there.

    def look_up(tile, table_ref, ids):
        """Returns the rows of a table with these ids, float32; NaN for ids that the table does not have."""
        values, there = tile.load_rows(table_ref, ids)
        return jnp.where(there, values.astype(jnp.float32), jnp.nan)

    def read(i):
        tile = common.tile(y_ref.shape, row, i * block_width, (block_rows, block_width))

        def given(ref):
            return common.load(ref.at[tile.place[0]], mask=tile.in_rows)

        counted = lax.rem(tile.rows, jnp.int32(length)) if position_ids_ref is None else given(position_ids_ref)
        total = look_up(tile, word_ref, given(ids_ref)) + look_up(tile, position_ref, counted)
        if token_type_ref is not None:
            kinds = jnp.zeros_like(tile.rows) if token_type_ids_ref is None else given(token_type_ids_ref)
            total = total + look_up(tile, token_type_ref, kinds)
        return tile, total

    def finish(tile, y):
        return y if seed_ref is None else drop(tile, y, seed_ref, dropout_rate)[0]

    normalize(read, block_width, epsilon, gamma_ref, beta_ref, y_ref, total_ref, saved_ref, finish)


def forward(
    word: Array,
    position: Array,
    token_type: Array | None,
    gamma: Array | None,
    beta: Array | None,
    ids: Array,
    position_ids: Array | None,
    token_type_ids: Array | None,
    seed: Array | None,
    *,
    length: int,
    epsilon: float,
    dropout_rate: float,
    dtype: Any,
    save: bool,
    config: RowConfig,
    interpret: bool,
) -> list[Array]:
    """Computes dropout(layer_norm(word[ids] + position[position_ids] + token_type[token_type_ids])), `[M, D]`.

    If `position_ids` is None, positions count from 0 in each sequence of `length` tokens. If `token_type_ids` is None,
    all are 0. Returns a list. With `save` two float32 arrays follow the result: the sum before normalisation, `[M, D]`,
    and `[2, M]`, the mean and 1 / sqrt(variance + epsilon) of each row of the sum.
    """
    shape = (ids.shape[0], word.shape[1])
    outputs = [jax.ShapeDtypeStruct(shape, dtype)]
    if save:
        outputs += [jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, (2, shape[0]))]
    return common.launch(
        functools.partial(_fwd_kernel, length=length, epsilon=epsilon, dropout_rate=dropout_rate, config=config),
        (pl.cdiv(shape[0], config.block_rows),),
        [word, position, token_type, gamma, beta, ids, position_ids, token_type_ids, seed],
        outputs,
        name="embeddings_layer_norm",
        num_warps=config.num_warps,
        interpret=interpret,
    )


# --- Backward ----------------------------------------------------------------------------------------------------


def _place(width: int, block_width: int) -> tuple[Array, Array, Array]:
    """Returns the row and the columns of this program, and a mask of the columns that exist."""
    blocks = jnp.int32(pl.cdiv(width, block_width))
    program = pl.program_id(0)
    columns = common.positions(lax.rem(program, blocks) * block_width, block_width)
    return lax.div(program, blocks), columns, columns < width


def _sum(rows_ref: Ref, order_ref: Ref, begin: Array, end: Array, columns: Array, in_width: Array, block_rows: int):
    """Sums the rows `begin` to `end`, or the rows `order[begin:end]` if an order is given; float32 [columns]."""
    shape = block_rows, columns.shape[0]

    def add(i, total):
        rows = common.positions(begin + i * block_rows, block_rows)
        inside = rows < end
        if order_ref is not None:
            rows = common.load(order_ref.at[rows], mask=inside)
        place = jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(columns[None, :], shape)
        return total + common.load(rows_ref.at[place], mask=inside[:, None] & in_width[None, :])

    steps = lax.div(end - begin + (block_rows - 1), jnp.int32(block_rows))
    return jnp.sum(lax.fori_loop(0, steps, add, jnp.zeros(shape, jnp.float32)), axis=0)


def _chunks_kernel(rows_ref, order_ref, ids_ref, starts_ref, sums_ref, *, config: RowConfig):
    """Sums the first run in each chunk of `CHUNK` sorted rows, up to the end of the chunk."""
    chunk, columns, in_width = _place(rows_ref.shape[1], config.block_width)
    begin = chunk * CHUNK
    end = common.load(starts_ref.at[common.load(ids_ref.at[begin]) + 1])
    total = _sum(rows_ref, order_ref, begin, jnp.minimum(end, begin + CHUNK), columns, in_width, config.block_rows)
    common.store(sums_ref.at[chunk, columns], total, mask=in_width)


def _runs_kernel(rows_ref, order_ref, starts_ref, sums_ref, out_ref, *, config: RowConfig):
    row, columns, in_width = _place(rows_ref.shape[1], config.block_width)
    begin, end = common.load(starts_ref.at[row]), common.load(starts_ref.at[row + 1])
    chunk = lax.div(begin, jnp.int32(CHUNK)) + 1  # The chunk after the one where the run begins.
    total = _sum(rows_ref, order_ref, begin, jnp.minimum(end, chunk * CHUNK), columns, in_width, config.block_rows)
    chunks = lax.div(end + (CHUNK - 1), jnp.int32(CHUNK))
    total = total + _sum(sums_ref, None, chunk, chunks, columns, in_width, config.block_rows)
    common.store(out_ref.at[row, columns], total.astype(out_ref.dtype), mask=in_width)


def sum_by_id(rows: Array, ids: Array, table: jax.ShapeDtypeStruct, *, config: RowConfig, interpret: bool) -> Array:
    """Sums float32 rows `[M, D]` by id, int32 `[M]`, into an array like `table`. The results are bitwise reproducible.

    Rows whose id the table does not have are left out.
    """
    count, width = rows.shape
    size = table.shape[0]
    ids = jnp.where((ids >= 0) & (ids < size), ids, size)
    ids, order = lax.sort_key_val(ids, jnp.arange(count, dtype=jnp.int32))  # A stable sort.
    starts = jnp.searchsorted(ids, jnp.arange(size + 2, dtype=jnp.int32), method="scan_unrolled").astype(jnp.int32)
    blocks = pl.cdiv(width, config.block_width)
    options: dict[str, Any] = {"num_warps": config.num_warps, "interpret": interpret}
    chunks = pl.cdiv(count, CHUNK)
    (sums,) = common.launch(
        functools.partial(_chunks_kernel, config=config),
        (chunks * blocks,),
        [rows, order, ids, starts],
        [jax.ShapeDtypeStruct((chunks, width), jnp.float32)],
        name="embeddings_chunks",
        **options,
    )
    (found,) = common.launch(
        functools.partial(_runs_kernel, config=config),
        (size * blocks,),
        [rows, order, starts, sums],
        [jax.ShapeDtypeStruct(table.shape, table.dtype)],
        name="embeddings_runs",
        **options,
    )
    return found
