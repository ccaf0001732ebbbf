"""What the gradient of attention needs of each row besides the inputs: the log-sum-exp and delta.

delta is the sum over a row of dout * out. The kernels of `attention_backward` find it themselves; that of Mosaic GPU
has it from here, beside the log-sum-exp in tiles, so that it copies both at once. And for dropout the row's two words
(`words_of_row`).

Bytes: dout and out once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxft.dropout import words_of_row
from jaxft.kernels.triton import common

Array = jax.Array

TILE = 64  # rows


def _kernel(dout_ref, out_ref, lse_ref, seed_ref, rows_ref):
    # Heads first: those of a row lie side by side. The kernel that follows begins with the first sequences.
    head, tile, batch = pl.program_id(0), pl.program_id(1), common.program_id_from_the_end(2)
    span = common.span(tile * TILE, TILE)
    place = batch, span, head, common.span(0, out_ref.shape[-1])
    dout, out = (common.load(ref.at[place]).astype(jnp.float32) for ref in (dout_ref, out_ref))
    lse = common.load(lse_ref.at[batch, head, span])
    attends = lse != -jnp.inf
    # Of a row with nothing to attend to: exp2(logit - inf) is 0.
    found = [jnp.where(attends, lse, jnp.inf), jnp.where(attends, jnp.sum(dout * out, axis=1), 0.0)]
    if seed_ref is not None:
        rows = (batch * out_ref.shape[2] + head) * out_ref.shape[1] + common.positions(tile * TILE, TILE)
        seed0, seed1 = (common.load(seed_ref.at[jnp.int32(i)]) for i in range(2))
        words = words_of_row(seed0, seed1, rows.astype(jnp.uint32))
        found += [lax.bitcast_convert_type(x, jnp.float32) for x in words]
    for i, x in enumerate(found):
        common.store(rows_ref.at[batch, head, tile, jnp.int32(i), common.span(0, TILE)], x)


def row_statistics(dout: Array, out: Array, lse: Array, seed: Array | None = None, *, interpret: bool) -> Array:
    """dout and out [B,T,N,H], lse (base 2) [B,N,T] -> [B,N,T/64,2,64] float32: of 64 rows the lse, and delta.

    T is a multiple of 64, H a power of two. An lse of -inf becomes inf. With the seed of dropout [B,N,T/64,4,64]: also
    the bits of the rows' words.
    """
    batch, length, heads, _ = out.shape
    tiles, numbers = length // TILE, 2 if seed is None else 4
    (rows,) = common.launch(
        _kernel,
        (heads, tiles, batch),
        [dout, out, lse, seed],
        [jax.ShapeDtypeStruct((batch, heads, tiles, numbers, TILE), jnp.float32)],
        name="attention_delta",
        num_warps=4,
        interpret=interpret,
    )
    return rows
