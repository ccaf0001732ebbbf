"""Encoders of the BERT family, `partition_specs` for many devices, and `attention_fn` for Flax's attention modules."""

from jaxft.models.flax_attention import attention_fn
from jaxft.models.partition import partition_specs

__all__ = ["attention_fn", "partition_specs"]
