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

# MPNet has no token types; one table of relative positions serves all layers.
_MPNET = {
    **_EMBEDDINGS,
    "relative_bias": ["encoder.relative_attention_bias.weight"],
    **_layers(
        {
            "layers.{i}.qkv_": [f"encoder.layer.{{i}}.attention.attn.{name}" for name in "qkv"],
            "layers.{i}.out_": ["encoder.layer.{i}.attention.attn.o"],
            "layers.{i}.attention_norm_": ["encoder.layer.{i}.attention.LayerNorm"],
            "layers.{i}.ffn_in_": ["encoder.layer.{i}.intermediate.dense"],
            "layers.{i}.ffn_out_": ["encoder.layer.{i}.output.dense"],
            "layers.{i}.ffn_norm_": ["encoder.layer.{i}.output.LayerNorm"],
            "pooler.": ["pooler.dense"],
        }
    ),
}

_MODERNBERT = {
    "embeddings.word": ["embeddings.tok_embeddings.weight"],
    **_layers(
        {
            "embeddings.norm_": ["embeddings.norm"],
            "layers.{i}.attention_norm_": ["layers.{i}.attn_norm"],
            "layers.{i}.qkv_": ["layers.{i}.attn.Wqkv"],
            "layers.{i}.out_": ["layers.{i}.attn.Wo"],
            "layers.{i}.ffn_norm_": ["layers.{i}.mlp_norm"],
            "layers.{i}.ffn_in_": ["layers.{i}.mlp.Wi"],
            "layers.{i}.ffn_out_": ["layers.{i}.mlp.Wo"],
            "final_norm_": ["final_norm"],
        }
    ),
}

_NOMIC_BERT = {
    "embeddings.word": ["embeddings.word_embeddings.weight"],
    "embeddings.token_type": ["embeddings.token_type_embeddings.weight"],
    **_layers(
        {
            "embeddings.norm_": ["emb_ln"],
            "layers.{i}.qkv_": ["encoder.layers.{i}.attn.Wqkv"],
            "layers.{i}.out_": ["encoder.layers.{i}.attn.out_proj"],
            "layers.{i}.attention_norm_": ["encoder.layers.{i}.norm1"],
            "layers.{i}.ffn_in_": ["encoder.layers.{i}.mlp.fc12", "encoder.layers.{i}.mlp.fc11"],
            "layers.{i}.ffn_out_": ["encoder.layers.{i}.mlp.fc2"],
            "layers.{i}.ffn_norm_": ["encoder.layers.{i}.norm2"],
            "pooler.": ["pooler.dense"],
        }
    ),
}

_GTE = {
    **{name: tensors for name, tensors in _BERT.items() if name.startswith(("embeddings.", "pooler."))},
    **_layers(
        {
            "layers.{i}.qkv_": ["encoder.layer.{i}.attention.qkv_proj"],
            "layers.{i}.out_": ["encoder.layer.{i}.attention.o_proj"],
            "layers.{i}.attention_norm_": ["encoder.layer.{i}.attn_ln"],
            "layers.{i}.ffn_in_": ["encoder.layer.{i}.mlp.up_gate_proj"],
            "layers.{i}.ffn_out_": ["encoder.layer.{i}.mlp.down_proj"],
            "layers.{i}.ffn_norm_": ["encoder.layer.{i}.mlp_ln"],
        }
    ),
}

_JINA_V3 = {
    **_NOMIC_BERT,
    **_layers(
        {
            "layers.{i}.qkv_": ["encoder.layers.{i}.mixer.Wqkv"],
            "layers.{i}.out_": ["encoder.layers.{i}.mixer.out_proj"],
            "layers.{i}.ffn_in_": ["encoder.layers.{i}.mlp.fc1"],
            "layers.{i}.ffn_out_": ["encoder.layers.{i}.mlp.fc2"],
        }
    ),
}

# Jina v2: a BERT with ALiBi and a gated feed-forward network.
_JINA_BERT = _BERT | _layers(
    {
        "layers.{i}.ffn_in_": ["encoder.layer.{i}.mlp.gated_layers"],
        "layers.{i}.ffn_out_": ["encoder.layer.{i}.mlp.wo"],
        "layers.{i}.ffn_norm_": ["encoder.layer.{i}.mlp.layernorm"],
    }
)

_DEBERTA = {
    **_BERT,
    **_layers(
        {
            "layers.{i}.qkv_": [
                f"encoder.layer.{{i}}.attention.self.{name}_proj" for name in ("query", "key", "value")
            ],
            "relative_norm_": ["encoder.LayerNorm"],
        }
    ),
    "relative_embeddings": ["encoder.rel_embeddings.weight"],
}

_ELECTRA = _BERT | _layers({"embeddings.projection_": ["embeddings_project"]})

_ALBERT_LAYER = "encoder.albert_layer_groups.0.albert_layers.0."
_ALBERT = {
    **{name: tensors for name, tensors in _BERT.items() if name.startswith("embeddings.")},
    **_layers(
        {
            "embeddings.projection_": ["encoder.embedding_hidden_mapping_in"],
            "layers.{i}.qkv_": [f"{_ALBERT_LAYER}attention.{name}" for name in ("query", "key", "value")],
            "layers.{i}.out_": [_ALBERT_LAYER + "attention.dense"],
            "layers.{i}.attention_norm_": [_ALBERT_LAYER + "attention.LayerNorm"],
            "layers.{i}.ffn_in_": [_ALBERT_LAYER + "ffn"],
            "layers.{i}.ffn_out_": [_ALBERT_LAYER + "ffn_output"],
            "layers.{i}.ffn_norm_": [_ALBERT_LAYER + "full_layer_layer_norm"],
            "pooler.": ["pooler"],
        }
    ),
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
# XLM-RoBERTa, CamemBERT and data2vec-text use the names of RoBERTa, and ERNIE uses the names of BERT.
#
# - "head" classifies sequences: a dense layer on the first token (in BERT the pooler), and a dense layer to the labels.
# - "classifier" classifies tokens, and "qa_outputs" finds answers: only a dense layer to the labels.
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

_HEADS = {
    **_HEADS,
    "modernbert": {
        **_layers({"head.dense_": ["head.dense"], "head.norm_": ["head.norm"], "head.out_": ["classifier"]}),
        **_layers({"classifier.dense_": ["head.dense"], "classifier.norm_": ["head.norm"]}),
        **_layers({"classifier.": ["classifier"]}),
        **_layers({"lm_head.dense_": ["head.dense"], "lm_head.norm_": ["head.norm"]}),
        "lm_head.out_bias": ["decoder.bias"],
    },
    "nomic_bert": _HEADS["bert"] | _layers({"lm_head.norm_": [_TRANSFORM + "layer_norm"]}),
    "gte": {
        **_HEADS["bert"],
        **_layers({"lm_head.dense_": ["lm_head.dense"], "lm_head.norm_": ["lm_head.norm"]}),
        "lm_head.out_bias": ["lm_head.decoder.bias"],
    },
    "electra": {
        **_HEADS["roberta"],
        **_layers(
            {
                "lm_head.dense_": ["generator_predictions.dense"],
                "lm_head.norm_": ["generator_predictions.LayerNorm"],
            }
        ),
        "lm_head.out_bias": ["generator_lm_head.bias"],
    },
    "albert": {
        **_layers({"head.dense_": ["pooler"], "head.out_": ["classifier"], "classifier.": ["classifier"]}),
        **_layers({"lm_head.dense_": ["predictions.dense"], "lm_head.norm_": ["predictions.LayerNorm"]}),
        "lm_head.out_bias": ["predictions.bias"],
    },
}

# A head for question answering is one dense layer, in ModernBERT the head of a classifier of tokens.
_HEADS = {kind: names | _layers({"qa_outputs.": ["qa_outputs"]}) for kind, names in _HEADS.items()}
_HEADS["modernbert"] |= _layers(
    {"qa_outputs.dense_": ["head.dense"], "qa_outputs.norm_": ["head.norm"], "qa_outputs.": ["classifier"]}
)

# Tensors of the last layer of classifiers. Their first axis is the number of labels.
LABELS = ("classifier.weight", "classifier.bias", "classifier.out_proj.weight", "classifier.out_proj.bias")

# Copy of a tensor that a checkpoint of a masked language model may hold -> name of the original.
_WORDS = "embeddings.word_embeddings.weight"
_TIED: Mapping[str, Mapping[str, str]] = {
    "modernbert": {"decoder.weight": "embeddings.tok_embeddings.weight"},
    "gte": {"lm_head.decoder.weight": _WORDS},
    "electra": {"generator_lm_head.weight": _WORDS},
    "albert": {"predictions.decoder.weight": _WORDS, "predictions.decoder.bias": "predictions.bias"},
    "bert": {"cls.predictions.decoder.weight": _WORDS, "cls.predictions.decoder.bias": "cls.predictions.bias"},
    "roberta": {"lm_head.decoder.weight": _WORDS, "lm_head.decoder.bias": "lm_head.bias"},
    "distilbert": {"vocab_projector.weight": _WORDS},
}

# --- Layouts -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Names of tensors and fields of config.json that all checkpoints of one `model_type` share."""

    names: Mapping[str, list[str]]
    prefix: str  # of the encoder's tensors if the checkpoint was saved from a model with a head
    other_prefixes: tuple[str, ...] = ()  # that older or newer checkpoints have in its place
    heads: tuple[str, ...]  # prefixes of the tensors of heads, which are read only on request
    tied: Mapping[str, str]  # tensor of a head -> tensor that it must equal
    architecture: str  # name of the encoder class in transformers
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # values that differ from BertConfig, fixed
    config_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # defaults that differ from it
    config_names: Mapping[str, str] = dataclasses.field(default_factory=dict)  # BertConfig's names -> others
    config_aliases: tuple[str, ...] = ()  # names of BertConfig that transformers reads too, and that win
    config_fields: tuple[str, ...] = ()  # fields of BertConfig that are not fixed, beyond a BERT's


_CLASSIFIERS = ("classifier.", "qa_outputs.")
_PADDING_1 = {"pad_token_id": 1}


def _bert(architecture: str, prefix: str = "bert.") -> Layout:
    return Layout(
        names=_BERT | _HEADS["bert"] | {"linear_kernel": ["linear.weight"]},  # Stanford's ColBERT
        prefix=prefix, heads=("cls.", "linear.", *_CLASSIFIERS), tied=_TIED["bert"], architecture=architecture,
    )  # fmt: skip


def _roberta(architecture: str, prefix: str = "roberta.", **defaults: Any) -> Layout:
    return Layout(
        names=_BERT | _HEADS["roberta"], prefix=prefix, heads=("lm_head.", *_CLASSIFIERS), tied=_TIED["roberta"],
        architecture=architecture, config_defaults=_PADDING_1 | defaults,
    )  # fmt: skip


LAYOUTS: Mapping[str, Layout] = {
    "bert": _bert("BertModel"),
    "ernie": _bert("ErnieModel", "ernie."),
    "roberta": _roberta("RobertaModel", vocab_size=50265),
    "xlm-roberta": _roberta("XLMRobertaModel"),
    "camembert": _roberta("CamembertModel"),
    "data2vec-text": _roberta("Data2VecTextModel", "data2vec_text."),
    "distilbert": Layout(
        names=_DISTILBERT | _HEADS["distilbert"],
        prefix="distilbert.",
        heads=("vocab_transform.", "vocab_layer_norm.", "vocab_projector.", "pre_classifier.", *_CLASSIFIERS),
        tied=_TIED["distilbert"],
        architecture="DistilBertModel",
        facts={"type_vocab_size": 0, "layer_norm_eps": 1e-12, "classifier_activation": "relu"},
        config_defaults={"num_hidden_layers": 6},
        config_names=_DISTILBERT_CONFIG,
        config_aliases=("hidden_size", "num_hidden_layers", "num_attention_heads"),
    ),
    "mpnet": Layout(
        names=_MPNET | _HEADS["roberta"],
        prefix="mpnet.",
        heads=("lm_head.", *_CLASSIFIERS),
        tied=_TIED["roberta"],
        architecture="MPNetModel",
        facts={"type_vocab_size": 0, "pad_token_id": 1, "relative_bias": True},
        config_defaults={"vocab_size": 30527},
        config_fields=("relative_attention_num_buckets",),
    ),
    "modernbert": Layout(
        names=_MODERNBERT | _HEADS["modernbert"],
        prefix="model.",
        heads=("head.", "decoder.", *_CLASSIFIERS),
        tied=_TIED["modernbert"],
        architecture="ModernBertModel",
        facts={
            "type_vocab_size": 0,
            "norm_first": True,
            "positions": "rotary",
            "activated_half": "first",
            "hidden_dropout_prob": 0.0,
            "classifier_norm": True,
        },
        config_defaults={
            "vocab_size": 50368,
            "intermediate_size": 1152,
            "num_hidden_layers": 22,
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "pad_token_id": 50283,
            "attention_probs_dropout_prob": 0.0,
            "qkv_bias": False,
            "out_bias": False,
            "ffn_in_bias": False,
            "ffn_out_bias": False,
            "norm_bias": False,
            "rope_theta": 160_000.0,
            "local_rope_theta": 10_000.0,
            "local_attention": 128,
            "classifier_activation": "gelu",
            "classifier_bias": False,
        },
        config_names={
            "layer_norm_eps": "norm_eps",
            "hidden_act": "hidden_activation",
            "attention_probs_dropout_prob": "attention_dropout",
            "qkv_bias": "attention_bias",
            "out_bias": "attention_bias",
            "ffn_in_bias": "mlp_bias",
            "ffn_out_bias": "mlp_bias",
            "rope_theta": "global_rope_theta",
        },
        config_fields=(
            "qkv_bias",
            "out_bias",
            "ffn_in_bias",
            "ffn_out_bias",
            "norm_bias",
            "rope_theta",
            "local_rope_theta",
            "local_attention",
            "layer_types",
            "classifier_pooling",
            "classifier_activation",
            "classifier_bias",
        ),
    ),
    "nomic_bert": Layout(
        names=_NOMIC_BERT | _HEADS["nomic_bert"],
        prefix="nomic_bert.",
        heads=("cls.", *_CLASSIFIERS),
        tied=_TIED["bert"],
        architecture="NomicBertModel",
        facts={
            "positions": "rotary",
            "activated_half": "first",
            "qkv_bias": False,
            "out_bias": False,
            "ffn_in_bias": False,
            "ffn_out_bias": False,
        },
        config_defaults={
            "vocab_size": 30528,
            "hidden_act": "silu",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "max_position_embeddings": 2048,
            "rope_theta": 1000.0,
        },
        config_fields=("rope_theta",),
    ),
    "gte": Layout(
        names=_GTE | _HEADS["gte"],
        prefix="new.",
        other_prefixes=("gte.",),
        heads=("lm_head.", *_CLASSIFIERS),
        tied=_TIED["gte"],
        architecture="GteModel",
        facts={"positions": "rotary", "activated_half": "second", "ffn_in_bias": False},
        config_defaults={
            "vocab_size": 250048,
            "attention_probs_dropout_prob": 0.0,
            "max_position_embeddings": 8192,
            "type_vocab_size": 1,
            "pad_token_id": 1,
            "rope_theta": 160_000.0,
        },
        config_fields=("rope_theta", "rope_factor"),
    ),
    "jina_embeddings_v3": Layout(
        names=_JINA_V3 | _HEADS["roberta"],
        prefix="roberta.",
        heads=("lm_head.", *_CLASSIFIERS),
        tied=_TIED["roberta"],
        architecture="JinaEmbeddingsV3Model",
        facts={"positions": "rotary"},
        config_defaults={
            "vocab_size": 250002,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "max_position_embeddings": 8194,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
            "pad_token_id": 1,
            "rope_theta": 20_000.0,
        },
        config_fields=("rope_theta",),
    ),
    "jina_bert": Layout(
        names=_JINA_BERT | _HEADS["bert"],
        prefix="bert.",
        heads=("cls.", *_CLASSIFIERS),
        tied=_TIED["bert"],
        architecture="JinaBertModel",
        facts={"positions": "alibi", "activated_half": "first", "ffn_in_bias": False},
    ),
    "deberta-v2": Layout(
        names=_DEBERTA | _HEADS["bert"],
        prefix="deberta.",
        heads=("cls.", "lm_predictions.", "mask_predictions.", "pooler.", *_CLASSIFIERS),
        tied=_TIED["bert"],
        architecture="DebertaV2Model",
        facts={"positions": "disentangled", "type_vocab_size": 0},
        config_defaults={
            "vocab_size": 128100,
            "hidden_size": 1536,
            "num_hidden_layers": 24,
            "num_attention_heads": 24,
            "intermediate_size": 6144,
            "layer_norm_eps": 1e-7,
            "classifier_activation": "gelu",
        },
        config_names={"classifier_activation": "pooler_hidden_act"},
        config_fields=("position_buckets", "max_relative_positions", "classifier_activation"),
    ),
    "electra": Layout(
        names=_ELECTRA | _HEADS["electra"],
        prefix="electra.",
        heads=(
            "generator_predictions.",
            "generator_lm_head.",
            "discriminator_predictions.",
            "sequence_summary.",
            *_CLASSIFIERS,
        ),  # fmt: skip
        tied=_TIED["electra"],
        architecture="ElectraModel",
        facts={"classifier_activation": "gelu"},
        config_defaults={
            "hidden_size": 256,
            "num_attention_heads": 4,
            "intermediate_size": 1024,
            "embedding_size": 128,
        },
        config_fields=("embedding_size",),
    ),
    "albert": Layout(
        names=_ALBERT | _HEADS["albert"],
        prefix="albert.",
        heads=("predictions.", "sop_classifier.", *_CLASSIFIERS),
        tied=_TIED["albert"],
        architecture="AlbertModel",
        facts={"shared_layers": True},
        config_defaults={
            "vocab_size": 30000,
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "intermediate_size": 16384,
            "hidden_act": "gelu_new",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "embedding_size": 128,
        },
        config_fields=("embedding_size",),
    ),
}

# Endings of constants that some versions stored.
BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids", "rotary_emb.inv_freq")
# Older RoBERTa classifiers have an unused pooler. ALBERT's pooler is one dense layer without a name of its own.
POOLER = ("pooler.dense.weight", "pooler.dense.bias", "pooler.weight", "pooler.bias")


def checkpoint_names(layout: Layout, parameter: str) -> list[str]:
    """Returns the names of the tensors that make up `parameter`, for example "layers.3.out_bias"."""
    number = re.match(r"layers\.(\d+)\.", parameter)
    if number is None:
        return layout.names[parameter]
    template = parameter.replace(number[0], "layers.{i}.")
    return [name.format(i=number[1]) for name in layout.names[template]]


def canonical(layout: Layout, name: str) -> str:
    """Returns a tensor's name in the layout's table: without the prefix, and without LayerNorm's old names."""
    for prefix in (layout.prefix, *layout.other_prefixes):
        name = name.removeprefix(prefix)
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
