"""What encoders with a head share: the encoder, and how both are read from checkpoints and written."""

import logging
import os
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jaxft.checkpoint import files as checkpoint_files
from jaxft.checkpoint import layouts as checkpoint_layouts
from jaxft.checkpoint import tensors as checkpoint_tensors
from jaxft.models import inputs
from jaxft.models.bert import BertModel, load_parameters, named_parameters, packed_rows
from jaxft.models.config import BertConfig

logger = logging.getLogger("jaxft")

# How the names of transformers' classes end whose heads' tensors have names in common.
_TASKS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForMultipleChoice")


class EncoderWithHead(nnx.Module):
    """An encoder, to which a subclass adds its head."""

    _TASK: ClassVar[str]  # one of them

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

    def _add_head(self, rngs: nnx.Rngs | None) -> None:
        raise NotImplementedError

    @property
    def config(self) -> BertConfig:
        """The encoder's sizes and options."""
        return self.bert.config

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
        remat: bool = False,
        rngs: nnx.Rngs | None = None,
        **head: Any,
    ) -> Self:
        """The encoder and the head of a Hugging Face checkpoint of transformers' classes for this task.

        Or, with `rngs`, the encoder of any checkpoint, and of the head what the checkpoint has: from that of an encoder
        alone, or of a model for another task, no more than the pooler. Tensors of other heads are not read.

        Args:
          folder_or_id, revision, cache_dir, local_files_only: as for `BertModel.from_pretrained`.
          dtype, param_dtype, implementation, remat: likewise.
          rngs: random numbers for the layers of the head that the checkpoint lacks, or has for another number of
            labels, as for a new model; None refuses such a checkpoint. All other parameters are the checkpoint's. The
            log "jaxft" says which are new, at level INFO.
          head: arguments of the class for the head, in place of what `config.json` says: a classifier's `num_labels`,
            `id2label` and `classifier_dropout`. As many labels as it has already keep their layer, and their names
            unless there is an `id2label`.

        Raises:
          CheckpointError: the checkpoint cannot be found, read or used, or has no such head and there are no `rngs`;
            all the problems of its tensors at once.
          TypeError: `folder_or_id` is not a string or path, `rngs` no `nnx.Rngs`, or `head` has what the class lacks.
          ValueError: as the class; `rngs` has no stream for parameters.
        """

        def parse(settings: dict[str, Any]) -> tuple[BertConfig, bool, dict[str, Any], dict[str, Any]]:
            config = BertConfig.from_dict(settings)
            is_own = cls._is_own(settings.get("architectures"), rngs)
            # Another task's labels are none of this head's.
            of_head = settings if is_own else {"tie_word_embeddings": settings.get("tie_word_embeddings")}
            return config, is_own, cls._head_options(of_head, config, head), settings

        inputs.check_initial(cls.__name__, rngs)
        param_dtype = dtype if param_dtype is None else param_dtype
        folder = checkpoint_files.resolve(
            folder_or_id, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only
        )
        config, is_own, options, settings = checkpoint_files.read_config(folder, parse)
        options |= {"dtype": dtype, "param_dtype": param_dtype, "implementation": implementation, "remat": remat}
        model = cls(config, **options, rngs=None)
        if rngs is not None:
            model._add_head(rngs)  # whose values stay where the checkpoint has none
        parameters, layout = model._parameters(), checkpoint_layouts.LAYOUTS[config.model_type]
        wanted = {
            name: parameter
            for name, parameter in parameters.items()
            # Another task's head may have the same names.
            if is_own or not layout.names.get(name, [""])[0].startswith(layout.heads)
        }
        has_new_head = rngs is not None
        found = load_parameters(wanted, folder, config.model_type, param_dtype, has_new_head=has_new_head)
        if new := sorted(parameters.keys() - found):
            logger.info("%s: new, and not of %s: %s", cls.__name__, folder, ", ".join(new))
        else:  # they are true of this model
            model._keep_settings(settings)
        return model

    @classmethod
    def _is_own(cls, architectures: Any, rngs: nnx.Rngs | None) -> bool:
        """Whether a config.json names none of the tasks, or this one; ValueError without `rngs` where it does not."""
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
        """`given` and the other arguments for the head that a config.json has; ValueError where it has wrong ones."""
        return {**given}

    def _keep_settings(self, settings: dict[str, Any]) -> None:
        """Keeps of a config.json what is neither an argument nor a parameter."""

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes `config.json` and `model.safetensors`, which transformers reads too; existing ones are replaced."""
        encoder = checkpoint_layouts.LAYOUTS[self.config.model_type].architecture
        architectures = {"architectures": [encoder.removesuffix("Model") + self._TASK]}
        parameters = {name: parameter.get_value() for name, parameter in self._parameters().items()}
        checkpoint_tensors.save(folder, self.config.to_dict() | architectures | self.settings, parameters)

    @property
    def settings(self) -> dict[str, Any]:
        """What `config.json` has about the head."""
        return {}

    def _parameters(self) -> dict[str, nnx.Param[Any]]:
        return named_parameters(self)


def labels_in_use(labels: Array, cu_seqlens: ArrayLike | None, max_seqlen: int | None) -> Array:
    """`labels` of tokens, with -100 in rows that belong to no sequence: `remove_padding` fills them with 0, a label."""
    if cu_seqlens is None:
        return labels
    *_, used = packed_rows(labels.size, jnp.asarray(cu_seqlens).astype(jnp.int32), max_seqlen or 0)
    return jnp.where(used, labels.astype(jnp.int32), -100)
