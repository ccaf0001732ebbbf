"""Pooling of the hidden states of tokens to one vector per sequence, for padded and for packed sequences."""

import jax
import jax.numpy as jnp

from jaxft import reference


def pool(hidden: jax.Array, mask: jax.Array, modes: tuple[str, ...]) -> jax.Array:
    """Pools float32 `[B, T, D]` under a mask `[B, T]` to `[B, D * len(modes)]`. A sequence without tokens gives 0."""
    count = jnp.sum(mask, axis=1, dtype=jnp.int32)[:, None]
    mask = mask[:, :, None]
    pooled = {
        "cls": lambda: hidden[:, 0],
        "max": lambda: jnp.max(hidden, axis=1, where=mask, initial=-jnp.inf),
        "mean": lambda: jnp.sum(hidden, axis=1, where=mask) / jnp.maximum(count, 1).astype(hidden.dtype),
    }
    return jnp.concatenate([jnp.where(count > 0, pooled[mode](), 0.0) for mode in modes], axis=-1)


def pool_packed(hidden: jax.Array, cu_seqlens: jax.Array, modes: tuple[str, ...], max_seqlen: int) -> jax.Array:
    """Pools the first `max_seqlen` tokens of packed sequences, `[M, D]`, as `pool` does for a padded batch.

    The result is bitwise independent of the other sequences and of the sequence's place in `hidden`. A sequence that
    ends beyond the M rows gives NaN ("cls" only if it starts there).
    """
    mask = jnp.arange(max_seqlen, dtype=jnp.int32)[None] < jnp.diff(cu_seqlens)[:, None]
    return pool(sequence_rows(hidden, cu_seqlens, max_seqlen), mask, modes)


def first_tokens(x: jax.Array, cu_seqlens: jax.Array | None) -> jax.Array:
    """Returns `[B, D]`, the first tokens of `[B, T, D]` or packed `[M, D]`; 0 for a packed sequence without tokens."""
    return (x if cu_seqlens is None else sequence_rows(x, cu_seqlens, 1))[:, 0]


def sequence_rows(x: jax.Array, cu_seqlens: jax.Array, length: int) -> jax.Array:
    """Pads packed `[M, D]` to `[B, length, D]`: 0 after a sequence's end, NaN where it goes beyond the M rows."""
    rows, row = x.shape[0], jnp.arange(length, dtype=jnp.int32)[None]
    used = row < jnp.diff(cu_seqlens)[:, None]
    index = jnp.where(used, cu_seqlens[:-1, None] + row, rows)
    if rows == 0:  # JAX's gather does not accept an empty axis
        taken = jnp.zeros((*used.shape, x.shape[1]), x.dtype)
    else:
        # No row occurs twice (`unique_indices`), so the gradient needs no atomics.
        # XLA fuses the lookup into the operation that reads the result.
        taken = x.at[index].get(mode="fill", fill_value=0, unique_indices=True)
    return taken * reference.one_or_nan(~used | (index < rows), x.dtype)[:, :, None]


def packed_rows_of(x: jax.Array, cu_seqlens: jax.Array, rows: int) -> jax.Array:
    """Packs padded `[B, length, D]` to `[rows, D]`, the inverse of `sequence_rows`. Rows of no sequence are 0."""
    row = jnp.arange(rows, dtype=cu_seqlens.dtype)
    sequence = jnp.searchsorted(cu_seqlens, row, side="right") - 1  # the last of those that start there: not empty
    place = row - cu_seqlens[jnp.maximum(sequence, 0)]
    used = (row < cu_seqlens[-1]) & (place < x.shape[1])
    index = jnp.where(used, sequence * x.shape[1] + place, x.shape[0] * x.shape[1])
    return x.reshape(-1, x.shape[2]).at[index].get(mode="fill", fill_value=0)


def l2_normalize(x: jax.Array) -> jax.Array:
    """Divides `x` by its L2 norm along the last axis, or by 1e-12 if the norm is smaller."""
    return x / jnp.sqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-24))  # 0 has a gradient, too
