"""dense with a bias, forward, with and without GELU (erf)."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

import timing
from jaxft import reference
from jaxft.ops.dense import dense

SIZES = [(768, 2304), (768, 768), (768, 3072), (3072, 768)]  # depth, width
SHAPES = [(rows, *sizes) for rows in (128, 256, 512, 1024) for sizes in SIZES]
LARGE = [(rows, *sizes) for rows in (4096, 16384) for sizes in SIZES]
LARGE += [(16384, *sizes) for sizes in ((1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024))]
DTYPE = "bfloat16"


def flops(rows: int, depth: int, width: int) -> int:
    """The product only."""
    return 2 * rows * depth * width


def inputs(rows: int, depth: int, width: int, seed: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = [(rows, depth), (depth, width), (width,)]
    return tuple(jax.random.normal(key, shape, DTYPE) for key, shape in zip(keys, shapes, strict=True))


def main(argv: Sequence[str] | None = None) -> None:
    args = timing.arguments(__doc__).parse_args(argv)
    results = []
    for shape in SHAPES[:4] if args.quick else SHAPES + LARGE:
        sets = [inputs(*shape, seed) for seed in range(timing.rotation(sum(x.nbytes for x in inputs(*shape, 0))))]
        for activation in (None, "gelu"):
            ours = jax.jit(functools.partial(dense, activation=activation))
            xla = jax.jit(functools.partial(reference.dense, activation=activation))
            with jax.default_matmul_precision("highest"):
                exact = xla(*(x.astype(jnp.float32) for x in sets[0]))
            op = f"dense{'' if activation is None else ' with erf GELU'}"
            timing.check(f"{op} {shape}", ours(*sets[0]), xla(*sets[0]), exact)
            results += timing.measure(
                {"jaxft": (ours, sets), "xla": (xla, sets)}, work=flops(*shape), unit="TFLOP/s", args=args,
                op=op, direction="forward", shape=shape, dtype=DTYPE,
            )  # fmt: skip
    timing.print_tables(results)


if __name__ == "__main__":
    main()
