"""Writes the folder of an encoder as sentence-transformers lays it out, with a model card."""

import dataclasses
import logging
import os
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxft._version import __version__
from jaxft.checkpoint import files as checkpoint_files
from jaxft.checkpoint import tensors
from jaxft.checkpoint.files import CheckpointError
from jaxft.models.classification import BertForSequenceClassification
from jaxft.models.embedding import Dense, Dropout, EmbeddingModel, LayerNorm, Module
from jaxft.models.multi_vector import MultiVectorModel
from jaxft.models.splade import SpladeModel
from jaxft.text import exported as exported_files
from jaxft.text import module_files
from jaxft.text import tokenizer as tokenizer_files

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Fields of a model card that a saved model has in common with the model that was loaded.
_KEPT = ("base_model", "base_model_relation", "language", "license", "license_link", "license_name")

# Files of an earlier save that would be applied to the new files.
_STALE = ("added_tokens.json", "special_tokens_map.json", "adapter_config.json", "processor_config.json",
          "preprocessor_config.json")  # fmt: skip

# Packages of sentence-transformers' modules, where they are not in `models`.
_PACKAGES = {
    "MLMTransformer": "sparse_encoder.models",
    "SpladePooling": "sparse_encoder.models",
    "MultiVectorMask": "multi_vector_encoder.modules",
}

Model = EmbeddingModel | BertForSequenceClassification | SpladeModel | MultiVectorModel

_log = logging.getLogger("jaxft")


@dataclasses.dataclass(frozen=True)
class Origin:
    """Facts about the loaded folder that a saved encoder keeps."""

    name: str | None = None  # the Hugging Face id
    card: str = ""  # README.md
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by name, as "mask_token"


def read_origin(folder_or_id: str | os.PathLike[str], folder: Path, settings: tokenizer_files.Settings) -> Origin:
    """Reads what a saved encoder keeps from a folder, which was resolved from `folder_or_id`."""
    file, card = folder / "README.md", ""
    if os.path.lexists(file):
        try:  # the model does not depend on its card
            checkpoint_files.check_file(file)
            card = file.read_text("utf-8")
        except (ValueError, OSError) as error:
            _log.warning("the model card is not kept: %s", error)
    tokens = {name: token.content for name, token in settings.named_tokens().items()}
    return Origin(None if os.path.isdir(folder_or_id) else str(folder_or_id), card, tokens)


def save(
    folder: str | os.PathLike[str],
    model: Model,
    tokenizer: "Tokenizer",
    settings: dict[str, Any],
    *,
    token_types: bool,
    max_length: int,
    origin: Origin,
    task_lengths: Mapping[str, int] = types.MappingProxyType({}),
    mask: Mapping[str, Any] | None = None,
    query_expansion: Mapping[str, Any] | None = None,
    exported: Mapping[str, Any] = types.MappingProxyType({}),
) -> None:
    """Writes a folder that sentence-transformers and jaxft load. `settings` go to config_sentence_transformers.json.

    `mask` has the settings of a MultiVectorMask module. `exported` has the files that `export` adds.

    All files are complete before one of them gets its final name. Files of an earlier save that do not belong to the
    new model are removed. Other files in the folder stay.
    """
    folder, is_scorer = tensors.checked_folder(folder), settings["model_type"] == "CrossEncoder"
    encoder: Any = model.mlm if isinstance(model, SpladeModel) else getattr(model, "encoder", model)
    files = encoder._files()
    config = files["config.json"]
    transformer: dict[str, Any] = {"max_seq_length": max_length, "do_lower_case": False}
    transformer |= {f"{task}_length": length for task, length in task_lengths.items()}
    if query_expansion is not None:
        transformer["query_expansion"] = dict(query_expansion)
    if isinstance(model, BertForSequenceClassification):
        transformer["transformer_task"] = "sequence-classification"
        config.pop("sbert_ce_default_activation_function", None)
        config["sentence_transformers"] = {"activation_fn": settings["activation_fn"]}  # for older versions
    padding = tokenizer.id_to_token(encoder.config.pad_token_id)
    special_tokens = ({} if padding is None else {"pad_token": padding}) | {**origin.special_tokens}
    contents = {
        **exported,
        **files,
        "sentence_bert_config.json": transformer,
        "config_sentence_transformers.json": settings | {"__version__": {"jaxft": __version__}},
        "README.md": _model_card(settings, model, max_length, origin, in_float8="model.safetensors" not in files),
        **tokenizer_files.files(tokenizer, special_tokens, token_types, max_length),
    }
    kinds = ["MLMTransformer" if isinstance(model, SpladeModel) else "Transformer"]
    for kind, fields, arrays in _modules(model, is_scorer, mask):
        path = f"{len(kinds)}_{kind}"
        kinds.append(kind)
        contents[f"{path}/config.json"] = fields
        if arrays:
            contents[f"{path}/model.safetensors"] = arrays
    contents["modules.json"] = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.{_PACKAGES.get(kind, 'models')}.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    stale = {*_stale(folder), *exported_files.old_files(folder), *tensors.WEIGHTS}
    tensors.write(folder, contents, sorted(stale - contents.keys()))


def _modules(
    model: Model, is_scorer: bool, mask: Mapping[str, Any] | None
) -> list[tuple[str, dict[str, Any], dict[str, np.ndarray]]]:
    """Returns class, config.json and tensors of each module after the Transformer."""
    if isinstance(model, BertForSequenceClassification):
        return []
    if isinstance(model, SpladeModel):
        settings = {
            "pooling_strategy": model.pooling_strategy,
            "activation_function": model.activation_function,
            "word_embedding_dimension": model.embedding_dimension,
        }
        return [("SpladePooling", settings, {})]
    if isinstance(model, MultiVectorModel):
        modules = [_module(module, "token_embeddings") for module in model.token_modules]
        # In the order of sentence-transformers: before a Normalize module at the end.
        place = len(modules) - (modules[-1:] != [] and modules[-1][0] == "Normalize")
        return [*modules[:place], ("MultiVectorMask", dict(mask or {}), {}), *modules[place:]]
    modules = [_module(module, "token_embeddings") for module in model.token_modules]
    modules.append(("Pooling", _pooling(model), {}))
    modules += [_module(module, "sentence_embedding") for module in model.modules]
    if is_scorer:
        modules[-1][1]["module_output_name"] = "scores"
    return modules


def _pooling(model: EmbeddingModel) -> dict[str, Any]:
    """Returns the config of the Pooling module, if possible with the fields that all its readers know."""
    modes, width = model.pooling, model.encoder.config.hidden_size
    for module in model.token_modules:
        width = module.out_features if isinstance(module, Dense) else width
    flags = {flag: mode in modes for flag, mode in module_files.POOLING_FLAGS.items()}
    if modes == tuple(mode for flag, mode in module_files.POOLING_FLAGS.items() if flags[flag]):
        return {"word_embedding_dimension": width, **flags, "include_prompt": model.include_prompt}
    return {"embedding_dimension": width, "pooling_mode": modes, "include_prompt": model.include_prompt}


def _module(module: Module, name: str) -> tuple[str, dict[str, Any], dict[str, np.ndarray]]:
    kind = type(module).__name__
    place = {} if name == "sentence_embedding" else {"module_input_name": name}
    if isinstance(module, Dense):
        arrays = {"linear.weight": module.kernel[...].T}
        if module.bias is not None:
            arrays["linear.bias"] = module.bias[...]
        if module.residual_kernel is not None:
            arrays["residual.weight"] = module.residual_kernel[...].T
        config = {
            "in_features": module.in_features,
            "out_features": module.out_features,
            "bias": module.bias is not None,
            "activation_function": activation_name(module.activation),
            **({"use_residual": True} if module.use_residual else {}),
        }
    elif isinstance(module, LayerNorm):
        arrays = {"norm.weight": module.gamma[...], "norm.bias": module.beta[...]}
        config = {"dimension": module.out_features}
    else:
        arrays, config = {}, {"dropout": module.rate} if isinstance(module, Dropout) else {}
    return kind, config | place, {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def activation_name(name: str) -> str:
    """Returns PyTorch's full name of an activation, as files contain it."""
    return f"torch.nn.modules.{'linear' if name == 'Identity' else 'activation'}.{name}"


def _stale(folder: Path) -> list[str]:
    """Returns the files of an earlier save that would be applied to a new model, or that only the old one has."""
    try:
        entries = checkpoint_files.read_json(folder / "modules.json")
    except CheckpointError:  # no earlier save, or none that could be loaded
        entries = []
    paths = (
        [str(entry.get("path")) for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    )
    modules = [
        path
        for path in paths
        if re.fullmatch(r"\d+_(Pooling|SpladePooling|MultiVectorMask|Dense|LayerNorm|Dropout|Normalize)", path)
    ]
    files = ("config.json", "model.safetensors", "pytorch_model.bin")
    return [*_STALE, *(f"{path}/{file}" for path in modules for file in files)]


# --- Model card --------------------------------------------------------------------------------------------------

_ENCODER_USE = """\
from {package} import {name}

model = {call}
queries = model.encode_query(["Where is the cat?"])
documents = model.encode_document(["There is a cat on a rug.", "Shares fell sharply on Monday."])
print(model.similarity(queries, documents))
"""
_SCORER_USE = """\
from {package} import {name}

model = {call}
print(model.predict([("Where is the cat?", "There is a cat on a rug."), ("Where is the cat?", "Shares fell.")]))
"""


def _model_card(
    settings: Mapping[str, Any], model: Model, max_length: int, origin: Origin, *, in_float8: bool
) -> str:  # fmt: skip
    """Returns the content of README.md. Licence, language and base model are from the card of the origin.

    Only jaxft loads a model in float8.
    """
    import huggingface_hub

    kept = _kept_fields(origin)
    size = model.num_labels if isinstance(model, BertForSequenceClassification) else model.embedding_dimension
    if settings["model_type"] == "CrossEncoder":
        tags = ["sentence-transformers", "cross-encoder", "reranker"]
        task, use, ours = "text-ranking" if size == 1 else "text-classification", _SCORER_USE, "CrossEncoder"
        what = f"scores pairs of texts. A pair gets {size} score{'s' * (size > 1)}"
    elif isinstance(model, SpladeModel):
        tags = ["sentence-transformers", "sparse-encoder", "sparse", "splade"]
        task, use, ours = "feature-extraction", _ENCODER_USE, "SparseEncoder"
        what = f"maps texts to weights of {size} tokens, of which most are 0"
    elif isinstance(model, MultiVectorModel):
        tags = ["sentence-transformers", "multi-vector", "late-interaction", "ColBERT"]
        task, use, ours = "sentence-similarity", _ENCODER_USE, "MultiVectorEncoder"
        what = f"maps each token of a text to a vector of {size} numbers"
    else:
        tags = ["sentence-transformers", "sentence-similarity", "feature-extraction"]
        task, use, ours = "sentence-similarity", _ENCODER_USE, "SentenceEncoder"
        what = f"maps texts to vectors of {min(settings.get('truncate_dim') or size, size)} numbers"
    fields: dict[str, Any] = {
        **kept,
        "library_name": "jaxft" if in_float8 else "sentence-transformers",
        "pipeline_tag": task,
        "tags": [*tags[in_float8:], "jaxft"],
    }
    base = kept.get("base_model", [])
    bases = [f"[{name}](https://huggingface.co/{name})" for name in ([base] if isinstance(base, str) else base)]
    theirs = settings["model_type"]
    call = f'{ours}.from_pretrained("path/to/this/folder")'
    by_them = [
        "With [sentence-transformers](https://www.sbert.net):", "", "```python",
        use.format(package="sentence_transformers", name=theirs, call=f'{theirs}("path/to/this/folder")') + "```", "",
    ]  # fmt: skip
    lines = [
        "---", huggingface_hub.CardData(**dict(sorted(fields.items()))).to_yaml(), "---", "", f"# {theirs}", "",
        f"This model {what}. It was saved by jaxft {__version__}.", "",
        *([f"- Base model: {', '.join(bases)}"] if bases else []),
        f"- Maximum length: {max_length} tokens",
        *(f"- Similarity: {name}" for name in [settings.get("similarity_fn_name")] if name),
        *(f"- Prompt {name!r}: {text!r}" for name, text in settings["prompts"].items() if text),
        *["- Weights: float8_e4m3fn, which only jaxft loads"] * in_float8, "",
        "## Usage", "", *by_them[: 0 if in_float8 else None],
        "With jaxft, on JAX:", "", "```python", use.format(package="jaxft", name=ours, call=call) + "```", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _kept_fields(origin: Origin) -> dict[str, str | list[str]]:
    """Returns the fields of the loaded model's card that hold for a model made from it, too."""
    import huggingface_hub

    fields: dict[str, Any] = {}
    try:
        if origin.card:
            fields = huggingface_hub.RepoCard(origin.card).data.to_dict()
    except Exception as error:  # of the YAML library
        _log.warning("the metadata of the loaded model card are not kept: %s", error)
    kept: dict[str, str | list[str]] = {} if origin.name is None else {"base_model": origin.name}
    for name in _KEPT:
        value: Any = fields.get(name)
        items = value if isinstance(value, list) else [value]
        if items and all(isinstance(item, str) and item for item in items):
            kept[name] = value
    return kept
