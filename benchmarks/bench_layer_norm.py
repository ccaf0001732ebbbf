"""bias_residual_layer_norm, forward and backward: microseconds, and the share of a same-bytes copy in the same run.

"forward+backward" is what a training step does: the result, and from dy the gradients of x, bias, residual, gamma and
beta, the reductions included, in one program.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import timing
from jaxft import reference
from jaxft.ops.layer_norm import bias_residual_layer_norm

SHAPES = [(128, 768), (1024, 768), (4096, 768), (16384, 768), (16384, 1024), (65536, 1024)]  # rows, width
DTYPES = ("bfloat16", "float32")
DIRECTIONS = ("forward", "forward+backward")


def nbytes(direction: str, rows: int, width: int, itemsize: int) -> int:
    """Forward, x and the residual are read and the result is written; backward they are read with dy, dx is written.

    The gradient of the residual is that of x. Bias, gamma and beta are read once, and their gradients written.
    """
    arrays, vectors = (3, 3) if direction == "forward" else (7, 8)
    return (arrays * rows * width + vectors * width) * itemsize


def inputs(rows: int, width: int, dtype: str, seed: int) -> tuple[jax.Array, ...]:
    """x, bias, residual, gamma, beta, and dy."""
    keys = jax.random.split(jax.random.key(seed), 6)
    shapes = [(rows, width), (width,), (rows, width), (width,), (width,), (rows, width)]
    return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))


def directed(op: Callable[..., Any], direction: str) -> Callable[..., Any]:
    """A function of the inputs: the result of `op`, or that and the gradients."""

    def run(*arrays: jax.Array) -> Any:
        *operands, dy = arrays
        if direction == "forward":
            return op(*operands)
        y, pull_back = jax.vjp(op, *operands)
        return y, pull_back(dy)

    return run


def main(argv: Sequence[str] | None = None) -> None:
    args = timing.arguments(__doc__).parse_args(argv)
    results = []
    for direction in DIRECTIONS:
        for rows, width in SHAPES[:2] if args.quick else SHAPES:
            for dtype in DTYPES:
                ours, xla = (
                    jax.jit(directed(op, direction))
                    for op in (bias_residual_layer_norm, reference.bias_residual_layer_norm)
                )
                moved = nbytes(direction, rows, width, jnp.dtype(dtype).itemsize)
                sets = [inputs(rows, width, dtype, seed) for seed in range(timing.rotation(moved))]
                with jax.enable_x64(True):  # long sums of float32 err too
                    exact = [
                        y.astype(jnp.float32) for y in jax.tree.leaves(xla(*(x.astype("float64") for x in sets[0])))
                    ]
                for leaves in zip(*map(jax.tree.leaves, (ours(*sets[0]), xla(*sets[0]), exact)), strict=True):
                    timing.check(f"bias_residual_layer_norm {direction} {rows}x{width} {dtype}", *leaves)
                del exact, leaves
                results += timing.measure(
                    {"jaxft": (ours, sets), "xla": (xla, sets), **timing.copies(moved)},
                    work=moved, unit="TB/s", args=args,
                    op="bias_residual_layer_norm",
                    direction=direction, shape=(rows, width), dtype=dtype,
                )  # fmt: skip
    timing.print_tables(results)


if __name__ == "__main__":
    main()
