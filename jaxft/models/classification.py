"""Encoders of all model types with a head for classes of a text, a score, or labels of tokens."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jaxft.checkpoint import files as checkpoint_files
from jaxft.dropout import dropout
from jaxft.models import inputs
from jaxft.models.bert import value
from jaxft.models.config import ROBERTA_TYPES, BertConfig
from jaxft.models.dropout import head_keys
from jaxft.models.heads import EncoderWithHead
from jaxft.models.pooling import first_tokens, pool, pool_packed
from jaxft.ops import checks
from jaxft.ops.layer_norm import layer_norm

_MAX_LABELS = 2**20
# Task and type -> the field of config.json that holds the dropout rate of the head, if it is not `classifier_dropout`,
# and transformers' default, if it is not `hidden_dropout_prob`. Without a field, the rate is always that default.
_RATES: Mapping[tuple[str, str], tuple[str | None, float | None]] = {
    ("ForSequenceClassification", "mpnet"): (None, None),
    ("ForTokenClassification", "mpnet"): (None, None),
    ("ForTokenClassification", "deberta-v2"): (None, None),
    ("ForTokenClassification", "distilbert"): (None, None),
    ("ForSequenceClassification", "distilbert"): ("seq_classif_dropout", 0.2),
    ("ForSequenceClassification", "deberta-v2"): ("cls_dropout", None),
    ("ForSequenceClassification", "albert"): ("classifier_dropout_prob", 0.1),
    ("ForTokenClassification", "albert"): ("classifier_dropout_prob", 0.1),
}

# Fields of config.json that give the logits their meaning. They are saved as they were read.
_MEANING = ("problem_type", "sentence_transformers", "sbert_ce_default_activation_function")


@dataclasses.dataclass(frozen=True)
class _Labels:
    """Names of labels. Flax would look at each item of a tuple that is an attribute: 2 s for 66,000 labels."""

    names: tuple[str, ...]


class _Classifier(EncoderWithHead):
    """Base class of models with labels: names of the labels, dropout of the head, reading and writing."""

    def __init__(
        self,
        config: BertConfig,
        *,
        num_labels: int | None = None,
        id2label: Mapping[int, str] | Sequence[str] | None = None,
        classifier_dropout: float | None = None,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        remat: bool = False,
        rngs: nnx.Rngs | None,
    ) -> None:
        # Checked before the encoder is initialised, so that a wrong argument costs no time and memory.
        self._labels = _Labels(_label_names(type(self).__name__, num_labels, id2label))
        self.classifier_dropout = _rate(type(self).__name__, "classifier_dropout", classifier_dropout)
        self._meaning = "{}"  # JSON, since static attributes of a module must be hashable
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "implementation": implementation}
        super().__init__(config, **options, remat=remat, rngs=rngs)

    @property
    def num_labels(self) -> int:
        """Number of labels."""
        return len(self._labels.names)

    @property
    def id2label(self) -> dict[int, str]:
        """Name of each label by its number."""
        return dict(enumerate(self._labels.names))

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of `config.json` about the head: labels, dropout rate and what a checkpoint says of its logits."""
        labels = {"id2label": self.id2label, "label2id": {label: number for number, label in self.id2label.items()}}
        field, _ = _rate_field(self._TASK, self.config.model_type)
        rate = {} if field is None or self.classifier_dropout is None else {field: self.classifier_dropout}
        return labels | rate | json.loads(self._meaning)

    @property
    def _head_rate(self) -> float:
        """Dropout rate of the head, with the defaults of transformers."""
        if self.classifier_dropout is not None:
            return self.classifier_dropout
        default = _rate_field(self._TASK, self.config.model_type)[1]
        return self.config.hidden_dropout_prob if default is None else default

    def _encode(
        self, *ids: Any, deterministic: bool | None, rngs: nnx.Rngs | Array | None, **packing: Any
    ) -> tuple[Array, Array | None]:
        """Returns the hidden states, and two keys for dropout in the head (None without dropout)."""
        key = self.bert._dropout_key(deterministic, rngs, classifier_dropout=self._head_rate)
        hidden = self.bert(*ids, **packing, deterministic=key is None, rngs=key).last_hidden_state
        return hidden, None if key is None else head_keys(key)

    @classmethod
    def _head_options(cls, settings: dict[str, Any], config: BertConfig, given: dict[str, Any]) -> dict[str, Any]:
        # As in transformers: the labels of `id2label`, else `num_labels` unnamed labels, else two.
        id2label = settings.get("id2label")
        if isinstance(id2label, dict):  # in files, names may be integers
            id2label = {number: str(name) if isinstance(name, int) else name for number, name in id2label.items()}
        labels = _label_names(cls.__name__, settings.get("num_labels") if id2label is None else None, id2label)
        field, _ = _rate_field(cls._TASK, config.model_type)
        rate = None if field is None else _rate(cls.__name__, field, settings.get(field))
        has_other_labels = given.get("id2label") is not None or given.get("num_labels") not in (None, len(labels))
        return {"classifier_dropout": rate} | given | ({} if has_other_labels else {"id2label": labels})

    def _keep_settings(self, settings: dict[str, Any], folder: Path) -> None:
        meaning = {name: settings[name] for name in _MEANING if settings.get(name) is not None}
        # sentence-transformers prefers the activation in its own file. Here it goes to config.json, the older place.
        file = folder / "config_sentence_transformers.json"
        saved = checkpoint_files.read_settings(file) if os.path.lexists(folder / "modules.json") else {}
        if saved.get("model_type") == "CrossEncoder" and saved.get("activation_fn") is not None:
            meaning["sentence_transformers"] = {"activation_fn": saved["activation_fn"]}
        self._meaning = json.dumps(meaning, sort_keys=True, allow_nan=False)  # sorted: equal settings make equal models


# Types whose classifiers of texts have dropout on the input of the head too.
_DROPS_INPUT = (*ROBERTA_TYPES, "mpnet", "electra", "jina_embeddings_v3")


class HiddenHead(nnx.Module):
    """Dense layer with an activation and, in ModernBERT, a LayerNorm: all of a head but its last layer."""

    def __init__(self, options: Any, rngs: nnx.Rngs | None) -> None:
        self.options, config = options, options.config
        width = config.hidden_size
        self.dense_kernel = options.normal(rngs, width, width)
        self.dense_bias = options.zeros(rngs, width) if config.classifier_bias else None
        self.norm_gamma, self.norm_beta = options.norm(rngs, width, exists=config.classifier_norm)

    def hidden(self, x: Array) -> Array:
        """Computes `[..., D]` from `x` `[..., D]`."""
        config, implementation = self.options.config, self.options.implementation
        x = self.options.dense(x, self.dense_kernel, self.dense_bias, config.head_activation)
        if self.norm_gamma is None:
            return x
        gamma, beta = self.norm_gamma[...], value(self.norm_beta)
        return layer_norm(x, gamma, beta, epsilon=config.layer_norm_eps, implementation=implementation)


class ClassificationHead(HiddenHead):
    """Two dense layers on one vector of a text. Checkpoints of BERT name the first layer the pooler."""

    def __init__(self, options: Any, num_labels: int, rngs: nnx.Rngs | None) -> None:
        super().__init__(options, rngs)
        self.out_kernel = options.normal(rngs, options.config.hidden_size, num_labels)
        self.out_bias = options.zeros(rngs, num_labels)

    def __call__(self, x: Array, *, dropout_rate: float = 0.0, dropout_rng: Array | None = None) -> Array:
        """Computes the logits `[B, num_labels]` from vectors `[B, D]`. `dropout_rng` holds two random keys."""
        x = self.features(x, dropout_rate=dropout_rate, dropout_rng=dropout_rng)
        return self.options.dense(x, self.out_kernel, self.out_bias)

    def features(self, x: Array, *, dropout_rate: float = 0.0, dropout_rng: Array | None = None) -> Array:
        """Computes the input of the second layer, `[B, D]`, from the same arguments as the logits."""
        of_input, of_inner = (None, None) if dropout_rng is None else dropout_rng
        if self.options.config.model_type in _DROPS_INPUT:
            x = dropout(x, dropout_rate, of_input)
        return dropout(self.hidden(x), dropout_rate, of_inner)


class BertForSequenceClassification(_Classifier):
    """An encoder with a head on its first token (or on the mean), for logits of classes of a text, or one score.

    The network equals transformers' class of the same name (`RobertaForSequenceClassification` and so on for the other
    types). Call and train the model like `BertModel`.

    `from_pretrained` takes the labels from `id2label` in `config.json`. Without `id2label` there are `num_labels`
    unnamed labels, and without both there are two, as in transformers. To start from the checkpoint of an encoder, pass
    labels and `rngs`::

        names = ["negative", "positive"]
        model = BertForSequenceClassification.from_pretrained(folder, id2label=names, rngs=nnx.Rngs(0))

    For a model from a checkpoint, `settings` also holds `problem_type` and the fields of sentence-transformers in
    `config.json`, and `save_pretrained` writes them again. If any parameter of the head is new, these fields are
    dropped.

    A call returns the logits, `[B, num_labels]`. The `labels` of `loss` are `[B]`: the number of each sequence's label.
    A packed sequence without tokens should have no label.

    `BertModel` describes the other arguments. All but `remat` also apply to the head.

    Args:
      num_labels: number of logits, at most 2**20. None is the number of names in `id2label`, or 2 without `id2label`.
      id2label: names of the labels, in order or by number. None is "LABEL_0", "LABEL_1", ...
      classifier_dropout: dropout rate of the head. None is `config.hidden_dropout_prob`; 0.2 in DistilBERT, 0.1 in
        ALBERT. MPNet's config.json has no field for it: there the rate is not saved.

    Attributes:
      bert: the `BertModel`. It has no pooler: the pooler is the first layer of the head.
      head: `dense_kernel` `[D, D]`, `dense_bias` `[D]`, `out_kernel` `[D, num_labels]`, `out_bias` `[num_labels]`.

    Raises:
      TypeError: as for `BertModel`.
      ValueError: as for `BertModel`; `num_labels`, `id2label` or `classifier_dropout` has a wrong type or an impossible
        value; or `num_labels` and `id2label` contradict each other.
    """

    _TASK = "ForSequenceClassification"
    _LABELS_TOKENS = False

    def _add_head(self, rngs: nnx.Rngs | None) -> None:
        self.head = ClassificationHead(self.bert.embeddings.options, self.num_labels, rngs)

    def _features(self, *ids: Any, cu_seqlens: ArrayLike | None, **call: Any) -> Array:
        hidden, keys = self._encode(*ids, cu_seqlens=cu_seqlens, **call)
        starts = None if cu_seqlens is None else inputs.as_ids("BertModel", "cu_seqlens", cu_seqlens)
        if self.config.classifier_pooling == "cls":
            vectors = first_tokens(hidden, starts)
        else:
            vectors = _mean(hidden, ids[1] if len(ids) > 1 else None, starts, call.get("max_seqlen"))
        return self.head.features(vectors, dropout_rate=self._head_rate, dropout_rng=keys)

    def _logits(self, x: Array) -> Array:
        return self.bert.embeddings.options.dense(x, self.head.out_kernel, self.head.out_bias)

    def _classes(self) -> tuple[Array, Array]:
        return self.head.out_kernel[...].T, self.head.out_bias[...]

    def _check_labels(self, input_ids: ArrayLike, labels: ArrayLike, cu_seqlens: ArrayLike | None) -> Array:
        where = type(self).__name__
        problem_type = self.settings.get("problem_type", "single_label_classification")
        if self.num_labels == 1 or problem_type != "single_label_classification":
            raise ValueError(
                f"{where}: loss is for num_labels above 1 and problem_type 'single_label_classification', got "
                f"{self.num_labels} and {problem_type!r:.100}; take another loss of the logits"
            )
        ids, labels = inputs.as_ids("BertModel", "input_ids", input_ids), inputs.as_ids(where, "labels", labels)
        starts = None if cu_seqlens is None else inputs.as_ids("BertModel", "cu_seqlens", cu_seqlens)
        if starts is None or starts.shape[:1] > (0,):  # BertModel rejects other shapes
            checks.check_shape(where, "labels", labels, ids.shape[:1] if starts is None else (starts.size - 1,))
        return labels


def _mean(hidden: Array, mask: ArrayLike | None, starts: Array | None, max_seqlen: Any) -> Array:
    """Returns the mean `[B, D]` of the hidden states of each text, in their dtype."""
    wide = hidden.astype(jnp.float32)
    if starts is not None:
        return pool_packed(wide, starts, ("mean",), max_seqlen).astype(hidden.dtype)
    keep = jnp.ones(hidden.shape[:2], bool) if mask is None else jnp.asarray(mask).astype(bool)
    return pool(wide, keep, ("mean",)).astype(hidden.dtype)


class TokenClassificationHead(HiddenHead):
    """Dense layer on each token, with dropout on its input. In ModernBERT, the layers of `HiddenHead` come before."""

    def __init__(self, options: Any, num_labels: int, rngs: nnx.Rngs | None) -> None:
        self.options = options
        if options.config.classifier_norm:
            super().__init__(options, rngs)
        self.kernel = options.normal(rngs, options.config.hidden_size, num_labels)
        self.bias = options.zeros(rngs, num_labels)

    def __call__(self, x: Array, *, dropout_rate: float = 0.0, dropout_rng: Array | None = None) -> Array:
        """Computes the logits `[..., num_labels]` from `x` `[..., D]`."""
        x = self.features(x, dropout_rate=dropout_rate, dropout_rng=dropout_rng)
        return self.options.dense(x, self.kernel, self.bias)

    def features(self, x: Array, *, dropout_rate: float = 0.0, dropout_rng: Array | None = None) -> Array:
        """Computes the input of the dense layer, `[..., D]`: `x` after dropout."""
        if self.options.config.classifier_norm:
            x = self.hidden(x)
        # The backward pass recomputes the dropout mask, so that the mask is not stored.
        return jax.checkpoint(lambda x: dropout(x, dropout_rate, dropout_rng))(x)


class BertForTokenClassification(_Classifier):
    """An encoder with a dense layer on each token, for logits of each token's labels.

    The network equals transformers' class of the same name (`RobertaForTokenClassification` and so on for the other
    types). Call and train the model like `BertModel`. Labels and `settings` are read and written as in
    `BertForSequenceClassification`, which also describes the arguments and errors.

    A call returns the logits, `[B, T, num_labels]`, or `[M, num_labels]` for packed sequences. The `labels` of `loss`
    have the shape of `input_ids`: the number of each token's label, or -100 for a token without a label (padding, and
    all but the first token of a word). Rows that belong to no packed sequence have no label.

    Args:
      classifier_dropout: dropout rate before the dense layer. None is `config.hidden_dropout_prob`; 0.1 in ALBERT.
        The config.json of MPNet, DistilBERT and DeBERTa has no field for it: there the rate is not saved.

    Attributes:
      bert: the `BertModel`. It has no pooler.
      classifier: `kernel` `[D, num_labels]`, `bias` `[num_labels]`.
    """

    _TASK = "ForTokenClassification"

    def _add_head(self, rngs: nnx.Rngs | None) -> None:
        self.classifier = TokenClassificationHead(self.bert.embeddings.options, self.num_labels, rngs)

    def _features(self, *ids: Any, **call: Any) -> Array:
        hidden, keys = self._encode(*ids, **call)
        key = None if keys is None else keys[0]
        return self.classifier.features(hidden, dropout_rate=self._head_rate, dropout_rng=key)

    def _logits(self, x: Array) -> Array:
        return self.bert.embeddings.options.dense(x, self.classifier.kernel, self.classifier.bias)

    def _classes(self) -> tuple[Array, Array]:
        return self.classifier.kernel[...].T, self.classifier.bias[...]

    def _check_labels(self, input_ids: ArrayLike, labels: ArrayLike, cu_seqlens: ArrayLike | None) -> Array:
        if self.num_labels == 1:
            where = type(self).__name__
            raise ValueError(f"{where}: loss is for num_labels above 1, got 1; take another loss of the logits")
        return super()._check_labels(input_ids, labels, cu_seqlens)


def _rate_field(task: str, model_type: str) -> tuple[str | None, float | None]:
    """Returns the field of config.json that holds the dropout rate of the head, and its own default, or None."""
    if task == "ForQuestionAnswering":
        return {"distilbert": ("qa_dropout", 0.1), "modernbert": ("classifier_dropout", 0.0)}.get(
            model_type, (None, 0.0)
        )
    return _RATES.get((task, model_type), ("classifier_dropout", None))


def _rate(where: str, name: str, rate: Any) -> float | None:
    """Checks the dropout rate of the head and returns it as a float, or None."""
    if rate is None:
        return None
    if not checks.is_number(rate) or not 0 <= rate < 1:
        raise ValueError(f"{where}: {name} must be None or a number in [0, 1), got {rate!r:.100}")
    return float(rate)


def _label_names(where: str, num_labels: Any, id2label: Any) -> tuple[str, ...]:
    """Checks `num_labels` and `id2label` (arguments or fields of a config.json) and returns the label names."""
    count = 2 if num_labels is None else num_labels
    if not checks.is_natural(count) or not 1 <= count <= _MAX_LABELS:
        raise ValueError(f"{where}: num_labels must be an integer from 1 to {_MAX_LABELS}, got {count!r:.100}")
    if id2label is None:
        return tuple(f"LABEL_{number}" for number in range(count))
    names = tuple(id2label) if isinstance(id2label, list | tuple) else ()
    if isinstance(id2label, Mapping):
        given = {str(number): name for number, name in id2label.items()}  # a config.json has strings as keys
        names = tuple(given.get(str(number)) for number in range(len(given)))
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where}: id2label must name the labels from 0 on, each by a string, got {id2label!r:.100}")
    if num_labels not in (None, len(names)):
        raise ValueError(f"{where}: num_labels is {num_labels!r:.100}, but id2label names {len(names)} labels")
    return names
