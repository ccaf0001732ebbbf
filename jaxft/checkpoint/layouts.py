"""Names of the tensors in checkpoints, by `model_type`: encoders, heads, and the layouts that combine both.

Each table maps a parameter of jaxft to its tensors in the checkpoint; {i} is the number of the layer. A parameter with
several tensors is their concatenation along the last axis. A `kernel` is [in, out]; torch.nn.Linear, and thus the
checkpoint, stores it as [out, in].
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

Shape = tuple[int, ...]
Names = dict[str, list[str]]

# --- Encoders ----------------------------------------------------------------------------------------------------

_BERT = {
    "embeddings.word": ["embeddings.word_embeddings.weight"],
    "embeddings.position": ["embeddings.position_embeddings.weight"],
    "embeddings.token_type": ["embeddings.token_type_embeddings.weight"],
    "embeddings.norm_gamma": ["embeddings.LayerNorm.weight"],
    "embeddings.norm_beta": ["embeddings.LayerNorm.bias"],
    "layers.{i}.qkv_kernel": [
        "encoder.layer.{i}.attention.self.query.weight",
        "encoder.layer.{i}.attention.self.key.weight",
        "encoder.layer.{i}.attention.self.value.weight",
    ],
    "layers.{i}.qkv_bias": [
        "encoder.layer.{i}.attention.self.query.bias",
        "encoder.layer.{i}.attention.self.key.bias",
        "encoder.layer.{i}.attention.self.value.bias",
    ],
    "layers.{i}.out_kernel": ["encoder.layer.{i}.attention.output.dense.weight"],
    "layers.{i}.out_bias": ["encoder.layer.{i}.attention.output.dense.bias"],
    "layers.{i}.attention_norm_gamma": ["encoder.layer.{i}.attention.output.LayerNorm.weight"],
    "layers.{i}.attention_norm_beta": ["encoder.layer.{i}.attention.output.LayerNorm.bias"],
    "layers.{i}.ffn_in_kernel": ["encoder.layer.{i}.intermediate.dense.weight"],
    "layers.{i}.ffn_in_bias": ["encoder.layer.{i}.intermediate.dense.bias"],
    "layers.{i}.ffn_out_kernel": ["encoder.layer.{i}.output.dense.weight"],
    "layers.{i}.ffn_out_bias": ["encoder.layer.{i}.output.dense.bias"],
    "layers.{i}.ffn_norm_gamma": ["encoder.layer.{i}.output.LayerNorm.weight"],
    "layers.{i}.ffn_norm_beta": ["encoder.layer.{i}.output.LayerNorm.bias"],
    "pooler.kernel": ["pooler.dense.weight"],
    "pooler.bias": ["pooler.dense.bias"],
}

_DISTILBERT = {
    "embeddings.word": ["embeddings.word_embeddings.weight"],
    "embeddings.position": ["embeddings.position_embeddings.weight"],
    "embeddings.norm_gamma": ["embeddings.LayerNorm.weight"],
    "embeddings.norm_beta": ["embeddings.LayerNorm.bias"],
    "layers.{i}.qkv_kernel": [
        "transformer.layer.{i}.attention.q_lin.weight",
        "transformer.layer.{i}.attention.k_lin.weight",
        "transformer.layer.{i}.attention.v_lin.weight",
    ],
    "layers.{i}.qkv_bias": [
        "transformer.layer.{i}.attention.q_lin.bias",
        "transformer.layer.{i}.attention.k_lin.bias",
        "transformer.layer.{i}.attention.v_lin.bias",
    ],
    "layers.{i}.out_kernel": ["transformer.layer.{i}.attention.out_lin.weight"],
    "layers.{i}.out_bias": ["transformer.layer.{i}.attention.out_lin.bias"],
    "layers.{i}.attention_norm_gamma": ["transformer.layer.{i}.sa_layer_norm.weight"],
    "layers.{i}.attention_norm_beta": ["transformer.layer.{i}.sa_layer_norm.bias"],
    "layers.{i}.ffn_in_kernel": ["transformer.layer.{i}.ffn.lin1.weight"],
    "layers.{i}.ffn_in_bias": ["transformer.layer.{i}.ffn.lin1.bias"],
    "layers.{i}.ffn_out_kernel": ["transformer.layer.{i}.ffn.lin2.weight"],
    "layers.{i}.ffn_out_bias": ["transformer.layer.{i}.ffn.lin2.bias"],
    "layers.{i}.ffn_norm_gamma": ["transformer.layer.{i}.output_layer_norm.weight"],
    "layers.{i}.ffn_norm_beta": ["transformer.layer.{i}.output_layer_norm.bias"],
}

# Field of BertConfig -> its name in a DistilBERT's config.json.
_DISTILBERT_CONFIG = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}

# --- Heads -------------------------------------------------------------------------------------------------------
#
# XLM-RoBERTa and CamemBERT use the names of RoBERTa.

# Sequence classification: a dense layer on the first token (in BERT the pooler), and a dense layer to the labels.

_CLASSIFICATION: Mapping[str, Names] = {
    "bert": {
        "head.dense_kernel": ["pooler.dense.weight"],
        "head.dense_bias": ["pooler.dense.bias"],
        "head.out_kernel": ["classifier.weight"],
        "head.out_bias": ["classifier.bias"],
    },
    "roberta": {
        "head.dense_kernel": ["classifier.dense.weight"],
        "head.dense_bias": ["classifier.dense.bias"],
        "head.out_kernel": ["classifier.out_proj.weight"],
        "head.out_bias": ["classifier.out_proj.bias"],
    },
    "distilbert": {
        "head.dense_kernel": ["pre_classifier.weight"],
        "head.dense_bias": ["pre_classifier.bias"],
        "head.out_kernel": ["classifier.weight"],
        "head.out_bias": ["classifier.bias"],
    },
}

# Token classification: only a dense layer to the labels.

_TOKEN_CLASSIFICATION: Names = {"classifier.kernel": ["classifier.weight"], "classifier.bias": ["classifier.bias"]}

# Masked language modelling: a dense layer, a LayerNorm and the bias of the logits. The matrix of the logits is the
# table of word embeddings.

_MASKED_LM: Mapping[str, Names] = {
    "bert": {
        "lm_head.dense_kernel": ["cls.predictions.transform.dense.weight"],
        "lm_head.dense_bias": ["cls.predictions.transform.dense.bias"],
        "lm_head.norm_gamma": ["cls.predictions.transform.LayerNorm.weight"],
        "lm_head.norm_beta": ["cls.predictions.transform.LayerNorm.bias"],
        "lm_head.out_bias": ["cls.predictions.bias"],
    },
    "roberta": {
        "lm_head.dense_kernel": ["lm_head.dense.weight"],
        "lm_head.dense_bias": ["lm_head.dense.bias"],
        "lm_head.norm_gamma": ["lm_head.layer_norm.weight"],
        "lm_head.norm_beta": ["lm_head.layer_norm.bias"],
        "lm_head.out_bias": ["lm_head.bias"],
    },
    "distilbert": {
        "lm_head.dense_kernel": ["vocab_transform.weight"],
        "lm_head.dense_bias": ["vocab_transform.bias"],
        "lm_head.norm_gamma": ["vocab_layer_norm.weight"],
        "lm_head.norm_beta": ["vocab_layer_norm.bias"],
        "lm_head.out_bias": ["vocab_projector.bias"],
    },
}

_HEADS: Mapping[str, Names] = {
    kind: _CLASSIFICATION[kind] | _TOKEN_CLASSIFICATION | _MASKED_LM[kind] for kind in ("bert", "roberta", "distilbert")
}

# Tensors of the last layer of classifiers. Their first axis is the number of labels.
LABELS = ("classifier.weight", "classifier.bias", "classifier.out_proj.weight", "classifier.out_proj.bias")

# Copy of a tensor that a checkpoint of a masked language model may hold -> name of the original.
_WORDS = "embeddings.word_embeddings.weight"
_TIED: Mapping[str, Mapping[str, str]] = {
    "bert": {"cls.predictions.decoder.weight": _WORDS, "cls.predictions.decoder.bias": "cls.predictions.bias"},
    "roberta": {"lm_head.decoder.weight": _WORDS, "lm_head.decoder.bias": "lm_head.bias"},
    "distilbert": {"vocab_projector.weight": _WORDS},
}

# --- Layouts -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layout:
    """Names in the checkpoints of one `model_type`."""

    names: Mapping[str, list[str]]
    prefix: str  # of the encoder's tensors if the checkpoint was saved from a model with a head
    heads: tuple[str, ...]  # prefixes of the tensors of heads, which are read only on request
    tied: Mapping[str, str]  # tensor of a head -> tensor that it must equal
    architecture: str  # name of the encoder class in transformers
    config_defaults: Mapping[str, Any]  # defaults that differ from BertConfig
    config_names: Mapping[str, str] = dataclasses.field(default_factory=dict)  # BertConfig's names -> others
    config_aliases: tuple[str, ...] = ()  # names of BertConfig that transformers reads too, and that win


_CLASSIFIERS = ("classifier.", "qa_outputs.")


_ROBERTA = _BERT | _HEADS["roberta"]


_ROBERTA_HEADS = "roberta.", ("lm_head.", *_CLASSIFIERS), _TIED["roberta"]


_PADDING_1 = {"pad_token_id": 1}


LAYOUTS: Mapping[str, Layout] = {
    "bert": Layout(_BERT | _HEADS["bert"], "bert.", ("cls.", *_CLASSIFIERS), _TIED["bert"], "BertModel", {}),
    "roberta": Layout(_ROBERTA, *_ROBERTA_HEADS, "RobertaModel", _PADDING_1 | {"vocab_size": 50265}),
    "xlm-roberta": Layout(_ROBERTA, *_ROBERTA_HEADS, "XLMRobertaModel", _PADDING_1),
    "camembert": Layout(_ROBERTA, *_ROBERTA_HEADS, "CamembertModel", _PADDING_1),
    "distilbert": Layout(
        _DISTILBERT | _HEADS["distilbert"],
        "distilbert.",
        ("vocab_transform.", "vocab_layer_norm.", "vocab_projector.", "pre_classifier.", *_CLASSIFIERS),
        _TIED["distilbert"],
        "DistilBertModel",
        {"num_hidden_layers": 6, "type_vocab_size": 0},
        _DISTILBERT_CONFIG,
        ("hidden_size", "num_hidden_layers", "num_attention_heads"),
    ),
}


BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")  # constants that some versions stored


POOLER = ("pooler.dense.weight", "pooler.dense.bias")  # older RoBERTa classifiers have an unused pooler


def checkpoint_names(layout: Layout, parameter: str) -> list[str]:
    """Returns the names of the tensors that make up `parameter`, for example "layers.3.out_bias"."""
    number = re.match(r"layers\.(\d+)\.", parameter)
    if number is None:
        return layout.names[parameter]
    template = parameter.replace(number[0], "layers.{i}.", 1)
    return [name.format(i=number[1]) for name in layout.names[template]]


def canonical(layout: Layout, name: str) -> str:
    """Returns a tensor's name in the layout's table: without the prefix, and without LayerNorm's old names."""
    name = name.removeprefix(layout.prefix)
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def with_prefix(layout: Layout, name: str) -> str:
    """Returns a tensor's name in a model with a head: tensors of the encoder get the prefix, others do not."""
    return name if name.startswith(layout.heads) else layout.prefix + name


def is_kernel(parameter: str) -> bool:
    """Returns whether the parameter is a matrix that the checkpoint stores transposed."""
    return parameter.endswith("kernel")


def expected_tensors(layout: Layout, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Returns the shape of each tensor in the checkpoint, given the shapes of jaxft's parameters."""
    expected: dict[str, Shape] = {}
    for parameter, shape in shapes.items():
        names = checkpoint_names(layout, parameter)
        shape = (*shape[:-1], shape[-1] // len(names))
        expected |= {name: shape[::-1] if is_kernel(parameter) else shape for name in names}
    return expected
