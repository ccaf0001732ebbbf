"""Fine-tunes all-MiniLM-L6-v2 to find the docstring of a function of Python's standard library.

    python examples/train_embedder.py --model FOLDER

FOLDER is the checkpoint (`make train-embedder` installs it). A query is the name of a function or class with the first
paragraph of its docstring, and its document is the rest of the docstring. A tenth of the modules is held out: before
and after the training, each of their queries has to find its document among all of theirs. Ctrl-C, SIGTERM or SIGHUP
saves the run and ends it with exit code 130; the same command resumes it.
"""

if __name__ == "__main__":  # before the other imports, which take seconds
    from jaxft import atomic

    atomic.end_at_signals(lambda number: "interrupted")

# ruff: noqa: E402
import collections
import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import common
from jaxft import BertModel, SentenceEncoder, atomic, training
from jaxft.text import batching

LEAST_CHARACTERS = 40  # shorter documents ("See above.") are not specific to a function
TEMPERATURE = 0.05
CUTOFFS = (1, 10)  # numbers of documents in a result


@dataclasses.dataclass(frozen=True)
class Preset:
    length: int  # maximum number of tokens of a text
    pairs: int  # pairs in a micro-batch
    steps: int
    learning_rate: float


PRESETS = {
    "small": Preset(length=48, pairs=32, steps=60, learning_rate=1e-4),
    "base": Preset(length=128, pairs=256, steps=60, learning_rate=2e-4),
}


def docstring_pairs() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Returns the pairs (query, document) to learn from, and those held out, which are from other modules.

    Queries and documents that occur twice are left out.
    """
    pairs = {
        (f"{found.name}: {found.paragraphs[0]}", " ".join(found.paragraphs[1:])): found.owner
        for found in common.docstrings()
        if found.name is not None
    }
    pairs = {pair: owner for pair, owner in pairs.items() if len(pair[1]) >= LEAST_CHARACTERS}
    counts = collections.Counter(text for pair in pairs for text in pair)
    pairs = {pair: owner for pair, owner in pairs.items() if counts[pair[0]] == counts[pair[1]] == 1}
    parts = [
        [pair for pair, owner in pairs.items() if common.held_out(owner) == held_out] for held_out in (False, True)
    ]
    return parts[0], parts[1]


class Pairs:
    """Tokenised pairs that make batches of `count` random pairs, padded to `length` tokens or packed."""

    def __init__(
        self, pairs: Sequence[tuple[str, str]], encoder: SentenceEncoder, preset: Preset, packed: bool
    ) -> None:
        self.length, self.packed, self.count = preset.length, packed, min(preset.pairs, len(pairs))
        self.padding = encoder.model.config.pad_token_id
        sides = zip(*pairs, strict=True)
        self.sequences = [[np.array(ids, np.int32) for ids in encoder.tokenize(texts)] for texts in sides]
        self.tokens = np.array([sum(map(len, pair)) for pair in zip(*self.sequences, strict=True)])
        # A packed batch has room for an average batch and four standard deviations.
        room = self.count * self.tokens.mean() + 4 * np.sqrt(self.count) * self.tokens.std()
        self.rows = -(-int(room) // 128) * 128

    def batch(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Makes a batch: first the queries, then their documents.

        Args:
          rng: the source of randomness.

        Returns:
          A dict of arrays. Padded: `input_ids`, int32 `[2 * count, length]`, and `attention_mask`, bool. Packed:
          `input_ids`, int32 `[rows]`, and `cu_seqlens`, int32 `[2 * count + 1]`.
        """
        chosen, others = np.split(rng.permutation(len(self.tokens)), [self.count])
        for other in others:  # a batch without enough room gets another pair for its longest one
            if self.tokens[chosen].sum() <= self.rows:
                break
            chosen[self.tokens[chosen].argmax()] = other
        sequences = [side[i] for side in self.sequences for i in chosen]
        lengths = np.array([len(sequence) for sequence in sequences])
        if self.packed:
            input_ids, cu_seqlens = np.full(self.rows, self.padding, np.int32), np.zeros(len(lengths) + 1, np.int32)
            cu_seqlens[1:] = lengths.cumsum()
            input_ids[: cu_seqlens[-1]] = np.concatenate(sequences)
            return {"input_ids": input_ids, "cu_seqlens": cu_seqlens}
        mask = np.arange(self.length) < lengths[:, None]
        input_ids = np.full(mask.shape, self.padding, np.int32)
        input_ids[mask] = np.concatenate(sequences)
        return {"input_ids": input_ids, "attention_mask": mask}


def retrieval(queries: np.ndarray, documents: np.ndarray, dims: Sequence[int]) -> dict[str, float]:
    """Computes recall@k and nDCG@10 of embeddings `[n, D]`, where document i is the only right one for query i.

    Args:
      queries: embeddings of the queries.
      documents: embeddings of the documents.
      dims: numbers of leading components to compare. The metrics of all but the first one have it in their name.
    """
    metrics: dict[str, float] = {}
    for dim in dims:
        unit = [x[:, :dim] / np.linalg.norm(x[:, :dim], axis=1, keepdims=True) for x in (queries, documents)]
        scores = unit[0] @ unit[1].T
        rank = (scores >= np.diagonal(scores)[:, None]).sum(1)  # 1 is the best; equal documents count as better ones
        found = {f"recall@{k}": float((rank <= k).mean()) for k in CUTOFFS}
        found["nDCG@10"] = float(np.where(rank <= 10, 1 / np.log2(rank + 1), 0.0).mean())
        metrics |= {name if dim == dims[0] else f"{name}, {dim} dimensions": value for name, value in found.items()}
    return metrics


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.arguments(__doc__, "train_embedder", PRESETS)
    parser.add_argument(
        "--dims", type=common.positive, nargs="+", metavar="D",
        help="numbers of dimensions to which the trained embeddings can be cut (Matryoshka)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    preset = PRESETS[args.preset]
    args.steps = args.steps or preset.steps
    encoder = SentenceEncoder.from_pretrained(args.model)
    options: dict[str, Any] = {"dtype": args.dtype, "param_dtype": jnp.float32, "remat": args.remat}
    encoder.embedder.encoder = BertModel.from_pretrained(args.model, **options)
    width, own_length = encoder.embedding_dimension, encoder.max_seq_length
    if args.dims and max(args.dims) > width:
        parser.error(f"argument --dims: the embeddings have {width} dimensions, got {max(args.dims)}")
    dims = [width, *sorted({*(args.dims or ())} - {width}, reverse=True)]
    encoder.max_seq_length = min(preset.length, own_length)
    train_pairs, test_pairs = docstring_pairs()
    train_set = Pairs(train_pairs, encoder, preset, packed=batching.packs(None))
    print(f"{len(train_pairs)} pairs to learn from, {len(test_pairs)} held out")

    encoder.embedder.train()
    graph, params = nnx.split(encoder.embedder)
    optimizer = common.adamw(preset.learning_rate, args.steps)
    data = common.fingerprint(*(ids for side in train_set.sequences for ids in side))
    weights = common.fingerprint(*map(np.asarray, jax.tree.leaves(params)))
    about = {"preset": dataclasses.asdict(preset), "dims": dims, "data": data, "weights": weights}
    state = common.initial_state(params, optimizer, args.dtype)
    run = common.Run(args.out, common.settings(args, **about), state)

    def embed(params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        packing: dict[str, Any] = {"max_seqlen": preset.length} if train_set.packed else {}
        embeddings = nnx.merge(graph, params)(**batch, **packing, rngs=key)
        return embeddings[: train_set.count], embeddings[train_set.count :]

    loss_fn: Any = functools.partial(training.contrastive_loss, temperature=TEMPERATURE)
    if len(dims) > 1:
        loss_fn = training.matryoshka_loss(loss_fn, dims)

    def gradients_of(embed: Any, params: Any, batches: Any, **options: Any) -> Any:
        return training.cached_gradients(embed, loss_fn, params, batches, **options)

    def batch_at(step: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng([args.seed, step])
        parts = [train_set.batch(rng) for _ in range(args.accumulate)]
        return {name: np.stack([part[name] for part in parts]) for name in parts[0]}

    report = args.out / "retrieval.json"
    results: dict[str, dict[str, float]] = {}  # number of steps done -> metrics

    def measure(params: Any) -> float:
        nnx.update(encoder.embedder, params)
        queries, documents = (encoder.encode(texts, show_progress_bar=False) for texts in zip(*test_pairs, strict=True))
        results[str(run.step)] = found = retrieval(queries, documents, dims)
        with atomic.replacing(report) as (new,), atomic.writing(report):
            new.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
        return found["nDCG@10"]

    if run.step and report.exists():
        results |= json.loads(report.read_text())
    step = common.make_step(embed, optimizer, gradients_of)
    evaluation = common.Evaluation("nDCG@10", measure, ".3f")
    finished = run.train(step, batch_at, save_every=args.save_every, evaluation=evaluation)
    if run.step_seconds is not None:
        print(f"{args.accumulate * train_set.count / run.step_seconds:,.0f} pairs/s")
    if not finished:
        return common.INTERRUPTED
    for name, after in results[str(args.steps)].items():
        print(f"{name}: from {results['0'][name]:.3f} to {after:.3f}")
    nnx.update(encoder.embedder, run.state.params)
    encoder.max_seq_length = own_length
    with run.saving():
        encoder.save_pretrained(args.out / "model")
    print(f"{args.out}: model/, loss.png, losses.csv, held_out.csv, retrieval.json, checkpoints/")
    return 0


if __name__ == "__main__":
    common.run(main)
