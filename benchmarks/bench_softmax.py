"""softmax, forward and backward: microseconds, and the share of a same-bytes copy in the same run."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import timing
from jaxft import reference
from jaxft.ops import softmax as ops

DIRECTIONS = ("forward", "forward+backward")

ELEMENTS = 64 * 2**20
# op, direction, shape, dtype
CASES: list[tuple[str, str, tuple[int, ...], str]] = [
    ("softmax", direction, (ELEMENTS // width, width), "float16")
    for direction in DIRECTIONS
    for width in (32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
]
CASES += [("softmax", "forward", (rows, width), "bfloat16") for rows in (128, 4096) for width in (128, 1024)]
CASES += [("log_softmax", direction, (256, 250_000), "bfloat16") for direction in DIRECTIONS]  # a vocabulary
# Attention scores: those of OneFlow's table, and with the mask and the scale of FasterTransformer's.
CASES += [("softmax", "forward", (32, 64, length, length), "float32") for length in (16, 32, 64, 128, 256, 512)]
CASES += [
    ("softmax, masked", direction, (32, 12, length, length), "float16")
    for direction in DIRECTIONS
    for length in (128, 512)
]
# Nothing is known of the cache in that table's runs; the shortest of its times are below those of memory.
CASES += [("softmax, one buffer", "forward", (32, 64, length, length), "float32") for length in (16, 32)]
QUICK_CASES = [case for case in CASES if math.prod(case[2]) <= ELEMENTS // 2]


def nbytes(direction: str, shape: Sequence[int], itemsize: int, masked: bool) -> int:
    """x is read, the result is written; backward x and its gradient are read, that of x is written. A mask is read."""
    mask = shape[0] * shape[-1] if masked else 0
    forward = 2 * math.prod(shape) * itemsize + mask
    return forward if direction == "forward" else forward + 3 * math.prod(shape) * itemsize + mask


def inputs(direction: str, shape: Sequence[int], dtype: str, masked: bool, seed: int) -> tuple[Any, ...]:
    """x, the mask, and where it is asked for the gradient of the result."""
    keys = jax.random.split(jax.random.key(seed), 3)
    mask = None
    if masked:
        lengths = jax.random.randint(keys[1], (shape[0], 1, 1, 1), shape[-1] // 2, shape[-1] + 1)
        mask = jnp.arange(shape[-1]) < lengths
    x = jax.random.normal(keys[0], shape, dtype)
    return (x, mask) if direction == "forward" else (x, mask, jax.random.normal(keys[2], shape, dtype))


def run(op: Callable[..., jax.Array], masked: bool, x: jax.Array, mask: jax.Array | None, *dy: jax.Array) -> Any:
    """The result, and with dy the gradient of x: in one program, where XLA too can share what both need."""

    def apply(x: jax.Array) -> jax.Array:
        return op(x, scale=0.125, mask=mask) if masked else op(x)

    if not dy:
        return apply(x)
    y, pull_back = jax.vjp(apply, x)
    return y, *pull_back(dy[0])


def main(argv: Sequence[str] | None = None) -> None:
    args = timing.arguments(__doc__).parse_args(argv)
    results = []
    for name, direction, shape, dtype in QUICK_CASES if args.quick else CASES:
        op, masked = name.split(",")[0], name.endswith("masked")
        ours, xla = (jax.jit(functools.partial(run, getattr(module, op), masked)) for module in (ops, reference))
        moved = nbytes(direction, shape, jnp.dtype(dtype).itemsize, masked)
        rotation = 1 if name.endswith("one buffer") else timing.rotation(moved)
        sets = [inputs(direction, shape, dtype, masked, seed) for seed in range(rotation)]
        timing.check_all(f"{name} {direction} {'x'.join(map(str, shape))} {dtype}", ours, xla, sets[0])
        results += timing.measure(
            {"jaxft": (ours, sets), "xla": (xla, sets), **timing.copies(moved, rotation)},
            work=moved, unit="TB/s", args=args, op=name, direction=direction, shape=shape, dtype=dtype,
        )  # fmt: skip
    timing.print_tables(results)


if __name__ == "__main__":
    main()
