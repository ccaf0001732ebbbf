"""Base class of encoders with a head: the encoder, and reading and writing of checkpoints."""

import logging
import os
from pathlib import Path
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jaxft.checkpoint import files as checkpoint_files
from jaxft.checkpoint import layouts as checkpoint_layouts
from jaxft.checkpoint import tensors as checkpoint_tensors
from jaxft.models import inputs
from jaxft.models.bert import BertModel, checkpoint_of, load_model, named_parameters, packed_rows
from jaxft.models.config import BertConfig
from jaxft.models.float8 import Float8Recipe, check_load_options, load_options, read_settings
from jaxft.ops import checks
from jaxft.ops.cross_entropy import CrossEntropy, linear_cross_entropy

logger = logging.getLogger("jaxft")

# Name endings of the transformers classes whose heads have tensors with the same names.
_TASKS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForMultipleChoice",
          "ForQuestionAnswering")  # fmt: skip


class EncoderWithHead(nnx.Module):
    """An encoder to which a subclass adds its head."""

    _TASK: ClassVar[str]  # one of _TASKS
    _LABELS_TOKENS: ClassVar[bool] = True  # else sequences

    def __init__(
        self,
        config: BertConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        remat: bool = False,
        rngs: nnx.Rngs | None,
    ) -> None:
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "implementation": implementation}
        self.bert = BertModel(config, **options, add_pooling_layer=False, remat=remat, rngs=rngs)
        self._add_head(rngs)

    # A subclass defines these four methods. It also overrides `_check_labels` if texts, not tokens, have its labels.

    def _add_head(self, rngs: nnx.Rngs | None) -> None:
        raise NotImplementedError

    def _features(self, *ids: Any, **call: Any) -> Array:
        """Returns the input of the head's last matmul, from the arguments of `__call__`."""
        raise NotImplementedError

    def _logits(self, x: Array) -> Array:
        """Returns the logits from what `_features` has returned."""
        raise NotImplementedError

    def _classes(self) -> tuple[Array, Array]:
        """Returns the matrix `[V, D]` and the bias `[V]` of the last matmul."""
        raise NotImplementedError

    def _check_labels(self, input_ids: ArrayLike, labels: ArrayLike, cu_seqlens: ArrayLike | None) -> Array:
        shape = inputs.as_ids("BertModel", "input_ids", input_ids).shape
        return inputs.as_ids(type(self).__name__, "labels", labels, shape)

    @property
    def config(self) -> BertConfig:
        """Sizes and options of the encoder."""
        return self.bert.config

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
        """Computes the logits, whose shape the class describes, in the model's `dtype`.

        Takes the arguments of `BertModel.__call__` except `output_hidden_states`, and raises the same errors. The
        logits of masked tokens, of rows of no packed sequence and of packed sequences without tokens have no meaning.

        Gradients: for all parameters.
        """
        call = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "deterministic": deterministic, "rngs": rngs}
        return self._logits(self._features(input_ids, attention_mask, token_type_ids, position_ids, **call))

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
        """Computes the cross-entropy of the labels. No logits are computed where there is no label.

        The argument `labels` holds integers, -100 where there is no label. The class describes their shape and meaning.
        `__call__` describes the other arguments. The logits are float32 in every `dtype`.

        Returns:
          The result of `jaxft.linear_cross_entropy`: the tuple (total, labelled). Its property `mean` is the loss that
          transformers returns, or 0 if there is no label. For gradient accumulation over steps or for several devices,
          sum `total` and `labelled` before you divide.

        Raises:
          TypeError: as for `BertModel.__call__`, or `labels` is not an array of integers.
          ValueError: as for `BertModel.__call__`, or `labels` has a wrong shape, or a classifier does not distinguish
            classes: it has only one label (a score), or the `problem_type` of its checkpoint is another one. Apply
            another loss to the logits then.

        Gradients: for all parameters. A label that the model does not have makes the loss NaN.
        """
        call = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "deterministic": deterministic, "rngs": rngs}
        checked = self._check_labels(input_ids, labels, cu_seqlens)
        x = self._features(input_ids, attention_mask, token_type_ids, position_ids, **call)
        if cu_seqlens is not None and self._LABELS_TOKENS:
            # `remove_padding` puts 0, a valid label, in rows of no sequence.
            starts = inputs.as_ids("BertModel", "cu_seqlens", cu_seqlens)
            *_, used = packed_rows(checked.size, starts, checks.as_size("BertModel", "max_seqlen", max_seqlen))
            checked = jnp.where(used, checked, -100)
        table, bias = self._classes()
        return linear_cross_entropy(x, table, checked, bias)

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | os.PathLike[str],
        *,
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike | None = None,
        implementation: str | None = None,
        remat: bool = False,
        quantization: str | Float8Recipe | None = None,
        rngs: nnx.Rngs | None = None,
        **head: Any,
    ) -> Self:
        """Loads the encoder and the head of a Hugging Face checkpoint of transformers' class for this task.

        With `rngs`, the checkpoint may be of any encoder, or of a model for another task. The encoder then comes from
        the checkpoint, and so do the layers of the head that the checkpoint has. The checkpoint of an encoder alone or
        of a model for another task has at most the pooler. Tensors of other heads are not read.

        `BertModel.from_pretrained` describes the arguments up to `quantization`. The others are:

        - `rngs`: random numbers for the layers of the head that the checkpoint lacks or has for another number of
          labels. These layers are initialised as in a new model; the log "jaxft" lists them at level INFO. All other
          parameters come from the checkpoint. If `rngs` is None, such layers are an error.
        - `**head`: arguments of the class for its head, in place of the values in `config.json`. A classifier has
          `num_labels`, `id2label` and `classifier_dropout`. If the number of labels is the same as in the checkpoint,
          the checkpoint's last layer is kept, and so are the names of its labels unless `id2label` is given.

        Returns:
          The model, with dropout off.

        Raises:
          CheckpointError: the checkpoint cannot be found, read or used, or it has no head for this task and `rngs` is
            None. The message lists all problems with its tensors.
          TypeError: `folder_or_id` is not a string or path, `rngs` is not an `nnx.Rngs`, or `head` has an argument that
            the class does not have.
          ValueError: as for the class, or `rngs` has no stream for parameters.
        """

        def parse(settings: dict[str, Any]) -> tuple[BertConfig, bool, dict[str, Any], dict[str, Any], Any]:
            settings, saved = read_settings(settings)
            config = BertConfig.from_dict(settings)
            is_own = cls._is_own(settings.get("architectures"), rngs)
            # The labels of another task do not fit this head.
            of_head = settings if is_own else {"tie_word_embeddings": settings.get("tie_word_embeddings")}
            return config, is_own, cls._head_options(of_head, config, head), settings, saved

        recipe = check_load_options(dtype, param_dtype, implementation, quantization)
        inputs.check_initial(cls.__name__, rngs)
        folder = checkpoint_files.resolve(
            folder_or_id, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only
        )
        config, is_own, options, settings, saved = checkpoint_files.read_config(folder, parse)
        recipe, dtype, param_dtype = load_options(recipe, saved, dtype, param_dtype)
        options |= {"dtype": dtype, "param_dtype": param_dtype, "implementation": implementation, "remat": remat}
        model = cls(config, **options, rngs=None)
        if rngs is not None:
            model._add_head(rngs)  # its values stay unless the checkpoint has others
        parameters, layout = named_parameters(model), checkpoint_layouts.LAYOUTS[config.model_type]
        wanted = {
            name: parameter
            for name, parameter in parameters.items()
            # The head of another task may have tensors with the same names.
            if is_own or not layout.names.get(name, [""])[0].startswith(layout.heads)
        }
        found = load_model(
            model, folder, config.model_type, param_dtype, saved, recipe, wanted=wanted, has_new_head=rngs is not None
        )
        if lacking := sorted(parameters.keys() - found):
            logger.info("%s: new, and not of %s: %s", cls.__name__, folder, ", ".join(lacking))
        else:  # the settings are valid only for the checkpoint's own head
            model._keep_settings(settings, folder)
        return model

    @classmethod
    def _is_own(cls, architectures: Any, rngs: nnx.Rngs | None) -> bool:
        """Returns whether config.json names this task or none of `_TASKS`. Other tasks require `rngs`."""
        names = architectures if isinstance(architectures, list) else []
        tasks = {task for task in _TASKS for name in names if str(name).endswith(task)}
        is_own = not tasks or cls._TASK in tasks
        if not is_own and rngs is None:
            raise ValueError(
                f"architectures must name a class that ends in {cls._TASK}, got {names!r:.100}; for a new head on its "
                f"encoder pass rngs=nnx.Rngs(0) to {cls.__name__}.from_pretrained"
            )
        return is_own

    @classmethod
    def _head_options(cls, settings: dict[str, Any], config: BertConfig, given: dict[str, Any]) -> dict[str, Any]:
        """Returns `given`, completed by the arguments for the head in a config.json."""
        return {**given}

    def _keep_settings(self, settings: dict[str, Any], folder: Path) -> None:
        """Keeps the fields of a config.json that are neither arguments nor parameters."""

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes the files of the encoder and the head, see `BertModel.save_pretrained`."""
        checkpoint_tensors.save(folder, self._files())

    def _files(self) -> dict[str, Any]:
        encoder = checkpoint_layouts.LAYOUTS[self.config.model_type].architecture
        architectures = {"architectures": [encoder.removesuffix("Model") + self._TASK]}
        return checkpoint_of(self, self.config.to_dict() | architectures | self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of `config.json` about the head."""
        return {}
