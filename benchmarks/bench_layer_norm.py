"""bias_residual_layer_norm, forward and backward: microseconds, and the share of a same-bytes copy in the same run.

"forward+backward" is what a training step does: the result, and from dy the gradients of x, bias, residual, gamma and
beta, the reductions included, in one program.
"""

import itertools
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
    """A function of the inputs: the result of `op`, or that and the gradients.

    Without that of the residual, which is that of x: as a second result of a program it would be a copy.
    """

    def run(*arrays: jax.Array) -> Any:
        *operands, dy = arrays
        if direction == "forward":
            return op(*operands)
        y, pull_back = jax.vjp(op, *operands)
        dx, dbias, _, *others = pull_back(dy)
        return y, dx, dbias, *others

    return run


def main(argv: Sequence[str] | None = None) -> None:
    args = timing.arguments(__doc__).parse_args(argv)
    op = "bias_residual_layer_norm"
    shapes = SHAPES[:2] if args.quick else SHAPES
    cases = [(op, *case) for case in itertools.product(DIRECTIONS, shapes, DTYPES)]
    # In a model x comes from the kernel before, and where it fits the L2 cache it is still there.
    cases += [(f"{op}, one buffer", "forward", shape, "bfloat16") for shape in shapes[:3]]
    results = []
    for name, direction, (rows, width), dtype in cases:
        ours, xla = (
            jax.jit(directed(op, direction)) for op in (bias_residual_layer_norm, reference.bias_residual_layer_norm)
        )
        moved = nbytes(direction, rows, width, jnp.dtype(dtype).itemsize)
        rotation = 1 if name.endswith("one buffer") else timing.rotation(moved)
        sets = [inputs(rows, width, dtype, seed) for seed in range(rotation)]
        timing.check_all(f"{name} {direction} {rows}x{width} {dtype}", ours, xla, sets[0])
        results += timing.measure(
            {"jaxft": (ours, sets), "xla": (xla, sets), **timing.copies(moved, rotation)},
            work=moved, unit="TB/s", args=args, op=name, direction=direction, shape=(rows, width), dtype=dtype,
        )  # fmt: skip
    timing.print_tables(results)


if __name__ == "__main__":
    main()
