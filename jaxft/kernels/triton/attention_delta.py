"""Row statistics for the gradient of attention on Mosaic GPU: the log-sum-exp and delta of each row.

Delta is the sum of `dout * out` over a row. The Triton kernels of `attention_backward` compute delta themselves. The
Mosaic GPU kernel reads it from the array that this kernel writes. A tile of that array holds the log-sum-exp and delta
of 64 rows, so that one copy fetches both. With dropout, a tile also holds the two random words of each row (see
`words_of_row`). The kernel reads dout and out once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jaxft.dropout import words_of_row
from jaxft.kernels.triton import common

TILE = 64  # rows in a tile of the result


def _kernel(dout_ref, out_ref, lse_ref, seed_ref, rows_ref, *, heads: int):
    # Heads are the fastest grid axis, because the heads of a row are adjacent in memory. Sequences run from the last to
    # the first, because the next kernel begins with the first ones and then finds them in the L2 cache.
    head, tile, batch = pl.program_id(0), pl.program_id(1), common.program_id_from_the_end(2)
    span = common.span(tile * TILE, TILE)
    place = batch, span, head, common.span(0, out_ref.shape[-1])
    dout, out = (common.load(ref.at[place]).astype(jnp.float32) for ref in (dout_ref, out_ref))
    lse = common.load(lse_ref.at[batch, head, span])
    attends = lse != -jnp.inf
    # A row that attends to no key gets a log-sum-exp of inf, so that exp2(logit - inf) is 0.
    found = [jnp.where(attends, lse, jnp.inf), jnp.where(attends, jnp.sum(dout * out, axis=1), 0.0)]
    if seed_ref is not None:
        rows = (batch * heads + head) * out_ref.shape[1] + common.positions(tile * TILE, TILE)
        seed0, seed1 = (common.load(seed_ref.at[jnp.int32(i)]) for i in range(2))
        words = words_of_row(seed0, seed1, rows.astype(jnp.uint32))
        found += [lax.bitcast_convert_type(x, jnp.float32) for x in words]
    for i, x in enumerate(found):
        common.store(rows_ref.at[batch, head, tile, jnp.int32(i), common.span(0, TILE)], x)


def row_statistics(
    dout: Array, out: Array, lse: Array, seed: Array | None = None, heads_of_rows: int | None = None, *, interpret: bool
) -> Array:
    """Computes float32 `[B, N, T/64, 2 or 4, 64]` from dout and out `[B, T, N, H]` and the base-2 lse `[B, N, T]`.

    T is a multiple of 64 and H a power of two. Index 0 of the second to last axis holds the log-sum-exp, with inf in
    place of -inf. Index 1 holds delta, which is 0 where the log-sum-exp was -inf. With a seed, indices 2 and 3 hold the
    bits of the two random words of each row. Rows of dropout are counted over `heads_of_rows`, None for the heads
    of `out`.
    """
    batch, length, heads, _ = out.shape
    tiles, numbers = length // TILE, 2 if seed is None else 4
    (rows,) = common.launch(
        functools.partial(_kernel, heads=heads_of_rows or heads),
        (heads, tiles, batch),
        [dout, out, lse, seed],
        [jax.ShapeDtypeStruct((batch, heads, tiles, numbers, TILE), jnp.float32)],
        name="attention_delta",
        num_warps=4,
        interpret=interpret,
    )
    return rows
