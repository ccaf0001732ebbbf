"""The public operations, one file a family. `explain` tells which implementation each would use here, and why."""

from __future__ import annotations

from jaxft import dispatch

#: Every public op, and the kernels that it has besides XLA's.
OPS: dict[str, tuple[str, ...]] = {
    "layer_norm": ("triton",),
    "bias_residual_layer_norm": ("triton",),
    "bias_activation": ("triton",),
    "softmax": (),
    "log_softmax": (),
    "qkv_bias_split_heads": (),
    "merge_heads": (),
    "permute": (),
    "dot_product_attention": ("triton",),
    "qkv_attention": ("triton",),
    "varlen_qkv_attention": (),
    "dense": ("triton",),
}


def explain() -> list[tuple[str, str, str]]:
    """(op, implementation, why) of every public op, for arguments that all of its kernels support."""
    return [(op, *dispatch.explain(op, dict.fromkeys(names))) for op, names in OPS.items()]
