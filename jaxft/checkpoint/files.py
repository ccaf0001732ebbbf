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
    """Returns the folder of a checkpoint.

    An existing folder is returned as it is. A Hugging Face id is downloaded, or taken from the cache.

    Args:
      folder_or_id: folder, or the id of a model on Hugging Face.
      revision: branch, tag or commit of the model on Hugging Face.
      cache_dir: folder for downloads. None is Hugging Face's default.
      local_files_only: whether to use only files that were downloaded before.

    Raises:
      CheckpointError: `folder_or_id` is neither a folder nor an id whose files are available. The message gives advice.
      TypeError: `folder_or_id` is not a string or path.
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
    """Returns the content of a JSON file.

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
    """Returns the object in a JSON file.

    Raises:
      CheckpointError: the file is missing, unreadable, not JSON or not an object.
    """
    value = read_json(file)
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is not a JSON object, but a {type(value).__name__}")
    return value


def read_config(folder: Path, parse: Callable[[dict[str, Any]], T]) -> T:
    """Applies `parse` to the object in `config.json` and returns the result.

    Raises:
      CheckpointError: the file is missing, unreadable, not JSON or not an object, or `parse` raises a ValueError.
    """
    file = folder / "config.json"
    settings = read_json_object(file)
    try:
        return parse(settings)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error
