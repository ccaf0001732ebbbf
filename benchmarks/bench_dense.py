"""dense with a bias, with and without GELU (erf), forward and backward, and dense_residual_layer_norm, forward.

Of few rows in float32 (TF32) as well.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import timing
from jaxft import reference
from jaxft.ops.dense import dense
from jaxft.ops.dense_layer_norm import dense_residual_layer_norm

SIZES = [(768, 2304), (768, 768), (768, 3072), (3072, 768)]  # depth, width; of BERT-base
SIZES_LARGE = [(1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024)]  # of BERT-large
SHAPES = [(rows, *sizes) for rows in (16, 32, 64, 128, 256, 512, 1024) for sizes in SIZES]
LARGE = [(rows, *sizes) for rows in (4096, 16384) for sizes in SIZES]
LARGE += [(16384, *sizes) for sizes in SIZES_LARGE]
Pair = tuple[Callable[..., Any], Callable[..., Any]]  # jaxft's and plain jnp's


def flops(direction: str, rows: int, depth: int, width: int) -> int:
    """The products only: one, and two more for the gradients of x and kernel."""
    return 2 * rows * depth * width * (1 if direction == "forward" else 3)


def inputs(rows: int, depth: int, width: int, dtype: str, seed: int) -> tuple[jax.Array, ...]:
    """x, kernel, bias, residual (or the gradient of the result), gamma and beta."""
    keys = jax.random.split(jax.random.key(seed), 6)
    shapes = [(rows, depth), (depth, width), (width,), (rows, width), (width,), (width,)]
    return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))


def cases(depth: int, width: int) -> Iterator[tuple[str, str, Pair]]:
    """(op, direction, functions of `inputs`) that have a use at this shape in a BERT."""

    def forward(f: Callable[..., Any], activation: str | None) -> Callable[..., Any]:
        return lambda x, kernel, bias, *_: f(x, kernel, bias, activation=activation)

    def backward(f: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: jax.Array, kernel: jax.Array, bias: jax.Array, dy: jax.Array, *_: jax.Array) -> Any:
            y, pull_back = jax.vjp(functools.partial(f, activation="gelu"), x, kernel, bias)
            return y, *pull_back(dy)

        return run

    yield "dense", "forward", (forward(dense, None), forward(reference.dense, None))
    yield "dense with erf GELU", "forward", (forward(dense, "gelu"), forward(reference.dense, "gelu"))
    if width == 4 * depth:
        yield "dense with erf GELU", "forward+backward", (backward(dense), backward(reference.dense))
    if width <= depth:
        yield "dense_residual_layer_norm", "forward", (dense_residual_layer_norm, reference.dense_residual_layer_norm)


def main(argv: Sequence[str] | None = None) -> None:
    args = timing.arguments(__doc__).parse_args(argv)
    results = []
    shapes = SHAPES[:4] if args.quick else SHAPES
    measured = [(shape, dtype) for dtype in ("bfloat16", "float32") for shape in shapes]
    for shape, dtype in measured + [(shape, "bfloat16") for shape in LARGE if not args.quick]:
        nbytes = sum(x.nbytes for x in inputs(*shape, dtype, 0))
        sets = [inputs(*shape, dtype, seed) for seed in range(timing.rotation(nbytes))]
        for op, direction, pair in cases(*shape[1:]):
            ours, xla = map(jax.jit, pair)
            timing.check_all(f"{op} {direction} {shape} {dtype}", ours, xla, sets[0])
            results += timing.measure(
                {"jaxft": (ours, sets), "xla": (xla, sets)}, work=flops(direction, *shape), unit="TFLOP/s", args=args,
                op=op, direction=direction, shape=shape, dtype=dtype,
            )  # fmt: skip
    timing.print_tables(results)


if __name__ == "__main__":
    main()
