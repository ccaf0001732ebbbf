"""The public operations, one file a family. `explain` tells which implementation each would use here, and why."""

from __future__ import annotations

from jaxft import dispatch

_KERNEL: dict[str, str | None] = {"triton": None}
_KERNEL_BY_NAME: dict[str, str | None] = {"triton": "used by name only, it has not been measured yet"}

#: Every public op, and the kernels that it has besides XLA's, each with why it is never chosen by itself (None: it is).
OPS: dict[str, dict[str, str | None]] = {
    "layer_norm": _KERNEL,
    "bias_residual_layer_norm": _KERNEL,
    "bias_activation": _KERNEL,
    "softmax": {},
    "log_softmax": {},
    "qkv_bias_split_heads": _KERNEL_BY_NAME,
    "merge_heads": _KERNEL_BY_NAME,
    "permute": _KERNEL_BY_NAME,
    "dot_product_attention": _KERNEL,
    "qkv_attention": _KERNEL,
    "varlen_qkv_attention": {},
    "dense": _KERNEL,
}


def explain() -> list[tuple[str, str, str]]:
    """(op, implementation, why) of every public op, for arguments that all of its kernels support."""
    return [(op, *dispatch.explain(op, reasons)) for op, reasons in OPS.items()]
