"""Attention from packed QKV, forward and with its gradient: jaxft, XLA, and cuDNN (from separate arrays and packed).

"half valid" shapes have random key lengths that leave half of the keys: time should fall with the valid tokens.

"back to back" are sequences of random lengths without padding, of jaxft alone. Its peers have them padded, in the
memory already. The shapes are rows, sequences (the last of which may be empty), tokens of the longest, heads and head
size; the first is like a step of `examples/pretrain.py`, the second like a batch of longer texts.
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
from jaxft.ops.attention import qkv_attention, varlen_qkv_attention

HEADS, HEAD_SIZE = 16, 64
SHAPES = [(256, 128), (64, 512), (8, 2048), (2, 8192)]  # batch, length
BACK_TO_BACK = [(16384, 1024, 128, 3), (16384, 64, 512, 1)]  # rows, sequences, longest, how few are long
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


def peers() -> dict[str, Callable[..., Any]]:
    names: tuple[Literal["xla", "cudnn"], ...] = ("xla", "cudnn") if jax.default_backend() == "gpu" else ("xla",)
    return {name: functools.partial(peer, implementation=name) for name in names}


def check(
    name: str, mine: Any, plain: Callable[..., Any], arrays: Sequence[jax.Array], rows: Any = slice(None)
) -> None:
    """`mine` must err no more than a plain function of `arrays`, of whose results only some rows count."""
    with jax.default_matmul_precision("highest"):
        exact = plain(*(x.astype(jnp.float32) if x.dtype == DTYPE else x for x in arrays))
    for got, *others in zip(*map(jax.tree.leaves, (mine, plain(*arrays), exact)), strict=True):
        timing.check(name, got, *(x[rows] for x in others))


def in_batches(direction: str, valid: float, batch: int, length: int, args: Any) -> list[timing.Row]:
    name = f"attention{'' if valid == 1 else ', half valid'}"
    qkv_bytes = 3 * batch * length * HEADS * HEAD_SIZE * jnp.dtype(DTYPE).itemsize
    packed = [inputs(batch, length, valid, seed) for seed in range(timing.rotation(qkv_bytes))]
    separate = [(dout, *(qkv[:, :, i] for i in range(3)), *rest) for dout, qkv, *rest in packed]
    variants: dict[str, tuple[Callable[..., Any], list]] = {"jaxft": (ours, packed)}
    variants |= {who: (f, packed) for who, f in peers().items()}
    if "cudnn" in variants:
        variants["cudnn, separate arrays"] = variants["cudnn"][0], separate
    jitted = {who: (jax.jit(directed(f, direction)), sets) for who, (f, sets) in variants.items()}
    check(f"{name} {direction} {batch}x{length}", jitted["jaxft"][0](*packed[0]), jitted["xla"][0], packed[0])
    return timing.measure(
        jitted, work=flops(direction, batch, length, HEADS, HEAD_SIZE), unit="TFLOP/s", args=args,
        op=name, direction=direction, shape=(batch, length, HEADS, HEAD_SIZE), dtype=DTYPE,
    )  # fmt: skip


def back_to_back(direction: str, rows: int, sequences: int, longest: int, skew: int, args: Any) -> list[timing.Row]:
    lengths = np.maximum(3, longest * np.random.default_rng(0).random(sequences) ** skew).astype(np.int32)
    begins = np.append(0, np.cumsum(lengths))
    count = int(np.searchsorted(begins, rows, side="right")) - 1  # of those that have room
    lengths, begins = lengths[:count], np.minimum(begins, begins[count])
    place = np.arange(longest)[None, :] < lengths[:, None]  # of the padded tokens

    def padded(x: jax.Array) -> jax.Array:
        flat = jnp.zeros((count * longest, *x.shape[1:]), x.dtype)
        return flat.at[np.flatnonzero(place)].set(x[: begins[-1]]).reshape(count, longest, *x.shape[1:])

    def attend(qkv: jax.Array) -> Any:
        return varlen_qkv_attention(qkv, jnp.asarray(begins, jnp.int32), max_seqlen=longest)

    qkv_bytes = 3 * rows * HEADS * HEAD_SIZE * jnp.dtype(DTYPE).itemsize
    packed = [inputs(1, rows, 1, seed) for seed in range(timing.rotation(qkv_bytes))]
    packed = [(dout[0], qkv[0]) for dout, qkv in packed]
    batches = [(padded(dout), padded(qkv), jnp.asarray(lengths)) for dout, qkv in packed]
    jitted: dict[str, timing.Variant] = {"jaxft": (jax.jit(directed(attend, direction)), packed)}
    jitted |= {f"{who}, padded": (jax.jit(directed(f, direction)), batches) for who, f in peers().items()}
    mine = jax.tree.map(lambda x: x[: begins[-1]], jitted["jaxft"][0](*packed[0]))
    check(f"back to back {direction} {rows}x{longest}", mine, jitted["xla, padded"][0], batches[0], np.nonzero(place))
    work = sum(flops(direction, 1, int(length), HEADS, HEAD_SIZE) for length in lengths)
    return timing.measure(
        jitted, work=work, unit="TFLOP/s", args=args, op="attention, back to back", direction=direction,
        shape=(rows, sequences, longest, HEADS, HEAD_SIZE), dtype=DTYPE,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__)
    parser.add_argument("--only", choices=("in batches", "back to back"), help="one kind of them")
    args = parser.parse_args(argv)
    results = []
    if args.only != "back to back":
        shapes = SHAPES[:2] if args.quick else SHAPES
        for valid, direction, shape in itertools.product((1, 0.5), DIRECTIONS, shapes):
            results += in_batches(direction, valid, *shape, args)
    if args.only != "in batches":
        for direction, case in itertools.product(DIRECTIONS, BACK_TO_BACK[:1] if args.quick else BACK_TO_BACK):
            results += back_to_back(direction, *case, args)
    timing.print_tables(results)


if __name__ == "__main__":
    main()
