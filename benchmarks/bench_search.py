"""`semantic_search` in a corpus that is on the device, beside plain JAX: all scores in one matmul, then `lax.top_k`."""

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxft
import shapes
import timing
from jaxft.models.pooling import l2_normalize
from jaxft.tuning import profiler

DTYPE = "float32"
TOP_K = 10


@jax.jit
def best(queries: jax.Array, corpus: jax.Array) -> Sequence[jax.Array]:
    """Returns scores and positions of the best entries by cosine, `[q, TOP_K]`."""
    scores = jnp.matmul(l2_normalize(queries), l2_normalize(corpus).T, precision="highest")
    return jax.lax.top_k(scores, TOP_K)


def plain(queries: jax.Array, corpus: jax.Array) -> list[list[dict[str, Any]]]:
    """Returns the results of `semantic_search`."""
    scores, ids = (x.tolist() for x in jax.device_get(best(queries, corpus)))
    return [[{"corpus_id": i, "score": s} for i, s in zip(*row, strict=True)] for row in zip(ids, scores, strict=True)]


def run(shape: tuple[int, int, int], args: argparse.Namespace) -> list[timing.Row]:
    """Checks and times one shape."""
    count, entries, width = shape
    keys = jax.random.split(jax.random.key(0))
    arrays = [jax.random.normal(key, (n, width), DTYPE) for key, n in zip(keys, (count, entries), strict=True)]
    ways = {
        ("jaxft", "wall_us"): functools.partial(jaxft.semantic_search, *arrays, top_k=TOP_K),
        ("xla", "wall_us"): functools.partial(plain, *arrays),
    }
    ours, theirs = ([[entry["score"] for entry in row] for row in way()] for way in ways.values())
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)
    times = profiler.turns([*ways], 5 if args.quick else 15, lambda way: profiler.queued_us(ways[way], 1))
    samples = {way: column.tolist() for way, column in zip(ways, times.T, strict=True)}
    key: dict[str, Any] = {"op": "semantic_search", "direction": "forward", "shape": shape, "dtype": DTYPE}
    return timing.as_rows(samples, 2.0 * count * entries * width, "TFLOP/s", args, **key)


def main(argv: Sequence[str] | None = None) -> None:
    args = timing.arguments(__doc__).parse_args(argv)
    results: list[timing.Row] = []
    for shape in shapes.SEARCH[:2] if args.quick else shapes.SEARCH:
        results += run(shape, args)
    timing.print_tables(results)


if __name__ == "__main__":
    main()
