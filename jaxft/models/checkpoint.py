"""Hugging Face checkpoints: finding, checking, reading and writing them.

A checkpoint is a folder with `config.json` and safetensors files. The tables below say under which names each layout
keeps the parameters of the models. The headers of all files are checked against the expected names, shapes and dtypes
before any tensor is read. Pickle files are never opened.
"""

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxft.models import checkpoint_files
from jaxft.models import checkpoint_heads as heads

Shape = tuple[int, ...]
T = TypeVar("T")


class CheckpointError(ValueError):
    """A checkpoint cannot be found, read or used; the message lists every problem with its file and tensor."""


# --- Names -------------------------------------------------------------------------------------------------------
#
# Our parameter -> its name in the checkpoint, where {i} is the number of the layer. A parameter with several names is
# the concatenation of those tensors along its last axis. A `kernel` is [in, out]; the checkpoint's torch.nn.Linear
# keeps it as [out, in].

_BERT = {
    "embeddings.word": ["embeddings.word_embeddings.weight"],
    "embeddings.position": ["embeddings.position_embeddings.weight"],
    "embeddings.token_type": ["embeddings.token_type_embeddings.weight"],
    "embeddings.norm_gamma": ["embeddings.LayerNorm.weight"],
    "embeddings.norm_beta": ["embeddings.LayerNorm.bias"],
    "layers.{i}.qkv_kernel": [
        "encoder.layer.{i}.attention.self.query.weight",
        "encoder.layer.{i}.attention.self.key.weight",
        "encoder.layer.{i}.attention.self.value.weight",
    ],
    "layers.{i}.qkv_bias": [
        "encoder.layer.{i}.attention.self.query.bias",
        "encoder.layer.{i}.attention.self.key.bias",
        "encoder.layer.{i}.attention.self.value.bias",
    ],
    "layers.{i}.out_kernel": ["encoder.layer.{i}.attention.output.dense.weight"],
    "layers.{i}.out_bias": ["encoder.layer.{i}.attention.output.dense.bias"],
    "layers.{i}.attention_norm_gamma": ["encoder.layer.{i}.attention.output.LayerNorm.weight"],
    "layers.{i}.attention_norm_beta": ["encoder.layer.{i}.attention.output.LayerNorm.bias"],
    "layers.{i}.ffn_in_kernel": ["encoder.layer.{i}.intermediate.dense.weight"],
    "layers.{i}.ffn_in_bias": ["encoder.layer.{i}.intermediate.dense.bias"],
    "layers.{i}.ffn_out_kernel": ["encoder.layer.{i}.output.dense.weight"],
    "layers.{i}.ffn_out_bias": ["encoder.layer.{i}.output.dense.bias"],
    "layers.{i}.ffn_norm_gamma": ["encoder.layer.{i}.output.LayerNorm.weight"],
    "layers.{i}.ffn_norm_beta": ["encoder.layer.{i}.output.LayerNorm.bias"],
    "pooler.kernel": ["pooler.dense.weight"],
    "pooler.bias": ["pooler.dense.bias"],
}

_DISTILBERT = {
    "embeddings.word": ["embeddings.word_embeddings.weight"],
    "embeddings.position": ["embeddings.position_embeddings.weight"],
    "embeddings.norm_gamma": ["embeddings.LayerNorm.weight"],
    "embeddings.norm_beta": ["embeddings.LayerNorm.bias"],
    "layers.{i}.qkv_kernel": [
        "transformer.layer.{i}.attention.q_lin.weight",
        "transformer.layer.{i}.attention.k_lin.weight",
        "transformer.layer.{i}.attention.v_lin.weight",
    ],
    "layers.{i}.qkv_bias": [
        "transformer.layer.{i}.attention.q_lin.bias",
        "transformer.layer.{i}.attention.k_lin.bias",
        "transformer.layer.{i}.attention.v_lin.bias",
    ],
    "layers.{i}.out_kernel": ["transformer.layer.{i}.attention.out_lin.weight"],
    "layers.{i}.out_bias": ["transformer.layer.{i}.attention.out_lin.bias"],
    "layers.{i}.attention_norm_gamma": ["transformer.layer.{i}.sa_layer_norm.weight"],
    "layers.{i}.attention_norm_beta": ["transformer.layer.{i}.sa_layer_norm.bias"],
    "layers.{i}.ffn_in_kernel": ["transformer.layer.{i}.ffn.lin1.weight"],
    "layers.{i}.ffn_in_bias": ["transformer.layer.{i}.ffn.lin1.bias"],
    "layers.{i}.ffn_out_kernel": ["transformer.layer.{i}.ffn.lin2.weight"],
    "layers.{i}.ffn_out_bias": ["transformer.layer.{i}.ffn.lin2.bias"],
    "layers.{i}.ffn_norm_gamma": ["transformer.layer.{i}.output_layer_norm.weight"],
    "layers.{i}.ffn_norm_beta": ["transformer.layer.{i}.output_layer_norm.bias"],
}

# Field of BertConfig -> its name in a DistilBERT's config.json.
_DISTILBERT_CONFIG = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the checkpoints of one `model_type` name things."""

    names: Mapping[str, list[str]]
    prefix: str  # of the encoder's tensors, when the checkpoint was saved from a model with a head
    heads: tuple[str, ...]  # beginnings of the names of such heads' tensors, read only where they are asked for
    tied: Mapping[str, str]  # a head's tensor -> the one that it must be the same as
    architecture: str  # transformers' class of the encoder
    config_defaults: Mapping[str, Any]  # of a config.json, where they are not BertConfig's
    config_names: Mapping[str, str] = dataclasses.field(default_factory=dict)  # where they are not BertConfig's


_CLASSIFIERS = ("classifier.", "qa_outputs.")
_ROBERTA = _BERT | heads.NAMES["roberta"]
_ROBERTA_HEADS = "roberta.", ("lm_head.", *_CLASSIFIERS), heads.TIED["roberta"]
_PADDING_1 = {"pad_token_id": 1}

LAYOUTS: Mapping[str, Layout] = {
    "bert": Layout(_BERT | heads.NAMES["bert"], "bert.", ("cls.", *_CLASSIFIERS), heads.TIED["bert"], "BertModel", {}),
    "roberta": Layout(_ROBERTA, *_ROBERTA_HEADS, "RobertaModel", _PADDING_1 | {"vocab_size": 50265}),
    "xlm-roberta": Layout(_ROBERTA, *_ROBERTA_HEADS, "XLMRobertaModel", _PADDING_1),
    "camembert": Layout(_ROBERTA, *_ROBERTA_HEADS, "CamembertModel", _PADDING_1),
    "distilbert": Layout(
        _DISTILBERT | heads.NAMES["distilbert"],
        "distilbert.",
        ("vocab_transform.", "vocab_layer_norm.", "vocab_projector.", "pre_classifier.", *_CLASSIFIERS),
        heads.TIED["distilbert"],
        "DistilBertModel",
        {"num_hidden_layers": 6, "type_vocab_size": 0},
        _DISTILBERT_CONFIG,
    ),
}

_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")  # constants that some versions stored
_POOLER = ("pooler.dense.weight", "pooler.dense.bias")  # older RoBERTa classifiers have one, and do not use it
_DTYPES = ("F32", "F16", "BF16", "F64")
_NEW = "rngs=nnx.Rngs(0) to the model's from_pretrained, which initialises it"


def _checkpoint_names(layout: Layout, parameter: str) -> list[str]:
    """Names of the tensors that `parameter` consists of, for example "layers.3.out_bias"."""
    number = re.match(r"layers\.(\d+)\.", parameter)
    if number is None:
        return layout.names[parameter]
    template = parameter.replace(number[0], "layers.{i}.", 1)
    return [name.format(i=number[1]) for name in layout.names[template]]


def _canonical(layout: Layout, name: str) -> str:
    """The name in the layout's table: without the prefix, and LayerNorm's old gamma and beta renamed."""
    name = name.removeprefix(layout.prefix)
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _with_prefix(layout: Layout, name: str) -> str:
    """The name of a tensor, of the encoder or of a head, in the checkpoint of a model with a head."""
    return name if name.startswith(layout.heads) else layout.prefix + name


def _is_kernel(parameter: str) -> bool:
    return parameter.endswith("kernel")


def _expected_tensors(layout: Layout, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Shape of every tensor of the checkpoint, from those of our parameters."""
    expected: dict[str, Shape] = {}
    for parameter, shape in shapes.items():
        names = _checkpoint_names(layout, parameter)
        shape = (*shape[:-1], shape[-1] // len(names))
        expected |= {name: shape[::-1] if _is_kernel(parameter) else shape for name in names}
    return expected


# --- Finding -----------------------------------------------------------------------------------------------------

_LONGEST_ID = 96  # that Hugging Face allows


def resolve(
    folder_or_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Path:
    """The folder of a checkpoint: an existing folder as it is, otherwise a Hugging Face id, downloaded or cached.

    Raises:
      CheckpointError: neither a folder nor an id that can be had; the message says what to do.
      TypeError: `folder_or_id` is not a string or path.
    """
    name = os.fspath(folder_or_id) if isinstance(folder_or_id, os.PathLike) else folder_or_id
    if not isinstance(name, str):
        raise TypeError(f"from_pretrained: folder_or_id must be a string or a path, got {type(name).__name__}")
    # os.path: the methods of Path raise what the operating system says to a name that is too long.
    if os.path.isdir(name):
        return Path(name)
    if os.path.exists(name):
        raise CheckpointError(f"{name} is a file; expected the folder of a checkpoint, or a Hugging Face id")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith(".") or len(name) > _LONGEST_ID:
        raise CheckpointError(f"{name!r:.200} is neither an existing folder nor a Hugging Face id such as 'owner/name'")

    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                cache_dir=None if cache_dir is None else Path(cache_dir),
                local_files_only=local_files_only,
                allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model", "1_Pooling/*"],
                ignore_patterns=["onnx/*", "openvino/*", "coreml/*"],
            )
        )
    except Exception as error:  # its own errors, the operating system's, and those of its HTTP library of the day
        wanted = f"{name!r}" + (f" at revision {revision!r}" if revision else "")
        if local_files_only:
            advice = "It is not in the local cache: download it once without local_files_only, or give its folder."
        else:
            advice = (
                "Check the name, the network and, for a private model, the access token; where there is no network, "
                "give a local folder."
            )
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"no folder {name!r} exists, and the Hugging Face model {wanted} cannot be had. {advice} "
            f"({type(error).__name__}: {reason})"
        ) from error


def read_json(file: Path) -> Any:
    """The content of a JSON file.

    Raises:
      CheckpointError: the file is missing, unreadable or not JSON.
    """
    try:
        return json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} does not exist; the folder of a checkpoint has one") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      CheckpointError: the file is missing, unreadable, not JSON or not an object.
    """
    value = read_json(file)
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is not a JSON object, but a {type(value).__name__}")
    return value


def read_config(folder: Path, parse: Callable[[dict[str, Any]], T]) -> T:
    """What `parse` makes of the object in `config.json`.

    Raises:
      CheckpointError: the file is missing, unreadable, not JSON or not an object, or `parse` raises a ValueError.
    """
    file = folder / "config.json"
    settings = read_json_object(file)
    try:
        return parse(settings)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _tensor_files(folder: Path) -> tuple[Path, Mapping[str, set[str] | None]]:
    """The file that lists the tensors, and the safetensors files with the tensors that each must have (None: any)."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return single, {single.name: None}
    if not index.is_file():
        others = sorted(
            file.name
            for file in folder.iterdir()
            if file.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".h5", ".msgpack")
        )
        hint = f" (there is {', '.join(others)})" if others else ""
        raise CheckpointError(
            f"{folder} has neither model.safetensors nor model.safetensors.index.json{hint}. Pickle checkpoints are "
            "never opened; convert with transformers: from_pretrained(folder) of the class that config.json names "
            "under 'architectures', then save_pretrained(folder)"
        )
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no object 'weight_map' from tensor names to files")
    problems: list[str] = []
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        # A plain file name: nothing that could lead out of the folder on any operating system.
        if not isinstance(shard, str) or not re.fullmatch(r"\w[\w.-]*\.safetensors", shard):
            problems.append(f"{index.name}: {name!r} is said to be in {shard!r}, no plain name of a safetensors file")
        else:
            shards.setdefault(shard, set()).add(name)
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    problems += [f"{index.name}: names the file {shard!r}, which does not exist" for shard in missing]
    if problems:
        raise _error(folder, problems)
    return index, shards


def _error(folder: Path, problems: Iterable[str]) -> CheckpointError:
    lines = list(problems)
    shown = [line if len(line) < 500 else line[:500] + "..." for line in lines[:50]]
    if len(lines) > len(shown):
        shown.append(f"... and {len(lines) - len(shown)} more")
    return CheckpointError("\n  ".join([f"{folder} is not a usable checkpoint:", *shown]))


# --- Reading -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor of an open file, not read yet."""

    file: str
    name: str
    reader: Any

    @property
    def shape(self) -> Shape:
        return tuple(self.reader.get_slice(self.name).get_shape())

    def problem(self, expected: Shape) -> str | None:
        dtype = self.reader.get_slice(self.name).get_dtype()
        if dtype not in _DTYPES:
            return f"{self}: has dtype {dtype}, expected one of {', '.join(_DTYPES)}"
        if self.shape != expected:
            return f"{self}: has shape {list(self.shape)}, expected {list(expected)}"
        return None

    def value(self) -> np.ndarray:
        return self.reader.get_tensor(self.name)

    def __str__(self) -> str:
        return f"{self.file}: {self.name!r}"


def _open_file(file: Path, stack: contextlib.ExitStack) -> Any:
    """A reader of `file` whose header has been checked: it is valid and accounts for every byte of the file."""
    import safetensors

    with file.open("rb") as start:
        if start.read(19) == b"version https://git":
            raise CheckpointError("is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`")
    return stack.enter_context(safetensors.safe_open(file, framework="numpy"))


def _find_tensors(
    folder: Path, layout: Layout, expected: Mapping[str, Shape], has_new_head: bool, stack: contextlib.ExitStack
) -> dict[str, _Tensor]:
    """The expected tensors by their names in the layout's table, once all headers are known to be right.

    Where a tensor is tied to another one of them, either will do, and both must be equal. With a new head, those of a
    head that are missing or have another number of labels are left out.
    """
    import safetensors

    modules = {name.partition(".")[0] for name in expected}  # those asked for
    tied = {name: original for name, original in layout.tied.items() if name.partition(".")[0] in modules}
    shapes = {**expected, **{name: expected[original] for name, original in tied.items()}}
    listing, files = _tensor_files(folder)
    problems: list[str] = []
    found: dict[str, _Tensor] = {}
    unread = False
    for file, listed in files.items():
        try:
            reader = _open_file(folder / file, stack)
        except (safetensors.SafetensorError, OSError, CheckpointError) as error:
            problems.append(f"{file}: {error}")
            unread = True
            continue
        present = set(reader.keys())
        if listed is not None:
            problems += [f"{file}: lacks {name!r}, which {listing.name} places there" for name in listed - present]
            problems += [f"{file}: has {name!r}, which {listing.name} does not mention" for name in present - listed]
        for name in sorted(present if listed is None else present & listed):
            tensor, canonical = _Tensor(file, name, reader), _canonical(layout, name)
            if canonical in found:
                problems.append(f"{tensor}: is the same tensor as {found[canonical].name!r} ({found[canonical].file})")
            elif canonical in shapes:
                found[canonical], shape = tensor, shapes[canonical]
                problem = tensor.problem(shape)
                if canonical in heads.LABELS and () != tensor.shape != shape and tensor.shape[1:] == shape[1:]:
                    advice = f"{problem}; pass num_labels={tensor.shape[0]} or {_NEW}"
                    problem = tensor.problem(tensor.shape) if has_new_head else advice
                problems += filter(None, [problem])
            elif canonical not in _BUFFERS + _POOLER and not canonical.startswith(layout.heads):
                problems.append(f"{tensor}: is unexpected")
    copies = [(found.pop(name), original) for name, original in tied.items() if name in found]
    pairs = [(copy, found.setdefault(original, copy)) for copy, original in copies]
    head = {name for name in expected if name.startswith(layout.heads)}
    if not unread:  # otherwise they may be in a file that could not be read
        needed = expected.keys() - found.keys()
        if head:
            head |= {*_POOLER}  # a part of BERT's classifier
        elif needed.issuperset(_POOLER):  # masked language models are saved without
            needed -= {*_POOLER}
        prefixed = any(tensor.name.startswith(layout.prefix) for tensor in found.values())
        for name in needed - head if has_new_head else needed:
            shown = _with_prefix(layout, name) if prefixed else name
            problems.append(f"{listing.name}: {shown!r} is missing" + f"; pass {_NEW}" * (name in head))
    problems = problems or [
        f"{copy}: differs from {original.name!r}, with which it is tied; an output layer with weights of its own "
        "(tie_word_embeddings false) is not supported"
        for copy, original in pairs
        if not np.array_equal(copy.value(), original.value())
    ]
    if problems:
        raise _error(folder, sorted(problems))
    # Of the head a layer is the checkpoint's or new, and not half of each.
    new = tuple(
        name.rpartition(".")[0] + "." for name in head if name not in found or found[name].shape != expected[name]
    )
    return {name: tensor for name, tensor in found.items() if name not in head or not name.startswith(new)}


def load(
    folder: Path, model_type: str, shapes: Mapping[str, Shape], dtype: DTypeLike, *, has_new_head: bool = False
) -> dict[str, jax.Array]:
    """The parameters of a checkpoint in `dtype`, read one at a time.

    A checkpoint without pooler gives none for it, unless a head is asked for too, of which it is a part in BERT.

    Args:
      folder: holds `model.safetensors`, or `model.safetensors.index.json` and its shards.
      model_type: a key of `LAYOUTS`.
      shapes: of every parameter by name, for example `{"layers.0.qkv_bias": (1152,), ...}`.
      dtype: that of the result, whatever that of the checkpoint (float16, bfloat16, float32 or float64).
      has_new_head: whether parameters of the head that it lacks, or has for another number of labels, are left out.

    Raises:
      CheckpointError: anything wrong with the files, all of it at once, before a tensor is read.
    """
    layout = LAYOUTS[model_type]
    with contextlib.ExitStack() as stack:
        tensors = _find_tensors(folder, layout, _expected_tensors(layout, shapes), has_new_head, stack)
        parameters = {}
        for parameter, shape in shapes.items():
            names = _checkpoint_names(layout, parameter)
            if names[0] not in tensors:
                continue
            value = np.empty(shape, dtype)
            for name, part in zip(names, np.split(value, len(names), axis=-1), strict=True):
                tensor = tensors[name].value()
                part[...] = tensor.T if _is_kernel(parameter) else tensor
            parameters[parameter] = jnp.asarray(value)
    return parameters


# --- Writing -----------------------------------------------------------------------------------------------------


def save(folder: str | os.PathLike[str], config: Mapping[str, Any], parameters: Mapping[str, jax.Array]) -> None:
    """Writes `config.json` and `model.safetensors` in the layout of `config["model_type"]`.

    Where `parameters` has a head's, the names of the encoder's tensors get the layout's prefix, as transformers has it.

    Raises:
      TypeError: `folder` is not a string or path.
      NotADirectoryError: it is a file.
      ValueError: the parameters are shapes only.
    """
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"save_pretrained: folder must be a string or path, got {type(folder).__name__}")
    if os.path.isfile(folder):
        raise NotADirectoryError(f"save_pretrained: folder must not be a file, got {folder}")
    if shapes := [name for name, value in parameters.items() if isinstance(value, jax.ShapeDtypeStruct)]:
        raise ValueError(f"save_pretrained: the model's parameters have no values yet, only shapes, as {shapes[0]}")
    layout = LAYOUTS[config["model_type"]]
    tensors = {}
    for parameter, value in parameters.items():
        names = _checkpoint_names(layout, parameter)
        for name, part in zip(names, np.split(np.asarray(value), len(names), axis=-1), strict=True):
            tensors[name] = np.ascontiguousarray(part.T if _is_kernel(parameter) else part)
    if any(name.startswith(layout.heads) for name in tensors):
        tensors = {_with_prefix(layout, name): tensor for name, tensor in tensors.items()}
    checkpoint_files.write(Path(folder), config, tensors)
