"""Attention from packed QKV, forward and with its gradient: jaxft, XLA, and cuDNN (from separate arrays and packed).

"half valid" shapes have random key lengths that leave half of the keys: time should fall with the valid tokens.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import timing
from jaxft.ops.attention import qkv_attention

HEADS, HEAD_SIZE = 16, 64
SHAPES = [(256, 128), (64, 512), (8, 2048), (2, 8192)]  # batch, length
DTYPE = "bfloat16"
DIRECTIONS = ("forward", "forward+backward")


def flops(direction: str, batch: int, length: int, heads: int, head_size: int) -> int:
    """Matrix products of length x length x head_size for each head, over all keys, valid or not: two, and five more."""
    products = 2 if direction == "forward" else 7
    return 2 * products * batch * heads * length**2 * head_size


def peer(*arrays: jax.Array, implementation: Literal["xla", "cudnn"]) -> jax.Array:
    """jax.nn's attention of (query, key, value[, lengths]), or of (packed qkv[, lengths])."""
    if arrays[0].ndim == 5:
        arrays = (*(arrays[0][:, :, i] for i in range(3)), *arrays[1:])
    query, key, value, *lengths = arrays
    return jax.nn.dot_product_attention(
        query, key, value, key_value_seq_lengths=lengths[0] if lengths else None, implementation=implementation
    )


def ours(qkv: jax.Array, lengths: jax.Array | None = None) -> Any:
    return qkv_attention(qkv, key_value_seq_lengths=lengths)


def directed(op: Callable[..., Any], direction: str) -> Callable[..., Any]:
    """A function of the inputs: the result of `op`, or that and the gradients of the float arrays."""

    def run(dout: jax.Array, *arrays: jax.Array) -> Any:
        if direction == "forward":
            return op(*arrays)
        floats = [x for x in arrays if x.dtype == dout.dtype]
        out, pull_back = jax.vjp(lambda *floats: op(*floats, *arrays[len(floats) :]), *floats)
        return out, pull_back(dout)

    return run


def inputs(batch: int, length: int, valid: float, seed: int) -> tuple[jax.Array, ...]:
    """The gradient of the output, and what `ours` and `peer` take."""
    keys = jax.random.split(jax.random.key(seed))
    qkv = jax.random.normal(keys[0], (batch, length, 3, HEADS, HEAD_SIZE), DTYPE)
    dout = jax.random.normal(keys[1], (batch, length, HEADS, HEAD_SIZE), DTYPE)
    if valid == 1:
        return dout, qkv
    low = max(1, math.floor(length * (2 * valid - 1)))
    lengths = np.random.default_rng(seed).integers(low, length + 1, batch)
    return dout, qkv, jnp.asarray(lengths, jnp.int32)


def main(argv: Sequence[str] | None = None) -> None:
    args = timing.arguments(__doc__).parse_args(argv)
    results = []
    shapes = SHAPES[:2] if args.quick else SHAPES
    for valid, direction, (batch, length) in itertools.product((1, 0.5), DIRECTIONS, shapes):
        name = f"attention{'' if valid == 1 else ', half valid'}"
        qkv_bytes = 3 * batch * length * HEADS * HEAD_SIZE * jnp.dtype(DTYPE).itemsize
        packed = [inputs(batch, length, valid, seed) for seed in range(timing.rotation(qkv_bytes))]
        separate = [(dout, *(qkv[:, :, i] for i in range(3)), *rest) for dout, qkv, *rest in packed]
        xla = functools.partial(peer, implementation="xla")
        variants: dict[str, tuple[Callable[..., Any], list]] = {"jaxft": (ours, packed), "xla": (xla, packed)}
        if jax.default_backend() == "gpu":
            cudnn = functools.partial(peer, implementation="cudnn")
            variants |= {"cudnn, separate arrays": (cudnn, separate), "cudnn": (cudnn, packed)}
        jitted = {who: (jax.jit(directed(f, direction)), sets) for who, (f, sets) in variants.items()}

        dout, qkv, *lengths = packed[0]
        with jax.default_matmul_precision("highest"):
            exact = jitted["xla"][0](dout.astype(jnp.float32), qkv.astype(jnp.float32), *lengths)
        results_of = (jitted["jaxft"][0](*packed[0]), jitted["xla"][0](*packed[0]), exact)
        for leaves in zip(*map(jax.tree.leaves, results_of), strict=True):
            timing.check(f"{name} {direction} {batch}x{length}", *leaves)
        del results_of, exact, leaves
        results += timing.measure(
            jitted, work=flops(direction, batch, length, HEADS, HEAD_SIZE), unit="TFLOP/s", args=args,
            op=name, direction=direction, shape=(batch, length, HEADS, HEAD_SIZE), dtype=DTYPE,
        )  # fmt: skip
    timing.print_tables(results)


if __name__ == "__main__":
    main()
