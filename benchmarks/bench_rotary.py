"""rotary on packed queries, keys and values: microseconds, beside a copy that moves the same bytes.

"rotary, in place" neither reads nor writes the values. Its inputs are needed again, so XLA copies each before the
kernel runs: `queued_us` includes this copy, and `device_us` does not.

"dense_rotary" is the projection to queries, keys and values with the rotation: what `None` takes, the matmul without
the rotation ("jaxft, dense alone"), `dense` and `rotary` ("jaxft, two ops"), and XLA.
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
from jaxft.ops.dense_rotary import dense_rotary
from jaxft.ops.rotary import rotary

DTYPE = "bfloat16"


def nbytes(b: int, t: int, n: int, h: int, in_place: bool) -> int:
    """Returns the bytes of one call: queries and keys are read and written, and the values unless `in_place`."""
    return 2 * (2 if in_place else 3) * b * t * n * h * jnp.dtype(DTYPE).itemsize


def inputs(b: int, t: int, n: int, h: int, seed: int) -> tuple[jax.Array, jax.Array]:
    """Makes qkv and positions."""
    return jax.random.normal(jax.random.key(seed), (b, t, 3, n, h), DTYPE), jnp.arange(t)


def factors(b: int, t: int, n: int, h: int, seed: int) -> tuple[jax.Array, ...]:
    """Makes x, the kernel and positions."""
    keys, sizes = jax.random.split(jax.random.key(seed), 2), ((b, t, n * h), (n * h, 3 * n * h))
    x, kernel = (jax.random.normal(key, size, DTYPE) for key, size in zip(keys, sizes, strict=True))
    return x, kernel, jnp.arange(t)


def projections(n: int, h: int) -> dict[str, Callable[..., Any]]:
    """Returns the variants of the rotated projection to `n` heads of size `h`, and the matmul alone."""

    def two_ops(x: jax.Array, kernel: jax.Array, positions: jax.Array) -> jax.Array:
        return rotary(dense(x, kernel).reshape(*x.shape[:2], 3, n, h), positions, in_place=True)

    return {
        "jaxft": lambda x, kernel, positions: dense_rotary(x, kernel, None, positions, num_heads=n),
        "jaxft, two ops": two_ops,
        "jaxft, dense alone": lambda x, kernel, positions: dense(x, kernel),
        "xla": lambda x, kernel, positions: reference.dense_rotary(x, kernel, None, positions, num_heads=n),
    }


def main(argv: Sequence[str] | None = None) -> None:
    args = timing.arguments(__doc__).parse_args(argv)
    results = []
    for in_place in (False, True):
        name = "rotary" + ", in place" * in_place
        ours, xla = jax.jit(functools.partial(rotary, in_place=in_place)), jax.jit(reference.rotary)
        for shape in shapes.ROTARY[:2] if args.quick else shapes.ROTARY:
            moved = nbytes(*shape, in_place)
            sets = [inputs(*shape, seed) for seed in range(timing.rotation(moved))]
            timing.check_all(f"{name} {shape}", ours, xla, sets[0])
            results += timing.measure(
                {"jaxft": (ours, sets), "xla": (xla, sets), **timing.copies(moved)},
                work=moved, unit="TB/s", args=args, op=name, direction="forward", shape=shape, dtype=DTYPE,
            )  # fmt: skip
    for shape in shapes.ROTARY[:2] if args.quick else shapes.ROTARY:
        b, t, n, h = shape
        variants = {name: jax.jit(run) for name, run in projections(n, h).items()}
        moved = nbytes(*shape, in_place=False)
        layers = [factors(*shape, seed) for seed in range(timing.rotation(moved))]
        for name in ("jaxft", "jaxft, two ops"):
            timing.check_all(f"dense_rotary {shape}, {name}", variants[name], variants["xla"], layers[0])
        results += timing.measure(
            {name: (run, layers) for name, run in variants.items()}, work=6 * b * t * (n * h) ** 2, unit="TFLOP/s",
            args=args, op="dense_rotary", direction="forward", shape=shape, dtype=DTYPE,
        )  # fmt: skip
    timing.print_tables(results)


if __name__ == "__main__":
    main()
