"""A sample call of every public op, for the tables of `jaxft info` and docs/kernels.md."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxft.ops.attention import dot_product_attention, qkv_attention, varlen_qkv_attention
from jaxft.ops.bias_activation import bias_activation
from jaxft.ops.bundle import Rebuild
from jaxft.ops.cross_entropy import linear_cross_entropy
from jaxft.ops.dense import dense
from jaxft.ops.dense_layer_norm import dense_residual_layer_norm
from jaxft.ops.dense_rotary import dense_rotary
from jaxft.ops.embeddings import embeddings_layer_norm
from jaxft.ops.feed_forward import feed_forward_residual_layer_norm
from jaxft.ops.gated_activation import gated_activation
from jaxft.ops.layer_norm import bias_residual_layer_norm, layer_norm, rms_norm
from jaxft.ops.padding import remove_padding, restore_padding
from jaxft.ops.permute import merge_heads, permute, qkv_bias_split_heads
from jaxft.ops.plans import Plan, explain
from jaxft.ops.rotary import rotary
from jaxft.ops.softmax import log_softmax, softmax

WIDTH, INNER, HEADS, HEAD_SIZE, CLASSES = 768, 3072, 12, 64, 30522  # BERT-base

#: Batch and length of each size class.
SIZES = {"1x128": (1, 128), "32x128": (32, 128), "32x512": (32, 512)}

Call = tuple[Callable[..., Any], tuple[Any, ...]]


def calls(batch: int, length: int, dtype: Any) -> dict[str, Call]:
    """Returns functions and arguments, as shapes, for the ops of BERT-base. Names begin with the op's name."""

    def of(*shape: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def as_ids(*shape: int) -> jax.ShapeDtypeStruct:
        return of(*shape, dtype=jnp.int32)

    rows, tokens = batch * length, (batch, length)
    x, vector = of(rows, WIDTH), of(WIDTH)
    qkv, heads = of(*tokens, 3, HEADS, HEAD_SIZE), of(*tokens, HEADS, HEAD_SIZE)
    packed, ends = of(rows, 3, HEADS, HEAD_SIZE), as_ids(batch + 1)
    logits = of(batch, HEADS, length, length)

    def layer(depth: int, width: int, activation: str | None, gate: str | None = None) -> Call:
        fn = functools.partial(dense, activation=activation, gate=gate)
        return fn, (of(rows, depth), of(depth, width), of(width))

    rebuild = Rebuild(jax.tree.structure([0, 0]), (0, 1), ((2 * WIDTH,),), ((WIDTH, WIDTH),), None)
    ffn = (x, of(WIDTH, INNER), of(INNER), of(INNER, WIDTH), vector, vector, vector)
    return {
        "layer_norm": (layer_norm, (x, vector, vector)),
        "bias_residual_layer_norm": (bias_residual_layer_norm, (x, vector, x, vector, vector)),
        "rms_norm": (rms_norm, (x, vector)),
        "embeddings_layer_norm": (
            embeddings_layer_norm,
            (as_ids(*tokens), of(CLASSES, WIDTH), of(512, WIDTH), of(2, WIDTH), vector, vector),
        ),
        "bias_activation": (bias_activation, (of(rows, INNER), of(INNER))),
        "gated_activation": (gated_activation, (of(rows, 2 * INNER), of(2 * INNER))),
        "softmax": (softmax, (logits,)),
        "log_softmax": (log_softmax, (logits,)),
        "qkv_bias_split_heads": (
            functools.partial(qkv_bias_split_heads, num_heads=HEADS),
            (of(*tokens, 3 * WIDTH), of(3 * WIDTH)),
        ),
        "merge_heads": (merge_heads, (of(batch, HEADS, length, HEAD_SIZE),)),
        "permute": (functools.partial(permute, axes=(0, 2, 1, 3)), (heads,)),
        "rotary": (rotary, (qkv, as_ids(length))),
        "dot_product_attention": (dot_product_attention, (heads, heads, heads)),
        "qkv_attention": (qkv_attention, (qkv,)),
        "varlen_qkv_attention": (functools.partial(varlen_qkv_attention, max_seqlen=length), (packed, ends)),
        f"dense ({WIDTH}x{3 * WIDTH})": layer(WIDTH, 3 * WIDTH, None),
        "dense_rotary": (
            functools.partial(dense_rotary, num_heads=HEADS),
            (of(*tokens, WIDTH), of(WIDTH, 3 * WIDTH), of(3 * WIDTH), as_ids(length)),
        ),
        f"dense ({WIDTH}x{WIDTH}, gelu)": layer(WIDTH, WIDTH, "gelu"),
        f"dense ({WIDTH}x{INNER}, gelu)": layer(WIDTH, INNER, "gelu"),
        f"dense ({WIDTH}x{INNER}, gelu, gate)": layer(WIDTH, INNER, "gelu", "first"),
        f"dense ({INNER}x{WIDTH})": layer(INNER, WIDTH, None),
        f"dense_residual_layer_norm ({WIDTH}x{WIDTH})": (
            dense_residual_layer_norm,
            (x, of(WIDTH, WIDTH), vector, x, vector, vector),
        ),
        f"dense_residual_layer_norm ({INNER}x{WIDTH})": (
            dense_residual_layer_norm,
            (of(rows, INNER), of(INNER, WIDTH), vector, x, vector, vector),
        ),
        "feed_forward_residual_layer_norm": (feed_forward_residual_layer_norm, ffn),
        "linear_cross_entropy": (linear_cross_entropy, (x, of(CLASSES, WIDTH), as_ids(rows))),
        "remove_padding": (
            lambda x, mask: remove_padding(x, mask, capacity=rows).x,
            (of(*tokens, WIDTH), of(*tokens, dtype=jnp.bool_)),
        ),
        "restore_padding": (
            functools.partial(restore_padding, batch=batch, length=length),
            (x, as_ids(rows)),
        ),
        "bundle": (rebuild, ([of(2 * WIDTH)],)),
    }


def plan_table(size: str, dtype: Any) -> dict[str, Plan]:
    """Returns the plan of every sample call on the present device (or `dispatch.target`), by the call's name."""
    batch, length = SIZES[size]
    return {name: explain(fn, *arguments)[0].plan for name, (fn, arguments) in calls(batch, length, dtype).items()}
