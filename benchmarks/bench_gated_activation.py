"""gated_activation without a bias, as GeGLU and SwiGLU: microseconds, beside a copy that moves the same bytes.

"backward" is what the gradient adds to a training step: the gradient of x from dy and x. "dense with GeGLU" is the
whole layer: what `None` takes, the matmul with the gate in its epilogue ("jaxft, triton"), and XLA.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import shapes
import timing
from jaxft import reference
from jaxft.ops.dense import dense
from jaxft.ops.gated_activation import gated_activation

DTYPE = "bfloat16"


def nbytes(direction: str, rows: int, width: int) -> int:
    """Returns the bytes of one call: x (and dy) are read, and the result (or dx) is written."""
    return (3 if direction == "forward" else 5) * rows * width * jnp.dtype(DTYPE).itemsize


def inputs(rows: int, width: int, seed: int) -> tuple[jax.Array, ...]:
    """Makes dy and x."""
    keys = jax.random.split(jax.random.key(seed), 2)
    sizes = [(rows, width), (rows, 2 * width)]
    return tuple(jax.random.normal(key, size, DTYPE) for key, size in zip(keys, sizes, strict=True))


def factors(rows: int, depth: int, width: int, seed: int) -> tuple[jax.Array, ...]:
    """Makes x and the kernel."""
    keys = jax.random.split(jax.random.key(seed), 2)
    return tuple(
        jax.random.normal(key, size, DTYPE) for key, size in zip(keys, ((rows, depth), (depth, width)), strict=True)
    )


def directed(op: Callable[..., jax.Array], direction: str) -> Callable[..., Any]:
    """Returns a function of dy and x: the result of `op`, or the gradient of x."""

    def run(dy: jax.Array, x: jax.Array) -> Any:
        return op(x) if direction == "forward" else jax.vjp(op, x)[1](dy)

    return run


def main(argv: Sequence[str] | None = None) -> None:
    args = timing.arguments(__doc__).parse_args(argv)
    results = []
    for direction in ("forward", "backward"):
        for rows, width in shapes.GATED_ACTIVATION[:2] if args.quick else shapes.GATED_ACTIVATION:
            moved = nbytes(direction, rows, width)
            sets = [inputs(rows, width, seed) for seed in range(timing.rotation(moved))]
            for activation in ("gelu", "silu"):
                ours, xla = (
                    jax.jit(directed(functools.partial(op, activation=activation), direction))
                    for op in (gated_activation, reference.gated_activation)
                )
                name = f"gated_activation {activation}"
                timing.check_all(f"{name} {direction} {rows}x{width}", ours, xla, sets[0])
                results += timing.measure(
                    {"jaxft": (ours, sets), "xla": (xla, sets), **timing.copies(moved)},
                    work=moved, unit="TB/s", args=args, op=name, direction=direction, shape=(rows, width), dtype=DTYPE,
                )  # fmt: skip
    for rows, depth, width in shapes.GATED_DENSE[:2] if args.quick else shapes.GATED_DENSE:
        ops: dict[str, Callable[..., Any]] = {
            "jaxft": dense, "jaxft, triton": functools.partial(dense, implementation="triton"), "xla": reference.dense
        }  # fmt: skip
        layers = {name: jax.jit(functools.partial(op, activation="gelu", gate="first")) for name, op in ops.items()}
        moved = (rows * depth + 2 * depth * width + rows * width) * jnp.dtype(DTYPE).itemsize
        sets = [factors(rows, depth, 2 * width, seed) for seed in range(timing.rotation(moved))]
        for name in ("jaxft", "jaxft, triton"):
            timing.check_all(f"dense with GeGLU {rows}x{depth}x{width}, {name}", layers[name], layers["xla"], sets[0])
        results += timing.measure(
            {name: (layer, sets) for name, layer in layers.items()}, work=4 * rows * depth * width, unit="TFLOP/s",
            args=args, op="dense with GeGLU", direction="forward", shape=(rows, depth, width), dtype=DTYPE,
        )  # fmt: skip
    timing.print_tables(results)


if __name__ == "__main__":
    main()
