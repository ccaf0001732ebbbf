"""Embeddings of parquet files on all GPUs of a Ray cluster: one process for each GPU reads, encodes and writes.

For example: python examples/distributed/ray_data.py --model M --data DATA.parquet --out OUT --gpus 8. Without --gpus
there is one process without a GPU. Needs ray[data].
"""

import argparse
from collections.abc import Sequence
from typing import Any

import ray.data

from jaxft import SentenceEncoder


class Encoder:
    """Loads the model once in its process, and adds embeddings to batches of rows."""

    def __init__(self, model: str, dtype: str) -> None:
        self.encoder = SentenceEncoder.from_pretrained(model, dtype=dtype)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        return rows | {"embedding": self.encoder.encode(rows["text"])}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help='parquet files with a column "text"')
    parser.add_argument("--out", required=True, help="folder for parquet files")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--rows", type=int, default=16_384, help="rows of a call of encode (default: %(default)s)")
    args = parser.parse_args(argv)
    rows = ray.data.read_parquet(args.data).map_batches(
        Encoder,
        fn_constructor_kwargs={"model": args.model, "dtype": "bfloat16" if args.gpus else "float32"},
        batch_size=args.rows,
        num_gpus=1 if args.gpus else None,
        concurrency=args.gpus or 1,
    )
    rows.write_parquet(args.out)


if __name__ == "__main__":
    main()
