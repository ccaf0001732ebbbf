"""bias_activation, forward, both forms of GELU: microseconds, and the share of a same-bytes copy in the same run."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

import timing
from jaxft import reference
from jaxft.ops.bias_activation import bias_activation

SHAPES = [(4096, 3072), (16384, 4096)]  # rows, width
DTYPES = ("bfloat16", "float16", "float32")


def nbytes(rows: int, width: int, itemsize: int) -> int:
    """x is read, the result is written; the bias is read once."""
    return (2 * rows * width + width) * itemsize


def inputs(rows: int, width: int, dtype: str, seed: int) -> tuple[jax.Array, jax.Array]:
    x_key, bias_key = jax.random.split(jax.random.key(seed))
    return jax.random.normal(x_key, (rows, width), dtype), jax.random.normal(bias_key, (width,), dtype)


def main(argv: Sequence[str] | None = None) -> None:
    args = timing.arguments(__doc__).parse_args(argv)
    results = []
    for rows, width in SHAPES[:1] if args.quick else SHAPES:
        for dtype in DTYPES:
            moved = nbytes(rows, width, jnp.dtype(dtype).itemsize)
            sets = [inputs(rows, width, dtype, seed) for seed in range(timing.rotation(moved))]
            for form in ("gelu", "gelu_tanh"):
                ours = jax.jit(functools.partial(bias_activation, activation=form))
                xla = jax.jit(functools.partial(reference.bias_activation, activation=form))
                exact = xla(*(x.astype(jnp.float32) for x in sets[0]))
                timing.check(f"bias_{form} {rows}x{width} {dtype}", ours(*sets[0]), xla(*sets[0]), exact)
                results += timing.measure(
                    {"jaxft": (ours, sets), "xla": (xla, sets), **timing.copies(moved)},
                    work=moved, unit="TB/s", args=args,
                    op=f"bias_activation {form}", direction="forward", shape=(rows, width), dtype=dtype,
                )  # fmt: skip
    timing.print_tables(results)


if __name__ == "__main__":
    main()
