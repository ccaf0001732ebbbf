"""Checking, reading and writing of the safetensors files of Hugging Face checkpoints.

The headers of all files are checked against the expected names, shapes and dtypes before any tensor is read. Pickle
files are never opened.
"""

import contextlib
import dataclasses
import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxft import atomic, dispatch
from jaxft.checkpoint import layouts
from jaxft.checkpoint.files import CheckpointError, check_file, is_library_error, read_json_object
from jaxft.checkpoint.layouts import Shape

# Names of files with weights. A folder has one of them.
WEIGHTS = "model.safetensors", "model_float8.safetensors"
_DTYPES = ("F32", "F16", "BF16", "F64")
_NEW = "rngs=nnx.Rngs(0) to the model's from_pretrained, which initialises it"


def _tensor_files(folder: Path) -> tuple[Path, Mapping[str, set[str] | None]]:
    """Returns the file that lists the tensors, and which tensors each safetensors file must have (None: any)."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if os.path.lexists(single):
        return single, {single.name: None}
    if not os.path.lexists(index):
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be read: {error}") from error
        others = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt", ".h5", ".msgpack"))]
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
        # Only a plain file name, so that no path leads out of the folder on any operating system.
        if not isinstance(shard, str) or not re.fullmatch(r"\w[\w.-]*\.safetensors", shard):
            problems.append(f"{index.name}: {name!r} is said to be in {shard!r}, no plain name of a safetensors file")
        else:
            shards.setdefault(shard, set()).add(name)
    missing = [shard for shard in shards if not os.path.lexists(folder / shard)]
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
    """Tensor of an open file that has not been read yet."""

    file: str
    name: str
    reader: Any

    @property
    def shape(self) -> Shape:
        return tuple(self.reader.get_slice(self.name).get_shape())

    def problem(self, expected: Shape, dtypes: Sequence[str] = _DTYPES) -> str | None:
        dtype = self.reader.get_slice(self.name).get_dtype()
        if dtype not in dtypes:
            return f"{self}: has dtype {dtype}, expected one of {', '.join(dtypes)}"
        if self.shape != expected:
            return f"{self}: has shape {list(self.shape)}, expected {list(expected)}"
        return None

    def value(self) -> np.ndarray:
        return self.reader.get_tensor(self.name)

    def __str__(self) -> str:
        return f"{self.file}: {self.name!r}"


def _open_file(file: Path, stack: contextlib.ExitStack) -> Any:
    """Opens a safetensors file. safetensors checks the header, which must account for each byte of the file."""
    import safetensors

    check_file(file, most_bytes=math.inf)
    with file.open("rb") as start:
        if start.read(19) == b"version https://git":
            raise CheckpointError("is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`")
    return stack.enter_context(safetensors.safe_open(file, framework="numpy"))


def _find_tensors(
    folder: Path, layout: layouts.Layout, expected: Mapping[str, Shape], has_new_head: bool, stack: contextlib.ExitStack
) -> dict[str, _Tensor]:
    """Checks the headers of all files, and returns the expected tensors by their names in the layout's table.

    If a tensor is tied to another expected tensor, the checkpoint may have either one. If it has both, they must be
    equal. With `has_new_head`, tensors of the head that are missing or have another number of labels are left out.
    """
    modules = {name.partition(".")[0] for name in expected}  # modules that were requested
    tied = {name: original for name, original in layout.tied.items() if name.partition(".")[0] in modules}
    shapes = {**expected, **{name: expected[original] for name, original in tied.items()}}
    listing, files = _tensor_files(folder)
    problems: list[str] = []
    found: dict[str, _Tensor] = {}
    unread = False
    for file, listed in files.items():
        try:
            reader = _open_file(folder / file, stack)
        except BaseException as error:
            if not is_library_error(error):
                raise
            problems.append(f"{file}: {error}")
            unread = True
            continue
        present = set(reader.keys())
        if listed is not None:
            problems += [f"{file}: lacks {name!r}, which {listing.name} places there" for name in listed - present]
            problems += [f"{file}: has {name!r}, which {listing.name} does not mention" for name in present - listed]
        for name in sorted(present):
            tensor, canonical = _Tensor(file, name, reader), layouts.canonical(layout, name)
            if canonical in found:
                problems.append(f"{tensor}: is the same tensor as {found[canonical].name!r} ({found[canonical].file})")
            elif canonical in shapes:
                found[canonical], shape = tensor, shapes[canonical]
                problem = tensor.problem(shape)
                if canonical in layouts.LABELS and () != tensor.shape != shape and tensor.shape[1:] == shape[1:]:
                    advice = f"{problem}; pass num_labels={tensor.shape[0]} or {_NEW}"
                    problem = tensor.problem(tensor.shape) if has_new_head else advice
                problems += filter(None, [problem])
            elif canonical not in layouts.POOLER and not (
                canonical.startswith(layout.heads) or canonical.endswith(layouts.BUFFERS)
            ):
                advice = "; adapters are not supported, merge them into the weights" * ("lora_" in name)
                problems.append(f"{tensor}: is unexpected{advice}")
    copies = [(found.pop(name), original) for name, original in tied.items() if name in found]
    pairs = [(copy, found.setdefault(original, copy)) for copy, original in copies]
    head = {name for name in expected if name.startswith(layout.heads)}
    if not unread:  # otherwise the file that could not be read may have the missing tensors
        needed = expected.keys() - found.keys()
        if head:
            head |= expected.keys() & layouts.POOLER  # part of BERT's classification head
        elif needed.issuperset(pooler := expected.keys() & layouts.POOLER):  # masked language models are saved without
            needed -= pooler
        prefixed = any(tensor.name.startswith(layout.prefix) for tensor in found.values())
        for name in needed - head if has_new_head else needed:
            shown = layouts.with_prefix(layout, name) if prefixed else name
            problems.append(f"{listing.name}: {shown!r} is missing" + f"; pass {_NEW}" * (name in head))
    problems = problems or [
        f"{copy}: differs from {original.name!r}, with which it is tied; an output layer with weights of its own "
        "(tie_word_embeddings false) is not supported"
        for copy, original in pairs
        if not np.array_equal(copy.value(), original.value())
    ]
    if problems:
        raise _error(folder, sorted(problems))
    # A layer of the head is taken from the checkpoint as a whole, or is new as a whole.
    new = tuple(
        name.rpartition(".")[0] + "." for name in head if name not in found or found[name].shape != expected[name]
    )
    return {name: tensor for name, tensor in found.items() if name not in head or not name.startswith(new)}


def load(
    folder: Path, model_type: str, shapes: Mapping[str, Shape], dtype: DTypeLike, *, has_new_head: bool = False
) -> dict[str, jax.Array]:
    """Reads the parameters of a checkpoint, one tensor at a time, after the headers of all files have been checked.

    The names in `shapes` are as "layers.0.qkv_bias". The result has no pooler if the checkpoint has none. This is an
    error if a head is requested too, because the pooler is part of BERT's classification head. With `has_new_head`, the
    result lacks parameters of the head that the checkpoint lacks or has for another number of labels. A CheckpointError
    lists all problems, tensors that are not finite in `dtype` included.
    """
    layout, problems = layouts.LAYOUTS[model_type], []
    with contextlib.ExitStack() as stack, np.errstate(over="ignore"):
        tensors = _find_tensors(folder, layout, layouts.expected_tensors(layout, shapes), has_new_head, stack)
        parameters = {}
        for parameter, shape in shapes.items():
            names = layouts.checkpoint_names(layout, parameter)
            if names[0] not in tensors:
                continue
            value = np.empty(shape, dtype)
            for name, part in zip(names, np.split(value, len(names), axis=-1), strict=True):
                tensor = tensors[name].value()
                part[...] = tensor.T if layouts.is_kernel(parameter) else tensor
            if np.isfinite(value).all():
                parameters[parameter] = dispatch.to_device(value)
                continue
            wrong = [tensors[name] for name in names if not np.isfinite(tensors[name].value()).all()]
            problems += [f"{tensor}: has NaN or infinite values" for tensor in wrong] or [
                f"{tensors[names[0]]}: has values beyond the range of {jnp.dtype(dtype)}; pass a dtype with more range"
            ]
    if problems:
        raise _error(folder, problems)
    return parameters


def load_float8(
    folder: Path, file: str, expected: Mapping[str, Any], optional: Iterable[str]
) -> dict[str, jax.Array]:  # fmt: skip
    """Reads parameters that `float8_tensors` has named. Their shapes and dtypes are as `expected`.

    Parameters of other dtypes than float8_e4m3fn are converted. Only the `optional` ones may be absent. Tensors that
    are not expected are not read: they may belong to a head. A CheckpointError lists all problems.
    """
    if not os.path.lexists(folder / file):
        raise CheckpointError(f"{folder} has no {file}, which config.json says that it has")
    problems, values = [], {}
    with contextlib.ExitStack() as stack, np.errstate(over="ignore"):
        try:
            reader = _open_file(folder / file, stack)
        except BaseException as error:
            if not is_library_error(error):
                raise
            raise _error(folder, [f"{file}: {error}"]) from error
        present = {name: _Tensor(file, name, reader) for name in reader.keys()}  # noqa: SIM118
        problems += [f"{file}: {name!r} is missing" for name in expected.keys() - present.keys() - {*optional}]
        for name in sorted(expected.keys() & present.keys()):
            is_float8 = expected[name].dtype == jnp.float8_e4m3fn
            problem = present[name].problem(expected[name].shape, ("U8",) if is_float8 else _DTYPES)
            if problem is None:
                value = present[name].value()
                value = value.view(jnp.float8_e4m3fn) if is_float8 else value.astype(expected[name].dtype)
                problem = None if np.isfinite(value).all() else f"{present[name]}: has values that are not finite"
                values[name] = dispatch.to_device(value)
            problems += filter(None, [problem])
    if problems:
        raise _error(folder, sorted(problems))
    return values


def load_exact(folder: Path, shapes: Mapping[str, Shape]) -> dict[str, np.ndarray]:
    """Reads the tensors of a small module from model.safetensors, in float32. It must have these tensors and no others.

    A CheckpointError lists all problems.
    """
    file = folder / "model.safetensors"
    if not os.path.lexists(file):
        pickle = folder / "pytorch_model.bin"
        found = f", only {pickle.name}, a pickle, which is never opened" if os.path.lexists(pickle) else ""
        raise CheckpointError(
            f"{folder} has no model.safetensors{found}. To convert the whole checkpoint, load it with"
            " sentence-transformers and save it: SentenceTransformer(folder).save_pretrained(new_folder)"
        )
    with contextlib.ExitStack() as stack, np.errstate(over="ignore"):
        try:
            reader = _open_file(file, stack)
        except BaseException as error:
            if not is_library_error(error):
                raise
            raise _error(folder, [f"{file.name}: {error}"]) from error
        present = {name: _Tensor(file.name, name, reader) for name in reader.keys()}  # noqa: SIM118
        problems = [f"{file.name}: {name!r} is missing" for name in shapes.keys() - present.keys()]
        problems += [f"{present[name]}: is unexpected" for name in present.keys() - shapes.keys()]
        problems += filter(None, (present[name].problem(shapes[name]) for name in shapes.keys() & present.keys()))
        values = {} if problems else {name: present[name].value().astype(np.float32) for name in shapes}
    problems += [
        f"{file.name}: {n!r}: has values that are not finite" for n in values if not np.isfinite(values[n]).all()
    ]
    if problems:
        raise _error(folder, sorted(problems))
    return values


# --- Writing -----------------------------------------------------------------------------------------------------


def save(folder: str | os.PathLike[str], contents: Mapping[str, Any]) -> None:
    """Writes files as `write` does. Weights of an earlier save under another name are removed."""
    write(checked_folder(folder), contents, [name for name in WEIGHTS if name not in contents])


def checked_folder(folder: str | os.PathLike[str], argument: str = "save_pretrained: folder") -> Path:
    """Returns the folder to write, as an `argument` names it. Raises if it is of a wrong type, or a file."""
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"{argument} must be a string or path, got {type(folder).__name__}")
    if not os.fspath(folder):
        raise ValueError(f"{argument} must not be empty, got ''")
    if os.path.isfile(folder):
        raise NotADirectoryError(f"{argument} must not be a file, got {folder}")
    return Path(folder)


def named_tensors(model_type: str, parameters: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Returns the tensors of a checkpoint in the layout of `model_type`, by name.

    If `parameters` includes a head, the tensors of the encoder get the layout's prefix, as in transformers.
    """
    _check_values(parameters)
    layout = layouts.LAYOUTS[model_type]
    tensors = {}
    for parameter, value in parameters.items():
        names = layouts.checkpoint_names(layout, parameter)
        for name, part in zip(names, np.split(np.asarray(value), len(names), axis=-1), strict=True):
            tensors[name] = np.ascontiguousarray(part.T if layouts.is_kernel(parameter) else part)
    if any(name.startswith(layout.heads) for name in tensors):
        tensors = {layouts.with_prefix(layout, name): tensor for name, tensor in tensors.items()}
    return tensors


def float8_tensors(parameters: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Returns the tensors of a model in float8 by the names of its parameters."""
    _check_values(parameters)
    return {name: np.ascontiguousarray(value) for name, value in parameters.items()}


def _check_values(parameters: Mapping[str, Any]) -> None:
    if shapes := [name for name, value in parameters.items() if isinstance(value, jax.ShapeDtypeStruct)]:
        raise ValueError(f"save_pretrained: the model's parameters have no values yet, only shapes, as {shapes[0]}")


def write(folder: Path, contents: Mapping[str, Any], without: Iterable[str] = ()) -> None:
    """Writes files by their path in the folder. A content is arrays by name, a text, bytes, or a value for JSON.

    Arrays of float8_e4m3fn are written as uint8.

    A content may also be a function that returns it. The function gets the paths of the other files by name, after they
    are complete.

    All files are complete before one of them gets its final name. The files `without` are removed then, too. If an
    exception occurs, KeyboardInterrupt included, an earlier checkpoint in the folder stays as it was. Raises a
    ValueError if an array is not finite.
    """
    import safetensors.numpy

    for name, content in contents.items():
        arrays = content if name.endswith(".safetensors") else {}
        if wrong := [tensor for tensor, array in arrays.items() if not np.isfinite(array).all()]:
            raise ValueError(f"{folder / name} is not written: the tensor {wrong[0]!r} has NaN or infinite values")
    with atomic.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)

    # config.json first: no reader takes a folder without it, if the process is killed while it renames the files.
    def place(name: str) -> tuple[bool, ...]:
        return name != "config.json", callable(contents[name]), name.endswith(".safetensors")

    order = sorted(contents, key=place)
    targets = [folder / name for name in order]
    with atomic.replacing(*targets, without=[folder / name for name in without]) as files:
        for file, target, content in zip(files, targets, map(contents.__getitem__, order), strict=True):
            with atomic.writing(target):
                if callable(content):
                    content = content(dict(zip(order, files, strict=True)))
                if isinstance(content, bytes):
                    file.write_bytes(content)
                    continue
                if target.suffix != ".safetensors":
                    text = json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"
                    file.write_text(content if isinstance(content, str) else text, encoding="utf-8")
                    continue
                stored = {n: x.view(np.uint8) if x.dtype == jnp.float8_e4m3fn else x for n, x in content.items()}
                try:
                    # transformers expects this metadata, which says that the tensors follow PyTorch's conventions.
                    safetensors.numpy.save_file(stored, file, metadata={"format": "pt"})
                except safetensors.SafetensorError as error:  # of the disk, for example a full one
                    number = re.search(r"os error (\d+)", str(error))
                    raise OSError(int(number[1]) if number else errno.EIO, str(error)) from error
                file.chmod(stat.S_IMODE(files[0].stat().st_mode))  # safetensors lets only the owner read the file
