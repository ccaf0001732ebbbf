"""The dropout mask: a pure function of a random key and of each element's index, the same in every implementation."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


def dropout_seed(key: Array) -> Array:
    """Two uint32 words from a JAX random key (typed or raw) of any generator, the seed of `keep_bits`."""
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    words = data.reshape(-1, 2)
    seed = mix(words[0])  # mixed, so that neighbouring keys are no neighbours
    for i in range(1, words.shape[0]):  # of generators with longer keys, such as "rbg"
        seed = mix(seed + words[i])
    return seed


def mix(x: Array, word: Array | int = 0) -> Array:
    """A bijective mixing function on uint32 (xorshift-multiply), in operations that every backend lowers.

    `word` is thrown in half way.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15) ^ word) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def keep_bits(seed0: Array, seed1: Array, row: Array, column: Array) -> Array:
    """32 random bits for each (row, column): a pure function of the seed and the element's index, all uint32.

    The row's two words cost a kernel one evaluation a row; an element costs one `mix` with a word thrown in half way,
    so that two rows whose first words collide still differ.
    """
    first, second = words_of_row(seed0, seed1, row)
    return mix(column + first, second)


def words_of_row(seed0: Array, seed1: Array, row: Array) -> tuple[Array, Array]:
    first = mix(row + seed0)
    return first, mix(first ^ seed1)


def keep_threshold(rate: float) -> int:
    """An element is kept when its 32 bits are at least this."""
    return min(round(rate * 2**32), 2**32 - 1)


def dropout_mask(key: Array, rate: float, shape: tuple[int, ...]) -> Array:
    """True where an element is kept; its index is (flat index of the leading axes, index in the last axis)."""
    seed = dropout_seed(key)
    rows = math.prod(shape[:-1])
    row = lax.broadcasted_iota(jnp.uint32, (rows, shape[-1]), 0)
    column = lax.broadcasted_iota(jnp.uint32, (rows, shape[-1]), 1)
    return (keep_bits(seed[0], seed[1], row, column) >= jnp.uint32(keep_threshold(rate))).reshape(shape)


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """x / (1 - rate) where `dropout_mask` keeps it, 0 elsewhere; x itself without a rate or a key."""
    if rate == 0.0 or key is None:
        return x
    return jnp.where(dropout_mask(key, rate, x.shape), x * (1.0 / (1.0 - rate)), jnp.zeros_like(x))
