"""jaxft: a fast BERT encoder for JAX. Fused operations, Flax NNX models built on them, and text encoders.

`import jaxft` loads nothing: each name loads its module on first use. The models and encoders need Flax.
"""

from typing import TYPE_CHECKING

from jaxft._version import __version__ as __version__

if TYPE_CHECKING:
    from jaxft.checkpoint.files import CheckpointError
    from jaxft.compilation_cache import use_compilation_cache
    from jaxft.dispatch import EXPORT_DISABLED_CHECKS
    from jaxft.fusion.transform import fuse
    from jaxft.models.bert import BertModel
    from jaxft.models.classification import BertForSequenceClassification, BertForTokenClassification
    from jaxft.models.config import BertConfig
    from jaxft.models.embedding import EmbeddingModel
    from jaxft.models.masked_lm import BertForMaskedLM
    from jaxft.models.multi_vector import MultiVectorModel, max_sim
    from jaxft.models.question_answering import BertForQuestionAnswering
    from jaxft.models.splade import SpladeModel
    from jaxft.ops.attention import dot_product_attention, qkv_attention, varlen_qkv_attention
    from jaxft.ops.bias_activation import bias_activation
    from jaxft.ops.bundle import bundle
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
    from jaxft.ops.plans import explain
    from jaxft.ops.rotary import rotary
    from jaxft.ops.softmax import log_softmax, softmax
    from jaxft.text.cross_encoder import CrossEncoder
    from jaxft.text.multi_vector_encoder import MultiVectorEncoder
    from jaxft.text.quantization import quantize_embeddings
    from jaxft.text.search import paraphrase_mining, paraphrase_mining_embeddings, semantic_search
    from jaxft.text.sentence_encoder import SentenceEncoder
    from jaxft.text.sparse_encoder import SparseEncoder

__all__ = [
    "EXPORT_DISABLED_CHECKS",
    "BertConfig",
    "BertForMaskedLM",
    "BertForQuestionAnswering",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertModel",
    "CheckpointError",
    "CrossEncoder",
    "EmbeddingModel",
    "MultiVectorEncoder",
    "MultiVectorModel",
    "SentenceEncoder",
    "SparseEncoder",
    "SpladeModel",
    "bias_activation",
    "bias_residual_layer_norm",
    "bundle",
    "dense",
    "dense_residual_layer_norm",
    "dense_rotary",
    "dot_product_attention",
    "embeddings_layer_norm",
    "explain",
    "feed_forward_residual_layer_norm",
    "fuse",
    "gated_activation",
    "layer_norm",
    "linear_cross_entropy",
    "log_softmax",
    "max_sim",
    "merge_heads",
    "paraphrase_mining",
    "paraphrase_mining_embeddings",
    "permute",
    "qkv_attention",
    "qkv_bias_split_heads",
    "quantize_embeddings",
    "remove_padding",
    "restore_padding",
    "rms_norm",
    "rotary",
    "semantic_search",
    "softmax",
    "use_compilation_cache",
    "varlen_qkv_attention",
]

# The public names of each module.
_MODULES = {
    "jaxft.checkpoint.files": "CheckpointError",
    "jaxft.compilation_cache": "use_compilation_cache",
    "jaxft.dispatch": "EXPORT_DISABLED_CHECKS",
    "jaxft.fusion.transform": "fuse",
    "jaxft.models.bert": "BertModel",
    "jaxft.models.classification": "BertForSequenceClassification BertForTokenClassification",
    "jaxft.models.config": "BertConfig",
    "jaxft.models.embedding": "EmbeddingModel",
    "jaxft.models.masked_lm": "BertForMaskedLM",
    "jaxft.models.question_answering": "BertForQuestionAnswering",
    "jaxft.models.multi_vector": "MultiVectorModel max_sim",
    "jaxft.models.splade": "SpladeModel",
    "jaxft.ops.attention": "dot_product_attention qkv_attention varlen_qkv_attention",
    "jaxft.ops.bias_activation": "bias_activation",
    "jaxft.ops.bundle": "bundle",
    "jaxft.ops.cross_entropy": "linear_cross_entropy",
    "jaxft.ops.dense": "dense",
    "jaxft.ops.dense_layer_norm": "dense_residual_layer_norm",
    "jaxft.ops.dense_rotary": "dense_rotary",
    "jaxft.ops.embeddings": "embeddings_layer_norm",
    "jaxft.ops.feed_forward": "feed_forward_residual_layer_norm",
    "jaxft.ops.gated_activation": "gated_activation",
    "jaxft.ops.layer_norm": "bias_residual_layer_norm layer_norm rms_norm",
    "jaxft.ops.padding": "remove_padding restore_padding",
    "jaxft.ops.permute": "merge_heads permute qkv_bias_split_heads",
    "jaxft.ops.plans": "explain",
    "jaxft.ops.rotary": "rotary",
    "jaxft.ops.softmax": "log_softmax softmax",
    "jaxft.text.cross_encoder": "CrossEncoder",
    "jaxft.text.multi_vector_encoder": "MultiVectorEncoder",
    "jaxft.text.quantization": "quantize_embeddings",
    "jaxft.text.search": "paraphrase_mining paraphrase_mining_embeddings semantic_search",
    "jaxft.text.sentence_encoder": "SentenceEncoder",
    "jaxft.text.sparse_encoder": "SparseEncoder",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    import importlib

    if name in ("dispatch", "dropout", "kernels", "models", "ops", "reference", "tuning"):
        return importlib.import_module(f"jaxft.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
