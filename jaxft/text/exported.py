"""Folders with exported programs, for a server that must not trace: what `export` writes and `from_exported` reads.

Such a folder has the files of `save_pretrained`, a program for each shape of a batch, serialised by `jax.export`, and
exported.json. This file says what the programs were made with, and has the SHA-256 of the other files except README.md.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxft import dispatch
from jaxft._version import __version__
from jaxft.checkpoint import files as checkpoint_files
from jaxft.checkpoint import tensors
from jaxft.checkpoint.files import CheckpointError
from jaxft.kernels.mosaic_gpu import support
from jaxft.models.bert import BertModel, encoder_of, named_parameters
from jaxft.ops.bundle import Rebuild, bundle
from jaxft.text import batching, programs
from jaxft.text.batching import Batcher
from jaxft.text.devices import Arguments

FILE = "exported.json"
_PROGRAM = "programs/{}.stablehlo"


def contents(
    owner: str,
    path: str | os.PathLike[str],
    function: Any,
    model: nnx.Module,
    batchers: Iterable[Batcher],
    variants: Sequence[Arguments],
    *,
    batch_size: int,
    packed: bool,
    options: Mapping[str, Any],
    show_progress_bar: bool | None,
) -> dict[str, Any]:
    """Returns the files that `export` adds to the files of `save_pretrained`.

    Args:
      owner: name of the encoder's class.
      path: the folder. It is checked before the programs are made.
      function: the jitted function of the model's arrays and a batch.
      model: the model whose arrays the function gets.
      batchers: give the shapes of the batches.
      variants: functions that return the arguments of `function` for a batch. Each variant is exported.
      batch_size: the argument of `export`.
      packed: whether the encoder packs batches.
      options: the other arguments of `export` that choose programs, for messages.
      show_progress_bar: the argument of `export`.
    """
    tensors.checked_folder(path, "export: path")
    _check_installed("export")
    batch_size = batching.check_batch_size("export", batch_size)
    encoder = encoder_of(model)
    dtype = _dtype(model, encoder)
    implementation = encoder.embeddings.options.implementation
    arrays, rebuild = bundle(model, implementation="xla" if implementation == "xla" else None)
    calls: dict[Any, tuple[Any, ...]] = {}
    for batcher in batchers:
        for batch in batcher.blanks(batch_size):
            for arguments in variants:
                call = arguments(arrays, rebuild, batch)
                calls.setdefault(_key(call), call)
    files: dict[str, Any] = {}
    show = batching.is_terminal() if show_progress_bar is None else show_progress_bar
    with batching.progress_bar(len(calls), "program", show) as bar:
        for call in calls.values():
            files[_PROGRAM.format(len(files))] = _serialised(function, call)
            bar.update()
    record = {
        "encoder": owner,
        "made_with": _made_with(),
        "load": {"dtype": dtype, "implementation": implementation, "packed": packed},
        "options": {"batch_size": batch_size, **options},
        "programs": [*calls],
    }

    def with_sums(written: Mapping[str, Path]) -> dict[str, Any]:
        names = sorted(written.keys() - {FILE, "README.md"})
        whole = record | {"sha256": {name: _sha256(written[name]) for name in names}}
        return whole | {"digest": _digest(whole)}

    return files | {FILE: with_sums}


def old_files(folder: Path) -> list[str]:
    """Returns the files that an earlier export has added to a folder."""
    return [FILE, *(f"programs/{file.name}" for file in (folder / "programs").glob("*.stablehlo"))]


def read(path: str | os.PathLike[str], owner: type) -> dict[str, Any]:
    """Reads exported.json of a folder for an encoder of the class `owner`, and checks all that it says.

    Raises a CheckpointError that names the file, or the version or device, that is not as it was at the export.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"from_exported: path must be a string or path, got {type(path).__name__}")
    file = Path(path) / FILE
    if not os.path.lexists(file):
        raise CheckpointError(f"{file} does not exist: path must be a folder that {owner.__name__}.export has written")
    _check_installed("from_exported")
    record = checkpoint_files.read_json_object(file)
    if record.pop("digest", None) != _digest(record):
        raise CheckpointError(f"{file} is not as export has written it; export again")
    if record["encoder"] not in [base.__name__ for base in owner.__mro__]:
        raise CheckpointError(f"{file}: was exported from {record['encoder']}, got from_exported of {owner.__name__}")
    for name, here in _made_with().items():
        if (there := record["made_with"][name]) != here:
            raise CheckpointError(f"{file}: was exported for the {name} {there!r}, here is {here!r}; export again")
    for name, expected in record["sha256"].items():
        checkpoint_files.check_file(Path(path) / name, math.inf)
        if _sha256(Path(path) / name) != expected:
            raise CheckpointError(f"{Path(path) / name} is not the exported file: its SHA-256 is not as {FILE} says")
    return record


class Programs:
    """Exported programs of a folder in place of the jitted function that they were exported from.

    A program is read and compiled when it is first called.

    Args:
      path: the folder.
      record: the result of `read`.
    """

    def __init__(self, path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
        self._folder, self._options = Path(path), record["options"]
        self._files = {_as_key(key): _PROGRAM.format(i) for i, key in enumerate(record["programs"])}
        self._sums = record["sha256"]
        self._programs: dict[Any, Any] = {}

    def __call__(self, *call: Any) -> Any:
        """Computes the result of a batch."""
        return self._program(call)(*programs.traced(call))

    def lower(self, *call: Any) -> jax.stages.Lowered:
        """Lowers the program of a batch, to compile it."""
        return self._program(call).lower(*programs.traced(call))

    def _program(self, call: Sequence[Any]) -> Any:
        key = _key(call)
        if key not in self._programs:
            if key not in self._files:
                options = ", ".join(f"{name}={value!r}" for name, value in self._options.items())
                raise ValueError(
                    f"{self._folder} has no program for the shapes and options {key}: it was exported with {options}"
                )
            content = (file := self._folder / self._files[key]).read_bytes()
            if hashlib.sha256(content).hexdigest() != self._sums.get(self._files[key]):
                raise CheckpointError(f"{file} has changed since the encoder was loaded: load it again")
            program = jax.export.deserialize(bytearray(content))
            if b"mosaic_gpu_v2" in program.mlir_module_serialized:
                support.register_calls()
            # A compiled program gets None for each array that a call lacks. `program` has no arguments for them.
            self._programs[key] = jax.jit(lambda *traced: program.call(*_given(traced)))
        return self._programs[key]


def _check_installed(where: str) -> None:
    if importlib.util.find_spec("flatbuffers") is None:
        raise ImportError(f"{where} needs flatbuffers, with which jax.export serialises: pip install 'jaxft[export]'")


def _serialised(function: Any, call: Sequence[Any]) -> bytes:
    """Exports `function` for the shapes of a call, and with its static arguments."""
    fixed = [_Given if _is_given(x) else x for x in call]

    def program(*given: Any) -> Any:
        rest = iter(given)
        return function(*(next(rest) if x is _Given else x for x in fixed))

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), _given(call))
    export = jax.export.export(
        jax.jit(program), platforms=[dispatch.platform()], disabled_checks=dispatch.EXPORT_DISABLED_CHECKS
    )
    with dispatch.lowering():
        return bytes(export(*shapes).serialize())


class _Given:
    """Marks the place of an argument that has arrays."""


def _is_given(x: Any) -> bool:
    return isinstance(x, list | np.ndarray | np.generic | jax.Array)


def _given(call: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(x for x in call if _is_given(x))


def _key(call: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the shapes and the static arguments of a call, without the model."""
    return tuple(np.shape(x) if _is_given(x) else x for x in call if not isinstance(x, list | Rebuild))


def _as_key(value: Any) -> Any:
    """Makes tuples of the lists of JSON."""
    return tuple(map(_as_key, value)) if isinstance(value, list) else value


def _made_with() -> dict[str, str]:
    device = dispatch.device()
    return {
        "jaxft": __version__,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "platform": device.platform,
        "device": device.kind,
    }


def _dtype(model: nnx.Module, encoder: BertModel) -> str:
    """Returns the dtype with which `from_pretrained` loads the saved parameters as they are."""
    in_float8 = encoder.recipe is not None
    dtype = encoder.embeddings.options.dtype if in_float8 else encoder.embeddings.word[...].dtype
    if any(layer.views for layer in encoder.layers):
        raise ValueError("export: a model of jaxft.models.join_kernels cannot be exported; export the original model")
    for name, parameter in named_parameters(model).items():
        expected = jnp.dtype(jnp.float32) if re.match(r"(token_)?modules\.", name) else dtype
        if in_float8 and re.search(r"\blayers\.\d+\.\w+_(kernel|scale)$", name):
            continue
        if parameter.dtype != expected:
            raise ValueError(f"export: the parameter {name} must be {expected}, as it is loaded, got {parameter.dtype}")
    return str(dtype)


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
