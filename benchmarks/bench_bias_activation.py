"""bias_activation with both forms of GELU: microseconds, beside a copy that moves the same bytes.

"backward" is what the gradient adds to a training step. It computes the gradients of x and the bias from dy, x and the
bias, with the reduction over rows.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import shapes
import timing
from jaxft import reference
from jaxft.ops.bias_activation import bias_activation


def nbytes(direction: str, rows: int, width: int, itemsize: int) -> int:
    """Returns the bytes of one call: x (and dy) are read, the result (or dx) is written; the bias is read once."""
    arrays, vectors = (2, 1) if direction == "forward" else (3, 2)
    return (arrays * rows * width + vectors * width) * itemsize


def inputs(rows: int, width: int, dtype: str, seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Makes dy, x and the bias."""
    keys = jax.random.split(jax.random.key(seed), 3)
    sizes = [(rows, width), (rows, width), (width,)]
    return tuple(jax.random.normal(key, size, dtype) for key, size in zip(keys, sizes, strict=True))  # type: ignore


def directed(op: Callable[..., jax.Array], direction: str) -> Callable[..., Any]:
    """Returns a function of dy, x and bias: the result of `op`, or the gradients of x and bias."""

    def run(dy: jax.Array, x: jax.Array, bias: jax.Array) -> Any:
        return op(x, bias) if direction == "forward" else jax.vjp(op, x, bias)[1](dy)

    return run


def main(argv: Sequence[str] | None = None) -> None:
    args = timing.arguments(__doc__).parse_args(argv)
    results = []
    for direction in ("forward", "backward"):
        for rows, width in shapes.BIAS_ACTIVATION[:2] if args.quick else shapes.BIAS_ACTIVATION:
            for dtype in shapes.DTYPES:
                moved = nbytes(direction, rows, width, jnp.dtype(dtype).itemsize)
                sets = [inputs(rows, width, dtype, seed) for seed in range(timing.rotation(moved))]
                for form in ("gelu", "gelu_tanh"):
                    ours, xla = (
                        jax.jit(directed(functools.partial(op, activation=form), direction))
                        for op in (bias_activation, reference.bias_activation)
                    )
                    timing.check_all(f"bias_{form} {direction} {rows}x{width} {dtype}", ours, xla, sets[0])
                    results += timing.measure(
                        {"jaxft": (ours, sets), "xla": (xla, sets), **timing.copies(moved)},
                        work=moved, unit="TB/s", args=args,
                        op=f"bias_activation {form}", direction=direction,
                        shape=(rows, width), dtype=dtype,
                    )  # fmt: skip
    timing.print_tables(results)


if __name__ == "__main__":
    main()
