"""Embeddings as a column of a data set of Hugging Face, with `Dataset.map`. One process computes on all local GPUs.

For example: python examples/distributed/datasets_map.py --model M --data DATA.parquet --out OUT.parquet

It needs datasets.
"""

import argparse
import hashlib
from collections.abc import Sequence
from typing import Any

import datasets
import jax

from jaxft import SentenceEncoder


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help='parquet files with a column "text"')
    parser.add_argument("--out", required=True, help="parquet file")
    parser.add_argument("--rows", type=int, default=16_384, help="rows of a call of encode (default: %(default)s)")
    args = parser.parse_args(argv)
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    encoder = SentenceEncoder.from_pretrained(args.model, dtype=dtype)
    rows: Any = datasets.load_dataset("parquet", data_files=args.data, split="train")
    # Without a fingerprint, `map` pickles the function with the whole model to find one.
    fingerprint = hashlib.sha256(f"{args.model} {args.data} {dtype} {args.rows}".encode()).hexdigest()[:16]
    rows = rows.map(
        lambda part: {"embedding": encoder.encode(part["text"])},
        batched=True, batch_size=args.rows, new_fingerprint=fingerprint, load_from_cache_file=False,
    )  # fmt: skip
    rows.to_parquet(args.out)


if __name__ == "__main__":
    main()
