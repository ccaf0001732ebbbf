"""embeddings_layer_norm, forward and backward: microseconds, and the share of a same-bytes copy in the same run.

"forward+backward" is what a training step does: the result, and from dy the gradients of the tables, which are dense,
of gamma and of beta. Tokens are as frequent as words are: the n-th of the vocabulary comes 1/n times as often.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import timing
from jaxft import reference
from jaxft.ops.embeddings import embeddings_layer_norm

SHAPES = [(1, 128), (8, 128), (32, 128), (32, 512)]  # batch, length
TABLES = (30522, 512, 2)  # rows of the word, position and token type tables of BERT-base
WIDTH = 768
DTYPES = ("bfloat16", "float32")
DIRECTIONS = ("forward", "forward+backward")


def nbytes(direction: str, batch: int, length: int, itemsize: int) -> int:
    """Forward, the tokens' rows of the word table are read, and the result is written; backward the rows are read
    again, and dy, and the tables' gradients are written.

    Ids, gamma, beta and the rows of the smaller tables are read once, and the gradients of gamma and beta are written.
    """
    words, vectors = 2 * batch * length, length + TABLES[2] + 2
    if direction != "forward":
        words, vectors = 2 * words, 2 * vectors + sum(TABLES) + 2
    return (words + vectors) * WIDTH * itemsize + 2 * batch * length * 4


def tables(dtype: str, seed: int) -> tuple[jax.Array, ...]:
    """The three tables, gamma and beta."""
    keys = jax.random.split(jax.random.key(seed), 5)
    shapes = [*((rows, WIDTH) for rows in TABLES), (WIDTH,), (WIDTH,)]
    return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))


def inputs(batch: int, length: int, dtype: str, seed: int) -> tuple[jax.Array, ...]:
    """Word and token type ids, and dy."""
    keys = jax.random.split(jax.random.key(seed), 3)
    words = jnp.floor(TABLES[0] ** jax.random.uniform(keys[0], (batch, length))).astype(jnp.int32) - 1
    kinds = jax.random.randint(keys[1], (batch, length), 0, TABLES[2], jnp.int32)
    return words, kinds, jax.random.normal(keys[2], (batch, length, WIDTH), dtype)


def directed(op: Callable[..., jax.Array], direction: str) -> Callable[..., Any]:
    """A function of the inputs and the tables: the result of `op`, or that and the gradients."""

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
    op = "embeddings_layer_norm"
    results = []
    for dtype in DTYPES:
        itemsize = jnp.dtype(dtype).itemsize
        # Each with its word table, which all of a model's other weights put out of the L2 cache between two calls.
        weights = [tables(dtype, seed) for seed in range(timing.rotation(TABLES[0] * WIDTH * itemsize))]
        for direction, (batch, length) in itertools.product(DIRECTIONS, SHAPES[:2] if args.quick else SHAPES):
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
                work=moved, unit="TB/s", args=args, op=op, direction=direction, shape=(batch, length, WIDTH),
                dtype=dtype,
            )  # fmt: skip
    timing.print_tables(results)


if __name__ == "__main__":
    main()
