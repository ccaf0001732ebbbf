"""Pooling of the hidden states of tokens to one vector per sequence, for padded and for packed sequences."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxft import reference

# By their names in the files of sentence-transformers, in the order in which it concatenates old boolean settings.
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def pool(
    hidden: jax.Array, mask: jax.Array, modes: tuple[str, ...], prompt_lengths: jax.Array | None = None
) -> jax.Array:
    """Pools float32 `[B, T, D]` under a mask `[B, T]` to `[B, D * len(modes)]`. A sequence without tokens gives 0.

    `prompt_lengths`, a scalar or `[B]`, is the number of tokens that are left out at the start of each sequence, which
    is its first token under the mask. "weightedmean" weights a token by its number, counted from the start, prompt
    included. A sequence that has no other tokens gives 0, and its first token for "cls".
    """

    def take(index: jax.Array) -> jax.Array:
        # Not with two indices: the sequences may be divided among devices.
        return jax.vmap(lambda row, i: row.at[i].get(mode="promise_in_bounds", unique_indices=True))(hidden, index)

    return _pool(hidden, mask, modes, prompt_lengths, take, lambda: jnp.argmax(mask, axis=1).astype(jnp.int32))


def pool_packed(
    hidden: jax.Array, cu_seqlens: jax.Array, modes: tuple[str, ...], max_seqlen: int,
    prompt_lengths: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Pools the first `max_seqlen` tokens of packed sequences, `[M, D]`, as `pool` does for a padded batch.

    The result is bitwise independent of the other sequences and of the sequence's place in `hidden`. A sequence that
    ends beyond the M rows gives NaN ("cls" and "lasttoken" only if that token lies there).
    """
    lengths = jnp.diff(cu_seqlens)
    mask = jnp.arange(max_seqlen, dtype=jnp.int32)[None] < lengths[:, None]

    def take(index: jax.Array) -> jax.Array:
        return _rows(hidden, cu_seqlens[:-1] + index, lengths > 0)

    rows = sequence_rows(hidden, cu_seqlens, max_seqlen)
    return _pool(rows, mask, modes, prompt_lengths, take, lambda: jnp.zeros_like(lengths, jnp.int32))


def _pool(
    hidden: jax.Array, mask: jax.Array, modes: tuple[str, ...], prompt_lengths: jax.Array | None,
    take: Callable[[jax.Array], jax.Array], start: Callable[[], jax.Array],
) -> jax.Array:  # fmt: skip
    """Pools `[B, T, D]`.

    `take` looks up one token of each sequence by its index in T; `start` returns the index of the first tokens.
    """
    index, every = jnp.arange(hidden.shape[1], dtype=jnp.int32)[None], mask

    def number() -> jax.Array:
        return index - start()[:, None]

    if prompt_lengths is not None:
        mask = mask & (number() >= jnp.reshape(prompt_lengths, (-1, 1)))
    count = jnp.sum(mask, axis=1, dtype=jnp.int32)[:, None]
    size = jnp.maximum(count, 1).astype(hidden.dtype)
    kept = mask[:, :, None]

    def first() -> jax.Array:
        if prompt_lengths is None:
            return take(start())
        return take(jnp.where(count[:, 0] > 0, jnp.argmax(mask, axis=1).astype(jnp.int32), start()))

    def weighted_mean() -> jax.Array:
        weights = (number() + 1).astype(hidden.dtype)
        total = jnp.sum(weights, axis=1, where=mask)[:, None]
        return jnp.sum(hidden * weights[:, :, None], axis=1, where=kept) / jnp.maximum(total, 1)

    pooled = {
        "cls": first,
        "max": lambda: reference.largest(hidden, 1, kept),
        "mean": lambda: jnp.sum(hidden, axis=1, where=kept) / size,
        "mean_sqrt_len_tokens": lambda: jnp.sum(hidden, axis=1, where=kept) / jnp.sqrt(size),
        "weightedmean": weighted_mean,
        "lasttoken": lambda: take(jnp.max(jnp.where(mask, index, 0), axis=1)),
    }
    found = {mode: jnp.any(every, axis=1)[:, None] if mode == "cls" else count > 0 for mode in modes}
    return jnp.concatenate([jnp.where(found[mode], pooled[mode](), 0.0) for mode in modes], axis=-1)


def first_tokens(x: jax.Array, cu_seqlens: jax.Array | None) -> jax.Array:
    """Returns `[B, D]`, the first tokens of `[B, T, D]` or packed `[M, D]`; 0 for a packed sequence without tokens."""
    return x[:, 0] if cu_seqlens is None else _rows(x, cu_seqlens[:-1], jnp.diff(cu_seqlens) > 0)


def sequence_rows(x: jax.Array, cu_seqlens: jax.Array, length: int) -> jax.Array:
    """Pads packed `[M, D]` to `[B, length, D]`: 0 after a sequence's end, NaN where it goes beyond the M rows."""
    row = jnp.arange(length, dtype=jnp.int32)[None]
    return _rows(x, cu_seqlens[:-1, None] + row, row < jnp.diff(cu_seqlens)[:, None])


def _rows(x: jax.Array, index: jax.Array, used: jax.Array) -> jax.Array:
    """Looks up rows of `[M, D]`: 0 where `used` is False, NaN beyond the M rows. No row may be used twice."""
    rows = x.shape[0]
    index = jnp.where(used, index, rows)
    if rows == 0:  # JAX's gather does not accept an empty axis
        taken = jnp.zeros((*used.shape, x.shape[1]), x.dtype)
    else:
        # No row occurs twice (`unique_indices`), so the gradient needs no atomics.
        # XLA fuses the lookup into the operation that reads the result.
        taken = x.at[index].get(mode="fill", fill_value=0, unique_indices=True)
    return taken * reference.one_or_nan(~used | (index < rows), x.dtype)[..., None]


def packed_rows_of(x: jax.Array, cu_seqlens: jax.Array, rows: int) -> jax.Array:
    """Packs padded `[B, length, D]` to `[rows, D]`, the inverse of `sequence_rows`. Rows of no sequence are 0."""
    row = jnp.arange(rows, dtype=cu_seqlens.dtype)
    # The last of the sequences that start there, which is not empty. JAX's searchsorted takes no symbolic size.
    sequence = jnp.sum(cu_seqlens[None] <= row[:, None], axis=1, dtype=jnp.int32) - 1
    place = row - cu_seqlens[jnp.maximum(sequence, 0)]
    # The rows after the last sequence count as rows of one more, and so lie beyond the array.
    index = jnp.where(place < x.shape[1], sequence * x.shape[1] + place, x.shape[0] * x.shape[1])
    return x.reshape(-1, x.shape[2]).at[index].get(mode="fill", fill_value=0)


def l2_normalize(x: jax.Array) -> jax.Array:
    """Divides `x` by its L2 norm along the last axis, or by 1e-12 if the norm is smaller."""
    return x / jnp.sqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-24))  # 0 has a gradient, too
