"""feed_forward_residual_layer_norm with erf GELU, forward, and with the gradients of all arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

import timing
from jaxft import reference
from jaxft.ops.feed_forward import feed_forward_residual_layer_norm

SIZES = [(768, 3072), (1024, 4096)]  # of BERT-base and BERT-large
SHAPES = [(rows, *sizes) for rows in (512, 4096, 16384) for sizes in SIZES]  # rows, width, inner width
DTYPE = "bfloat16"
DIRECTIONS = ("forward", "forward+backward")


def inputs(rows: int, width: int, inner: int, seed: int) -> tuple[jax.Array, ...]:
    """The op's seven arrays, and the gradient of its result."""
    shapes = [(rows, width), (width, inner), (inner,), (inner, width), (width,), (width,), (width,), (rows, width)]
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    arrays = [jax.random.normal(key, shape, DTYPE) for key, shape in zip(keys, shapes, strict=True)]
    arrays[1], arrays[3] = arrays[1] * width**-0.5, arrays[3] * inner**-0.5
    return tuple(arrays)


def directed(op: Callable[..., jax.Array], direction: str) -> Callable[..., Any]:
    """A function of the inputs: the result of `op`, or that and the gradients."""

    def run(*arrays: jax.Array) -> Any:
        if direction == "forward":
            return op(*arrays[:-1])
        y, pull_back = jax.vjp(op, *arrays[:-1])
        return y, *pull_back(arrays[-1])

    return run


def main(argv: Sequence[str] | None = None) -> None:
    args = timing.arguments(__doc__).parse_args(argv)
    results = []
    for shape in SHAPES[:1] if args.quick else SHAPES:
        rows, width, inner = shape
        sets = [inputs(*shape, seed) for seed in range(timing.rotation(sum(x.nbytes for x in inputs(*shape, 0))))]
        for direction in DIRECTIONS:
            ours = jax.jit(directed(feed_forward_residual_layer_norm, direction))
            xla = jax.jit(directed(reference.feed_forward_residual_layer_norm, direction))
            with jax.default_matmul_precision("highest"):
                timing.check_all(f"{direction} {shape}", ours, xla, sets[0])
            results += timing.measure(
                {"jaxft": (ours, sets), "xla": (xla, sets)}, unit="TFLOP/s", args=args, direction=direction,
                work=4 * rows * width * inner * (1 if direction == "forward" else 3),
                op="feed_forward_residual_layer_norm", shape=shape, dtype=DTYPE,
            )  # fmt: skip
    timing.print_tables(results)


if __name__ == "__main__":
    main()
