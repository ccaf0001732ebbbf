"""From the hidden states of tokens to one vector a sequence, for padded and for packed sequences."""

import jax
import jax.numpy as jnp


def pool(hidden: jax.Array, mask: jax.Array, modes: tuple[str, ...]) -> jax.Array:
    """`hidden` float32 `[B, T, D]`, `mask` bool `[B, T]` -> float32 `[B, D * len(modes)]`; no token at all gives 0."""
    count = jnp.sum(mask, axis=1, dtype=jnp.int32)[:, None]
    mask = mask[:, :, None]
    pooled = {
        "cls": lambda: hidden[:, 0],
        "max": lambda: jnp.max(hidden, axis=1, where=mask, initial=-jnp.inf),
        "mean": lambda: jnp.sum(hidden, axis=1, where=mask) / jnp.maximum(count, 1).astype(hidden.dtype),
    }
    return jnp.concatenate([jnp.where(count > 0, pooled[mode](), 0.0) for mode in modes], axis=-1)


def pool_packed(hidden: jax.Array, cu_seqlens: jax.Array, modes: tuple[str, ...], max_seqlen: int) -> jax.Array:
    """`pool` of sequences back to back: `hidden` float32 `[M, D]`, `cu_seqlens` int32 `[B + 1]`.

    A sequence's result does not depend, in any bit, on what the others hold or where it lies. Tokens after the first
    `max_seqlen` of a sequence take no part; a sequence that ends beyond M gives NaN ("cls" only if it starts there).
    """
    mask = jnp.arange(max_seqlen, dtype=jnp.int32) < jnp.diff(cu_seqlens)[:, None]
    return pool(sequence_rows(hidden, cu_seqlens, max_seqlen), mask, modes)


def first_tokens(x: jax.Array, cu_seqlens: jax.Array | None) -> jax.Array:
    """`[B, D]` of `x` `[B, T, D]`, or of `[M, D]` with `cu_seqlens`: 0 for a sequence of no token."""
    return (x if cu_seqlens is None else sequence_rows(x, cu_seqlens, 1))[:, 0]


def sequence_rows(x: jax.Array, cu_seqlens: jax.Array, length: int) -> jax.Array:
    """The first rows of each sequence in `x` `[M, D]`, as `[B, length, D]`: 0 after its end, NaN from row M on.

    XLA fuses the look-up into what reads the result.
    """
    rows, row = x.shape[0], jnp.arange(length, dtype=jnp.int32)
    used = row < jnp.diff(cu_seqlens)[:, None]
    if rows == 0:  # which JAX's gather refuses
        taken = jnp.full((*used.shape, x.shape[1]), jnp.nan, x.dtype)
    else:
        # No row twice, so that the gradient needs no atomics.
        index = jnp.where(used, cu_seqlens[:-1, None] + row, rows)
        taken = x.at[index].get(mode="fill", fill_value=jnp.nan, unique_indices=True)
    return jnp.where(used[:, :, None], taken, jnp.zeros((), x.dtype))


def l2_normalize(x: jax.Array) -> jax.Array:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
