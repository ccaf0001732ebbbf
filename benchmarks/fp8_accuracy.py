"""Accuracy of a classifier in FP8 and in bfloat16 beside float32, on the held-out texts of examples/finetune.py.

    python examples/finetune.py --model FOLDER --preset small
    python benchmarks/fp8_accuracy.py runs/finetune/model

Kendall's tau compares the orders of the texts by the logits of a class, as a reranker orders texts, with those in
float32. It is the mean of all classes. All devices compute the same function, so that a CPU is enough.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import scipy.stats
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import common
import finetune
from jaxft import BertForSequenceClassification
from jaxft.text import tokenizer as tokenizer_files

PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"}, "bfloat16": {"dtype": "bfloat16"}, "FP8": {"quantization": "fp8"}
}  # fmt: skip


def logits(folder: Path, length: int, batch: int, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the logits `[texts, classes]` of the held-out texts, and their classes."""
    model = BertForSequenceClassification.from_pretrained(folder, **options)
    texts, _ = finetune.paragraphs(model.num_labels)
    texts, names = {t: module for t, module in texts.items() if common.held_out(t)}, list(model.id2label.values())
    whole = tokenizer_files.load(tokenizer_files.Settings(folder))
    tokenizer = tokenizer_files.truncating(whole, length, model.config, owner="fp8_accuracy", argument="length")
    data = finetune.Texts(texts, names, tokenizer, length)
    run = nnx.jit(lambda model, ids, mask: model(ids, mask))
    found = []
    for first in range(0, len(texts), batch):
        rows = np.arange(first, first + batch).clip(max=len(texts) - 1)
        found.append(np.asarray(run(model, data.input_ids[rows], data.mask[rows]), np.float32))
    return np.concatenate(found)[: len(texts)], data.labels


def kendall(x: np.ndarray, y: np.ndarray) -> float:
    """Computes Kendall's tau-b of two vectors: the correlation of the orders of all pairs, where ties are 0."""
    return float(scipy.stats.kendalltau(x, y).statistic)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the classifier")
    parser.add_argument("--length", type=int, default=finetune.PRESETS["small"].length, help="most tokens of a text")
    args = parser.parse_args(argv)
    with jax.default_matmul_precision("highest"):
        found = {name: logits(args.folder, args.length, 64, **options) for name, options in PRECISIONS.items()}
    wide, labels = found["float32"]
    print(f"{len(labels)} texts\n\n| | accuracy | same class as float32 | Kendall's tau |\n|---|---:|---:|---:|")
    for name, (ours, _) in found.items():
        same = np.mean(ours.argmax(-1) == wide.argmax(-1))
        tau = np.mean([kendall(a, b) for a, b in zip(ours.T, wide.T, strict=True)])
        print(f"| {name} | {np.mean(ours.argmax(-1) == labels):.1%} | {same:.1%} | {tau:.3f} |")


if __name__ == "__main__":
    main()
