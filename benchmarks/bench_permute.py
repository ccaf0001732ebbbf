"""permute, merge_heads and qkv_bias_split_heads: microseconds, beside a copy that moves the same bytes."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import shapes
import timing
from jaxft import reference
from jaxft.ops.permute import merge_heads, permute, qkv_bias_split_heads

DTYPE = "bfloat16"  # of heads


def permute_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Returns the bytes of one call: x is read, the result is written."""
    return 2 * math.prod(shape) * itemsize


def split_bytes(b: int, t: int, n: int, h: int, itemsize: int) -> int:
    """Returns the bytes of one call, which are the same in both directions.

    Forward, the projection and the bias are read, and its parts are written. Backward, the gradients of the parts are
    read, and the gradients of projection and bias are written.
    """
    return (2 * b * t + 1) * 3 * n * h * itemsize


def inputs(dtype: str, seed: int, *sizes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Makes arrays of these sizes."""
    keys = jax.random.split(jax.random.key(seed), len(sizes))
    return tuple(jax.random.normal(key, size, dtype) for key, size in zip(keys, sizes, strict=True))


def moves(
    name: str, call: Mapping[str, Callable[..., jax.Array]], shape: tuple[int, ...], dtype: str, args: Any
) -> list[timing.Row]:
    """Checks and times functions that move every element to another place."""
    functions = {who: jax.jit(f) for who, f in call.items()}
    moved = permute_bytes(shape, jnp.dtype(dtype).itemsize)
    sets = [inputs(dtype, seed, shape) for seed in range(timing.rotation(moved))]
    if not jnp.array_equal(*(f(*sets[0]) for f in functions.values())):
        raise SystemExit(f"{name} {shape} {dtype}: not jnp.transpose; nothing is timed")
    return timing.measure(
        {who: (f, sets) for who, f in functions.items()} | timing.copies(moved),
        work=moved, unit="TB/s", args=args, op=name, direction="forward", shape=shape, dtype=dtype,
    )  # fmt: skip


def split(b: int, t: int, n: int, h: int, args: Any) -> list[timing.Row]:
    """Checks and times qkv_bias_split_heads, forward and the gradients of projection and bias."""
    packed, bias, part = (b, t, 3 * n * h), (3 * n * h,), (b, n, t, h)

    def forward(op: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(op, num_heads=n)

    def backward(op: Callable[..., Any]) -> Callable[..., Any]:
        def gradients(bias: jax.Array, *dy: jax.Array) -> Any:
            qkv = jnp.zeros(packed, bias.dtype)  # the gradients do not depend on it, so nothing else is computed
            return jax.vjp(forward(op), qkv, bias)[1](dy)

        return gradients

    moved = split_bytes(b, t, n, h, jnp.dtype(DTYPE).itemsize)
    rows = []
    for direction, function, sizes in (
        ("forward", forward, (packed, bias)),
        ("backward", backward, (bias, part, part, part)),
    ):
        ours, xla = (jax.jit(function(op)) for op in (qkv_bias_split_heads, reference.qkv_bias_split_heads))
        sets = [inputs(DTYPE, seed, *sizes) for seed in range(timing.rotation(moved))]
        timing.check_all(f"qkv_bias_split_heads {direction} {(b, t, n, h)}", ours, xla, sets[0])
        rows += timing.measure(
            {"jaxft": (ours, sets), "xla": (xla, sets), **timing.copies(moved)},
            work=moved, unit="TB/s", args=args, op="qkv_bias_split_heads", direction=direction, shape=(b, t, n, h),
            dtype=DTYPE,
        )  # fmt: skip
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    args = timing.arguments(__doc__).parse_args(argv)
    results = []
    call: dict[str, Callable[..., jax.Array]]
    for shape, axes in shapes.PERMUTE[:4] if args.quick else shapes.PERMUTE:
        call = {"jaxft": functools.partial(permute, axes=axes), "xla": functools.partial(reference.permute, axes=axes)}
        for dtype in shapes.PERMUTE_DTYPES:
            results += moves(f"permute {','.join(map(str, axes))}", call, shape, dtype, args)
    for b, t, n, h in shapes.SPLIT_HEADS[:2] if args.quick else shapes.SPLIT_HEADS:
        call = {"jaxft": merge_heads, "xla": reference.merge_heads}
        results += moves("merge_heads", call, (b, n, t, h), DTYPE, args)
        results += split(b, t, n, h, args)
    timing.print_tables(results)


if __name__ == "__main__":
    main()
