"""Attention, forward, from packed QKV: jaxft, XLA, and cuDNN (from separate arrays and from the packed one).

"half valid" shapes have random key lengths that leave half of the keys: time should fall with the valid tokens.
"""

import functools
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


def flops(batch: int, length: int, heads: int, head_size: int) -> int:
    """Two matrix products of length x length x head_size for each head, over all keys, valid or not."""
    return 4 * batch * heads * length**2 * head_size


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


def inputs(batch: int, length: int, valid: float, seed: int) -> tuple[jax.Array, ...]:
    qkv = jax.random.normal(jax.random.key(seed), (batch, length, 3, HEADS, HEAD_SIZE), DTYPE)
    if valid == 1:
        return (qkv,)
    low = max(1, math.floor(length * (2 * valid - 1)))
    lengths = np.random.default_rng(seed).integers(low, length + 1, batch)
    return qkv, jnp.asarray(lengths, jnp.int32)


def main(argv: Sequence[str] | None = None) -> None:
    args = timing.arguments(__doc__).parse_args(argv)
    results = []
    shapes = SHAPES[:2] if args.quick else SHAPES
    for (batch, length), valid in [*((shape, 1) for shape in shapes), *((shape, 0.5) for shape in shapes)]:
        name = f"attention{'' if valid == 1 else ', half valid'}"
        qkv_bytes = 3 * batch * length * HEADS * HEAD_SIZE * jnp.dtype(DTYPE).itemsize
        packed = [inputs(batch, length, valid, seed) for seed in range(timing.rotation(qkv_bytes))]
        separate = [(*(qkv[:, :, i] for i in range(3)), *rest) for qkv, *rest in packed]
        xla = functools.partial(peer, implementation="xla")
        variants: dict[str, tuple[Callable[..., Any], list]] = {"jaxft": (ours, packed), "xla": (xla, packed)}
        if jax.default_backend() == "gpu":
            cudnn = functools.partial(peer, implementation="cudnn")
            variants |= {"cudnn, separate arrays": (cudnn, separate), "cudnn": (cudnn, packed)}
        jitted = {implementation: (jax.jit(f), sets) for implementation, (f, sets) in variants.items()}

        qkv, *lengths = packed[0]
        with jax.default_matmul_precision("highest"):
            exact = jitted["xla"][0](qkv.astype(jnp.float32), *lengths)
        timing.check(f"{name} {batch}x{length}", jitted["jaxft"][0](*packed[0]), jitted["xla"][0](*packed[0]), exact)
        results += timing.measure(
            jitted, work=flops(batch, length, HEADS, HEAD_SIZE), unit="TFLOP/s", args=args,
            op=name, direction="forward", shape=(batch, length, HEADS, HEAD_SIZE), dtype=DTYPE,
        )  # fmt: skip
    timing.print_tables(results)


if __name__ == "__main__":
    main()
