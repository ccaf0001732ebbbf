"""`BertConfig`: the validated sizes and kind of an encoder, converted from and to Hugging Face's config.json."""

import dataclasses
import logging
import sys
from collections.abc import Mapping
from typing import Any, Self

from jaxft.checkpoint import layouts as checkpoint_layouts
from jaxft.models import dialects

ROBERTA_TYPES = ("roberta", "xlm-roberta", "camembert", "data2vec-text")

# Hugging Face's name of an activation -> jaxft's name.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}

# Smallest and largest accepted values. The limits are generous: they reject a config.json whose sizes would exhaust
# the memory before any other error shows.
_LIMITS = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**16),
    "num_hidden_layers": (1, 2**10),
    "num_attention_heads": (1, 2**16),
    "intermediate_size": (1, 2**18),
    "max_position_embeddings": (1, 2**20),
    "type_vocab_size": (0, 2**16),
    "pad_token_id": (0, 2**24),
    "embedding_size": (1, 2**16),
    "local_attention": (1, 2**24),
    "relative_attention_num_buckets": (32, 2**16),
    "position_buckets": (0, 2**16),
    "max_relative_positions": (1, 2**20),
}
_POSITIVE = ("layer_norm_eps", "rope_theta", "local_rope_theta", "rope_factor")
_FLAGS = ("norm_first", "relative_bias", "shared_layers", "qkv_bias", "out_bias", "ffn_in_bias", "ffn_out_bias",
          "norm_bias", "classifier_bias", "classifier_norm")  # fmt: skip
_LAYER_TYPES = ("full_attention", "sliding_attention")
_OPTIONAL = ("embedding_size", "local_attention")  # sizes that may be None
# Fields that change numbers and no shape of a tensor. Null is refused, as in transformers.
_NOT_NULL = ("num_hidden_layers", "num_attention_heads", "hidden_act", "layer_norm_eps", "local_attention")
_MAX_PARAMETERS = 2**36

# Fields of config.json that transformers applies and jaxft refuses, with what a field would mean.
REFUSED = {
    "is_decoder": "a decoder",
    "add_cross_attention": "cross-attention",
    "is_causal": "causal attention",
    "quantization_config": "quantised weights",
    "per_layer_config": "layers of different sizes",
}

_log = logging.getLogger("jaxft")


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Sizes and kind of an encoder, under Hugging Face's names. The defaults are BERT-base.

    `from_dict({"model_type": "modernbert"})` returns the defaults of another type. Types that have other names in their
    config.json (`dim` of DistilBERT, `norm_eps` of ModernBERT) have BERT's names here; `from_dict` and `to_dict`
    translate them. The dropout rates apply to a model in training (`BertModel.train`).

    The fields after `pad_token_id` say how an encoder differs from BERT. `model_type` fixes most of them: they may be
    left out, and another value is an error.

    Attributes:
      model_type: a key of `jaxft.checkpoint.layouts.LAYOUTS`: "bert", "roberta", "xlm-roberta", "camembert",
        "distilbert", "mpnet", "modernbert", "nomic_bert", "gte", "jina_embeddings_v3", "jina_bert" (Jina v2),
        "deberta-v2", "electra", "albert", "ernie" or "data2vec-text".
      embedding_size: width of the tables, if a dense layer projects their sum to `hidden_size`; None is `hidden_size`.
      norm_first: whether LayerNorm comes before attention and the feed-forward network, not after.
      positions: "learned" (a table), "rotary", "alibi" (a bias of attention) or "disentangled" (DeBERTa).
      relative_bias: whether attention has a bias by relative position as in T5, beside the positions.
      relative_attention_num_buckets: rows of its table, of which 32 are used.
      activated_half: "first" or "second": the half of a gated feed-forward network that the activation is applied to,
        before the product of both. None is not gated.
      qkv_bias, out_bias, ffn_in_bias, ffn_out_bias, norm_bias: whether these layers have a bias.
      rope_theta: base of the rotary angles.
      local_rope_theta: the same, of layers with local attention.
      rope_factor: factor by which rotary positions are stretched (NTK scaling); 1 does not stretch.
      local_attention: width of the window of layers with local attention: a token attends to `local_attention // 2`
        tokens before and after it.
      layer_types: for each layer "full_attention" or "sliding_attention" (local). None makes all layers full.
      position_buckets: number of buckets of relative positions on each side (DeBERTa).
      max_relative_positions: distance of the last of these buckets.
      shared_layers: whether all layers share one set of parameters.
      classifier_pooling: what the head of a classifier of texts gets: "cls", the first token, or "mean", of all tokens.
      classifier_activation: activation of the first layer of this head, a name as for `hidden_act`, or "tanh".
      classifier_bias: whether this layer has a bias.
      classifier_norm: whether a LayerNorm follows this layer, which classifiers of tokens then have too.

    Raises:
      ValueError: values have a wrong type, are impossible, exceed a limit or do not fit `model_type`. The message lists
        all of them. The limits are a vocabulary of 2**24, width 2**16, feed-forward width 2**18, 1024 layers, 2**20
        positions, 2**16 token types and 2**36 parameters.
    """

    model_type: str = "bert"
    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0
    embedding_size: int | None = None
    norm_first: bool = False
    positions: str = "learned"
    relative_bias: bool = False
    relative_attention_num_buckets: int = 32
    activated_half: str | None = None
    qkv_bias: bool = True
    out_bias: bool = True
    ffn_in_bias: bool = True
    ffn_out_bias: bool = True
    norm_bias: bool = True
    rope_theta: float = 10_000.0
    local_rope_theta: float = 10_000.0
    rope_factor: float = 1.0
    local_attention: int | None = None
    layer_types: tuple[str, ...] | None = None
    position_buckets: int = 256
    max_relative_positions: int = 512
    shared_layers: bool = False
    classifier_pooling: str = "cls"
    classifier_activation: str = "tanh"
    classifier_bias: bool = True
    classifier_norm: bool = False

    def __post_init__(self) -> None:
        layout = checkpoint_layouts.LAYOUTS.get(str(self.model_type))
        facts = {} if layout is None else layout.facts
        for field in dataclasses.fields(self)[len(_BERT_FIELDS) :]:
            if field.name in facts and getattr(self, field.name) == field.default:
                object.__setattr__(self, field.name, facts[field.name])
        if problems := _problems(dataclasses.asdict(self)):
            raise ValueError("BertConfig: " + "; ".join(problems))

    @property
    def position_offset(self) -> int:
        """Position id of the first token. RoBERTa models reserve the ids up to `pad_token_id`."""
        return self.pad_token_id + 1 if self.model_type in (*ROBERTA_TYPES, "mpnet") else 0

    @property
    def positions_count_padding(self) -> bool:
        """True if padding before a text would move its tokens to other positions of a table."""
        return self.positions == "learned" and not self.position_offset

    @property
    def width_of_tables(self) -> int:
        """Width of the tables of word, position and token type embeddings."""
        return self.embedding_size or self.hidden_size

    def window(self, layer: int) -> int | None:
        """Number of tokens on each side that the tokens of a layer attend to, or None for all tokens."""
        is_local = self.layer_types is not None and self.layer_types[layer] == "sliding_attention"
        return self.local_attention // 2 if is_local and self.local_attention is not None else None

    @property
    def activation(self) -> str:
        """Name that `jaxft.dense` has for `hidden_act`."""
        return _ACTIVATIONS[self.hidden_act]

    @property
    def head_activation(self) -> str:
        """Name that `jaxft.dense` has for `classifier_activation`."""
        return _ACTIVATIONS.get(self.classifier_activation, "tanh")

    @property
    def max_sequence_length(self) -> int:
        """Largest number of tokens in a sequence that `max_position_embeddings` names."""
        return self.max_position_embeddings - self.position_offset

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens that a sequence can have: without a table of positions, 2**20."""
        return self.max_sequence_length if self.positions == "learned" else _LIMITS["max_position_embeddings"][1]

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Creates a config from the content of a Hugging Face `config.json`.

        Args:
          config: fields by name. An absent field gets transformers' default for the model type, and so does a null
            field whose value the shapes of the tensors show. docs/checkpoints.md lists the fields that are applied,
            refused and harmless.

        Raises:
          ValueError: as for `BertConfig`, or the fields describe a kind of model that is not supported.
        """
        model_type = dialects.model_type(config)
        if not isinstance(model_type, str) or model_type not in checkpoint_layouts.LAYOUTS:
            reason = dialects.REASONS.get(model_type) if isinstance(model_type, str) else None
            problem = _one_of("model_type", model_type, checkpoint_layouts.LAYOUTS)
            raise ValueError(f"BertConfig: {problem}" + f" ({reason})" * (reason is not None))
        layout = checkpoint_layouts.LAYOUTS[model_type]
        values: dict[str, Any] = dataclasses.asdict(cls()) | {**layout.config_defaults, **layout.facts}
        values["model_type"] = model_type
        null = []
        for name in (*_BERT_FIELDS, *layout.config_fields):
            given = config.get(layout.config_names.get(name, name))
            if name in layout.config_aliases and config.get(name) is not None:
                given = config[name]
            if name == "model_type" or name in layout.facts:
                continue
            if given is not None:
                values[name] = given
            elif name in _NOT_NULL and layout.config_names.get(name, name) in config:
                null.append(name)
        problems = [
            f"{option} is {config[option]!r:.100}; {meaning} is not supported"
            for option, meaning in REFUSED.items()
            if config.get(option)
        ]
        own, more = dialects.read(model_type, config, values)
        if "sliding_attention" not in str(own.get("layer_types")):  # then no layer needs it
            null = [name for name in null if name != "local_attention"]
        more += [f"{layout.config_names.get(name, name)} must not be null" for name in null if name not in own]
        if problems := problems + more + _problems(values | own):
            raise ValueError("BertConfig: " + "; ".join(problems))
        if config.get("auto_map"):  # as with trust_remote_code=False
            _log.warning(
                "the checkpoint has code of its own, which is not run (auto_map is %.100r)", config["auto_map"]
            )
        return cls(**(values | own))

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of a `config.json` that transformers can read."""
        layout = checkpoint_layouts.LAYOUTS[self.model_type]
        fields = dataclasses.asdict(self)
        names = [name for name in (*_BERT_FIELDS, *layout.config_fields) if name not in _UNWRITTEN]
        values = {layout.config_names.get(name, name): fields[name] for name in names}
        return values | dialects.write(self.model_type, fields) | {"architectures": [layout.architecture]}


_BERT_FIELDS = tuple(field.name for field in dataclasses.fields(BertConfig))[:14]
_UNWRITTEN = ("rope_theta", "local_rope_theta", "rope_factor")  # `dialects.write` writes them under other names


def _one_of(name: str, value: Any, allowed: Any) -> str:
    return f"{name} must be one of {', '.join(allowed)}, got {value!r:.100}"


def _problems(values: Mapping[str, Any]) -> list[str]:
    """Returns a description of each problem with the fields of a BertConfig."""

    def is_number(value: Any) -> bool:
        # Must also be finite as a float: JSON has integers of any size.
        most = sys.float_info.max
        return isinstance(value, int | float) and not isinstance(value, bool) and -most <= value <= most

    def is_name(value: Any, names: Any) -> bool:
        return isinstance(value, str) and value in names

    if not is_name(values["model_type"], checkpoint_layouts.LAYOUTS):
        return [_one_of("model_type", values["model_type"], checkpoint_layouts.LAYOUTS)]
    names = checkpoint_layouts.LAYOUTS[values["model_type"]].config_names

    def show(name: str) -> str:
        return f"{name} ({names[name]})" if name in names else name

    problems = []
    if not is_name(values["hidden_act"], _ACTIVATIONS):
        problems.append(_one_of(show("hidden_act"), values["hidden_act"], _ACTIVATIONS))
    allowed = [*_ACTIVATIONS, "tanh"]
    if not is_name(values["classifier_activation"], allowed):
        problems.append(_one_of(show("classifier_activation"), values["classifier_activation"], allowed))
    if not is_name(values["classifier_pooling"], ("cls", "mean")):
        problems.append(_one_of("classifier_pooling", values["classifier_pooling"], ("cls", "mean")))
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        if not is_number(values[name]) or not 0 <= values[name] <= 1:
            problems.append(f"{show(name)} must be a number from 0 to 1, got {values[name]!r:.100}")
    if not is_number(values["initializer_range"]) or values["initializer_range"] < 0:
        given = values["initializer_range"]
        problems.append(f"initializer_range must be a finite number of at least 0, got {given!r:.100}")
    for name in _POSITIVE:
        if not is_number(values[name]) or values[name] <= 0:
            problems.append(f"{show(name)} must be a finite number above 0, got {values[name]!r:.100}")
    for name in _FLAGS:
        if not isinstance(values[name], bool):
            problems.append(f"{show(name)} must be true or false, got {values[name]!r:.100}")
    sizes_before = len(problems)
    for name, (least, most) in _LIMITS.items():
        value = values[name]
        if value is None and name in _OPTIONAL:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            problems.append(f"{show(name)} must be an integer from {least} to {most}, got {value!r:.100}")
    if len(problems) > sizes_before:
        return problems  # the checks below compare sizes

    width, inner, layers = values["hidden_size"], values["intermediate_size"], values["num_hidden_layers"]
    heads, positions, padding = values["num_attention_heads"], values["max_position_embeddings"], values["pad_token_id"]
    tables = values["vocab_size"] + positions + values["type_vocab_size"]
    matrices = 2 if values["activated_half"] is None else 3
    sets = 1 if values["shared_layers"] else layers
    parameters = width * (tables + width) + sets * width * (4 * width + matrices * inner)
    if parameters > _MAX_PARAMETERS:
        problems.append(f"the sizes make {parameters} parameters, at most {_MAX_PARAMETERS} are supported")
    if width % heads:
        problems.append(f"{show('hidden_size')} {width} is not divisible by {show('num_attention_heads')} {heads}")
    if padding >= values["vocab_size"]:
        problems.append(f"pad_token_id {padding} is not below vocab_size {values['vocab_size']}")
    if values["model_type"] in (*ROBERTA_TYPES, "mpnet") and positions <= padding + 1:
        problems.append(f"max_position_embeddings {positions} leaves no position after pad_token_id {padding}")
    if values["positions"] == "rotary" and width % heads == 0 and width // heads % 2:
        problems.append(f"rotary positions need an even head size, got {width // heads}")
    kinds = values["layer_types"]
    if kinds is not None and (
        not isinstance(kinds, tuple) or len(kinds) != layers or not all(is_name(kind, _LAYER_TYPES) for kind in kinds)
    ):
        problems.append(f"layer_types must name {layers} times one of {', '.join(_LAYER_TYPES)}, got {kinds!r:.100}")
    layout = checkpoint_layouts.LAYOUTS[values["model_type"]]
    defaults = {field.name: field.default for field in dataclasses.fields(BertConfig)}
    fixed = {name: value for name, value in defaults.items() if name not in (*_BERT_FIELDS, *layout.config_fields)}
    for name, value in {**fixed, **layout.facts}.items():
        if values[name] != value:
            problems.append(f"of a {values['model_type']} model {name} is always {value}, got {values[name]!r:.100}")
    for name, on_disk in layout.config_names.items():
        others = [other for other, shared in layout.config_names.items() if shared == on_disk]
        if values[name] != values[others[0]]:
            problems.append(f"{others[0]} and {name} must be equal, they are one field, {on_disk}, of config.json")
    return problems
