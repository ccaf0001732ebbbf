"""Arguments that the encoders share: prompts, and arguments of sentence-transformers that have no meaning here."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from jaxft.ops import checks
from jaxft.text import batching

_log = logging.getLogger("jaxft")

_FILES = "edit tokenizer_config.json or config.json of the folder"
_DEVICES = "pass devices, for example jax.local_devices(); one process computes on all of them"
# What to do in place of arguments of sentence-transformers' classes and methods.
_EQUIVALENTS = {
    "convert_to_tensor": "convert_to_numpy=False of encode and predict returns a JAX array",
    "save_to_cpu": "convert_to_numpy=True, the default, returns arrays in the memory of the host",
    "token_pooling": "pool the arrays that encode returns",
    "device": "pass devices to encode and predict, or choose one with jax.default_device or JAX_PLATFORMS",
    "pool": _DEVICES,
    "chunk_size": "texts are cut into batches by batch_size alone; encode_iter has a chunk_size",
    "num_workers": "texts are always tokenised by threads",
    "processing_kwargs": "set max_seq_length (max_length of a CrossEncoder)",
    "default_activation_function": "pass activation_fn",
    "model_name_or_path": "pass the folder or id as the first argument",
    "model_name": "pass the folder or id as the first argument",
    "path": "pass the folder as the first argument",
    "modules": "pass them to the constructor, SentenceEncoder(model, tokenizer, modules=...)",
    "cache_folder": "pass cache_dir",
    "trust_remote_code": "code of a checkpoint is never run; leave the argument out",
    "token": "set the environment variable HF_TOKEN, or run `hf auth login`",
    "use_auth_token": "set the environment variable HF_TOKEN, or run `hf auth login`",
    "model_kwargs": "pass dtype and implementation",
    "automodel_args": "pass dtype and implementation",
    "processor_kwargs": _FILES,
    "tokenizer_kwargs": _FILES,
    "tokenizer_args": _FILES,
    "config_kwargs": _FILES,
    "config_args": _FILES,
    "classifier_dropout": "set classifier_dropout in config.json",
    "backend": "JAX computes everything; leave the argument out",
    "model_card_data": "edit README.md in the folder",
    "torch_dtype": "pass dtype",
    "safe_serialization": "weights are always saved as safetensors; leave the argument out",
    "create_model_card": "a model card is always written; leave the argument out",
    "train_datasets": "edit README.md in the folder",
    "keep_in_fp32_modules": "scores and embeddings are always float32; leave the argument out",
    "sentences": "pass inputs",
    "activation_fct": "pass activation_fn",
    "apply_softmax": "rank needs one score for each pair; call predict for several labels",
    "convert_to_numpy": "rank returns Python floats; leave the argument out",
}


def refuse(where: str, given: Iterable[str]) -> None:
    """Raises a TypeError for the first argument that a function does not have, with its equivalent if there is one."""
    for name in given:
        if name in _EQUIVALENTS:
            raise TypeError(f"{where}: {name} is an argument of sentence-transformers only: {_EQUIVALENTS[name]}")
        raise TypeError(f"{where}: unexpected argument {name!r}")


def check_flags(where: str, **given: Any) -> None:
    """Raises a TypeError unless flags are booleans. Some may be None."""
    for name, value in given.items():
        if value is not None or name not in ("packed", "show_progress_bar", "apply_softmax"):
            checks.check_flag(where, name, value)


def one_of(where: str, **given: Any) -> Any:
    """Returns the value of an argument that has several names. Raises a TypeError if two of them are given."""
    found = [name for name, value in given.items() if value is not None]
    if len(found) > 1:
        raise TypeError(f"{where}: {' and '.join(found)} are names of the same argument, pass only one")
    return given[found[0]] if found else None


def merged_prompts(
    where: str, own: Mapping[str, str | None], given: Any, saved: Mapping[str, str | None]
) -> dict[str, str]:
    """Returns prompts by name: the `given` ones, else the ones `saved` in a folder, else a class's `own`.

    Raises a TypeError if `given` is neither None nor a mapping.
    """
    if not isinstance(given, Mapping | None):
        raise TypeError(f"{where}: prompts must be a dict from names to texts, got {type(given).__name__}")
    prompts = {**own, **(given or {})}
    for name, prompt in saved.items():
        if prompts.get(name) is None:
            prompts[name] = prompt
    return {name: prompt or "" for name, prompt in prompts.items()}


def check_prompts(where: str, prompts: Mapping[str, str], default_prompt_name: str | None) -> None:
    """Raises a TypeError unless prompts are texts by name, and a ValueError unless the default is one of them."""
    for name, prompt in prompts.items():
        if not isinstance(name, str):
            raise TypeError(f"{where}: names of prompts must be str, got {name!r:.80}")
        batching.as_text(where, f"prompts[{name!r:.80}]", prompt)
    if default_prompt_name is not None and default_prompt_name not in prompts:
        raise ValueError(
            f"{where}: default_prompt_name is {default_prompt_name!r:.80}, but prompts has no text of that name; it has"
            f" {', '.join(map(repr, prompts)) or 'none'}"
        )


def chosen_prompt(
    where: str, prompts: Mapping[str, str], default_prompt_name: str | None, prompt: str | None, prompt_name: str | None
) -> str:
    """Returns the prompt of a call: `prompt`, else the one of `prompt_name`, else the default one, else ""."""
    if prompt is not None:
        if prompt_name is not None:
            _log.warning("%s: prompt_name has no effect, because prompt is given", where)
        return batching.as_text(where, "prompt", prompt)
    argument, name = "prompt_name", prompt_name
    if name is None:
        argument, name = "default_prompt_name", default_prompt_name
    if name is None:
        return ""
    if not isinstance(name, str) or name not in prompts:
        names = ", ".join(map(repr, prompts)) or "none"
        raise ValueError(f"{where}: {argument} must be the name of one of the prompts, {names}, got {name!r:.80}")
    return batching.as_text(where, f"prompts[{name!r:.80}]", prompts[name])
