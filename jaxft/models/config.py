"""`BertConfig`: the validated sizes and options of an encoder, converted from and to Hugging Face's config.json."""

import dataclasses
import logging
import sys
from collections.abc import Mapping
from typing import Any, Self

from jaxft.checkpoint import layouts as checkpoint_layouts

ROBERTA_TYPES = ("roberta", "xlm-roberta", "camembert")

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
}
_MAX_PARAMETERS = 2**36

# Fields of config.json that transformers applies and jaxft refuses, with what a field would mean.
REFUSED = {
    "is_decoder": "a decoder",
    "add_cross_attention": "cross-attention",
    "quantization_config": "quantised weights",
    "per_layer_config": "layers of different sizes",
}

_log = logging.getLogger("jaxft")


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Sizes and options of an encoder, under Hugging Face's names. The defaults are the sizes of BERT-base.

    `model_type` is "bert", "roberta", "xlm-roberta", "camembert" or "distilbert". DistilBERT models use the same names
    (`hidden_size`, not `dim`); `from_dict` and `to_dict` translate them. `from_dict({"model_type": "roberta"})` returns
    the defaults of another type. The dropout rates apply to a model in training (`BertModel.train`).

    Raises:
      ValueError: values have a wrong type, are impossible or exceed a limit. The message lists all of them. The limits
        are a vocabulary of 2**24, width 2**16, feed-forward width 2**18, 1024 layers, 2**20 positions, 2**16 token
        types and 2**36 parameters.
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

    def __post_init__(self) -> None:
        if problems := _problems(dataclasses.asdict(self)):
            raise ValueError("BertConfig: " + "; ".join(problems))

    @property
    def position_offset(self) -> int:
        """Position id of the first token. RoBERTa models reserve the ids up to `pad_token_id`."""
        return self.pad_token_id + 1 if self.model_type in ROBERTA_TYPES else 0

    @property
    def activation(self) -> str:
        """Name that `jaxft.dense` has for `hidden_act`."""
        return _ACTIVATIONS[self.hidden_act]

    @property
    def max_sequence_length(self) -> int:
        """Largest number of tokens in a sequence."""
        return self.max_position_embeddings - self.position_offset

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Creates a config from the content of a Hugging Face `config.json`.

        Args:
          config: fields by name. An absent or null field gets transformers' default for the model type.
            docs/checkpoints.md lists the fields that are applied, refused and harmless.

        Raises:
          ValueError: as for `BertConfig`, or the fields describe a kind of model that is not supported.
        """
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in checkpoint_layouts.LAYOUTS:
            raise ValueError(f"BertConfig: {_one_of('model_type', model_type, checkpoint_layouts.LAYOUTS)}")
        layout = checkpoint_layouts.LAYOUTS[model_type]
        values: dict[str, Any] = {**dataclasses.asdict(cls()), **layout.config_defaults}
        for name in values:
            given = config.get(layout.config_names.get(name, name))
            if name in layout.config_aliases and config.get(name) is not None:
                given = config[name]
            values[name] = values[name] if given is None else given
        problems = [
            f"{option} is {config[option]!r:.100}; {meaning} is not supported"
            for option, meaning in REFUSED.items()
            if config.get(option)
        ]
        if config.get("position_embedding_type") not in (None, "absolute"):
            problems.append(_one_of("position_embedding_type", config["position_embedding_type"], ["absolute"]))
        if problems := problems + _problems(values):
            raise ValueError("BertConfig: " + "; ".join(problems))
        if config.get("auto_map"):  # as with trust_remote_code=False
            _log.warning(
                "the checkpoint has code of its own, which is not run (auto_map is %.100r)", config["auto_map"]
            )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of a `config.json` that transformers can read."""
        layout = checkpoint_layouts.LAYOUTS[self.model_type]
        values = {layout.config_names.get(name, name): value for name, value in dataclasses.asdict(self).items()}
        return values | {"architectures": [layout.architecture]}


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
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        if not is_number(values[name]) or not 0 <= values[name] <= 1:
            problems.append(f"{show(name)} must be a number from 0 to 1, got {values[name]!r:.100}")
    if not is_number(values["initializer_range"]) or values["initializer_range"] < 0:
        given = values["initializer_range"]
        problems.append(f"initializer_range must be a finite number of at least 0, got {given!r:.100}")
    if not is_number(values["layer_norm_eps"]) or values["layer_norm_eps"] <= 0:
        problems.append(f"layer_norm_eps must be a finite number above 0, got {values['layer_norm_eps']!r:.100}")
    sizes_before = len(problems)
    for name, (least, most) in _LIMITS.items():
        value = values[name]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            problems.append(f"{show(name)} must be an integer from {least} to {most}, got {value!r:.100}")
    if len(problems) > sizes_before:
        return problems  # the checks below compare sizes

    width, inner, layers = values["hidden_size"], values["intermediate_size"], values["num_hidden_layers"]
    heads, positions, padding = values["num_attention_heads"], values["max_position_embeddings"], values["pad_token_id"]
    tables = values["vocab_size"] + positions + values["type_vocab_size"]
    parameters = width * (tables + width) + layers * width * (4 * width + 2 * inner)
    if parameters > _MAX_PARAMETERS:
        problems.append(f"the sizes make {parameters} parameters, at most {_MAX_PARAMETERS} are supported")
    if width % heads:
        problems.append(f"{show('hidden_size')} {width} is not divisible by {show('num_attention_heads')} {heads}")
    if padding >= values["vocab_size"]:
        problems.append(f"pad_token_id {padding} is not below vocab_size {values['vocab_size']}")
    if values["model_type"] in ROBERTA_TYPES and positions <= padding + 1:
        problems.append(f"max_position_embeddings {positions} leaves no position after pad_token_id {padding}")
    if values["model_type"] == "distilbert" and (values["type_vocab_size"], values["layer_norm_eps"]) != (0, 1e-12):
        problems.append("of a DistilBERT model type_vocab_size must be 0 and layer_norm_eps 1e-12, as they are fixed")
    return problems
