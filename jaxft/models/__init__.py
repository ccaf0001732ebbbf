"""Encoders of the BERT family from the fused ops, `partition_specs`, FP8, and `attention_fn` for Flax's modules."""

from jaxft.models.flax_attention import attention_fn
from jaxft.models.float8 import Float8Recipe, quantize
from jaxft.models.joined import join_kernels
from jaxft.models.partition import partition_specs
from jaxft.ops.float8 import count_clipped

__all__ = ["Float8Recipe", "attention_fn", "count_clipped", "join_kernels", "partition_specs", "quantize"]
