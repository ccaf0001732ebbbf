"""bias_residual_layer_norm, forward and backward: microseconds, beside a copy that moves the same bytes.

"forward+backward" is what a training step does. One program computes the result, and from dy the gradients of x, bias,
residual, gamma and beta, with the reductions over rows.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import shapes
import timing
from jaxft import reference
from jaxft.ops.layer_norm import bias_residual_layer_norm


def nbytes(direction: str, rows: int, width: int, itemsize: int) -> int:
    """Returns the bytes of one call.

    Forward, x and the residual are read, and the result is written. Backward, x, the residual and dy are read, and dx
    is written, which is the gradient of the residual too. Bias, gamma and beta are read once, and their gradients are
    written.
    """
    arrays, vectors = (3, 3) if direction == "forward" else (7, 8)
    return (arrays * rows * width + vectors * width) * itemsize


def inputs(rows: int, width: int, dtype: str, seed: int) -> tuple[jax.Array, ...]:
    """Makes x, bias, residual, gamma, beta and dy."""
    keys = jax.random.split(jax.random.key(seed), 6)
    sizes = [(rows, width), (width,), (rows, width), (width,), (width,), (rows, width)]
    return tuple(jax.random.normal(key, size, dtype) for key, size in zip(keys, sizes, strict=True))


def directed(op: Callable[..., Any], direction: str) -> Callable[..., Any]:
    """Returns a function of the inputs: the result of `op`, or the result and the gradients.

    The gradient of the residual is left out. It equals the gradient of x, and a program returns the same array twice by
    a copy.
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
    sizes = shapes.LAYER_NORM[:2] if args.quick else shapes.LAYER_NORM
    cases = [(op, *case) for case in itertools.product(shapes.DIRECTIONS, sizes, shapes.DTYPES)]
    # In a model the kernel before writes x, which is still in the L2 cache if it fits.
    cases += [(f"{op}, one buffer", "forward", size, "bfloat16") for size in sizes[:3]]
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
