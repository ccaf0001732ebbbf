"""Rows normalised in one pass over memory, wherever they come from: for `layer_norm` and `embeddings`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxft.kernels.triton import common

Array = jax.Array
Ref = Any


def _moments(tile: common.Tile, total: Array) -> tuple[Array, Array, Array]:
    """Count, mean and sum of squared deviations of the rows."""
    whole = jnp.full((), tile.shape[1], jnp.float32)
    count = whole if tile.in_width is None else jnp.sum(tile.in_width.astype(jnp.float32))
    mean = jnp.sum(total, axis=1) / count
    centered = total - mean[:, None]
    if tile.in_width is not None:
        centered = jnp.where(tile.in_width[None, :], centered, 0.0)
    return count, mean, jnp.sum(centered * centered, axis=1)


def _merge_moments(a: tuple[Array, Array, Array], b: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """The moments of two sets together (Chan, Golub and LeVeque, 1979)."""
    count = a[0] + b[0]
    delta = b[1] - a[1]
    return count, a[1] + delta * (b[0] / count), a[2] + b[2] + delta * delta * (a[0] * b[0] / count)


def drop(tile: common.Tile, x: Array, seed_ref: Ref, rate: float) -> tuple[Array, Array]:
    """dropout(x) of a tile in float32, and what it keeps."""
    keep = common.keep(seed_ref, rate, tile.rows[:, None], tile.columns[None, :])
    return jnp.where(keep, x * (1.0 / (1.0 - rate)), 0.0), keep


def normalize(
    read: Callable[[Any], tuple[common.Tile, Array]], block_width: int, epsilon: float,
    gamma_ref: Ref, beta_ref: Ref, y_ref: Ref, total_ref: Ref, saved_ref: Ref,
    finish: Callable[[common.Tile, Array], Array] = lambda tile, y: y, *, vectors_first: bool = False,
) -> None:  # fmt: skip
    """Writes a block of normalised rows [rows, D]; `read(i)` gives the i-th `block_width` columns, with zeros beyond.

    They are written as `finish` makes them. To `total_ref`, if there, go the rows as they were read, and to `saved_ref`
    [2, M] what a backward pass needs: the mean and 1 / sqrt(variance + epsilon) of each row.

    `vectors_first`: if one block holds a row, gamma and beta come from memory while it is added up, and then stay in
    registers. That is for few rows, which would wait for them (128 rows of partial sums of 768 columns in 2.0 us for
    2.3, 16 rows in 1.8 for 2.1; H100, 2026-11-24).
    """

    def vectors_of(i):
        """These columns of gamma and beta."""
        tile = common.tile((1, y_ref.shape[1]), 0, i * block_width, (1, block_width))
        return [None if ref is None else tile.load_vector(ref) for ref in (gamma_ref, beta_ref)]

    def write(chunk, vectors, mean, scale):
        (tile, total), (gamma, beta) = chunk, vectors
        y = (total - mean[:, None]) * scale[:, None]
        if beta is not None:
            y = common.fma(y, 1.0 if gamma is None else gamma, beta)
        elif gamma is not None:
            y = y * gamma
        tile.store(y_ref, finish(tile, y))
        if total_ref is not None:
            tile.store(total_ref, total)

    chunks = pl.cdiv(y_ref.shape[1], block_width)
    early = vectors_of(0) if vectors_first and chunks == 1 else None
    first = read(0)
    _, mean, square = lax.fori_loop(
        1, chunks, lambda i, found: _merge_moments(found, _moments(*read(i))), _moments(*first)
    )
    scale = lax.rsqrt(square / y_ref.shape[1] + epsilon)
    if saved_ref is not None:
        for n, numbers in enumerate((mean, scale)):
            common.store(saved_ref.at[jnp.int32(n), first[0].place[0]], numbers, mask=first[0].in_rows)
    if chunks == 1:
        write(first, early or vectors_of(0), mean, scale)
    else:
        lax.fori_loop(0, chunks, lambda i, _: write(read(i), vectors_of(i), mean, scale), None)
