"""Encoders of the BERT family, built from the fused operations, and `attention_fn` for Flax's attention modules."""

from jaxft.models.flax_attention import attention_fn

__all__ = ["attention_fn"]
