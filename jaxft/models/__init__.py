"""BERT-type encoders built on the fused operations, and how their checkpoints are read and written."""

from jaxft.models.flax_attention import attention_fn

__all__ = ["attention_fn"]
