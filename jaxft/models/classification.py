"""BERT, RoBERTa and DistilBERT encoders with a head that classifies the sequence, or scores a pair of texts."""

import json
import os
from collections.abc import Mapping
from typing import Any, Self

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jaxft.models import checkpoint
from jaxft.models.bert import BertModel
from jaxft.models.config import BertConfig
from jaxft.models.pooling import first_tokens
from jaxft.ops.dense import dense

_MAX_LABELS = 2**20

# Fields of config.json that say what the logits mean; saved as they were read.
_MEANING = ("problem_type", "sentence_transformers", "sbert_ce_default_activation_function")


class ClassificationHead(nnx.Module):
    """Two dense layers on a sequence's first token, tanh between them, or relu in DistilBERT.

    BERT's first layer is what checkpoints call the pooler.
    """

    def __init__(self, encoder: BertModel, num_labels: int, rngs: nnx.Rngs | None) -> None:
        self.options, width = encoder.embeddings.options, encoder.config.hidden_size
        self.activation = "relu" if encoder.config.model_type == "distilbert" else "tanh"
        self.dense_kernel, self.dense_bias = self.options.normal(rngs, width, width), self.options.zeros(rngs, width)
        self.out_kernel = self.options.normal(rngs, width, num_labels)
        self.out_bias = self.options.zeros(rngs, num_labels)

    def __call__(self, x: Array) -> Array:
        """`x` `[B, D]`, the first tokens -> `[B, num_labels]`."""
        dtype, implementation = self.options.dtype, self.options.implementation
        kernel, bias = self.dense_kernel[...].astype(dtype), self.dense_bias[...]
        x = dense(x, kernel, bias, activation=self.activation, implementation=implementation)
        return dense(x, self.out_kernel[...].astype(dtype), self.out_bias[...], implementation=implementation)


class BertForSequenceClassification(nnx.Module):
    """A BERT, RoBERTa or DistilBERT encoder and a head on its first token: logits of classes, or one score.

    The same network as transformers' classes of that name (`RobertaForSequenceClassification` and so on for the other
    types), without dropout. Used in `nnx.jit` and `jax.jit` as `BertModel`.

    Args:
      config: sizes and options of the encoder.
      num_labels: how many logits there are, at most 2**20; None is as many as `id2label` has, or else 2.
      id2label: the labels' names by their number; None is "LABEL_0", "LABEL_1", ...
      dtype, param_dtype, implementation: as for `BertModel`; they hold for the head too.
      rngs: random numbers for the initial parameters, as for `BertModel`; those of the head are made as the encoder's.

    Attributes:
      bert: the `BertModel`. It has no pooler: that is the head's first layer.
      head: `dense_kernel` `[D, D]`, `dense_bias` `[D]`, `out_kernel` `[D, num_labels]`, `out_bias` `[num_labels]`.

    Raises:
      ValueError: `num_labels` or `id2label` is of a wrong type, impossible or contradicts the other.
    """

    def __init__(
        self,
        config: BertConfig,
        *,
        num_labels: int | None = None,
        id2label: Mapping[int, str] | None = None,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        rngs: nnx.Rngs | None,
    ) -> None:
        # Static attributes of a module must be hashable: no dictionaries.
        self._labels = _label_names(num_labels, id2label)
        self._settings = "{}"
        self.bert = BertModel(
            config,
            dtype=dtype,
            param_dtype=param_dtype,
            implementation=implementation,
            add_pooling_layer=False,
            rngs=rngs,
        )
        self.head = ClassificationHead(self.bert, self.num_labels, rngs)

    @property
    def config(self) -> BertConfig:
        """The encoder's sizes and options."""
        return self.bert.config

    @property
    def num_labels(self) -> int:
        """How many logits there are."""
        return len(self._labels)

    @property
    def id2label(self) -> dict[int, str]:
        """The labels' names by their number."""
        return dict(enumerate(self._labels))

    @property
    def settings(self) -> dict[str, Any]:
        """A copy of what was in `config.json` when the model was read from a checkpoint; otherwise empty."""
        return json.loads(self._settings)

    def __call__(
        self,
        input_ids: ArrayLike,
        attention_mask: ArrayLike | None = None,
        token_type_ids: ArrayLike | None = None,
        position_ids: ArrayLike | None = None,
        *,
        cu_seqlens: ArrayLike | None = None,
        max_seqlen: int | None = None,
    ) -> Array:
        """Computes the logits.

        Args:
          input_ids, attention_mask, token_type_ids, position_ids: as for `BertModel`, `[B, T]`, or packed `[M]`.
          cu_seqlens, max_seqlen: of packed sequences, as for `BertModel`: sequence b's first token is
            `cu_seqlens[b]`. The logits of a sequence without tokens mean nothing.

        Returns:
          `[B, num_labels]` in the model's `dtype`.

        Raises:
          TypeError, ValueError: as `BertModel`.

        Gradients: of all parameters.
        """
        packing = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        given: dict[str, Any] = {name: value for name, value in packing.items() if value is not None}
        hidden = self.bert(input_ids, attention_mask, token_type_ids, position_ids, **given).last_hidden_state
        return self.head(first_tokens(hidden, None if cu_seqlens is None else jnp.asarray(cu_seqlens)))

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | os.PathLike[str],
        *,
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike | None = None,
        implementation: str | None = None,
    ) -> Self:
        """The encoder and the head of a Hugging Face checkpoint for sequence classification.

        The labels are those of `id2label` in `config.json`, else `num_labels` unnamed ones, else two, as transformers
        has it.

        Args:
          folder_or_id, revision, cache_dir, local_files_only: as for `BertModel.from_pretrained`.
          dtype, param_dtype, implementation: likewise.

        Raises:
          CheckpointError: the checkpoint cannot be found, read or used, or has no such head; all the problems of its
            tensors at once.
          TypeError: `folder_or_id` is not a string or path.
        """

        def parse(settings: dict[str, Any]) -> tuple[BertConfig, tuple[str, ...], str]:
            id2label = settings.get("id2label")
            num_labels = settings.get("num_labels") if id2label is None else None
            return BertConfig.from_dict(settings), _label_names(num_labels, id2label), json.dumps(settings)

        param_dtype = dtype if param_dtype is None else param_dtype
        folder = checkpoint.resolve(
            folder_or_id, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only
        )
        config, labels, settings = checkpoint.read_config(folder, parse)
        model = cls(
            config,
            id2label=dict(enumerate(labels)),
            dtype=dtype,
            param_dtype=param_dtype,
            implementation=implementation,
            rngs=None,
        )
        model._settings = settings
        parameters = model._parameters()
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        for name, value in checkpoint.load(folder, config.model_type, shapes, param_dtype).items():
            parameters[name].set_value(value)
        return model

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes `config.json` and `model.safetensors`, which transformers reads too; existing ones are replaced.

        Of `settings`, `problem_type` and what sentence-transformers keeps there are written again.
        """
        encoder = checkpoint.LAYOUTS[self.config.model_type].architecture
        head = {
            "architectures": [encoder.removesuffix("Model") + "ForSequenceClassification"],
            "id2label": self.id2label,
            "label2id": {label: number for number, label in self.id2label.items()},
        }
        meaning = {name: value for name, value in self.settings.items() if name in _MEANING}
        parameters = {name: parameter[...] for name, parameter in self._parameters().items()}
        checkpoint.save(folder, self.config.to_dict() | head | meaning, parameters)

    def _parameters(self) -> dict[str, nnx.Param[Any]]:
        """By names such as "layers.0.out_bias" and "head.out_bias"."""
        head = nnx.to_flat_state(nnx.state(self.head, nnx.Param))
        return self.bert._parameters() | {f"head.{path[0]}": parameter for path, parameter in head}


def _label_names(num_labels: Any, id2label: Any) -> tuple[str, ...]:
    """The labels' names, once the two arguments (or fields of a config.json) are right."""
    where = "BertForSequenceClassification"
    if id2label is None:
        count = 2 if num_labels is None else num_labels
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _MAX_LABELS:
            raise ValueError(f"{where}: num_labels must be an integer from 1 to {_MAX_LABELS}, got {count!r:.100}")
        return tuple(f"LABEL_{number}" for number in range(count))
    names = {str(number): name for number, name in id2label.items()} if isinstance(id2label, Mapping) else {}
    numbers = [str(number) for number in range(len(names))]  # a config.json has them as strings
    if not names or names.keys() != set(numbers) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{where}: id2label must name the labels from 0 on, each by a string, got {id2label!r:.100}")
    if num_labels not in (None, len(names)):
        raise ValueError(f"{where}: num_labels is {num_labels!r:.100}, but id2label names {len(names)} labels")
    return tuple(names[number] for number in numbers)
