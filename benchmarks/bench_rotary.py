"""rotary on packed queries, keys and values: microseconds, beside a copy that moves the same bytes.

"rotary, in place" neither reads nor writes the values. Its inputs are needed again, so XLA copies each before the
kernel runs: `queued_us` includes this copy, and `device_us` does not.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

import shapes
import timing
from jaxft import reference
from jaxft.ops.rotary import rotary

DTYPE = "bfloat16"


def nbytes(b: int, t: int, n: int, h: int, in_place: bool) -> int:
    """Returns the bytes of one call: queries and keys are read and written, and the values unless `in_place`."""
    return 2 * (2 if in_place else 3) * b * t * n * h * jnp.dtype(DTYPE).itemsize


def inputs(b: int, t: int, n: int, h: int, seed: int) -> tuple[jax.Array, jax.Array]:
    """Makes qkv and positions."""
    return jax.random.normal(jax.random.key(seed), (b, t, 3, n, h), DTYPE), jnp.arange(t)


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
    timing.print_tables(results)


if __name__ == "__main__":
    main()
