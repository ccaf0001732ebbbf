"""Reads the files of sentence-transformers in a checkpoint folder: modules.json, and the settings of each module."""

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxft.checkpoint import files as checkpoint_files
from jaxft.checkpoint import tensors as checkpoint_tensors
from jaxft.checkpoint.files import CheckpointError, read_settings
from jaxft.models.embedding import ACTIVATIONS, Dense, Dropout, LayerNorm, Module, Normalize
from jaxft.models.pooling import MODES
from jaxft.ops import checks
from jaxft.text import tokenizer as tokenizer_files

# Pooling modes by their field in old config.json files of a Pooling module, in the order in which sentence-transformers
# concatenates the results of several modes.
POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLING_FIELDS = (*POOLING_FLAGS, "pooling_mode", "include_prompt", "embedding_dimension", "word_embedding_dimension")
_FIELDS = {"LayerNorm": ("dimension",), "Dropout": ("dropout",)}
_NORM = ("norm.weight", "norm.bias")
_TOKENS, _SENTENCE, _SCORES = "token_embeddings", "sentence_embedding", "scores"
_MODULES = ("Transformer", "Pooling", "Dense", "LayerNorm", "Dropout", "Normalize")

# File of a Transformer module's settings: the first that is not empty. The names end in kinds of models.
_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
# Settings of a Transformer module that jaxft applies, or that do not change embeddings.
_LENGTHS = {"query": "query_length", "document": "document_length"}
TRANSFORMER_FIELDS = ("max_seq_length", "do_lower_case", "unpad_inputs", *_LENGTHS.values())
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
    pooling: tuple[str, ...] = ("mean",)  # () for a classifier, which has a head of its own
    include_prompt: bool = True
    token_modules: tuple[Module, ...] = ()  # before the pooling, with parameters
    modules: tuple[Module, ...] = ()  # after the pooling
    max_seq_length: int | None = None
    do_lower_case: bool = False
    prompts: dict[str, str | None] = dataclasses.field(default_factory=dict)
    default_prompt_name: str | None = None
    truncate_dim: int | None = None
    similarity_fn_name: str | None = None
    task_lengths: dict[str, int] = dataclasses.field(default_factory=dict)  # maximum lengths of queries and documents
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
    layout = _read_modules(file, _SENTENCE)
    file = folder / "config_sentence_transformers.json"
    width = settings.get("truncate_dim")
    if width is not None and not (checks.is_natural(width) and width > 0):
        raise CheckpointError(f"{file}: truncate_dim must be a positive integer, got {width!r:.80}")
    prompts, default = _prompts(file, settings)
    similarity = settings.get("similarity_fn_name")
    return dataclasses.replace(
        layout, prompts=prompts, default_prompt_name=default, truncate_dim=width,
        similarity_fn_name=similarity if isinstance(similarity, str) else None,
    )  # fmt: skip


def read_cross_encoder(folder: Path) -> Layout:
    """Reads the layout of a CrossEncoder: a classifier, or an encoder with modules of which the last gives scores."""
    file = folder / "modules.json"
    # sentence-transformers takes one label for a model that is not saved as a classifier; transformers takes two.
    config = read_settings(folder / "config.json")
    is_classifier = "ForSequenceClassification'" in str(config.get("architectures"))
    num_labels = None if is_classifier or config.get("id2label") or config.get("num_labels") else 1
    if not os.path.lexists(file):
        _check_bare(folder)
        return Layout(folder, (), num_labels=num_labels)
    settings = _family_settings(folder, "CrossEncoder")
    modules = [(_kind(entry), entry.get("path")) for entry in _module_list(file)]
    settings_file = folder / "config_sentence_transformers.json"
    if settings.get("keep_in_fp32_modules"):
        raise CheckpointError(f"{settings_file}: keep_in_fp32_modules is not supported")
    if modules == [("Transformer", "")]:
        options = _transformer_settings(folder, "sequence-classification", "logits", _SCORES)
        layout = Layout(folder, (), **options, num_labels=num_labels)
    else:
        layout = _read_modules(file, _SCORES)
    prompts, default = _prompts(settings_file, settings)
    return dataclasses.replace(layout, prompts=prompts, default_prompt_name=default)


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


def _read_modules(file: Path, result: str) -> Layout:
    """Reads all modules that modules.json lists. The last module gives the feature `result`."""
    entries = []
    for entry in _module_list(file):
        kind, path = _kind(entry), entry.get("path")
        if kind not in _MODULES:
            raise CheckpointError(
                f"{file}: module {entry.get('type')!r:.80} is not supported; supported are {', '.join(_MODULES)}"
            )
        if not isinstance(path, str) or Path(path).is_absolute() or ".." in Path(path).parts:
            raise CheckpointError(f"{file}: module {kind} must have a path inside the folder, got {path!r:.80}")
        entries.append((kind, file.parent / path))
    kinds = [kind for kind, _ in entries]
    for kind in ("Transformer", "Pooling"):
        if kinds.count(kind) > 1:
            raise CheckpointError(f"{file}: module {kind} appears twice, which is not supported")
    if kinds[:1] != ["Transformer"] or "Pooling" not in kinds:
        raise CheckpointError(
            f"{file}: expected a Transformer module, then one Pooling module and any number of others, got"
            f" {', '.join(kinds):.200}"
        )
    transformer = entries[0][1]
    if not os.path.isdir(transformer):
        raise CheckpointError(f"{file}: the folder of module Transformer, {transformer}, does not exist")
    pooling, include_prompt = _read_pooling(entries[kinds.index("Pooling")][1] / "config.json")
    parts: dict[str, list[Module]] = {_TOKENS: [], _SENTENCE: []}
    for index, (kind, folder) in enumerate(entries):
        if kind in ("Transformer", "Pooling"):
            continue
        is_last = index == len(entries) - 1
        module, source, target = _read_module(kind, folder)
        is_pooled = index > kinds.index("Pooling")
        if kind == "Normalize" and source == target == _SENTENCE and not is_pooled:
            continue  # there is nothing yet that it could normalise
        if source != (_SENTENCE if is_pooled else _TOKENS) or target != (result if is_last else source):
            raise CheckpointError(
                f"{folder / 'config.json'}: module_input_name and module_output_name of module {kind}, {source!r:.80}"
                f" and {target!r:.80}, are not supported {'after' if is_pooled else 'before'} the Pooling module"
            )
        parts[source].append(module)
    if result == _SCORES and kinds[-1] != "Dense":
        raise CheckpointError(f"{file}: the last module of a CrossEncoder must be a Dense module, got {kinds[-1]}")
    options = _transformer_settings(transformer, "feature-extraction", "last_hidden_state", _TOKENS)
    return Layout(transformer, pooling, include_prompt, tuple(parts[_TOKENS]), tuple(parts[_SENTENCE]), **options)


def _read_module(kind: str, folder: Path) -> tuple[Module, Any, Any]:
    """Reads a module with its parameters. Returns the module and the names of the features that it reads and writes."""
    file = folder / "config.json"
    config = read_settings(file)
    source = target = _SENTENCE
    if kind in ("Dense", "Normalize"):
        source = config.get("module_input_name", _SENTENCE)
        target = source if config.get("module_output_name") is None else config["module_output_name"]
    elif kind in _FIELDS:
        _check_known(file, config, _FIELDS[kind])
    try:
        if kind == "Dense":
            return _read_dense(folder, config), source, target
        if kind == "LayerNorm":
            # The size is compared with the file before anything of that size is made.
            width = checks.as_size(kind, "dimension", config.get("dimension"), positive=True)
            values = checkpoint_tensors.load_exact(folder, dict.fromkeys(_NORM, (width,)))
            layer_norm = LayerNorm(width)
            for parameter, name in zip((layer_norm.gamma, layer_norm.beta), _NORM, strict=True):
                parameter.set_value(jnp.asarray(values[name]))
            return layer_norm, source, target
        return (Dropout(config.get("dropout", 0.2)) if kind == "Dropout" else Normalize()), source, target
    except (TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: {error}") from error


def _read_dense(folder: Path, config: dict[str, Any]) -> Dense:
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = name.rpartition(".")[2] if name.startswith("torch.") else None
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation_function {name!r:.80} is not supported; supported are {', '.join(ACTIVATIONS)} of PyTorch"
        )
    sizes: Any = (config.get("in_features"), config.get("out_features"))
    flags = {"bias": config.get("bias", True), "use_residual": config.get("use_residual", False)}
    module = Dense(*sizes, **flags, activation=activation, rngs=None)
    named = {"linear.weight": module.kernel, "linear.bias": module.bias, "residual.weight": module.residual_kernel}
    parameters = {name: parameter for name, parameter in named.items() if parameter is not None}
    shapes = {name: parameter.shape[::-1] for name, parameter in parameters.items()}
    for name, value in checkpoint_tensors.load_exact(folder, shapes).items():
        parameters[name].set_value(jnp.asarray(value.T))
    return module


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
    unsupported = [mode for mode in modes if mode not in MODES] if isinstance(modes, list) else [modes]
    if unsupported or not modes or len(modes) > len(MODES):
        raise CheckpointError(
            f"{file}: pooling mode {', '.join(map(repr, unsupported or modes)):.200} is not supported; supported are"
            f" {', '.join(MODES)} and their concatenation"
        )
    return tuple(modes), bool(config.get("include_prompt", True))


def _prompts(file: Path, settings: dict[str, Any]) -> tuple[dict[str, str | None], str | None]:
    """Returns the prompts by name, and the name of the default prompt."""
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts")
    prompts = {} if prompts is None else prompts
    if not isinstance(prompts, dict):
        raise CheckpointError(f"{file}: prompts must be an object from names to texts, got {prompts!r:.80}")
    for key, prompt in prompts.items():
        if not isinstance(prompt, str | None):
            raise CheckpointError(f"{file}: prompts has no text of the name {key!r:.80}, but {prompt!r:.80}")
    if not isinstance(name, str | None):
        raise CheckpointError(f"{file}: default_prompt_name must be a name, got {name!r:.80}")
    return prompts, name


def _transformer_settings(folder: Path, task: str, output: str, feature: str) -> dict[str, Any]:
    """Returns the fields of `Layout` that a Transformer module has, and refuses what would change embeddings."""
    files = [folder / f"sentence_{kind}_config.json" for kind in _KINDS]
    file = next(filter(read_settings, files), files[0])
    settings = read_settings(file)
    expected: dict[str, Any] = {"transformer_task": task, "module_output_name": feature, "tokenizer_name_or_path": None,
                                "query_expansion": None}  # fmt: skip
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
    lengths = {name: tokenizer_files.check_length(file, settings.get(field)) for name, field in _LENGTHS.items()}
    return {
        "max_seq_length": tokenizer_files.check_length(file, settings.get("max_seq_length")),
        "do_lower_case": bool(settings.get("do_lower_case", False)),
        "task_lengths": {name: length for name, length in lengths.items() if length is not None},
    }


def _check_known(file: Path, config: dict[str, Any], fields: tuple[str, ...]) -> None:
    """Refuses fields that the module's class in sentence-transformers does not take either."""
    if unknown := [name for name in config if name not in fields]:
        raise CheckpointError(f"{file}: unknown field {unknown[0]!r:.80}; known are {', '.join(fields)}")
