"""bias_residual_layer_norm, forward: microseconds, and the share of a same-bytes copy in the same run."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

import timing
from jaxft import reference
from jaxft.ops.layer_norm import bias_residual_layer_norm

SHAPES = [(4096, 768), (16384, 768), (65536, 1024)]  # rows, width
DTYPES = ("bfloat16", "float16", "float32")


def nbytes(rows: int, width: int, itemsize: int) -> int:
    """x and the residual are read, the result is written; bias, gamma and beta are read once."""
    return (3 * rows * width + 3 * width) * itemsize


def inputs(rows: int, width: int, dtype: str, seed: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 5)
    shapes = [(rows, width), (width,), (rows, width), (width,), (width,)]
    return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))


def main(argv: Sequence[str] | None = None) -> None:
    args = timing.arguments(__doc__).parse_args(argv)
    results = []
    for rows, width in SHAPES[:2] if args.quick else SHAPES:
        for dtype in DTYPES:
            ours, xla = jax.jit(bias_residual_layer_norm), jax.jit(reference.bias_residual_layer_norm)
            moved = nbytes(rows, width, jnp.dtype(dtype).itemsize)
            sets = [inputs(rows, width, dtype, seed) for seed in range(timing.rotation(moved))]
            exact = xla(*(x.astype(jnp.float32) for x in sets[0]))
            timing.check(f"bias_residual_layer_norm {rows}x{width} {dtype}", ours(*sets[0]), xla(*sets[0]), exact)
            results += timing.measure(
                {"jaxft": (ours, sets), "xla": (xla, sets), **timing.copies(moved)},
                work=moved, unit="TB/s", args=args,
                op="bias_residual_layer_norm", direction="forward", shape=(rows, width), dtype=dtype,
            )  # fmt: skip
    timing.print_tables(results)


if __name__ == "__main__":
    main()
