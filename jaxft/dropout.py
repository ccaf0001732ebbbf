"""Dropout mask: a pure function of a random key and the index of each element, equal in all implementations."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


@functools.partial(jax.tree_util.register_dataclass, data_fields=["data", "start"], meta_fields=["within"])
@dataclasses.dataclass(frozen=True)
class ShardKey:
    """A random key for one shard of an array, whose elements are dropped as the elements of the whole array are.

    Attributes:
      data: data of the random key, uint32 `[words]`.
      start: row of the whole array that is the first one of the shard, uint32.
      within: sizes of the axes of the whole array that rows are counted over.
    """

    data: Array
    start: Array
    within: tuple[int, ...]


def dropout_seed(key: Any) -> Array:
    """Returns the seed of `keep_bits`: two uint32 words from a JAX random key (typed or raw) of any generator.

    The seed of a `ShardKey` counts rows from its first row on, because `words_of_row` adds the row to the first word.
    """
    if isinstance(key, ShardKey):
        return dropout_seed(key.data).at[0].add(key.start)
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    words = data.reshape(-1, 2)
    seed = mix(words[0])  # mixed, so that similar keys give unrelated seeds
    for i in range(1, words.shape[0]):  # for generators with longer keys, such as "rbg"
        seed = mix(seed + words[i])
    return seed


def mix(x: Array, word: Array | int = 0) -> Array:
    """Mixes the bits of uint32 `x` by a bijective function (xorshift-multiply). All backends can lower its operations.

    `word` is XORed in between the two multiplications.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15) ^ word) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def keep_bits(seed0: Array, seed1: Array, row: Array, column: Array) -> Array:
    """Returns 32 random bits for each (row, column), a pure function of the seed and the index. Everything is uint32.

    A kernel computes the two words of a row once per row. An element then costs one `mix` with the second word XORed
    in, so that two rows with the same first word still differ.
    """
    first, second = words_of_row(seed0, seed1, row)
    return mix(column + first, second)


def words_of_row(seed0: Array, seed1: Array, row: Array) -> tuple[Array, Array]:
    """Returns the two uint32 words of a row that `keep_bits` mixes with the column."""
    first = mix(row + seed0)
    return first, mix(first ^ seed1)


def keep_threshold(rate: float) -> int:
    """Returns the smallest value of the 32 random bits for which an element is kept."""
    return min(round(rate * 2**32), 2**32 - 1)


def dropout_mask(key: Array, rate: float, shape: tuple[int, ...], within: tuple[int, ...] | None = None) -> Array:
    """Returns the mask of the elements that are kept.

    The index of an element is (flat index of the leading axes, index in the last axis). If the elements are the first
    ones of a larger array along each axis, `within` is the shape of the larger array, whose indices count.
    """
    seed = dropout_seed(key)
    *leading, column = (lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(len(shape)))
    row = jnp.zeros(shape, jnp.uint32)
    for size, index in zip(within or shape, leading, strict=False):
        row = row * jnp.asarray(size, jnp.uint32) + index
    return keep_bits(seed[0], seed[1], row, column) >= jnp.uint32(keep_threshold(rate))


def dropout(x: Array, rate: float, key: Array | None, within: tuple[int, ...] | None = None) -> Array:
    """Returns x / (1 - rate) where the mask keeps the element, else 0; x itself if `rate` is 0 or `key` is None."""
    if rate == 0.0 or key is None:
        return x
    mask = dropout_mask(key, rate, x.shape, within)
    if (sharding := jax.typeof(x).sharding).mesh.explicit_axes:
        mask = jax.sharding.reshard(mask, sharding)
    return jnp.where(mask, x * (1.0 / (1.0 - rate)), jnp.zeros_like(x))
