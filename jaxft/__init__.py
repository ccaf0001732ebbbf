"""jaxft: a fast BERT encoder for JAX. Fused operations, Flax NNX models built on them, and text encoders.

`import jaxft` loads the operations only. The models and encoders, which need Flax, load on first use.
"""

from typing import TYPE_CHECKING

from jaxft._version import __version__ as __version__
from jaxft.dispatch import EXPORT_DISABLED_CHECKS
from jaxft.ops.attention import dot_product_attention, qkv_attention, varlen_qkv_attention
from jaxft.ops.bias_activation import bias_activation
from jaxft.ops.bundle import bundle
from jaxft.ops.cross_entropy import linear_cross_entropy
from jaxft.ops.dense import dense
from jaxft.ops.dense_layer_norm import dense_residual_layer_norm
from jaxft.ops.embeddings import embeddings_layer_norm
from jaxft.ops.feed_forward import feed_forward_residual_layer_norm
from jaxft.ops.layer_norm import bias_residual_layer_norm, layer_norm
from jaxft.ops.padding import remove_padding, restore_padding
from jaxft.ops.permute import merge_heads, permute, qkv_bias_split_heads
from jaxft.ops.plans import explain
from jaxft.ops.softmax import log_softmax, softmax

if TYPE_CHECKING:
    from jaxft.checkpoint.files import CheckpointError
    from jaxft.models.bert import BertModel
    from jaxft.models.classification import BertForSequenceClassification, BertForTokenClassification
    from jaxft.models.config import BertConfig
    from jaxft.models.masked_lm import BertForMaskedLM
    from jaxft.text.cross_encoder import CrossEncoder
    from jaxft.text.sentence_encoder import SentenceEncoder

__all__ = [
    "EXPORT_DISABLED_CHECKS",
    "BertConfig",
    "BertForMaskedLM",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertModel",
    "CheckpointError",
    "CrossEncoder",
    "SentenceEncoder",
    "bias_activation",
    "bias_residual_layer_norm",
    "bundle",
    "dense",
    "dense_residual_layer_norm",
    "dot_product_attention",
    "embeddings_layer_norm",
    "explain",
    "feed_forward_residual_layer_norm",
    "layer_norm",
    "linear_cross_entropy",
    "log_softmax",
    "merge_heads",
    "permute",
    "qkv_attention",
    "qkv_bias_split_heads",
    "remove_padding",
    "restore_padding",
    "softmax",
    "varlen_qkv_attention",
]

_LAZY = {
    "BertConfig": "jaxft.models.config",
    "BertForMaskedLM": "jaxft.models.masked_lm",
    "BertForSequenceClassification": "jaxft.models.classification",
    "BertForTokenClassification": "jaxft.models.classification",
    "BertModel": "jaxft.models.bert",
    "CheckpointError": "jaxft.checkpoint.files",
    "CrossEncoder": "jaxft.text.cross_encoder",
    "SentenceEncoder": "jaxft.text.sentence_encoder",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
