"""The pretraining example: the time of a step, tokens per second, and the model FLOPs utilisation.

Data and optimiser are included. On a CPU it runs the small preset in float32. Needs the extras `train` and `plot`.
"""

import csv
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import timing

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import pretrain  # noqa: E402


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__)
    parser.add_argument("--model", required=True, metavar="FOLDER", help="a checkpoint; its tokenizer is used")
    args = parser.parse_args(argv)
    preset, dtype = ("base", "bfloat16") if jax.default_backend() == "gpu" else ("small", "float32")
    steps = 40 if args.quick else 200
    with tempfile.TemporaryDirectory() as folder:
        options = {"model": args.model, "preset": preset, "dtype": dtype, "steps": steps, "out": folder}
        if pretrain.main([f"--{name}={value}" for name, value in options.items()]) != 0:
            raise SystemExit("pretrain: it was interrupted: nothing is written")
        with (Path(folder) / "held_out.csv").open(newline="") as file:
            before, *_, after = (float(row["value"]) for row in csv.DictReader(file))
        if not after < before:  # also when it is NaN
            raise SystemExit(f"pretrain: the loss of held-out text went from {before} to {after}: nothing is written")
        speed = json.loads((Path(folder) / "speed.json").read_text())
    key: dict[str, Any] = {
        "op": f"pretraining example, {preset}", "direction": "training step",
        "shape": [pretrain.PRESETS[preset].rows], "dtype": dtype,
    }  # fmt: skip
    step_us, flop = speed["step_seconds"] * 1e6, speed["flops_per_s"] * speed["step_seconds"]
    rows = timing.as_rows({("jaxft", "step_us"): [step_us]}, flop, "TFLOP/s", args, **key)
    shares = {"mfu_percent": speed["mfu"] * 100} if "mfu" in speed else {}
    others = {("jaxft", name): [value] for name, value in {"tokens_per_s": speed["tokens_per_s"], **shares}.items()}
    timing.print_tables(rows + timing.as_rows(others, 0.0, "", args, **key))


if __name__ == "__main__":
    main()
