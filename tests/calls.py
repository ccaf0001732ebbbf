"""Small calls of every public op with all of its options, for tests under JAX's modes and with symbolic sizes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxft
from jaxft.ops import bundle

SIZES = {"b": 3, "t": 5, "s": 6, "m": 10}  # sequences, queries, keys, packed rows
KEY = jax.random.key(1)
DROPOUT: dict[str, Any] = {"dropout_rate": 0.25, "dropout_rng": KEY}
NORM = {"gamma": "8", "beta": "8"}
QKV = "b, t, 3, 2, 4"


@dataclasses.dataclass(frozen=True)
class Call:
    """A call with arrays of the given shapes. The name of an array tells its dtype."""

    function: Callable[..., Any]  # arguments: the arrays by name, and implementation
    shapes: dict[str, str]
    kernel: bool = True

    def arrays(self, **sizes: int) -> dict[str, np.ndarray]:
        """Returns random floats, ids that all tables have, and masks and lengths that leave the first sequence out."""
        rng = np.random.default_rng(0)
        shapes = {name: eval(f"({shape},)", SIZES | sizes) for name, shape in self.shapes.items()}
        return {name: _values(rng, name, shape, SIZES | sizes) for name, shape in shapes.items()}

    def run(self, implementation: str | None, arrays: dict[str, Any]) -> Any:
        """Computes the result and the gradients of all float arrays."""
        floats = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        call = functools.partial(
            self.function, implementation=implementation, **{n: x for n, x in arrays.items() if n not in floats}
        )
        out, pull_back = jax.vjp(lambda floats: call(**floats), floats)
        return out, pull_back(jax.tree.map(jnp.ones_like, out))[0]


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...], sizes: dict[str, int]) -> np.ndarray:
    if "mask" in name:
        keep = rng.random(shape) < 0.7
        keep[:1] = False
        return keep
    if "lengths" in name:
        return np.arange(shape[0], dtype=np.int32)
    if name == "cu_seqlens":
        return (np.arange(shape[0], dtype=np.int32) * 3 - 3).clip(0, sizes["m"] - 1)
    if name == "indices":
        return np.arange(shape[0], dtype=np.int32)[::-1] + 1
    if name == "positions":
        return rng.integers(0, 100, shape, dtype=np.int32)
    if "ids" in name or name == "labels":
        ids = rng.integers(0, 3, shape, dtype=np.int32)
        return np.where(rng.random(shape) < 0.5, -100, ids).astype(np.int32) if name == "labels" else ids
    return rng.standard_normal(shape).astype(np.float32)


def _bundle(x, y, *, implementation):
    arrays, rebuild = jaxft.bundle([x, y], implementation=implementation)
    parts = bundle.Rebuild(jax.tree.structure([0, 0]), (0, 1), ((8,),), ((4, 4),), implementation)
    return rebuild(arrays), parts([jnp.concatenate([x, y])])


ATTENTION = {"query": "b, t, 4, 4", "key": "b, s, 2, 4", "value": "b, s, 2, 4"}
PAIRS = {"bias": "4, t, s", "mask": "b, 1, 1, s"}
LENGTHS = {"query_seq_lengths": "b", "key_value_seq_lengths": "b"}
IDS = {"query_segment_ids": "b, t", "key_value_segment_ids": "b, s"}

#: The calls. A name begins with the op's name.
CALLS = {
    "layer_norm": Call(jaxft.layer_norm, {"x": "b, t, 8", **NORM}),
    "layer_norm (a row)": Call(jaxft.layer_norm, {"x": "8", **NORM}),
    "bias_residual_layer_norm": Call(
        functools.partial(jaxft.bias_residual_layer_norm, **DROPOUT, return_sum=True),
        {"x": "b, t, 8", "bias": "8", "residual": "b, t, 8", **NORM},
    ),
    "rms_norm": Call(jaxft.rms_norm, {"x": "b, t, 8", "gamma": "8"}),
    "rms_norm (residual)": Call(
        functools.partial(jaxft.rms_norm, return_sum=True), {"x": "b, t, 8", "gamma": "8", "residual": "b, t, 8"}
    ),
    "embeddings_layer_norm": Call(
        functools.partial(jaxft.embeddings_layer_norm, **DROPOUT),
        {"input_ids": "b, t", "word": "4, 8", "position": "7, 8", "token_type": "3, 8", **NORM},
    ),
    "embeddings_layer_norm (ids)": Call(
        jaxft.embeddings_layer_norm,
        {"input_ids": "b, t", "word": "4, 8", "position": "7, 8", "token_type": "3, 8", **NORM,
         "position_ids": "b, t", "token_type_ids": "b, t"},
    ),
    "bias_activation": Call(jaxft.bias_activation, {"x": "b, t, 8", "bias": "8"}),
    "gated_activation": Call(functools.partial(jaxft.gated_activation, gate="second"), {"x": "b, t, 8", "bias": "8"}),
    "softmax": Call(jaxft.softmax, {"x": "b, 2, t, s", "bias": "t, s", "mask": "b, 1, 1, s"}),
    "log_softmax": Call(
        functools.partial(jaxft.log_softmax, scale=0.5), {"x": "b, 2, t, s", "bias": "s", "mask": "b, 1, t, s"}
    ),
    "log_softmax (no mask)": Call(jaxft.log_softmax, {"x": "b, t"}),
    "qkv_bias_split_heads": Call(
        functools.partial(jaxft.qkv_bias_split_heads, num_heads=2), {"qkv": "b, t, 24", "bias": "24"}
    ),
    "merge_heads": Call(jaxft.merge_heads, {"x": "b, 2, t, 4"}),
    "permute": Call(functools.partial(jaxft.permute, axes=(1, 0, -1)), {"x": "b, t, 8"}),
    "rotary": Call(functools.partial(jaxft.rotary, theta=1000.0), {"qkv": QKV, "positions": "b, t"}),
    "dense_rotary": Call(
        lambda positions, **f: jaxft.dense_rotary(**f, positions=positions, theta=1000.0, num_heads=2),
        {"x": "b, t, 8", "kernel": "8, 24", "bias": "24", "positions": "b, t"},
    ),
    "rotary (pair)": Call(
        lambda query, key, **options: jaxft.rotary((query, key), **options),
        {"query": "m, 4, 4", "key": "m, 2, 4", "positions": "m"},
    ),
    "dot_product_attention": Call(
        functools.partial(jaxft.dot_product_attention, **DROPOUT, return_residual=True), {**ATTENTION, **PAIRS}
    ),
    "dot_product_attention (lengths)": Call(
        functools.partial(jaxft.dot_product_attention, is_causal=True), {**ATTENTION, **LENGTHS}
    ),
    "dot_product_attention (segments)": Call(
        functools.partial(jaxft.dot_product_attention, local_window_size=(1, 2)), {**ATTENTION, **IDS}
    ),
    "dot_product_attention (no batch)": Call(
        jaxft.dot_product_attention,
        {"query": "t, 2, 4", "key": "s, 2, 4", "value": "s, 2, 4", "bias": "t, s", "mask": "t, s"},
    ),
    "qkv_attention": Call(jaxft.qkv_attention, {"qkv": QKV}),
    "qkv_attention (mask)": Call(
        functools.partial(jaxft.qkv_attention, **DROPOUT),
        {"qkv": QKV, "bias": "t", "mask": "b, 1, 1, t", **dict.fromkeys(IDS, "b, t")},
    ),
    "qkv_attention (relative_bias)": Call(
        functools.partial(jaxft.qkv_attention, is_causal=True, **DROPOUT),
        {"qkv": QKV, "relative_bias": "2, 5", "mask": "b, 1, 1, t"},
    ),
    "varlen_qkv_attention (relative_bias)": Call(
        functools.partial(jaxft.varlen_qkv_attention, max_seqlen=4),
        {"qkv": "m, 3, 2, 4", "cu_seqlens": "b + 1", "relative_bias": "1, 3"},
    ),
    "varlen_qkv_attention": Call(
        functools.partial(jaxft.varlen_qkv_attention, max_seqlen=4, return_residual=True, **DROPOUT),
        {"qkv": "m, 3, 2, 4", "cu_seqlens": "b + 1"},
    ),
    "dense": Call(
        functools.partial(jaxft.dense, activation="gelu_tanh"),
        {"x": "b, t, 8", "kernel": "8, 16", "bias": "16", "residual": "b, t, 16"},
    ),
    "dense (gate)": Call(
        functools.partial(jaxft.dense, activation="silu", gate="second"),
        {"x": "b, t, 8", "kernel": "8, 16", "bias": "16", "residual": "b, t, 8"},
    ),
    "dense (no activation)": Call(jaxft.dense, {"x": "b, t, 8", "kernel": "8, 16", "bias": "16"}),
    "dense_residual_layer_norm": Call(
        functools.partial(jaxft.dense_residual_layer_norm, **DROPOUT),
        {"x": "b, t, 16", "kernel": "16, 8", "bias": "8", "residual": "b, t, 8", **NORM},
    ),
    "feed_forward_residual_layer_norm": Call(
        functools.partial(jaxft.feed_forward_residual_layer_norm, **DROPOUT),
        {"x": "b, t, 8", "in_kernel": "8, 16", "in_bias": "16", "out_kernel": "16, 8", "out_bias": "8", **NORM},
    ),
    "feed_forward_residual_layer_norm (pre-norm)": Call(
        functools.partial(
            jaxft.feed_forward_residual_layer_norm, in_bias=None, out_bias=None, beta=None, gate="first",
            return_sum=True,
        ),
        {"x": "b, t, 8", "in_kernel": "8, 32", "out_kernel": "16, 8", "residual": "b, t, 8", "gamma": "8"},
    ),
    "linear_cross_entropy": Call(
        lambda **arrays: jaxft.linear_cross_entropy(**arrays).mean,
        {"x": "b, t, 8", "embedding": "11, 8", "labels": "b, t", "bias": "11"}, kernel=False,
    ),
    "linear_cross_entropy (no bias)": Call(
        lambda **arrays: jaxft.linear_cross_entropy(**arrays).total,
        {"x": "m, 8", "embedding": "16, 8", "labels": "m"}, kernel=False,
    ),
    "remove_padding": Call(
        lambda **arrays: jaxft.remove_padding(**arrays, capacity=16).x, {"x": "b, t, 8", "mask": "b, t"}
    ),
    "restore_padding": Call(
        functools.partial(jaxft.restore_padding, batch=3, length=5), {"x": "m, 8", "indices": "m"}
    ),
    "bundle": Call(_bundle, {"x": "4", "y": "4"}),
}  # fmt: skip


def public_ops() -> set[str]:
    """Returns the names of all public functions of `jaxft.ops`, but `explain`, which runs no op."""
    return {
        name for name in jaxft.__all__ if getattr(getattr(jaxft, name), "__module__", "").startswith("jaxft.ops")
    } - {"explain"}
