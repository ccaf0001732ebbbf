"""BERT, RoBERTa and DistilBERT encoders with a head: classes of a text, a score of a pair of texts, tokens' labels."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jaxft.dropout import dropout
from jaxft.models import inputs
from jaxft.models.config import ROBERTA_TYPES, BertConfig
from jaxft.models.heads import EncoderWithHead, labels_in_use
from jaxft.models.pooling import first_tokens
from jaxft.ops import checks
from jaxft.ops.cross_entropy import CrossEntropy, linear_cross_entropy
from jaxft.ops.dense import dense

_MAX_LABELS = 2**20
_SEQ_CLASSIF_DROPOUT = 0.2  # the default in a DistilBERT's config.json

# Fields of config.json that say what the logits mean; saved as they were read.
_MEANING = ("problem_type", "sentence_transformers", "sbert_ce_default_activation_function")


class _Classifier(EncoderWithHead):
    """What models with labels share: the labels' names, the head's dropout, and how they are read and written."""

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
        # Before the encoder is initialised: what is refused takes no time and memory.
        self._labels = _label_names(type(self).__name__, num_labels, id2label)
        self.classifier_dropout = _rate(type(self).__name__, "classifier_dropout", classifier_dropout)
        self._meaning = "{}"  # static attributes of a module must be hashable: no dictionaries
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "implementation": implementation}
        super().__init__(config, **options, remat=remat, rngs=rngs)

    @property
    def num_labels(self) -> int:
        """How many labels there are."""
        return len(self._labels)

    @property
    def id2label(self) -> dict[int, str]:
        """The labels' names by their number."""
        return dict(enumerate(self._labels))

    @property
    def settings(self) -> dict[str, Any]:
        """What `config.json` has about the head: labels, rate of dropout, and of a checkpoint what its logits mean."""
        labels = {"id2label": self.id2label, "label2id": {label: number for number, label in self.id2label.items()}}
        rate = {_rate_field(self._TASK, self.config.model_type): self.classifier_dropout}
        return labels | (rate if self.classifier_dropout is not None else {}) | json.loads(self._meaning)

    @property
    def _head_rate(self) -> float:
        """Of dropout in the head, as in transformers."""
        if self.classifier_dropout is not None:
            return self.classifier_dropout
        own_default = _rate_field(self._TASK, self.config.model_type) == "seq_classif_dropout"
        return _SEQ_CLASSIF_DROPOUT if own_default else self.config.hidden_dropout_prob

    def _encode(
        self, *ids: Any, deterministic: bool | None, rngs: nnx.Rngs | Array | None, **packing: Any
    ) -> tuple[Array, Array | None]:
        """The hidden states, and for dropout in the head two keys."""
        key = self.bert._dropout_key(deterministic, rngs, classifier_dropout=self._head_rate)
        hidden = self.bert(*ids, **packing, deterministic=key is None, rngs=key).last_hidden_state
        return hidden, None if key is None else dropout.head_keys(key)

    @classmethod
    def _head_options(cls, settings: dict[str, Any], config: BertConfig, given: dict[str, Any]) -> dict[str, Any]:
        # As transformers has it: the labels of `id2label`, else `num_labels` unnamed ones, else two.
        id2label = settings.get("id2label")
        labels = _label_names(cls.__name__, settings.get("num_labels") if id2label is None else None, id2label)
        field = _rate_field(cls._TASK, config.model_type)
        rate = _rate(cls.__name__, field, settings.get(field))
        has_other_labels = given.get("id2label") is not None or given.get("num_labels") not in (None, len(labels))
        return {"classifier_dropout": rate} | given | ({} if has_other_labels else {"id2label": labels})

    def _keep_settings(self, settings: dict[str, Any]) -> None:
        meaning = {name: settings[name] for name in _MEANING if settings.get(name) is not None}
        self._meaning = json.dumps(meaning, sort_keys=True)  # models that mean the same are equal


class ClassificationHead(nnx.Module):
    """Two dense layers on a sequence's first token, tanh between them, or relu in DistilBERT.

    BERT's first layer is what checkpoints call the pooler. Dropout is on the input of the second, in RoBERTa on that of
    both.
    """

    def __init__(self, options: Any, num_labels: int, rngs: nnx.Rngs | None) -> None:
        self.options, width = options, options.config.hidden_size
        self.activation = "relu" if options.config.model_type == "distilbert" else "tanh"
        self.dense_kernel, self.dense_bias = options.normal(rngs, width, width), options.zeros(rngs, width)
        self.out_kernel = options.normal(rngs, width, num_labels)
        self.out_bias = options.zeros(rngs, num_labels)

    def __call__(self, x: Array, *, dropout_rate: float = 0.0, dropout_rng: Array | None = None) -> Array:
        """`x` `[B, D]`, the first tokens -> `[B, num_labels]`; `dropout_rng` are two random keys."""
        x = self.features(x, dropout_rate=dropout_rate, dropout_rng=dropout_rng)
        kernel = self.out_kernel[...].astype(self.options.dtype)
        return dense(x, kernel, self.out_bias[...], implementation=self.options.implementation)

    def features(self, x: Array, *, dropout_rate: float = 0.0, dropout_rng: Array | None = None) -> Array:
        """`[B, D]`, what the second layer makes logits of."""
        of_input, of_inner = (None, None) if dropout_rng is None else dropout_rng
        if self.options.config.model_type in ROBERTA_TYPES:
            x = dropout(x, dropout_rate, of_input)
        kernel, implementation = self.dense_kernel[...].astype(self.options.dtype), self.options.implementation
        x = dense(x, kernel, self.dense_bias[...], activation=self.activation, implementation=implementation)
        return dropout(x, dropout_rate, of_inner)


class BertForSequenceClassification(_Classifier):
    """A BERT, RoBERTa or DistilBERT encoder and a head on its first token: logits of classes, or one score.

    The same network as transformers' classes of that name (`RobertaForSequenceClassification` and so on for the other
    types). Used in `nnx.jit` and `jax.jit`, and trained with dropout (`train()`, `eval()`), as `BertModel`.

    The labels that `from_pretrained` takes are those of `id2label` in `config.json`, else `num_labels` unnamed ones,
    else two, as transformers has it. To begin with the checkpoint of an encoder, give it labels and `rngs`::

        names = ["negative", "positive"]
        model = BertForSequenceClassification.from_pretrained(folder, id2label=names, rngs=nnx.Rngs(0))

    Of a checkpoint's `config.json`, `settings` keeps `problem_type` and what sentence-transformers has there, unless
    parameters of the head are new, and `save_pretrained` writes them again.

    Args:
      config: sizes and options of the encoder.
      num_labels: how many logits there are, at most 2**20; None is as many as `id2label` has, or else 2.
      id2label: the labels' names, in order or by their number; None is "LABEL_0", "LABEL_1", ...
      classifier_dropout: the rate of dropout in the head; None is `config.hidden_dropout_prob`, in DistilBERT 0.2.
      dtype, param_dtype, implementation, remat: as for `BertModel`; those that concern it hold for the head too.
      rngs: random numbers for the initial parameters, as for `BertModel`; those of the head are made as the encoder's.

    Attributes:
      bert: the `BertModel`. It has no pooler: that is the head's first layer.
      head: `dense_kernel` `[D, D]`, `dense_bias` `[D]`, `out_kernel` `[D, num_labels]`, `out_bias` `[num_labels]`.

    Raises:
      ValueError: `num_labels`, `id2label` or `classifier_dropout` is of a wrong type or impossible, or the first two
        contradict each other.
    """

    _TASK = "ForSequenceClassification"

    def _add_head(self, rngs: nnx.Rngs | None) -> None:
        self.head = ClassificationHead(self.bert.embeddings.options, self.num_labels, rngs)

    def __call__(
        self,
        input_ids: ArrayLike,
        attention_mask: ArrayLike | None = None,
        token_type_ids: ArrayLike | None = None,
        position_ids: ArrayLike | None = None,
        *,
        cu_seqlens: ArrayLike | None = None,
        max_seqlen: int | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | Array | None = None,
    ) -> Array:
        """Computes the logits.

        Args:
          input_ids, attention_mask, token_type_ids, position_ids: as for `BertModel`, `[B, T]`, or packed `[M]`.
          cu_seqlens, max_seqlen: of packed sequences, as for `BertModel`: sequence b's first token is
            `cu_seqlens[b]`. The logits of a sequence without tokens mean nothing.
          deterministic, rngs: of dropout, as for `BertModel`.

        Returns:
          `[B, num_labels]` in the model's `dtype`.

        Raises:
          TypeError, ValueError: as `BertModel`.

        Gradients: of all parameters.
        """
        first, dropped = self._first(
            input_ids, attention_mask, token_type_ids, position_ids,
            cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, deterministic=deterministic, rngs=rngs,
        )  # fmt: skip
        return self.head(first, **dropped)

    def loss(
        self,
        input_ids: ArrayLike,
        labels: ArrayLike,
        attention_mask: ArrayLike | None = None,
        token_type_ids: ArrayLike | None = None,
        position_ids: ArrayLike | None = None,
        *,
        cu_seqlens: ArrayLike | None = None,
        max_seqlen: int | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | Array | None = None,
    ) -> CrossEntropy:
        """The cross-entropy of the sequences' labels; its logits are float32 in every `dtype`.

        Args:
          labels: integers `[B]`, the number of each sequence's label, or -100 where it has none.
          input_ids, attention_mask, token_type_ids, position_ids: as for `BertModel`, `[B, T]`, or packed `[M]`.
          cu_seqlens, max_seqlen, deterministic, rngs: likewise. A sequence without tokens should have no label.

        Returns:
          What `jaxft.linear_cross_entropy` returns: the tuple (total, labelled), whose property `mean` is the loss
          that transformers returns, and 0 where there is no label.

        Raises:
          TypeError: as `BertModel`, or `labels` is not of integers.
          ValueError: as `BertModel`, or `labels` has a wrong shape; or the model does not tell classes apart: it has
            one label, a score, or its checkpoint's `problem_type` is another. Take a loss of the logits then.

        Gradients: of all parameters. A label that is none of the model's makes the loss NaN.
        """
        where = "BertForSequenceClassification"
        problem_type = self.settings.get("problem_type", "single_label_classification")
        if self.num_labels == 1 or problem_type != "single_label_classification":
            raise ValueError(
                f"{where}: loss is for num_labels above 1 and problem_type 'single_label_classification', got "
                f"{self.num_labels} and {problem_type!r:.100}; take another loss of the logits"
            )
        ids, labels = inputs.as_ids("BertModel", "input_ids", input_ids), inputs.as_ids(where, "labels", labels)
        starts = None if cu_seqlens is None else inputs.as_ids("BertModel", "cu_seqlens", cu_seqlens)
        if starts is None or starts.shape[:1] > (0,):  # the others are for BertModel to refuse
            checks.check_shape(where, "labels", labels, ids.shape[:1] if starts is None else (starts.size - 1,))
        first, dropped = self._first(
            input_ids, attention_mask, token_type_ids, position_ids,
            cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, deterministic=deterministic, rngs=rngs,
        )  # fmt: skip
        x = self.head.features(first, **dropped)
        return linear_cross_entropy(x, self.head.out_kernel[...].T, labels, self.head.out_bias[...])

    def _first(self, *ids: Any, cu_seqlens: ArrayLike | None, **options: Any) -> tuple[Array, dict[str, Any]]:
        """The hidden states of the first tokens, and the arguments for dropout in the head."""
        hidden, keys = self._encode(*ids, cu_seqlens=cu_seqlens, **options)
        first = first_tokens(hidden, None if cu_seqlens is None else jnp.asarray(cu_seqlens))
        return first, {"dropout_rate": self._head_rate, "dropout_rng": keys}


class TokenClassificationHead(nnx.Module):
    """A dense layer on each token, with dropout on its input."""

    def __init__(self, options: Any, num_labels: int, rngs: nnx.Rngs | None) -> None:
        self.options = options
        self.kernel = options.normal(rngs, options.config.hidden_size, num_labels)
        self.bias = options.zeros(rngs, num_labels)

    def __call__(self, x: Array, *, dropout_rate: float = 0.0, dropout_rng: Array | None = None) -> Array:
        """`x` `[..., D]` -> `[..., num_labels]`; `dropout_rng` is a random key."""
        x = self.features(x, dropout_rate=dropout_rate, dropout_rng=dropout_rng)
        kernel = self.kernel[...].astype(self.options.dtype)
        return dense(x, kernel, self.bias[...], implementation=self.options.implementation)

    def features(self, x: Array, *, dropout_rate: float = 0.0, dropout_rng: Array | None = None) -> Array:
        """`[..., D]`, what the layer makes logits of."""
        # What is dropped is computed again in the backward pass, not kept.
        return jax.checkpoint(lambda x: dropout(x, dropout_rate, dropout_rng))(x)


class BertForTokenClassification(_Classifier):
    """A BERT, RoBERTa or DistilBERT encoder and a dense layer on each token: logits of a label for every token.

    The same network as transformers' classes of that name (`RobertaForTokenClassification` and so on for the other
    types). Used in `nnx.jit` and `jax.jit`, and trained with dropout (`train()`, `eval()`), as `BertModel`. Labels and
    `settings` are read and written as those of `BertForSequenceClassification`.

    Args:
      config: sizes and options of the encoder.
      num_labels, id2label: as for `BertForSequenceClassification`.
      classifier_dropout: the rate of dropout before the dense layer; None is `config.hidden_dropout_prob`.
      dtype, param_dtype, implementation, remat, rngs: as for `BertForSequenceClassification`.

    Attributes:
      bert: the `BertModel`. It has no pooler.
      classifier: `kernel` `[D, num_labels]`, `bias` `[num_labels]`.

    Raises:
      ValueError: as `BertForSequenceClassification`.
    """

    _TASK = "ForTokenClassification"

    def _add_head(self, rngs: nnx.Rngs | None) -> None:
        self.classifier = TokenClassificationHead(self.bert.embeddings.options, self.num_labels, rngs)

    def __call__(
        self,
        input_ids: ArrayLike,
        attention_mask: ArrayLike | None = None,
        token_type_ids: ArrayLike | None = None,
        position_ids: ArrayLike | None = None,
        *,
        cu_seqlens: ArrayLike | None = None,
        max_seqlen: int | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | Array | None = None,
    ) -> Array:
        """Computes the logits.

        Args:
          input_ids, attention_mask, token_type_ids, position_ids: as for `BertModel`, `[B, T]`, or packed `[M]`.
          cu_seqlens, max_seqlen: of packed sequences, as for `BertModel`.
          deterministic, rngs: of dropout, as for `BertModel`.

        Returns:
          `[B, T, num_labels]`, of packed tokens `[M, num_labels]`, in the model's `dtype`. Those of tokens that are
          masked, or of rows that belong to no sequence, mean nothing.

        Raises:
          TypeError, ValueError: as `BertModel`.

        Gradients: of all parameters.
        """
        hidden, keys = self._encode(
            input_ids, attention_mask, token_type_ids, position_ids,
            cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, deterministic=deterministic, rngs=rngs,
        )  # fmt: skip
        return self.classifier(hidden, dropout_rate=self._head_rate, dropout_rng=None if keys is None else keys[0])

    def loss(
        self,
        input_ids: ArrayLike,
        labels: ArrayLike,
        attention_mask: ArrayLike | None = None,
        token_type_ids: ArrayLike | None = None,
        position_ids: ArrayLike | None = None,
        *,
        cu_seqlens: ArrayLike | None = None,
        max_seqlen: int | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | Array | None = None,
    ) -> CrossEntropy:
        """The cross-entropy of the tokens' labels; its logits are float32 in every `dtype`.

        Args:
          labels: integers of the shape of `input_ids`, the number of each token's label, or -100 where it has none, as
            in padding and in a word's further tokens. Of packed tokens, rows that take no part in a sequence have no
            label, whatever is given there.
          input_ids, attention_mask, token_type_ids, position_ids: as for `BertModel`, `[B, T]`, or packed `[M]`.
          cu_seqlens, max_seqlen, deterministic, rngs: likewise.

        Returns:
          As `BertForSequenceClassification.loss`.

        Raises:
          TypeError, ValueError: as `BertModel`, or `labels` is not of integers, or has a wrong shape; or the model
            has one label only.

        Gradients: of all parameters. A label that is none of the model's makes the loss NaN.
        """
        where = "BertForTokenClassification"
        if self.num_labels == 1:
            raise ValueError(f"{where}: loss is for num_labels above 1, got 1; take another loss of the logits")
        shape = inputs.as_ids("BertModel", "input_ids", input_ids).shape
        labels_of_all = inputs.as_ids(where, "labels", labels, shape)
        hidden, keys = self._encode(
            input_ids, attention_mask, token_type_ids, position_ids,
            cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, deterministic=deterministic, rngs=rngs,
        )  # fmt: skip
        key = None if keys is None else keys[0]
        x = self.classifier.features(hidden, dropout_rate=self._head_rate, dropout_rng=key)
        used = labels_in_use(labels_of_all, cu_seqlens, max_seqlen)
        return linear_cross_entropy(x, self.classifier.kernel[...].T, used, self.classifier.bias[...])


def _rate_field(task: str, model_type: str) -> str:
    """The field of config.json that has the head's rate of dropout."""
    own_field = (task, model_type) == ("ForSequenceClassification", "distilbert")
    return "seq_classif_dropout" if own_field else "classifier_dropout"


def _rate(where: str, name: str, rate: Any) -> float | None:
    """The head's rate of dropout, once it is right."""
    if rate is None:
        return None
    if not checks.is_number(rate) or not 0 <= rate < 1:
        raise ValueError(f"{where}: {name} must be None or a number in [0, 1), got {rate!r:.100}")
    return float(rate)


def _label_names(where: str, num_labels: Any, id2label: Any) -> tuple[str, ...]:
    """The labels' names, once the two arguments (or fields of a config.json) are right."""
    count = 2 if num_labels is None else num_labels
    if not checks.is_natural(count) or not 1 <= count <= _MAX_LABELS:
        raise ValueError(f"{where}: num_labels must be an integer from 1 to {_MAX_LABELS}, got {count!r:.100}")
    if id2label is None:
        return tuple(f"LABEL_{number}" for number in range(count))
    id2label = dict(enumerate(id2label)) if isinstance(id2label, list | tuple) else id2label
    names = {str(number): name for number, name in id2label.items()} if isinstance(id2label, Mapping) else {}
    numbers = [str(number) for number in range(len(names))]  # a config.json has them as strings
    if not names or names.keys() != set(numbers) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{where}: id2label must name the labels from 0 on, each by a string, got {id2label!r:.100}")
    if num_labels not in (None, len(names)):
        raise ValueError(f"{where}: num_labels is {num_labels!r:.100}, but id2label names {len(names)} labels")
    return tuple(names[number] for number in numbers)
