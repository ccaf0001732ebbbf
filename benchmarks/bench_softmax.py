"""softmax, forward and backward: microseconds, beside a copy that moves the same bytes."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import shapes
import timing
from jaxft import reference
from jaxft.ops import softmax as ops


def nbytes(direction: str, shape: Sequence[int], itemsize: int, masked: bool) -> int:
    """Returns the bytes of one call: x is read, the result is written; backward two arrays are read, one is written."""
    mask = shape[0] * shape[-1] if masked else 0
    forward = 2 * math.prod(shape) * itemsize + mask
    return forward if direction == "forward" else forward + 3 * math.prod(shape) * itemsize + mask


def inputs(direction: str, shape: Sequence[int], dtype: str, masked: bool, seed: int) -> tuple[Any, ...]:
    """Makes x, the mask and, for the backward direction, the gradient of the result."""
    keys = jax.random.split(jax.random.key(seed), 3)
    mask = None
    if masked:
        lengths = jax.random.randint(keys[1], (shape[0], 1, 1, 1), shape[-1] // 2, shape[-1] + 1)
        mask = jnp.arange(shape[-1]) < lengths
    x = jax.random.normal(keys[0], shape, dtype)
    return (x, mask) if direction == "forward" else (x, mask, jax.random.normal(keys[2], shape, dtype))


def run(op: Callable[..., jax.Array], masked: bool, x: jax.Array, mask: jax.Array | None, *dy: jax.Array) -> Any:
    """Computes the result and, with dy, the gradient of x, in one program in which XLA can share work."""

    def apply(x: jax.Array) -> jax.Array:
        return op(x, scale=0.125, mask=mask) if masked else op(x)

    if not dy:
        return apply(x)
    y, pull_back = jax.vjp(apply, x)
    return y, *pull_back(dy[0])


def main(argv: Sequence[str] | None = None) -> None:
    args = timing.arguments(__doc__).parse_args(argv)
    results = []
    chosen = shapes.SOFTMAX_QUICK if args.quick else shapes.SOFTMAX
    for case, direction in [(each, direction) for each in chosen for direction in each.directions]:
        name, shape, dtype, masked = case.op, case.shape, case.dtype, case.masked
        op = name.split(",")[0]
        ours, xla = (jax.jit(functools.partial(run, getattr(module, op), masked)) for module in (ops, reference))
        moved = nbytes(direction, shape, jnp.dtype(dtype).itemsize, masked)
        rotation = 1 if case.one_buffer else timing.rotation(moved)
        sets = [inputs(direction, shape, dtype, masked, seed) for seed in range(rotation)]
        timing.check_all(f"{name} {direction} {'x'.join(map(str, shape))} {dtype}", ours, xla, sets[0])
        results += timing.measure(
            {"jaxft": (ours, sets), "xla": (xla, sets), **timing.copies(moved, rotation)},
            work=moved, unit="TB/s", args=args, op=name, direction=direction, shape=shape, dtype=dtype,
        )  # fmt: skip
    timing.print_tables(results)


if __name__ == "__main__":
    main()
