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


def _layers(modules: Mapping[str, list[str]]) -> Names:
    """Returns the tensors of dense layers and LayerNorms, by the start of their parameters' names and their modules."""
    names: Names = {}
    for start, found in modules.items():
        weight, bias = ("gamma", "beta") if start.endswith("norm_") else ("kernel", "bias")
        names[start + weight] = [f"{module}.weight" for module in found]
        names[start + bias] = [f"{module}.bias" for module in found]
    return names


# --- Encoders ----------------------------------------------------------------------------------------------------

_EMBEDDINGS = {
    "embeddings.word": ["embeddings.word_embeddings.weight"],
    "embeddings.position": ["embeddings.position_embeddings.weight"],
    **_layers({"embeddings.norm_": ["embeddings.LayerNorm"]}),
}

_BERT = {
    **_EMBEDDINGS,
    "embeddings.token_type": ["embeddings.token_type_embeddings.weight"],
    **_layers(
        {
            "layers.{i}.qkv_": [f"encoder.layer.{{i}}.attention.self.{name}" for name in ("query", "key", "value")],
            "layers.{i}.out_": ["encoder.layer.{i}.attention.output.dense"],
            "layers.{i}.attention_norm_": ["encoder.layer.{i}.attention.output.LayerNorm"],
            "layers.{i}.ffn_in_": ["encoder.layer.{i}.intermediate.dense"],
            "layers.{i}.ffn_out_": ["encoder.layer.{i}.output.dense"],
            "layers.{i}.ffn_norm_": ["encoder.layer.{i}.output.LayerNorm"],
            "pooler.": ["pooler.dense"],
        }
    ),
}

_DISTILBERT = _EMBEDDINGS | _layers(
    {
        "layers.{i}.qkv_": [f"transformer.layer.{{i}}.attention.{name}" for name in ("q_lin", "k_lin", "v_lin")],
        "layers.{i}.out_": ["transformer.layer.{i}.attention.out_lin"],
        "layers.{i}.attention_norm_": ["transformer.layer.{i}.sa_layer_norm"],
        "layers.{i}.ffn_in_": ["transformer.layer.{i}.ffn.lin1"],
        "layers.{i}.ffn_out_": ["transformer.layer.{i}.ffn.lin2"],
        "layers.{i}.ffn_norm_": ["transformer.layer.{i}.output_layer_norm"],
    }
)

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
#
# - "head" classifies sequences: a dense layer on the first token (in BERT the pooler), and a dense layer to the labels.
# - "classifier" classifies tokens: only a dense layer to the labels.
# - "lm_head" is for masked language modelling: a dense layer, a LayerNorm and the bias of the logits. The matrix of the
#   logits is the table of word embeddings.

_TRANSFORM = "cls.predictions.transform."
_HEADS: Mapping[str, Names] = {
    "bert": {
        **_layers({"head.dense_": ["pooler.dense"], "head.out_": ["classifier"], "classifier.": ["classifier"]}),
        **_layers({"lm_head.dense_": [_TRANSFORM + "dense"], "lm_head.norm_": [_TRANSFORM + "LayerNorm"]}),
        "lm_head.out_bias": ["cls.predictions.bias"],
    },
    "roberta": {
        **_layers(
            {"head.dense_": ["classifier.dense"], "head.out_": ["classifier.out_proj"], "classifier.": ["classifier"]}
        ),
        **_layers({"lm_head.dense_": ["lm_head.dense"], "lm_head.norm_": ["lm_head.layer_norm"]}),
        "lm_head.out_bias": ["lm_head.bias"],
    },
    "distilbert": {
        **_layers({"head.dense_": ["pre_classifier"], "head.out_": ["classifier"], "classifier.": ["classifier"]}),
        **_layers({"lm_head.dense_": ["vocab_transform"], "lm_head.norm_": ["vocab_layer_norm"]}),
        "lm_head.out_bias": ["vocab_projector.bias"],
    },
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
