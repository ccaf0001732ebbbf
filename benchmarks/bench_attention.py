"""Attention from packed QKV, forward and with its gradient: jaxft, XLA, and cuDNN (from separate arrays and packed).

"half valid" shapes have random key lengths that keep half of the keys. Time should fall with the valid tokens.

"back to back" shapes are packed sequences of random lengths, for jaxft alone. Its peers get the same sequences padded;
the padding itself is not timed. The shape of such a row is (rows, sequences, tokens of the longest, heads, head size).
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import shapes
import timing
from jaxft.ops.attention import qkv_attention, varlen_qkv_attention

DTYPE = "bfloat16"


def flops(direction: str, batch: int, length: int, heads: int, head_size: int) -> int:
    """Returns the FLOP of the matmuls, over all keys: two for each head forward, five more for the gradient."""
    products = 2 if direction == "forward" else 7
    return 2 * products * batch * heads * length**2 * head_size


def peer(*arrays: jax.Array, implementation: Literal["xla", "cudnn"]) -> jax.Array:
    """Computes jax.nn's attention of (query, key, value[, lengths]), or of (packed qkv[, lengths])."""
    if arrays[0].ndim == 5:
        arrays = (*(arrays[0][:, :, i] for i in range(3)), *arrays[1:])
    query, key, value, *lengths = arrays
    return jax.nn.dot_product_attention(
        query, key, value, key_value_seq_lengths=lengths[0] if lengths else None, implementation=implementation
    )


def ours(qkv: jax.Array, lengths: jax.Array | None = None) -> Any:
    """Computes jaxft's attention of (packed qkv[, lengths])."""
    return qkv_attention(qkv, key_value_seq_lengths=lengths)


def directed(op: Callable[..., Any], direction: str) -> Callable[..., Any]:
    """Returns a function of `inputs`: the result of `op`, or the result and the gradients of the float arrays."""

    def run(dout: jax.Array, *arrays: jax.Array) -> Any:
        if direction == "forward":
            return op(*arrays)
        floats = [x for x in arrays if x.dtype == dout.dtype]
        out, pull_back = jax.vjp(lambda *floats: op(*floats, *arrays[len(floats) :]), *floats)
        return out, pull_back(dout)

    return run


def inputs(
    batch: int, length: int, heads: int, head_size: int, valid: float = 1, seed: int = 0
) -> tuple[jax.Array, ...]:
    """Makes the gradient of the output, packed QKV and, with `valid` < 1, lengths of keys."""
    keys = jax.random.split(jax.random.key(seed))
    qkv = jax.random.normal(keys[0], (batch, length, 3, heads, head_size), DTYPE)
    dout = jax.random.normal(keys[1], (batch, length, heads, head_size), DTYPE)
    if valid == 1:
        return dout, qkv
    low = max(1, math.floor(length * (2 * valid - 1)))
    lengths = np.random.default_rng(seed).integers(low, length + 1, batch)
    return dout, qkv, jnp.asarray(lengths, jnp.int32)


def peers() -> dict[str, Callable[..., Any]]:
    """Returns `peer` by each implementation that this device has."""
    names: tuple[Literal["xla", "cudnn"], ...] = ("xla", "cudnn") if jax.default_backend() == "gpu" else ("xla",)
    return {name: functools.partial(peer, implementation=name) for name in names}


def check(
    name: str, mine: Any, plain: Callable[..., Any], arrays: Sequence[jax.Array], rows: Any = slice(None)
) -> None:
    """Checks `mine` against a plain function of `arrays`. Only some rows of its results count."""
    with jax.default_matmul_precision("highest"):
        exact = plain(*(x.astype(jnp.float32) if x.dtype == DTYPE else x for x in arrays))
    for got, *others in zip(*map(jax.tree.leaves, (mine, plain(*arrays), exact)), strict=True):
        timing.check(name, got, *(x[rows] for x in others))


def in_batches(direction: str, valid: float, shape: shapes.Attention, args: Any) -> list[timing.Row]:
    """Times batches of sequences of the same length."""
    batch, length, heads, head_size = shape
    name = f"attention{'' if valid == 1 else ', half valid'}"
    qkv_bytes = 3 * batch * length * heads * head_size * jnp.dtype(DTYPE).itemsize
    packed = [inputs(*shape, valid, seed) for seed in range(timing.rotation(qkv_bytes))]
    separate = [(dout, *(qkv[:, :, i] for i in range(3)), *rest) for dout, qkv, *rest in packed]
    variants: dict[str, tuple[Callable[..., Any], list]] = {"jaxft": (ours, packed)}
    variants |= {who: (f, packed) for who, f in peers().items()}
    if "cudnn" in variants:
        variants["cudnn, separate arrays"] = variants["cudnn"][0], separate
    jitted = {who: (jax.jit(directed(f, direction)), sets) for who, (f, sets) in variants.items()}
    check(f"{name} {direction} {batch}x{length}", jitted["jaxft"][0](*packed[0]), jitted["xla"][0], packed[0])
    return timing.measure(
        jitted, work=flops(direction, *shape), unit="TFLOP/s", args=args, op=name, direction=direction, shape=shape,
        dtype=DTYPE,
    )  # fmt: skip


def back_to_back(direction: str, shape: shapes.PackedAttention, args: Any) -> list[timing.Row]:
    """Times packed sequences of random lengths."""
    rows, sequences, longest, skew, heads, head_size = shape
    lengths = np.maximum(3, longest * np.random.default_rng(0).random(sequences) ** skew).astype(np.int32)
    begins = np.append(0, np.cumsum(lengths))
    count = int(np.searchsorted(begins, rows, side="right")) - 1  # the sequences that have room
    lengths, begins = lengths[:count], np.minimum(begins, begins[count])
    place = np.arange(longest)[None, :] < lengths[:, None]  # which padded tokens are valid

    def padded(x: jax.Array) -> jax.Array:
        flat = jnp.zeros((count * longest, *x.shape[1:]), x.dtype)
        return flat.at[np.flatnonzero(place)].set(x[: begins[-1]]).reshape(count, longest, *x.shape[1:])

    def attend(qkv: jax.Array) -> Any:
        return varlen_qkv_attention(qkv, jnp.asarray(begins, jnp.int32), max_seqlen=longest)

    qkv_bytes = 3 * rows * heads * head_size * jnp.dtype(DTYPE).itemsize
    packed = [inputs(1, rows, heads, head_size, seed=seed) for seed in range(timing.rotation(qkv_bytes))]
    packed = [(dout[0], qkv[0]) for dout, qkv in packed]
    batches = [(padded(dout), padded(qkv), jnp.asarray(lengths)) for dout, qkv in packed]
    jitted: dict[str, timing.Variant] = {"jaxft": (jax.jit(directed(attend, direction)), packed)}
    jitted |= {f"{who}, padded": (jax.jit(directed(f, direction)), batches) for who, f in peers().items()}
    mine = jax.tree.map(lambda x: x[: begins[-1]], jitted["jaxft"][0](*packed[0]))
    check(f"back to back {direction} {rows}x{longest}", mine, jitted["xla, padded"][0], batches[0], np.nonzero(place))
    work = sum(flops(direction, 1, int(length), heads, head_size) for length in lengths)
    return timing.measure(
        jitted, work=work, unit="TFLOP/s", args=args, op="attention, back to back", direction=direction,
        shape=(rows, sequences, longest, heads, head_size), dtype=DTYPE,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__)
    parser.add_argument("--only", choices=("in batches", "back to back"), help="one kind of shapes")
    args = parser.parse_args(argv)
    results = []
    if args.only != "back to back":
        for valid, chosen in ((1, shapes.ATTENTION), (0.5, shapes.ATTENTION_HALF_VALID)):
            for direction, shape in itertools.product(shapes.DIRECTIONS, chosen[:2] if args.quick else chosen):
                results += in_batches(direction, valid, shape, args)
    if args.only != "in batches":
        packed = shapes.ATTENTION_PACKED[:1] if args.quick else shapes.ATTENTION_PACKED
        for direction, case in itertools.product(shapes.DIRECTIONS, packed):
            results += back_to_back(direction, case, args)
    timing.print_tables(results)


if __name__ == "__main__":
    main()
