"""embeddings_layer_norm, forward and backward: microseconds, beside a copy that moves the same bytes.

"forward+backward" is what a training step does. It computes the result, and from dy the gradients of gamma, beta and
the tables; the latter are dense. Tokens are as frequent as words: the n-th of the vocabulary comes 1/n times as often.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import shapes
import timing
from jaxft import reference
from jaxft.ops.embeddings import embeddings_layer_norm


def nbytes(direction: str, batch: int, length: int, itemsize: int) -> int:
    """Returns the bytes of one call.

    Forward, the tokens' rows of the word table are read, and the result is written. Backward, the rows and dy are read,
    and the gradients of the tables are written. Ids, gamma, beta and the rows of the smaller tables are read once, and
    the gradients of gamma and beta are written.
    """
    rows = shapes.EMBEDDINGS_TABLES
    words, vectors = 2 * batch * length, length + rows[2] + 2
    if direction != "forward":
        words, vectors = 2 * words, 2 * vectors + sum(rows) + 2
    return (words + vectors) * shapes.EMBEDDINGS_WIDTH * itemsize + 2 * batch * length * 4


def tables(dtype: str, seed: int) -> tuple[jax.Array, ...]:
    """Makes the three tables, gamma and beta."""
    keys, width = jax.random.split(jax.random.key(seed), 5), shapes.EMBEDDINGS_WIDTH
    sizes = [*((rows, width) for rows in shapes.EMBEDDINGS_TABLES), (width,), (width,)]
    return tuple(jax.random.normal(key, size, dtype) for key, size in zip(keys, sizes, strict=True))


def inputs(batch: int, length: int, dtype: str, seed: int) -> tuple[jax.Array, ...]:
    """Makes word and token type ids, and dy."""
    keys, (vocabulary, _, types) = jax.random.split(jax.random.key(seed), 3), shapes.EMBEDDINGS_TABLES
    words = jnp.floor(vocabulary ** jax.random.uniform(keys[0], (batch, length))).astype(jnp.int32) - 1
    kinds = jax.random.randint(keys[1], (batch, length), 0, types, jnp.int32)
    return words, kinds, jax.random.normal(keys[2], (batch, length, shapes.EMBEDDINGS_WIDTH), dtype)


def directed(op: Callable[..., jax.Array], direction: str) -> Callable[..., Any]:
    """Returns a function of the inputs and the tables: the result of `op`, or the result and the gradients."""

    def run(words: jax.Array, kinds: jax.Array, dy: jax.Array, *tables: jax.Array) -> Any:
        def forward(*tables: jax.Array) -> jax.Array:
            return op(words, *tables, token_type_ids=kinds, epsilon=1e-12)

        if direction == "forward":
            return forward(*tables)
        y, pull_back = jax.vjp(forward, *tables)
        return y, *pull_back(dy)

    return run


def main(argv: Sequence[str] | None = None) -> None:
    args = timing.arguments(__doc__).parse_args(argv)
    op, width = "embeddings_layer_norm", shapes.EMBEDDINGS_WIDTH
    chosen = shapes.EMBEDDINGS[:2] if args.quick else shapes.EMBEDDINGS
    results = []
    for dtype in shapes.DTYPES:
        itemsize = jnp.dtype(dtype).itemsize
        # Each set has a word table of its own. In a model the other weights evict the table between two calls.
        table_bytes = shapes.EMBEDDINGS_TABLES[0] * width * itemsize
        weights = [tables(dtype, seed) for seed in range(timing.rotation(table_bytes))]
        for direction, (batch, length) in itertools.product(shapes.DIRECTIONS, chosen):
            ours, xla = (
                jax.jit(directed(op, direction)) for op in (embeddings_layer_norm, reference.embeddings_layer_norm)
            )
            moved = nbytes(direction, batch, length, itemsize)
            sets = [
                (*inputs(batch, length, dtype, seed), *weights[seed % len(weights)])
                for seed in range(max(timing.rotation(moved), len(weights)))
            ]
            timing.check_all(f"{op} {direction} {batch}x{length} {dtype}", ours, xla, sets[0])
            results += timing.measure(
                {"jaxft": (ours, sets), "xla": (xla, sets), **timing.copies(moved)},
                work=moved, unit="TB/s", args=args, op=op, direction=direction, shape=(batch, length, width),
                dtype=dtype,
            )  # fmt: skip
    timing.print_tables(results)


if __name__ == "__main__":
    main()
