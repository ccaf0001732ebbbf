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


#: Where an op takes its kernel for some arguments only.
LIMITS = {
    "bias_residual_layer_norm": "without dropout",
    "dot_product_attention": "with key lengths and key masks only",
    "qkv_attention": "with key lengths and key masks only",
    "dense": "for 16-bit inputs of at most 1,024 rows; else XLA's product, and the kernel of bias_activation after it",
}


def explain() -> list[tuple[str, str, str]]:
    """(op, implementation, why) of every public op on this machine, for arguments that its kernels take."""
    found = []
    for op, names in OPS.items():
        implementation, why = dispatch.explain(op, dict.fromkeys(names))
        if implementation != "xla" and op in LIMITS:
            why += f", {LIMITS[op]}"
        found.append((op, implementation, why))
    return found
