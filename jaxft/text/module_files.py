"""Reads the files of sentence-transformers in a checkpoint folder: modules.json, and the settings of each module."""

import dataclasses
import logging
import os
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxft import dispatch
from jaxft.checkpoint import files as checkpoint_files
from jaxft.checkpoint import tensors as checkpoint_tensors
from jaxft.checkpoint.files import CheckpointError, read_settings
from jaxft.models.embedding import ACTIVATIONS, Dense, Dropout, LayerNorm, Module, Normalize
from jaxft.models.pooling import MODES
from jaxft.models.splade import ACTIVATIONS as SPLADE_ACTIVATIONS
from jaxft.models.splade import POOLINGS
from jaxft.ops import checks
from jaxft.text import tokenizer as tokenizer_files
from jaxft.text.similarities import MAX_SIMS, SIMILARITIES

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
SPLADE_FIELDS = (
    "pooling_strategy",
    "activation_function",
    "embedding_dimension",
    "word_embedding_dimension",
    "chunk_size",
)
MASK_FIELDS = ("skiplist_words", "skiplist_tasks", "keep_only_token_ids")
EXPANSION_FIELDS = ("strategy", "attend", "token", "length")
# Fields of config_sentence_transformers.json in PyLate's folders.
_PYLATE = ("query_length", "document_length", "query_expansion", "do_query_expansion", "attend_to_expansion_tokens",
           "attend_to_mask_tokens", "query_prefix", "document_prefix", "skiplist_words")  # fmt: skip
_NORM = ("norm.weight", "norm.bias")
_TOKENS, _SENTENCE, _SCORES = "token_embeddings", "sentence_embedding", "scores"
_MODULES = ("Transformer", "Pooling", "Dense", "LayerNorm", "Dropout", "Normalize")
_SPLADE_MODULES = ("MLMTransformer", "Transformer", "SpladePooling")
_MULTI_VECTOR_MODULES = ("Transformer", "Dense", "Normalize", "MultiVectorMask")
_CLASSES = {"SentenceTransformer": "SentenceEncoder", "CrossEncoder": "CrossEncoder", "SparseEncoder": "SparseEncoder",
            "MultiVectorEncoder": "MultiVectorEncoder", "ColBERT": "MultiVectorEncoder"}  # fmt: skip

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
    sources: Mapping[str, Path] = dataclasses.field(default_factory=dict)  # file of each field that is a length
    do_lower_case: bool = False
    prompts: dict[str, str | None] = dataclasses.field(default_factory=dict)
    default_prompt_name: str | None = None
    truncate_dim: int | None = None
    similarity_fn_name: str | None = None
    task_lengths: dict[str, int] = dataclasses.field(default_factory=dict)  # maximum lengths of queries and documents
    num_labels: int | None = None  # of a classifier whose config.json does not say it
    splade: Mapping[str, str] = dataclasses.field(default_factory=dict)  # settings of `SpladeModel`
    max_active_dims: int | None = None
    markers: tuple[str, ...] = ()  # prefixes that are one token each if the vocabulary has them
    query_expansion: Mapping[str, Any] | None = None
    mask: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # settings of the tokens that count
    projection: int | None = None  # width of the projection that is in the file of the encoder


def read_sentence_encoder(folder: Path) -> Layout:
    """Reads the layout of a SentenceTransformer. A folder without modules.json gets mean pooling."""
    file = folder / "modules.json"
    if not os.path.lexists(file):
        _check_bare(folder)
        config = checkpoint_files.read_json_object(folder / "config.json")
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
    width = _positive(file, "truncate_dim", settings.get("truncate_dim"))
    return dataclasses.replace(layout, **_shared(file, settings, SIMILARITIES), truncate_dim=width)


def read_sparse_encoder(folder: Path) -> Layout:
    """Reads the layout of a SparseEncoder with SPLADE. Without modules.json, the pooling is "max"."""
    file = folder / "modules.json"
    if not os.path.lexists(file):
        _check_bare(folder)
        architectures = read_settings(folder / "config.json").get("architectures")
        names = architectures if isinstance(architectures, list) else []
        if not any(str(name).endswith("ForMaskedLM") for name in names):
            raise CheckpointError(
                f"{folder}: without modules.json, a SparseEncoder needs a masked language model, whose class in"
                f" architectures of config.json ends in ForMaskedLM, got {architectures!r:.80}"
            )
        return Layout(folder)
    settings = _family_settings(folder, "SparseEncoder")
    entries = _entries(file, _SPLADE_MODULES)
    kinds = [kind for kind, _ in entries]
    if len(kinds) != 2 or kinds[0] == "SpladePooling" or kinds[1] != "SpladePooling":
        raise CheckpointError(
            f"{file}: expected a Transformer module for fill-mask and a SpladePooling module, got"
            f" {', '.join(kinds):.200}"
        )
    transformer, pooling = (path for _, path in entries)
    task = "fill-mask" if kinds[0] == "Transformer" else None  # which an MLMTransformer need not say
    options = _transformer_settings(transformer, "fill-mask", "logits", _TOKENS, needs_task=task is not None)
    config = checkpoint_files.read_json_object(pooling / "config.json")
    _check_known(pooling / "config.json", config, SPLADE_FIELDS)
    splade = {}
    for name, known in (("pooling_strategy", POOLINGS), ("activation_function", SPLADE_ACTIVATIONS)):
        splade[name] = config.get(name, known[0])
        if splade[name] not in known:
            raise CheckpointError(
                f"{pooling / 'config.json'}: {name} must be one of {', '.join(known)}, got {splade[name]!r:.80}"
            )
    file = folder / "config_sentence_transformers.json"
    most = _positive(file, "max_active_dims", settings.get("max_active_dims"))
    return Layout(
        transformer, (), **options, **_shared(file, settings, SIMILARITIES), splade=splade, max_active_dims=most
    )


def read_multi_vector_encoder(folder: Path) -> Layout:
    """Reads the layout of a MultiVectorEncoder, or of a ColBERT model of PyLate or Stanford."""
    file = folder / "modules.json"
    if not os.path.lexists(file):
        return _read_stanford(folder)
    family = folder / "config_sentence_transformers.json"
    settings = read_settings(family)
    is_pylate = settings.get("model_type", "SentenceTransformer") == "ColBERT"
    # Older versions of PyLate do not name another type of model.
    if not is_pylate and any(name in settings for name in ("query_prefix", "document_prefix")):
        is_pylate = settings.get("model_type", "SentenceTransformer") == "SentenceTransformer"
    if not is_pylate:
        _family_settings(folder, "MultiVectorEncoder")
    entries = _entries(file, _MULTI_VECTOR_MODULES)
    kinds = [kind for kind, _ in entries]
    if kinds[0] != "Transformer" or kinds.count("Transformer") > 1 or kinds.count("MultiVectorMask") > 1:
        raise CheckpointError(
            f"{file}: expected a Transformer module, then any number of Dense and Normalize modules and one"
            f" MultiVectorMask module, got {', '.join(kinds):.200}"
        )
    modules: list[Module] = []
    mask: dict[str, Any] = {}
    for kind, path in entries[1:]:
        if kind == "MultiVectorMask":
            mask = _read_mask(path / "config.json")
            continue
        module, source, target = _read_module(kind, path, _TOKENS if kind == "Dense" else _SENTENCE)
        if kind == "Normalize" and source == target == _SENTENCE:
            continue  # there is no sentence embedding that it could normalise
        if (source, target) != (_TOKENS, _TOKENS):
            raise CheckpointError(
                f"{path / 'config.json'}: module_input_name and module_output_name of module {kind} must be {_TOKENS},"
                f" got {source!r:.80} and {target!r:.80}"
            )
        modules.append(module)
    prompts, markers, defaults = _read_pylate(family, settings)
    if is_pylate:
        words = settings.get("skiplist_words")
        mask = _checked_mask(family, {"skiplist_words": [*string.punctuation] if words is None else words})
        modules.append(Normalize())
    options = _transformer_settings(
        entries[0][1],
        "feature-extraction",
        "last_hidden_state",
        _TOKENS,
        defaults=defaults,
        defaults_file=family,
        expands=True,
    )
    expansion = options["query_expansion"]
    if expansion is not None and not expansion["attend"] and not is_pylate and "MultiVectorMask" not in kinds:
        raise CheckpointError(f"{file}: query_expansion needs a MultiVectorMask module, which counts its tokens")
    shared = _shared(family, settings | {"prompts": prompts}, MAX_SIMS)
    return Layout(entries[0][1], (), token_modules=tuple(modules), **options, **shared, markers=markers, mask=mask)


def _read_stanford(folder: Path) -> Layout:
    """Reads the layout of a folder of Stanford's ColBERT, whose projection is in the file of the encoder."""
    config = read_settings(folder / "config.json")
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or "HF_ColBERT" not in architectures:
        raise CheckpointError(
            f"{folder}: has no modules.json, and architectures in config.json does not name HF_ColBERT. A new"
            " projection needs training: make a jaxft.MultiVectorEncoder of a BertModel and a Dense module"
        )
    if (kind := config.get("model_type")) != "bert":
        raise CheckpointError(
            f"{folder / 'config.json'}: model_type of Stanford's ColBERT must be 'bert', got {kind!r:.80}"
        )
    file = folder / "artifact.metadata"
    settings = read_settings(file)
    names = {"query": ("query_token_id", "[unused0]"), "document": ("doc_token_id", "[unused1]")}
    prompts: dict[str, str | None] = {}
    for name, (field, default) in names.items():
        marker = settings.get(field) or default
        if not isinstance(marker, str):
            raise CheckpointError(f"{file}: {field} must be a token, got {marker!r:.80}")
        prompts[name] = f"{marker} "
    length = _positive(file, "query_maxlen", settings.get("query_maxlen")) or 32
    expansion = {"strategy": "fixed", "attend": bool(settings.get("attend_to_mask_tokens")), "length": length}
    document_length = _positive(file, "doc_maxlen", settings.get("doc_maxlen"))
    words = [*string.punctuation] if settings.get("mask_punctuation", True) else []
    return Layout(
        folder, (), token_modules=(Normalize(),), prompts=prompts, markers=tuple(filter(None, prompts.values())),
        task_lengths={} if document_length is None else {"document": document_length},
        sources={"document_length": file},
        query_expansion=checked_expansion(str(file), expansion), mask=_checked_mask(file, {"skiplist_words": words}),
        projection=_positive(file, "dim", settings.get("dim")) or 128,
    )  # fmt: skip


def _read_pylate(file: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]:
    """Returns the prompts, the markers and the settings of the Transformer module in PyLate's fields."""
    prompts, _ = _prompts(file, settings)
    markers = []
    for field, name in (("query_prefix", "query"), ("document_prefix", "document")):
        if field in settings:
            prefix = settings[field] or ""
            if not isinstance(prefix, str):
                raise CheckpointError(f"{file}: {field} must be a text, got {prefix!r:.80}")
            markers.append(prefix)
            prompts[name] = prefix + (prompts.get(name) or "").removeprefix(prefix)
    lengths = {name: tokenizer_files.check_length(file, name, settings.get(name)) for name in _LENGTHS.values()}
    found: dict[str, Any] = {name: length for name, length in lengths.items() if length is not None}
    if "query_expansion" in settings:
        found["query_expansion"] = settings["query_expansion"]
    elif any(name in settings for name in _PYLATE) and settings.get("do_query_expansion") is not False:
        attend = settings.get("attend_to_expansion_tokens", settings.get("attend_to_mask_tokens"))
        length = found.pop("query_length", 32)
        found["query_expansion"] = {"strategy": "fixed", "attend": bool(attend), "length": length}
    return prompts, tuple(markers), found


def _read_mask(file: Path) -> dict[str, Any]:
    config = read_settings(file)
    _check_known(file, config, MASK_FIELDS)
    return _checked_mask(file, config)


def _checked_mask(file: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a MultiVectorMask module."""
    tasks = config.get("skiplist_tasks")
    found = {
        "skiplist_words": config.get("skiplist_words") or [],
        "skiplist_tasks": ["document"] if tasks is None else [tasks] if isinstance(tasks, str) else tasks,
        "keep_only_token_ids": config.get("keep_only_token_ids") or [],
    }
    for name, kind in (("skiplist_words", "str"), ("skiplist_tasks", "str"), ("keep_only_token_ids", "token ids")):
        is_right = checks.is_natural if kind == "token ids" else lambda item: isinstance(item, str)
        if not isinstance(found[name], list) or not all(map(is_right, found[name])):
            raise CheckpointError(f"{file}: {name} must be a list of {kind}, got {found[name]!r:.80}")
    return found


def checked_expansion(where: str, value: Any) -> dict[str, Any] | None:
    """Returns settings of query expansion with their defaults. Raises a ValueError that starts with `where`."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(name in EXPANSION_FIELDS for name in value):
        raise ValueError(f"{where}: query_expansion must have some of {', '.join(EXPANSION_FIELDS)}, got {value!r:.80}")
    found = {"attend": False, "token": None} | dict(value)
    for name, is_right, expected in (
        ("strategy", found.get("strategy") in ("fixed", "min"), "fixed or min"),
        ("attend", isinstance(found["attend"], bool), "a boolean"),
        ("token", isinstance(found["token"], str | None), "a token or None"),
        ("length", checks.is_natural(found.get("length")) and found["length"] > 0, "a positive integer"),
    ):
        if not is_right:
            raise ValueError(f"{where}: {name} of query_expansion must be {expected}, got {found.get(name)!r:.80}")
    return found | {"length": int(found["length"])}


def _shared(file: Path, settings: dict[str, Any], similarities: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `Layout` that config_sentence_transformers.json has for every encoder of texts."""
    prompts, default = _prompts(file, settings)
    name = settings.get("similarity_fn_name")
    known = isinstance(name, str) and name in similarities  # sentence-transformers ignores other names, too
    return {"prompts": prompts, "default_prompt_name": default, "similarity_fn_name": name if known else None}


def _positive(file: Path, name: str, value: Any) -> int | None:
    if value is not None and not (checks.is_natural(value) and value > 0):
        raise CheckpointError(f"{file}: {name} must be a positive integer, got {value!r:.80}")
    return value


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
        other = _CLASSES.get(str(found))
        advice = f"load it with jaxft.{other}" if other else "it is not supported"
        raise CheckpointError(f"{file}: model_type is {found!r:.80}, expected {family}; {advice}")
    return settings


def _module_list(file: Path) -> list[dict[str, Any]]:
    entries = checkpoint_files.read_json(file)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CheckpointError(f"{file}: expected a list of modules, got {entries!r:.80}")
    names = [entry["name"] for entry in entries if "name" in entry]
    if twice := [
        name for i, name in enumerate(names) if name in names[:i]
    ]:  # the second module would replace the first
        raise CheckpointError(f"{file}: the names of modules must differ, got {twice[0]!r:.80} twice")
    return entries


def _kind(entry: dict[str, Any]) -> str:
    """Returns the name of a module's class if it is one of sentence-transformers, else the full type."""
    kind = str(entry.get("type"))
    if kind == "pylate.models.Dense.Dense":
        return "Dense"
    return kind.rpartition(".")[2] if kind.startswith("sentence_transformers.") else kind


def _entries(file: Path, supported: Sequence[str]) -> list[tuple[str, Path]]:
    """Returns kind and folder of the modules that modules.json lists. The first one must have a folder."""
    entries = []
    for entry in _module_list(file):
        kind, path = _kind(entry), entry.get("path")
        if kind not in supported:
            raise CheckpointError(
                f"{file}: module {entry.get('type')!r:.80} is not supported; supported are {', '.join(supported)}"
            )
        if not isinstance(path, str) or Path(path).is_absolute() or ".." in Path(path).parts:
            raise CheckpointError(f"{file}: module {kind} must have a path inside the folder, got {path!r:.80}")
        entries.append((kind, file.parent / path))
    if not entries:
        raise CheckpointError(f"{file}: expected a list of modules, got none")
    if entries[0][0].endswith("Transformer") and not os.path.isdir(entries[0][1]):
        raise CheckpointError(f"{file}: the folder of module {entries[0][0]}, {entries[0][1]}, does not exist")
    return entries


def _read_modules(file: Path, result: str) -> Layout:
    """Reads all modules that modules.json lists. The last module gives the feature `result`."""
    entries = _entries(file, _MODULES)
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


def _read_module(kind: str, folder: Path, default: str = _SENTENCE) -> tuple[Module, Any, Any]:
    """Reads a module with its parameters. Returns the module and the names of the features that it reads and writes.

    `default` is the name of the feature that it reads if its settings do not say it.
    """
    file = folder / "config.json"
    config = read_settings(file)
    source = target = default
    if kind in ("Dense", "Normalize"):
        source = config.get("module_input_name", default)
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
                parameter.set_value(dispatch.to_device(values[name]))
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
        parameters[name].set_value(dispatch.to_device(value.T))
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


def _transformer_settings(
    folder: Path, task: str, output: str, feature: str, *, needs_task: bool = False,
    defaults: Mapping[str, Any] | None = None, defaults_file: Path | None = None, expands: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Returns the fields of `Layout` that a Transformer module has, and refuses what would change embeddings.

    With `needs_task`, the settings must name the task. `defaults` are settings of `defaults_file` for what the module's
    own file does not have. With `expands`, queries may be expanded.
    """
    files = [folder / f"sentence_{kind}_config.json" for kind in _KINDS]
    file = next(filter(read_settings, files), files[0])
    own = read_settings(file)
    settings = {**(defaults or {}), **own}
    expected: dict[str, Any] = {"transformer_task": task, "module_output_name": feature, "tokenizer_name_or_path": None,
                                "query_expansion": None}  # fmt: skip
    _check_known(file, settings, (*TRANSFORMER_FIELDS, *ARGUMENTS, *expected, "modality_config"))
    if expands:
        del expected["query_expansion"]
    for name, value in expected.items():
        required = needs_task and name == "transformer_task"
        if settings.get(name) not in ((value,) if required else (None, value)):
            raise CheckpointError(f"{file}: {name} {settings.get(name)!r:.80} is not supported, only {value}")
    for name, harmless in ARGUMENTS.items():
        values = settings.get(name) or {}
        values = values if isinstance(values, dict) else {str(values): None}
        if refused := [argument for argument in values if argument not in harmless]:
            raise CheckpointError(f"{file}: {refused[0]!r:.80} in {name} is not supported")
    modes = settings.get("modality_config", {"text": {"method": "forward", "method_output_name": output}})
    text = modes.get("text") if isinstance(modes, dict) and "message" not in modes else None
    if not isinstance(text, dict) or (text.get("method"), text.get("method_output_name")) != ("forward", output):
        raise CheckpointError(f"{file}: modality_config must take texts to {output} by forward, got {modes!r:.80}")
    lengths = {name: tokenizer_files.check_length(file, field, settings.get(field)) for name, field in _LENGTHS.items()}
    expansion = None
    if expands:
        try:
            expansion = checked_expansion(str(file), settings.get("query_expansion"))
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        if expansion is not None and (lengths["query"] or expansion["length"]) < expansion["length"]:
            raise CheckpointError(
                f"{file}: query_length must be at least the length of query_expansion, {expansion['length']}, got"
                f" {lengths['query']}"
            )
    return {
        "query_expansion": expansion,
        "sources": {name: file if name in own else defaults_file for name in ("max_seq_length", *_LENGTHS.values())},
        "max_seq_length": tokenizer_files.check_length(file, "max_seq_length", settings.get("max_seq_length")),
        "do_lower_case": bool(settings.get("do_lower_case", False)),
        "task_lengths": {name: length for name, length in lengths.items() if length is not None},
    }


def _check_known(file: Path, config: dict[str, Any], fields: tuple[str, ...]) -> None:
    """Refuses fields that the module's class in sentence-transformers does not take either."""
    if unknown := [name for name in config if name not in fields]:
        raise CheckpointError(f"{file}: unknown field {unknown[0]!r:.80}; known are {', '.join(fields)}")
