"""Folder of a checkpoint, local or from Hugging Face, and its JSON files."""

import json
import math
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import huggingface_hub

T = TypeVar("T")


class CheckpointError(ValueError):
    """Error for a checkpoint that cannot be found, read or used. Its message lists each problem, file and tensor.

    A message is cut after 30,000 characters, because a file may have a value of any length.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= _LONGEST_MESSAGE else message[:_LONGEST_MESSAGE] + "...")


_LONGEST_MESSAGE = 30_000
_LONGEST_ID = 96  # the limit of Hugging Face
_MOST_BYTES = 100_000_000  # of a file that is read as a whole; the tokenizer.json of XLM-RoBERTa has 17 MB

# Author and title of the pull requests in which the Hub offers a model's pickle as safetensors.
_CONVERTER, _CONVERSION = "SFconvertbot", "Adding `safetensors` variant of this model"


def resolve(
    folder_or_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Path:
    """Returns an existing folder as it is, or the folder of a Hugging Face id, downloaded or from the cache.

    Raises a CheckpointError with advice if there is neither such a folder nor such a model with available files, or if
    the model has safetensors only in a conversion request of the Hub.
    """
    name = os.fspath(folder_or_id) if isinstance(folder_or_id, os.PathLike) else folder_or_id
    if not isinstance(name, str):
        raise TypeError(f"from_pretrained: folder_or_id must be a string or a path, got {type(name).__name__}")
    for argument, value, kinds, expected in (
        ("revision", revision, str | None, "None or a string"),
        ("cache_dir", cache_dir, str | os.PathLike | None, "None, a string or a path"),
        ("local_files_only", local_files_only, bool, "True or False"),
    ):
        if not isinstance(value, kinds):
            raise TypeError(f"from_pretrained: {argument} must be {expected}, got {type(value).__name__}")
    # os.path, because the methods of Path raise the operating system's error for a name that is too long.
    if os.path.isdir(name):
        return Path(name)
    if os.path.exists(name):
        raise CheckpointError(f"{name} is a file; expected the folder of a checkpoint, or a Hugging Face id")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith(".") or len(name) > _LONGEST_ID:
        raise CheckpointError(f"{name!r:.200} is neither an existing folder nor a Hugging Face id such as 'owner/name'")

    import huggingface_hub

    wanted = f"{name!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                cache_dir=None if cache_dir is None else Path(cache_dir),
                local_files_only=local_files_only,
                allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "1_Pooling/*", "README.md"],
                ignore_patterns=["onnx/*", "openvino/*", "coreml/*"],
            )
        )
    except Exception as error:  # errors of huggingface_hub, the operating system or the HTTP library
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
    if not local_files_only and next(folder.rglob("*.safetensors"), None) is None:
        if request := _conversion_request(name):
            raise CheckpointError(
                f"the Hugging Face model {wanted} has no safetensors files, and pickle checkpoints are never opened. "
                f"The Hub has converted its main branch in {request.url}, which is not merged: pass "
                f'revision="{request.git_reference}"'
            )
    return folder


def _conversion_request(name: str) -> "huggingface_hub.Discussion | None":
    """Returns the newest open request of the Hub's conversion to safetensors; None without network or request."""
    import huggingface_hub

    try:
        requests = huggingface_hub.get_repo_discussions(
            name, author=_CONVERTER, discussion_type="pull_request", discussion_status="open"
        )
        # The Hub filters already. But a request of anybody else could hold other weights.
        found = [r for r in requests if (r.author, r.title, r.status) == (_CONVERTER, _CONVERSION, "open")]
        return max(found, key=lambda request: request.num, default=None)
    except Exception:  # errors of huggingface_hub, the operating system or the HTTP library
        return None


def check_file(file: Path, most_bytes: float = _MOST_BYTES) -> None:
    """Raises a CheckpointError unless `file` is a regular file that can be read, of at most `most_bytes`."""
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a FIFO could wait for ever
            raise CheckpointError(f"{file} is not a regular file, but {_kind(status.st_mode)}")
        if status.st_size > most_bytes:
            raise CheckpointError(f"{file} has {status.st_size:,} bytes, at most {most_bytes:,} are supported")
        handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        try:
            # A file of the kernel, as in /proc, has no size. Reading it may wait for ever or have no end.
            if status.st_size == 0 and os.read(handle, 1):
                raise CheckpointError(f"{file} is not a regular file, but one of the kernel")
        finally:
            os.close(handle)
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} does not exist; the folder of a checkpoint has one") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def is_library_error(error: BaseException) -> bool:
    """Returns whether an error is an Exception or a panic of a library in Rust, whose type cannot be imported."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def parse_json(text: str) -> Any:
    """Parses strict JSON. Raises a ValueError for NaN, numbers beyond float64 and repeated names, which Python takes.

    JSON that is nested too deeply raises a RecursionError.
    """

    def number(digits: str) -> float:
        if not math.isfinite(value := float(digits)):
            raise ValueError(f"the number {digits:.20} is not finite")
        return value

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(fields := dict(pairs)) < len(pairs):
            names = iter(fields)  # in the order of their first occurrence
            repeated = next(name for name, _ in pairs if name != next(names, None))
            raise ValueError(f"the name {repeated!r:.80} occurs twice in an object")
        return fields

    return json.loads(text, parse_float=number, parse_constant=number, object_pairs_hook=unique)


def read_json(file: Path) -> Any:
    """Returns the content of a JSON file. Raises a CheckpointError if it is missing, unreadable or not JSON."""
    check_file(file)
    try:
        value = parse_json(text := file.read_text("utf-8"))
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # raises for half of a surrogate pair
        return value
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def read_json_object(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises a CheckpointError as `read_json`, and if it is not an object."""
    value = read_json(file)
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is not a JSON object, but a {type(value).__name__}")
    return value


def read_settings(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, {} if the file does not exist."""
    return read_json_object(file) if os.path.lexists(file) else {}


def read_config(folder: Path, parse: Callable[[dict[str, Any]], T]) -> T:
    """Returns `parse` of the object in `config.json`. A ValueError of `parse` becomes a CheckpointError."""
    file, adapter = folder / "config.json", folder / "adapter_config.json"
    if os.path.lexists(adapter):
        raise CheckpointError(f"{adapter}: adapters are not supported; merge it and save the whole model")
    settings = read_json_object(file)
    try:
        return parse(settings)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error
