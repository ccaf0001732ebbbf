"""Training with jaxft's kernels beside training with plain XLA: the same seed, data, dropout masks and optimiser.

The task is masked language modelling on the docstrings of Python's standard library, word by word. In bfloat16, with
dropout, the means of 20 losses must agree within 1 %. In float32, without TF32, each loss must agree within 1e-4,
without and with dropout, because the rounding of bfloat16 would hide a wrong mask. The losses and a chart go to
`results/train_parity/`. The exit code is 1 if the losses do not agree.
"""

import argparse
import collections
import csv
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import timing
from bench_encode import docstrings
from jaxft import BertConfig, BertForMaskedLM, training

CONFIG = BertConfig(num_hidden_layers=6)
BATCH, LENGTH, MICRO_BATCHES = 32, 128, 2
STEPS, MEAN = 200, 20
LEARNING_RATE, WARMUP = 3e-4, 20
PADDING, MASK, UNKNOWN = range(3)  # ids; the ids of words follow
MASKED = 0.15
# On a CPU the kernels are interpreted, which is feasible for small sizes only.
IMPLEMENTATIONS: dict[str, str | None] = {"jaxft": None if jax.default_backend() == "gpu" else "triton", "xla": "xla"}


class Case(NamedTuple):
    """A training run. `relative`: the bound is for means of `MEAN` losses, relative to XLA's; else for each loss."""

    dtype: str
    dropout: float
    bound: float
    relative: bool

    def __str__(self) -> str:
        return f"{self.dtype}, {f'dropout {self.dropout}' if self.dropout else 'no dropout'}"


CASES = [Case("bfloat16", 0.1, 0.01, True), *(Case("float32", dropout, 1e-4, False) for dropout in (0.0, 0.1))]


def token_ids() -> list[np.ndarray]:
    """Returns the ids of the words and signs of each text. Only the most frequent ones are known."""
    words = [re.findall(r"\w+|[^\w\s]", text.lower()) for text in docstrings()]
    frequent = collections.Counter(word for text in words for word in text).most_common(CONFIG.vocab_size - 3)
    ids = {word: number for number, (word, _) in enumerate(frequent, start=3)}
    return [np.array([ids.get(word, UNKNOWN) for word in text], np.int32) for text in words if text]


def batches(texts: Sequence[np.ndarray], length: int) -> dict[str, np.ndarray]:
    """Makes padded batches `[STEPS, MICRO_BATCHES, BATCH // MICRO_BATCHES, length]` with 15 % of the tokens masked."""
    rng = np.random.default_rng(0)
    tokens = np.full((STEPS * BATCH, length), PADDING, np.int32)
    for row, choice in zip(tokens, rng.integers(len(texts), size=len(tokens)), strict=True):
        text = texts[choice][:length]
        row[: len(text)] = text
    predicted = (rng.random(tokens.shape) < MASKED) & (tokens != PADDING)
    arrays = {
        "input_ids": np.where(predicted, MASK, tokens),
        "labels": np.where(predicted, tokens, -100),
        "attention_mask": tokens != PADDING,
    }
    shape = STEPS, MICRO_BATCHES, BATCH // MICRO_BATCHES, length
    return {name: array.reshape(shape) for name, array in arrays.items()}


def losses(case: Case, implementation: str | None, data: dict[str, np.ndarray]) -> np.ndarray:
    """Trains a model that begins with the same parameters each time. Returns its losses `[STEPS]`."""
    rates = {"hidden_dropout_prob": case.dropout, "attention_probs_dropout_prob": case.dropout}
    config = BertConfig.from_dict(CONFIG.to_dict() | rates)
    model = BertForMaskedLM(config, dtype=case.dtype, implementation=implementation, rngs=nnx.Rngs(0))
    model.train()
    graph, params = nnx.split(model)
    schedule = optax.warmup_constant_schedule(0.0, LEARNING_RATE, WARMUP)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, eps=1e-6))

    def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        inputs, key = batch
        return nnx.merge(graph, params).loss(**inputs, rngs=key)

    def step(state: Any, number: jax.Array, batch: Any) -> tuple[Any, jax.Array]:
        params, opt_state = state
        keys = jax.random.split(jax.random.fold_in(jax.random.key(1), number), MICRO_BATCHES)
        loss, gradients = training.accumulate_gradients(loss_fn, params, (batch, keys))
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss.mean

    state, found = (params, optimizer.init(params)), []
    # TF32 is coarser than the bound of float32.
    with jax.default_matmul_precision("highest" if case.dtype == "float32" else None):
        compiled = jax.jit(step, donate_argnums=0)
        for number in range(STEPS):
            state, loss = compiled(state, jnp.int32(number), {name: array[number] for name, array in data.items()})
            found.append(loss)
        return np.array(found, np.float64)


def difference(case: Case, ours: np.ndarray, plain: np.ndarray) -> float:
    """Returns what the bound is for; NaN if a loss is not finite."""
    if not case.relative:
        return float(np.abs(ours - plain).max())
    ours, plain = (x.reshape(-1, MEAN).mean(1) for x in (ours, plain))
    return float((np.abs(ours - plain) / plain).max())


def write(folder: Path, columns: dict[str, np.ndarray], where: str, only: str) -> None:
    """Writes the losses as CSV and PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    # A run with `only` has a file of its own, so that the file of all cases stays.
    path = folder / f"{'_'.join(re.findall(r'[^ ,/]+', f'{where} {only}'))}.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        origin = timing.origin()
        writer.writerow(("step", *columns, *origin))
        losses = np.stack([*columns.values()], axis=1).tolist()
        writer.writerows((step, *row, *origin.values()) for step, row in enumerate(losses))
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure: Any
    done = [case for case in CASES if all(f"{case}, {name}" in columns for name in IMPLEMENTATIONS)]
    figure, axes = pyplot.subplots(1, len(done), figsize=(5 * len(done), 4), sharey=True, squeeze=False)
    for place, case in zip(axes[0], done, strict=True):
        for name, width in zip(IMPLEMENTATIONS, (4, 1), strict=True):  # the second line is drawn on the first
            place.plot(columns[f"{case}, {name}"], label=name, linewidth=width)
        place.set(title=f"{case}, {where}", xlabel="step", ylabel="training loss")
        place.legend(frameon=False)
    figure.savefig(path.with_suffix(".png"), dpi=120, bbox_inches="tight", metadata={"Software": None})
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = timing.RESULTS / "train_parity"
    parser.add_argument(
        "--out", type=Path, default=folder, metavar="FOLDER", help="where the results are (%(default)s)"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with TEXT in their name, as 'bfloat16'")
    parser.add_argument("--length", type=int, default=LENGTH, metavar="T", help="of a sequence (%(default)s)")
    args = parser.parse_args(argv)
    cases = [case for case in CASES if args.only in str(case)]
    if not cases:  # without a case nothing would fail
        parser.error(f"--only: no case has {args.only!r} in its name, only {'; '.join(map(str, CASES))}")
    where = jax.devices()[0].device_kind + (f", {args.length} tokens" if args.length != LENGTH else "")
    data, columns, passed = batches(token_ids(), args.length), dict[str, np.ndarray](), True
    for case in cases:
        for name, implementation in IMPLEMENTATIONS.items():
            start = time.perf_counter()
            found = columns[f"{case}, {name}"] = losses(case, implementation, data)
            seconds = time.perf_counter() - start
            print(f"{case}, {name}: loss {found[:MEAN].mean():.4f} -> {found[-MEAN:].mean():.4f}, {seconds:.1f} s")
        got = difference(case, *(columns[f"{case}, {name}"] for name in IMPLEMENTATIONS))
        within = got <= case.bound  # false for NaN
        passed &= within
        what = f"relative difference of {MEAN}-step means" if case.relative else "difference of a loss"
        print(f"{case}: largest {what} {got:.2e}, bound {case.bound:.0e}: {'PASS' if within else 'FAIL'}")
        write(args.out, columns, where, args.only)  # keeps this case if the next is interrupted
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
