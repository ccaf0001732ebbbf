"""The public operations, one file a family. `explain` tells which implementation each would use here, and why."""

from __future__ import annotations

from jaxft import dispatch

_KERNEL: dict[str, str | None] = {"triton": None}

#: Every public op, and the kernels that it has besides XLA's, each with why it cannot be used (None: it can).
OPS: dict[str, dict[str, str | None]] = {
    "layer_norm": _KERNEL,
    "bias_residual_layer_norm": _KERNEL,
    "embeddings_layer_norm": _KERNEL,
    "bias_activation": _KERNEL,
    "softmax": _KERNEL,
    "log_softmax": _KERNEL,
    "qkv_bias_split_heads": _KERNEL,
    "merge_heads": _KERNEL,
    "permute": _KERNEL,
    "dot_product_attention": _KERNEL,
    "qkv_attention": _KERNEL,
    "varlen_qkv_attention": _KERNEL,
    "dense": _KERNEL,
    "dense_residual_layer_norm": _KERNEL,
    "feed_forward_residual_layer_norm": _KERNEL,
    "linear_cross_entropy": {},
    "remove_padding": _KERNEL,
    "restore_padding": _KERNEL,
    "bundle": _KERNEL,
}


#: Where an op takes its kernel for some arguments only.
LIMITS = {
    "dense": "for few rows of 16 bits, but deep ones, and up to Hopper any with an activation and F > K; on Hopper "
    "Mosaic GPU's where it was measured faster; else XLA's product, and the kernel of bias_activation after it (XLA's "
    "for few rows, but not in full float32)",
    "dense_residual_layer_norm": "for few rows of 16 bits; else as dense and bias_residual_layer_norm, but all "
    "is XLA's for few rows whose product is XLA's",
    "feed_forward_residual_layer_norm": "as dense and dense_residual_layer_norm; in 16 bits its gradient has "
    "a Mosaic GPU kernel where the first layer does",
    "dot_product_attention": "but cuDNN on Hopper for large 16-bit arrays without masks where no gradient is asked for",
    "qkv_attention": "but Mosaic GPU's on Hopper for gradients of 256, 384 or 512 tokens in 16 bits",
    "remove_padding": "for floats of 32 bytes a token or more; else XLA's gathers",
    "restore_padding": "as remove_padding",
}


def explain() -> list[tuple[str, str, str]]:
    """(op, implementation, why) of every public op on this machine, for arguments that its kernels take."""
    found = []
    for op, reasons in OPS.items():
        implementation, why = dispatch.explain(op, reasons)
        if implementation != "xla" and op in LIMITS:
            why += f", {LIMITS[op]}"
        found.append((op, implementation, why))
    return found
