"""Attention by relative positions: tables of biases (T5's buckets, ALiBi), and DeBERTa's disentangled attention."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxft import reference
from jaxft.dropout import dropout

_BUCKETS, _FARTHEST = 32, 128  # MPNet's, which its config.json does not change


def bucket_table(weights: Array) -> Array:
    """Returns the table of biases that T5's buckets take from `weights` `[buckets, N]`, float32 `[N, 2R+1]`.

    It is the argument `relative_bias` of attention. All keys at a distance of R or more are in one bucket.
    """
    half, offsets = _BUCKETS // 2, np.arange(-_FARTHEST, _FARTHEST + 1)
    exact = half // 2
    distance = np.abs(offsets)
    with np.errstate(divide="ignore"):
        logs = np.log(distance.astype(np.float32) / np.float32(exact)) / np.float32(math.log(_FARTHEST / exact))
    far = np.minimum(exact + np.maximum(logs * np.float32(half - exact), 0).astype(np.int32), half - 1)
    bucket = np.where(distance < exact, distance, far) + half * (offsets > 0)
    # A matmul that copies numbers, because the gradient of a gather would add up in any order.
    chosen = np.arange(_BUCKETS)[:, None] == bucket[None]
    weights = reference.wide(weights[:_BUCKETS])
    return jnp.matmul(weights.T, jnp.asarray(chosen, weights.dtype), precision="highest")


def alibi_table(heads: int, length: Any) -> Array:
    """Returns the table of biases of symmetric ALiBi, minus a slope times the distance, float32 `[N, 2 * length + 1]`.

    It is the argument `relative_bias` of attention. `length` is the length of the longest sequence.
    """
    distance = jnp.abs(jnp.arange(2 * length + 1, dtype=jnp.int32) - length)
    return -jnp.asarray(_slopes(heads))[:, None] * distance[None].astype(jnp.float32)


def _slopes(heads: int) -> np.ndarray:
    power = 2 ** math.floor(math.log2(heads))
    first = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-8 * (i + 0.5) / power) for i in range(heads - power)]
    return np.asarray(first + between, np.float32)


def disentangled_attention(
    qkv: Array, relative: Array, mask: Array | None, buckets: int, farthest: int, dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
) -> Array:  # fmt: skip
    """Computes DeBERTa's attention by XLA.

    Args:
      qkv: `[B, T, 3, N, H]`.
      relative: queries and keys of the relative positions, `[2 * R, 2, N, H]`.
      mask: `[B, 1, 1, T]`, True where a key takes part, or None.
      buckets: number of buckets R on each side, 0 for one per position up to R.
      farthest: distance of the last bucket.
      dropout_rate: probability of dropping an attention probability.
      dropout_rng: a JAX random key, which turns dropout on.

    Returns:
      `[B, T, N, H]`.
    """
    query, key, value = (qkv[:, :, i] for i in range(3))
    length, size, span = qkv.shape[1], qkv.shape[-1], relative.shape[0] // 2
    scale = 1.0 / math.sqrt(3 * size)
    scores = reference.product(query, key, "bqnh,bknh->bnqk")
    most = max(farthest, span)  # all distances from here on have the same row of `relative`
    bucket = log_buckets(np.arange(-most, most + 1, dtype=np.int32), buckets, farthest)
    row = jnp.arange(length, dtype=jnp.int32)
    place = jnp.clip(row[:, None] - row[None, :], -most, most) + most  # of query minus key in `bucket`
    by_key = reference.product(query, relative[:, 1], "bqnh,rnh->bnqr")
    by_query = reference.product(key, relative[:, 0], "bknh,rnh->bnkr")
    for found, chosen in ((by_key, bucket), (by_query, -bucket)):  # rows are queries, then keys
        index = jnp.asarray(np.clip(chosen + span, 0, 2 * span - 1))[place]
        part = jnp.take_along_axis(found, index[None, None], axis=-1)
        scores += part if found is by_key else part.mT
    weights = reference.softmax(scores, scale=scale, mask=mask)
    weights = dropout(weights, dropout_rate, dropout_rng)
    return reference.weighted_sum(weights, value, None, value.dtype, "bnqk,bknh->bqnh").astype(value.dtype)


def log_buckets(offsets: np.ndarray, buckets: int, farthest: int) -> np.ndarray:
    """Returns the bucket of each offset: itself near 0, logarithmic up to `farthest`. Without buckets, the offset."""
    if buckets <= 0:
        return offsets
    middle = buckets // 2
    distance = np.where(np.abs(offsets) < middle, middle - 1, np.abs(offsets)).astype(np.float32)
    logs = np.log(distance / np.float32(middle)) / np.log(np.float32((farthest - 1) / middle))
    far = np.ceil(logs * np.float32(middle - 1)).astype(np.int32) + middle
    return np.where(distance <= middle, offsets, far * np.sign(offsets)).astype(np.int32)
