"""Reads the files of sentence-transformers in a checkpoint folder: modules.json, and the settings of each module."""

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

from jaxft.checkpoint import files as checkpoint_files
from jaxft.checkpoint.files import CheckpointError, read_settings
from jaxft.ops import checks
from jaxft.text import tokenizer as tokenizer_files

# Pooling modes by their field in a Pooling module's config.json, in the order in which sentence-transformers
# concatenates the results of several modes.
POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLING_MODES = ("cls", "max", "mean")
POOLING_FIELDS = (*POOLING_FLAGS, "pooling_mode", "include_prompt", "embedding_dimension", "word_embedding_dimension")

# File of a Transformer module's settings: the first that is not empty. The names end in kinds of models.
_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
# Settings of a Transformer module that jaxft applies, or that matter only for methods that jaxft does not have.
TRANSFORMER_FIELDS = ("max_seq_length", "do_lower_case", "unpad_inputs", "query_length", "document_length",
                      "query_expansion")  # fmt: skip
# Settings of a Transformer module that hold arguments, and the arguments that do not change embeddings.
_OPTIONS = ("trust_remote_code", "dtype", "torch_dtype", "attn_implementation")
ARGUMENTS = dict.fromkeys(
    ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs"), _OPTIONS
) | {"processing_kwargs": ("chat_template", "image", "audio", "video")}

_log = logging.getLogger("jaxft")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Settings from the files of a checkpoint folder, except for the model's and the tokenizer's own."""

    transformer: Path  # folder of the model and the tokenizer
    pooling: tuple[str, ...] = ("mean",)
    normalize: bool = False
    max_seq_length: int | None = None
    do_lower_case: bool = False
    prompt: str = ""
    truncate_dim: int | None = None
    num_labels: int | None = None  # of a classifier whose config.json does not say it


def read_sentence_encoder(folder: Path) -> Layout:
    """Reads the layout of a SentenceTransformer. A folder without modules.json gets mean pooling."""
    file = folder / "modules.json"
    if not os.path.lexists(file):
        _check_bare(folder)
        config = read_settings(folder / "config.json")
        architectures = config.get("architectures")
        first = architectures[0] if isinstance(architectures, list) and architectures else None
        if str(first).endswith("ForCausalLM") and config.get("is_causal", True):
            raise CheckpointError(f"{folder}: without modules.json, {first:.80} needs pooling of the last token")
        _log.warning(
            "%s has no modules.json: embeddings get mean pooling and no normalisation. If the model was made for"
            " sentence-transformers, the folder is not complete.", folder,
        )  # fmt: skip
        return Layout(folder)
    settings = _family_settings(folder, "SentenceTransformer")
    modules = _read_modules(file)
    transformer = modules["Transformer"]
    if not os.path.isdir(transformer):
        raise CheckpointError(f"{file}: the folder of module Transformer, {transformer}, does not exist")
    pooling, include_prompt = _read_pooling(modules["Pooling"] / "config.json")
    if "Normalize" in modules:
        _check_normalize(modules["Normalize"] / "config.json")
    file = folder / "config_sentence_transformers.json"
    prompt = _default_prompt(file, settings, {"query": "", "document": ""})
    if prompt and not include_prompt:
        raise CheckpointError(f"{file}: a default prompt together with include_prompt=false in the pooling's config")
    width = settings.get("truncate_dim")
    if width is not None and not (checks.is_natural(width) and width > 0):
        raise CheckpointError(f"{file}: truncate_dim must be a positive integer, got {width!r:.80}")
    max_seq_length, do_lower_case = _transformer_settings(
        transformer, "feature-extraction", "last_hidden_state", "token_embeddings"
    )
    return Layout(transformer, pooling, "Normalize" in modules, max_seq_length, do_lower_case, prompt, width)


def read_cross_encoder(folder: Path) -> Layout:
    """Reads the layout of a CrossEncoder."""
    file = folder / "modules.json"
    # sentence-transformers takes one label for a model that is not saved as a classifier; transformers takes two.
    config = read_settings(folder / "config.json")
    is_classifier = "ForSequenceClassification'" in str(config.get("architectures"))
    num_labels = None if is_classifier or config.get("id2label") or config.get("num_labels") else 1
    if not os.path.lexists(file):
        _check_bare(folder)
        return Layout(folder, num_labels=num_labels)
    settings = _family_settings(folder, "CrossEncoder")
    modules = [(_kind(entry), entry.get("path")) for entry in _module_list(file)]
    if modules != [("Transformer", "")]:
        kinds = ", ".join(str(kind) for kind, _ in modules)
        raise CheckpointError(
            f"{file}: a CrossEncoder must be one Transformer module in the folder itself; {kinds:.200} is not supported"
        )
    settings_file = folder / "config_sentence_transformers.json"
    if settings.get("keep_in_fp32_modules"):
        raise CheckpointError(f"{settings_file}: keep_in_fp32_modules is not supported")
    prompt = _default_prompt(settings_file, settings, {})
    max_seq_length, do_lower_case = _transformer_settings(folder, "sequence-classification", "logits", "scores")
    return Layout(
        folder, max_seq_length=max_seq_length, do_lower_case=do_lower_case, prompt=prompt, num_labels=num_labels
    )


def _check_bare(folder: Path) -> None:
    """Refuses a chat template in a folder without modules.json, where sentence-transformers applies it to texts."""
    file = folder / "chat_template.jinja"
    if os.path.lexists(file) or read_settings(folder / "tokenizer_config.json").get("chat_template"):
        raise CheckpointError(f"{folder}: without modules.json, a chat_template is not supported")


def _family_settings(folder: Path, family: str) -> dict[str, Any]:
    """Returns the content of config_sentence_transformers.json, which must be of the given kind of model."""
    file = folder / "config_sentence_transformers.json"
    settings = read_settings(file)
    found = settings.get("model_type", "SentenceTransformer")
    if found != family:
        other = {"SentenceTransformer": "SentenceEncoder", "CrossEncoder": "CrossEncoder"}.get(str(found))
        advice = f"load it with jaxft.{other}" if other else "it is not supported"
        raise CheckpointError(f"{file}: model_type is {found!r:.80}, expected {family}; {advice}")
    return settings


def _module_list(file: Path) -> list[dict[str, Any]]:
    entries = checkpoint_files.read_json(file)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CheckpointError(f"{file}: expected a list of modules, got {entries!r:.80}")
    return entries


def _kind(entry: dict[str, Any]) -> str:
    """Returns the name of a module's class if it is one of sentence-transformers, else the full type."""
    kind = str(entry.get("type"))
    return kind.rpartition(".")[2] if kind.startswith("sentence_transformers.") else kind


def _read_modules(file: Path) -> dict[str, Path]:
    """Reads the folder of each module of a SentenceTransformer. The keys are the names of the modules' classes."""
    modules: dict[str, Path] = {}
    for entry in _module_list(file):
        kind, path = _kind(entry), entry.get("path")
        if kind not in ("Transformer", "Pooling", "Normalize") or kind in modules:
            what = "appears twice" if kind in modules else "is not supported"
            raise CheckpointError(
                f"{file}: module {entry.get('type')!r:.80} {what}; supported are one Transformer, one Pooling and"
                " optionally one Normalize"
            )
        if not isinstance(path, str) or Path(path).is_absolute() or ".." in Path(path).parts:
            raise CheckpointError(f"{file}: module {kind} must have a path inside the folder, got {path!r:.80}")
        modules[kind] = file.parent / path
    if list(modules)[:2] != ["Transformer", "Pooling"]:
        raise CheckpointError(
            f"{file}: expected a Transformer, a Pooling and optionally a Normalize module in this order, got"
            f" {list(modules)}"
        )
    return modules


def _read_pooling(file: Path) -> tuple[tuple[str, ...], bool]:
    """Reads a Pooling module's config.json. Returns the modes, and whether prompt tokens take part in the pooling."""
    if not os.path.lexists(file):
        raise CheckpointError(f"{file}: missing, but modules.json names it")
    config = checkpoint_files.read_json_object(file)
    _check_known(file, config, POOLING_FIELDS)
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in POOLING_FLAGS.items() if config.get(flag)] or ["mean"]
    elif isinstance(modes, str):
        modes = [modes]
    unsupported = [mode for mode in modes if mode not in POOLING_MODES] if isinstance(modes, list) else [modes]
    if unsupported or not modes or len(modes) > len(POOLING_MODES):
        raise CheckpointError(
            f"{file}: pooling mode {', '.join(map(repr, unsupported or modes)):.200} is not supported; supported are"
            f" {', '.join(POOLING_MODES)} and their concatenation"
        )
    return tuple(modes), bool(config.get("include_prompt", True))


def _check_normalize(file: Path) -> None:
    """Refuses a Normalize module of anything but the embeddings of texts."""
    config = read_settings(file)
    for name in ("module_input_name", "module_output_name"):
        if config.get(name) not in (None, "sentence_embedding"):
            raise CheckpointError(f"{file}: {name} must be sentence_embedding, got {config[name]!r:.80}")


def _default_prompt(file: Path, settings: dict[str, Any], prompts: dict[str, str]) -> str:
    """Returns the text of the default prompt. `prompts` are the prompts that a model has by default."""
    name, given = settings.get("default_prompt_name"), settings.get("prompts")
    if name is None:
        return ""
    prompts = prompts | (given if isinstance(given, dict) else {})
    prompt = prompts[name] or "" if isinstance(name, str) and name in prompts else None
    if not isinstance(prompt, str):
        raise CheckpointError(f"{file}: default_prompt_name is {name!r:.80}, but prompts has no text of that name")
    return prompt


def _transformer_settings(folder: Path, task: str, output: str, feature: str) -> tuple[int | None, bool]:
    """Returns the maximum length and whether texts are lower-cased first, and refuses what would change embeddings."""
    files = [folder / f"sentence_{kind}_config.json" for kind in _KINDS]
    file = next(filter(read_settings, files), files[0])
    settings = read_settings(file)
    expected: dict[str, Any] = {"transformer_task": task, "module_output_name": feature, "tokenizer_name_or_path": None}
    _check_known(file, settings, (*TRANSFORMER_FIELDS, *ARGUMENTS, *expected, "modality_config"))
    for name, value in expected.items():
        if settings.get(name) not in (None, value):
            raise CheckpointError(f"{file}: {name} {settings[name]!r:.80} is not supported, only {value}")
    for name, harmless in ARGUMENTS.items():
        values = settings.get(name) or {}
        values = values if isinstance(values, dict) else {str(values): None}
        if refused := [argument for argument in values if argument not in harmless]:
            raise CheckpointError(f"{file}: {refused[0]!r:.80} in {name} is not supported")
    modes = settings.get("modality_config", {"text": {"method": "forward", "method_output_name": output}})
    text = modes.get("text") if isinstance(modes, dict) and "message" not in modes else None
    if not isinstance(text, dict) or (text.get("method"), text.get("method_output_name")) != ("forward", output):
        raise CheckpointError(f"{file}: modality_config must take texts to {output} by forward, got {modes!r:.80}")
    length = tokenizer_files.check_length(file, settings.get("max_seq_length"))
    return length, bool(settings.get("do_lower_case", False))


def _check_known(file: Path, config: dict[str, Any], fields: tuple[str, ...]) -> None:
    """Refuses fields that the module's class in sentence-transformers does not take either."""
    if unknown := [name for name in config if name not in fields]:
        raise CheckpointError(f"{file}: unknown field {unknown[0]!r:.80}; known are {', '.join(fields)}")
