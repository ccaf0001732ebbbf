"""feed_forward_residual_layer_norm with erf GELU, forward, and with the gradients of all arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

import shapes
import timing
from jaxft import reference
from jaxft.ops.feed_forward import feed_forward_residual_layer_norm

DTYPE = "bfloat16"


def inputs(rows: int, width: int, inner: int, seed: int) -> tuple[jax.Array, ...]:
    """Makes the op's seven arrays, and the gradient of its result."""
    sizes = [(rows, width), (width, inner), (inner,), (inner, width), (width,), (width,), (width,), (rows, width)]
    keys = jax.random.split(jax.random.key(seed), len(sizes))
    arrays = [jax.random.normal(key, size, DTYPE) for key, size in zip(keys, sizes, strict=True)]
    arrays[1], arrays[3] = arrays[1] * width**-0.5, arrays[3] * inner**-0.5
    return tuple(arrays)


def directed(op: Callable[..., jax.Array], direction: str) -> Callable[..., Any]:
    """Returns a function of the inputs: the result of `op`, or the result and the gradients."""

    def run(*arrays: jax.Array) -> Any:
        if direction == "forward":
            return op(*arrays[:-1])
        y, pull_back = jax.vjp(op, *arrays[:-1])
        return y, *pull_back(arrays[-1])

    return run


def main(argv: Sequence[str] | None = None) -> None:
    args = timing.arguments(__doc__).parse_args(argv)
    results = []
    for shape in shapes.FEED_FORWARD[:1] if args.quick else shapes.FEED_FORWARD:
        rows, width, inner = shape
        sets = [inputs(*shape, seed) for seed in range(timing.rotation(sum(x.nbytes for x in inputs(*shape, 0))))]
        for direction in shapes.DIRECTIONS:
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
