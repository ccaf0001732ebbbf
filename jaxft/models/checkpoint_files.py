"""The two files of a Hugging Face checkpoint, written so that nothing half-written or mixed can be read."""

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def write(folder: Path, config: Mapping[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """`config.json` and `model.safetensors`, both complete before either gets its name.

    A checkpoint that was there before is left as it was by any exception, KeyboardInterrupt included.
    """
    import safetensors.numpy

    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "model.safetensors"
    files = target.name, "config.json", "before"
    weights, settings, before = (folder / f".{file}.{os.getpid()}.part" for file in files)
    try:
        # transformers wants to be told that the tensors follow PyTorch's conventions.
        safetensors.numpy.save_file(tensors, weights, metadata={"format": "pt"})
        settings.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        weights.chmod(stat.S_IMODE(settings.stat().st_mode))  # safetensors makes it its owner's only
        with contextlib.suppress(OSError):  # there is none, or the file system has no links
            os.link(target, before)
        try:
            os.replace(weights, target)
            os.replace(settings, folder / "config.json")
        except BaseException:  # weights of one model beside the config.json of another would load
            if before.exists():
                os.replace(before, target)
            raise
    finally:
        for unfinished in (weights, settings, before):
            unfinished.unlink(missing_ok=True)
