"""What encoders with a head share: the encoder, and how both are read from checkpoints and written."""

import os
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxft.models import checkpoint
from jaxft.models.bert import BertModel, load_parameters, named_parameters
from jaxft.models.config import BertConfig

# How the names of transformers' classes for the tasks of jaxft's end; some heads' tensors have names in common.
_TASKS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")


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
    ) -> Self:
        """The encoder and the head of a Hugging Face checkpoint of transformers' classes for this task.

        Tensors of other heads are not read.

        Args:
          folder_or_id, revision, cache_dir, local_files_only: as for `BertModel.from_pretrained`.
          dtype, param_dtype, implementation, remat: likewise.

        Raises:
          CheckpointError: the checkpoint cannot be found, read or used, or has no such head; all the problems of its
            tensors at once.
          TypeError: `folder_or_id` is not a string or path.
        """

        def parse(settings: dict[str, Any]) -> tuple[BertConfig, dict[str, Any], dict[str, Any]]:
            config = BertConfig.from_dict(settings)
            cls._check_architectures(settings.get("architectures"))
            return config, cls._head_options(settings, config), settings

        param_dtype = dtype if param_dtype is None else param_dtype
        folder = checkpoint.resolve(
            folder_or_id, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only
        )
        config, options, settings = checkpoint.read_config(folder, parse)
        options |= {"dtype": dtype, "param_dtype": param_dtype, "implementation": implementation, "remat": remat}
        model = cls(config, **options, rngs=None)
        model._keep_settings(settings)
        load_parameters(model, folder, config.model_type, param_dtype)
        return model

    @classmethod
    def _check_architectures(cls, architectures: Any) -> None:
        """ValueError where a config.json names another of the tasks, and not this one."""
        names = architectures if isinstance(architectures, list) else []
        tasks = {task for task in _TASKS for name in names if str(name).endswith(task)}
        if tasks and cls._TASK not in tasks:
            raise ValueError(f"architectures must name a class that ends in {cls._TASK}, got {names!r:.100}")

    @classmethod
    def _head_options(cls, settings: dict[str, Any], config: BertConfig) -> dict[str, Any]:
        """The arguments for the head that a config.json has; ValueError where it has wrong ones."""
        return {}

    def _keep_settings(self, settings: dict[str, Any]) -> None:
        """Keeps of a config.json what is neither an argument nor a parameter: nothing, so that models are equal."""

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes `config.json` and `model.safetensors`, which transformers reads too; existing ones are replaced."""
        encoder = checkpoint.LAYOUTS[self.config.model_type].architecture
        architectures = {"architectures": [encoder.removesuffix("Model") + self._TASK]}
        parameters = {name: parameter[...] for name, parameter in self._parameters().items()}
        checkpoint.save(folder, self.config.to_dict() | architectures | self._head_settings(), parameters)

    def _head_settings(self) -> dict[str, Any]:
        """What a config.json has about the head."""
        return {}

    def _parameters(self) -> dict[str, nnx.Param[Any]]:
        return named_parameters(self)
