"""Attention with a table of biases by relative position, forward and with its gradient: jaxft, XLA and cuDNN.

The peers get the bias of all pairs, which they make from the table, and their gradient goes back to the table. In the
rows "packed", jaxft gets packed sequences of random lengths. Its peers get the same sequences padded; the padding
itself is not timed.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shapes
import timing
from bench_attention import DTYPE, check, flops
from jaxft.ops.attention import qkv_attention, varlen_qkv_attention
from plain_encoders import all_pairs


def peer(qkv: jax.Array, table: jax.Array, lengths: jax.Array | None = None, *, implementation: Any) -> jax.Array:
    """Computes jax.nn's attention of packed QKV with the bias of all pairs."""
    bias = all_pairs(table.astype(qkv.dtype), qkv.shape[1])[None]
    return jax.nn.dot_product_attention(
        qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], bias, query_seq_lengths=lengths, key_value_seq_lengths=lengths,
        implementation=implementation,
    )  # fmt: skip


def directed(op: Callable[..., Any], direction: str) -> Callable[..., Any]:
    """Returns a function of (dout, qkv, table, ...): the result of `op`, or the result and the two gradients."""

    def run(dout: jax.Array, qkv: jax.Array, table: jax.Array, *rest: jax.Array) -> Any:
        if direction == shapes.FORWARD:
            return op(qkv, table, *rest)
        out, pull_back = jax.vjp(lambda qkv, table: op(qkv, table, *rest), qkv, table)
        return out, pull_back(dout)

    return run


def peers(direction: str, arrays: Sequence[jax.Array]) -> dict[str, jax.stages.Wrapped]:
    """Returns the peers that can run this case."""
    found: dict[str, jax.stages.Wrapped] = {}
    for name in ("xla", "cudnn") if jax.default_backend() == "gpu" else ("xla",):
        run = jax.jit(directed(functools.partial(peer, implementation=name), direction))
        try:
            jax.block_until_ready(run(*arrays))
            found[name] = run
        except Exception as error:  # cuDNN's bias gradients depend on its version
            print(f"{name}, {direction}: {str(error)[:200]}")
    return found


def measure(direction: str, shape: shapes.Attention, packed: bool, args: Any) -> list[timing.Row]:
    batch, length, heads, head_size = shape
    rng = np.random.default_rng(0)
    lengths = rng.integers(length // 4, length + 1, batch) if packed else np.full(batch, length)
    ends, used = np.append(0, np.cumsum(lengths)), np.arange(length)[None] < lengths[:, None]
    starts, rest = jnp.asarray(ends, jnp.int32), [jnp.asarray(lengths, jnp.int32)] * packed

    def inputs(seed: int) -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(seed), 3)
        qkv = jax.random.normal(keys[0], (batch, length, 3, heads, head_size), DTYPE)
        dout = jax.random.normal(keys[1], (batch, length, heads, head_size), DTYPE)
        dout = jnp.where(used[:, :, None, None], dout, 0)
        return dout, qkv, jax.random.normal(keys[2], (heads, 2 * shapes.RELATIVE_BIAS_REACH + 1)), *rest

    def pack(dout: jax.Array, qkv: jax.Array, table: jax.Array, *_: jax.Array) -> tuple[jax.Array, ...]:
        return dout[used], qkv[used], table

    def attend(qkv: jax.Array, table: jax.Array, implementation: str | None = None) -> Any:
        if packed:
            return varlen_qkv_attention(
                qkv, starts, max_seqlen=length, relative_bias=table, implementation=implementation
            )
        return qkv_attention(qkv, relative_bias=table, implementation=implementation)

    nbytes = 3 * batch * length * heads * head_size * jnp.dtype(DTYPE).itemsize
    sets = [inputs(seed) for seed in range(timing.rotation(nbytes))]
    own = [pack(*x) for x in sets] if packed else sets
    ours = jax.jit(directed(attend, direction))
    name = "attention, relative bias" + ", packed" * packed
    plain = jax.jit(directed(functools.partial(attend, implementation="xla"), direction))
    check(f"{name} {direction} {batch}x{length}", ours(*own[0]), plain, own[0])
    variants: dict[str, timing.Variant] = {"jaxft": (ours, own)}
    variants |= {who + ", padded" * packed: (f, sets) for who, f in peers(direction, sets[0]).items()}
    work = sum(flops(direction, 1, int(n), heads, head_size) for n in lengths)
    return timing.measure(
        variants, work=work, unit="TFLOP/s", args=args, op=name, direction=direction, shape=shape, dtype=DTYPE
    )


def main(argv: Sequence[str] | None = None) -> None:
    args = timing.arguments(__doc__).parse_args(argv)
    results = []
    for shape in shapes.RELATIVE_BIAS[:1] if args.quick else shapes.RELATIVE_BIAS:
        for packed, direction in itertools.product((False, True), shapes.DIRECTIONS):
            results += measure(direction, shape, packed, args)
    timing.print_tables(results)


if __name__ == "__main__":
    main()
