"""permute by the Triton kernel: microseconds, and the share of a same-bytes copy in the same run."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

import timing
from jaxft import reference
from jaxft.ops.permute import permute

# shape, axes, dtypes
CASES = [
    ((32, 512, 12, 64), (0, 2, 1, 3), ("float16", "float32")),
    ((8192, 8192), (1, 0), ("float16",)),
    ((8191, 8193), (1, 0), ("float16",)),
    ((256, 512, 1024), (2, 1, 0), ("float16",)),
]


def nbytes(shape: Sequence[int], itemsize: int) -> int:
    """x is read, the result is written."""
    return 2 * math.prod(shape) * itemsize


def main(argv: Sequence[str] | None = None) -> None:
    args = timing.arguments(__doc__).parse_args(argv)
    results = []
    for shape, axes, dtypes in CASES[:2] if args.quick else CASES:
        # By name, since an automatic choice is XLA's.
        ours = jax.jit(functools.partial(permute, axes=axes, implementation="triton"))
        xla = jax.jit(functools.partial(reference.permute, axes=axes))
        for dtype in dtypes:
            moved = nbytes(shape, jnp.dtype(dtype).itemsize)
            sets = [(jax.random.normal(jax.random.key(seed), shape, dtype),) for seed in range(timing.rotation(moved))]
            wanted = xla(*sets[0])
            if not jnp.array_equal(ours(*sets[0]), wanted):
                raise SystemExit(f"permute {shape} {axes} {dtype}: not jnp.transpose; nothing is timed")
            del wanted
            results += timing.measure(
                {"jaxft": (ours, sets), "xla": (xla, sets), **timing.copies(moved)},
                work=moved, unit="TB/s", args=args,
                op=f"permute {','.join(map(str, axes))}", direction="forward", shape=shape, dtype=dtype,
            )  # fmt: skip
    timing.print_tables(results)


if __name__ == "__main__":
    main()
