"""Pretrains a BERT from scratch with masked language modelling, on the docstrings of Python's standard library.

    python examples/pretrain.py --model FOLDER

FOLDER is a checkpoint, of which only the tokenizer is used (`make pretrain` installs it). Batches are packed, without
padding. Ctrl-C, SIGTERM or SIGHUP saves the run and ends it with exit code 130; the same command resumes it.
"""

if __name__ == "__main__":  # before the other imports, which take seconds
    from jaxft import atomic

    atomic.end_at_signals(lambda number: "interrupted")

# ruff: noqa: E402
import argparse
import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import common
from jaxft import BertConfig, BertForMaskedLM, atomic, dispatch
from jaxft.text import tokenizer as tokenizer_files

MASKED = 0.15
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
EVALUATED = 8  # batches of held-out text in an evaluation

# Peak dense bf16 and fp16 throughput in TFLOP/s, by the beginning of the device kind. The TF32 peak is half of it.
PEAK_TFLOPS = {
    "NVIDIA H200 NVL": 835.5, "NVIDIA H200": 989.5, "NVIDIA H100 80GB": 989.5, "NVIDIA A100": 312.0,
    "NVIDIA L4": 121.0, "NVIDIA L40": 181.0, "NVIDIA L40S": 362.0,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Preset:
    config: BertConfig  # `vocab_size` is replaced by the tokenizer's
    length: int  # maximum number of tokens of a sequence
    rows: int  # rows of a packed micro-batch
    steps: int
    learning_rate: float


PRESETS = {
    "small": Preset(
        BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512),
        length=64, rows=1024, steps=600, learning_rate=2e-3,
    ),
    "base": Preset(BertConfig(), length=128, rows=16384, steps=1000, learning_rate=3e-4),
}  # fmt: skip


class Documents:
    """Tokenised texts that make packed batches for masked language modelling.

    15 % of the tokens are to be predicted. As in BERT, 80 % of these tokens become [MASK], 10 % become a random token,
    and 10 % stay.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Any, preset: Preset) -> None:
        ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
        if missing := [token for token, number in ids.items() if number is None]:
            raise SystemExit(f"pretrain: the tokenizer has no {', '.join(missing)}, which masking needs")
        self.preset, self.vocab_size = preset, tokenizer.get_vocab_size()
        self.padding, first, last, self.mask = ids.values()
        room = preset.length - 2
        self.sequences = [
            np.array([first, *encoding.ids[start : start + room], last], np.int32)
            for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)
            for start in range(0, len(encoding.ids), room)
        ]
        self.lengths = np.array([len(sequence) for sequence in self.sequences])

    def batch(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Makes a batch of random sequences.

        Args:
          rng: the source of randomness.

        Returns:
          A dict of int32 arrays: `input_ids` `[rows]`, `labels` `[rows]` and `cu_seqlens` `[rows // 16 + 1]`. The last
          sequences may be empty.
        """
        rows = self.preset.rows
        order = rng.permutation(len(self.sequences))[: rows // 16]
        ends = np.cumsum(self.lengths[order])
        chosen = order[: np.searchsorted(ends, rows, side="right")]
        cu_seqlens = np.full(rows // 16 + 1, ends[len(chosen) - 1], np.int32)
        cu_seqlens[0], cu_seqlens[1 : len(chosen) + 1] = 0, ends[: len(chosen)]
        tokens = np.full(rows, self.padding, np.int32)
        tokens[: cu_seqlens[-1]] = np.concatenate([self.sequences[i] for i in chosen])
        predicted = rng.random(rows) < MASKED
        predicted[cu_seqlens[:-1].clip(max=rows - 1)] = predicted[cu_seqlens[1:] - 1] = False  # [CLS] and [SEP]
        predicted[cu_seqlens[-1] :] = False
        how = rng.random(rows)
        replaced = np.where(how < 0.8, self.mask, rng.integers(self.vocab_size, size=rows, dtype=np.int32))
        input_ids = np.where(predicted & (how < 0.9), replaced, tokens)
        labels = np.where(predicted, tokens, np.int32(-100))
        return {"input_ids": input_ids, "labels": labels, "cu_seqlens": cu_seqlens}


def batches(documents: Documents, seed: Sequence[int], count: int) -> dict[str, np.ndarray]:
    """Makes `count` batches, stacked along a new first axis."""
    rng = np.random.default_rng(seed)
    parts = [documents.batch(rng) for _ in range(count)]
    return {name: np.stack([part[name] for part in parts]) for name in parts[0]}


def flops(config: BertConfig, batch: dict[str, np.ndarray]) -> float:
    """Counts the FLOPs of the matmuls of a step, forward and backward. Recomputation with --remat does not count."""
    width = config.hidden_size
    layer = 2 * (4 * width**2 + 2 * width * config.intermediate_size)
    lengths = np.diff(batch["cu_seqlens"]).astype(float)
    encoder = config.num_hidden_layers * (layer * lengths.sum() + 4 * width * (lengths**2).sum())
    head = 2 * width**2 * lengths.sum() + 2 * width * config.vocab_size * (batch["labels"] >= 0).sum()
    return 3 * (encoder + head)


def peak_flops(dtype: str, given: float | None) -> float | None:
    """Returns the peak FLOP/s of this device; None if it is unknown. `given`, in TFLOP/s, takes precedence."""
    if given is not None:
        return given * 1e12
    kind = dispatch.device_kind()
    # Match whole words, so that "L4" does not match an L40.
    found = next((tflops for name, tflops in PEAK_TFLOPS.items() if re.match(rf"{name}\b", kind)), None)
    return None if found is None else found * 1e12 / (2 if dtype == "float32" else 1)


def speed(config: BertConfig, batches: Sequence[dict[str, np.ndarray]], step_seconds: float) -> dict[str, float]:
    """Computes tokens per second and FLOP/s from the time of a step and some of its batches."""
    tokens = float(np.mean([batch["cu_seqlens"][:, -1].sum() for batch in batches]))
    work = float(np.mean([flops(config, batch) for batch in batches]))
    return {
        "step_seconds": step_seconds, "tokens_per_s": tokens / step_seconds, "flops_per_s": work / step_seconds
    }  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.arguments(__doc__, "pretrain", PRESETS)
    common.add_division(parser, "the micro-batches of a step (--accumulate)")
    parser.add_argument(
        "--peak-tflops", type=common.positive_float, help="of the device at this dtype, for devices that are not known"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    preset, devices = PRESETS[args.preset], common.Devices(args)
    devices.check("--accumulate", args.accumulate)
    args.steps = args.steps or preset.steps
    tokenizer_settings = tokenizer_files.Settings(args.model)
    tokenizer = tokenizer_files.load(tokenizer_settings)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    texts = common.paragraphs()
    train_set = Documents([text for text in texts if not common.held_out(text)], tokenizer, preset)
    test_set = Documents([text for text in texts if common.held_out(text)], tokenizer, preset)
    config = dataclasses.replace(preset.config, vocab_size=train_set.vocab_size)
    print(f"{train_set.lengths.sum():,} tokens to learn from, {test_set.lengths.sum():,} held out")

    rngs = nnx.Rngs(args.seed)
    model = BertForMaskedLM(config, dtype=args.dtype, remat=args.remat, rngs=rngs)
    model.train()
    graph, params = nnx.split(model)
    optimizer = common.adamw(preset.learning_rate, args.steps)
    state = common.initial_state(params, optimizer, args.dtype)
    data = common.fingerprint(*train_set.sequences)
    settings = common.settings(args, preset=dataclasses.asdict(preset), data=data)
    run = common.Run(args.out, settings, state, devices, devices.shardings(model, optimizer, state))

    def loss_fn(params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return nnx.merge(graph, params).loss(**batch, max_seqlen=preset.length, rngs=key)

    @functools.partial(jax.jit, out_shardings=devices.replicated() if devices.mesh is not None else None)
    def evaluate(params: Any, batches: Any) -> jax.Array:
        def loss(batch: Any) -> Any:
            model = nnx.merge(graph, devices.whole(params))
            return model.loss(**batch, max_seqlen=preset.length, deterministic=True)

        return jax.tree.map(jnp.sum, jax.lax.map(loss, batches)).mean

    held_out = batches(test_set, [args.seed], EVALUATED)
    evaluation = common.Evaluation("loss of held-out text", lambda params: evaluate(params, held_out), ".3f")

    def batch_at(step: int) -> dict[str, np.ndarray]:
        batch = batches(train_set, [args.seed, step], args.accumulate)
        if devices.mesh is None:
            return batch
        return {name: x.reshape(-1, devices.count, *x.shape[1:]) for name, x in batch.items()}

    step = common.make_step(loss_fn, optimizer, mesh=devices.mesh)
    finished = run.train(step, batch_at, save_every=args.save_every, evaluation=evaluation)
    speed_file = args.out / "speed.json"
    speed_file.unlink(missing_ok=True)  # from an earlier call
    if run.step_seconds is not None and jax.process_index() == 0:
        some = [batches(train_set, [args.seed, step], args.accumulate) for step in range(8)]
        found = speed(config, some, run.step_seconds)
        line = f"{found['tokens_per_s']:,.0f} tokens/s, {found['flops_per_s'] / 1e12:.3g} TFLOP/s"
        if (peak := peak_flops(args.dtype, args.peak_tflops)) is not None:
            found["mfu"] = found["flops_per_s"] / peak
            line += f": {found['mfu']:.1%} of the device's peak (MFU)"
        print(line)
        with atomic.replacing(speed_file) as (new,), atomic.writing(speed_file):
            new.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    if not finished:
        return common.INTERRUPTED
    run.save_model(nnx.merge(graph, run.params()), tokenizer, tokenizer_settings)
    print(f"{args.out}: model/, loss.png, losses.csv, held_out.csv, checkpoints/")
    return 0


if __name__ == "__main__":
    common.run(main)
