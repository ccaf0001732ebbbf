"""Normalisation of rows in one pass over memory, shared by the `layer_norm` and `embeddings` kernels."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jaxft.kernels.triton import common

Ref = Any


def _moments(tile: common.Tile, total: Array, center: bool) -> tuple[Array, Array, Array]:
    """Returns the count, the mean and the sum of squared deviations of each row of a tile.

    Without `center`, the mean is taken to be 0.
    """
    whole = jnp.full((), tile.shape[1], jnp.float32)
    if not center:
        return whole, jnp.zeros((tile.shape[0],), jnp.float32), jnp.sum(total * total, axis=1)
    count = whole if tile.in_width is None else jnp.sum(tile.in_width.astype(jnp.float32))
    mean = jnp.sum(total, axis=1) / count
    centered = total - mean[:, None]
    if tile.in_width is not None:
        centered = jnp.where(tile.in_width[None, :], centered, 0.0)
    return count, mean, jnp.sum(centered * centered, axis=1)


def _merge_moments(a: tuple[Array, Array, Array], b: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """Merges the moments of two sets (Chan, Golub and LeVeque, 1979)."""
    count = a[0] + b[0]
    delta = b[1] - a[1]
    return count, a[1] + delta * (b[0] / count), a[2] + b[2] + delta * delta * (a[0] * b[0] / count)


def drop(tile: common.Tile, x: Array, seed_ref: Ref, rate: float) -> tuple[Array, Array]:
    """Applies dropout; the tile's place determines the random bits. Also returns the mask of the kept elements."""
    keep = common.keep(seed_ref, rate, tile.rows[:, None], tile.columns[None, :])
    return jnp.where(keep, x * (1.0 / (1.0 - rate)), 0.0), keep


def normalize(
    read: Callable[[Any], tuple[common.Tile, Array]], block_width: int, epsilon: float,
    gamma_ref: Ref, beta_ref: Ref, y_ref: Ref, total_ref: Ref, saved_ref: Ref,
    finish: Callable[[common.Tile, Array], Array] = lambda tile, y: y, *,
    center: bool = True, vectors_first: bool = False, float8_ref: Ref = None, float8_scale: float = 1.0,
) -> None:  # fmt: skip
    """Normalises a block of rows `[rows, D]` and writes it to `y_ref`, `[M, D]`.

    `read(i)` returns the tile and the float32 values of the i-th chunk of `block_width` columns, with zeros beyond the
    edges. `total_ref` receives the rows as they were read, and `saved_ref`, `[2, M]`, the mean and
    1 / sqrt(variance + epsilon) of each row. Without `center`, the mean is taken to be 0 (RMSNorm). `finish` maps a
    tile and its normalised values to the values to write. With `vectors_first`, gamma and beta are loaded before the
    rows if one chunk holds a row: few rows would otherwise wait for them. `float8_ref` receives the values divided by
    `float8_scale`, in float8_e4m3fn.
    """
    # H100, partial sums of 128x768: 2.0 us with `vectors_first` (2.3 without), 2026-11-24
    # See docs/performance-notes.md, "Order of loads in LayerNorm with few rows".

    def vectors_of(i):
        tile = common.tile((1, y_ref.shape[1]), 0, i * block_width, (1, block_width))
        return [None if ref is None else tile.load_vector(ref) for ref in (gamma_ref, beta_ref)]

    def write(chunk, vectors, mean, scale):
        (tile, total), (gamma, beta) = chunk, vectors
        y = (total - mean[:, None]) * scale[:, None]
        if beta is not None:
            y = common.fma(y, 1.0 if gamma is None else gamma, beta)
        elif gamma is not None:
            y = y * gamma
        y = finish(tile, y)
        tile.store(y_ref, y)
        if float8_ref is not None:
            tile.store(float8_ref, common.to_float8(y, float8_scale))
        if total_ref is not None:
            tile.store(total_ref, total)

    chunks = pl.cdiv(y_ref.shape[1], block_width)
    early = vectors_of(0) if vectors_first and chunks == 1 else None
    first = read(0)
    _, mean, square = lax.fori_loop(
        1, chunks, lambda i, found: _merge_moments(found, _moments(*read(i), center)), _moments(*first, center)
    )
    scale = lax.rsqrt(square / y_ref.shape[1] + epsilon)
    if saved_ref is not None:
        for n, numbers in enumerate((mean, scale)):
            common.store(saved_ref.at[jnp.int32(n), first[0].place[0]], numbers, mask=first[0].in_rows)
    if chunks == 1:
        write(first, early or vectors_of(0), mean, scale)
    else:
        lax.fori_loop(0, chunks, lambda i, _: write(read(i), vectors_of(i), mean, scale), None)
