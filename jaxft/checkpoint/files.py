"""Folder of a checkpoint, local or from Hugging Face, and its JSON files."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class CheckpointError(ValueError):
    """Error for a checkpoint that cannot be found, read or used. Its message lists each problem, file and tensor."""


_LONGEST_ID = 96  # the limit of Hugging Face


def resolve(
    folder_or_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Path:
    """Returns an existing folder as it is, or the folder of a Hugging Face id, downloaded or from the cache.

    Raises a CheckpointError with advice if there is neither such a folder nor such a model with available files.
    """
    name = os.fspath(folder_or_id) if isinstance(folder_or_id, os.PathLike) else folder_or_id
    if not isinstance(name, str):
        raise TypeError(f"from_pretrained: folder_or_id must be a string or a path, got {type(name).__name__}")
    # os.path, because the methods of Path raise the operating system's error for a name that is too long.
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
    except Exception as error:  # errors of huggingface_hub, the operating system or the HTTP library
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
            f"no folder {name!r} exists, and the Hugging Face model {wanted} could not be obtained. {advice} "
            f"({type(error).__name__}: {reason})"
        ) from error


def read_json(file: Path) -> Any:
    """Returns the content of a JSON file. Raises a CheckpointError if it is missing, unreadable or not JSON."""
    try:
        return json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} does not exist; the folder of a checkpoint has one") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error


def read_json_object(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises a CheckpointError as `read_json`, and if it is not an object."""
    value = read_json(file)
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is not a JSON object, but a {type(value).__name__}")
    return value


def read_config(folder: Path, parse: Callable[[dict[str, Any]], T]) -> T:
    """Returns `parse` of the object in `config.json`. A ValueError of `parse` becomes a CheckpointError."""
    file, adapter = folder / "config.json", folder / "adapter_config.json"
    if adapter.exists():
        raise CheckpointError(f"{adapter}: adapters are not supported; merge it and save the whole model")
    settings = read_json_object(file)
    try:
        return parse(settings)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error
