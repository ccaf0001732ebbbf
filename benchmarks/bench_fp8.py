"""FP8 inference beside jaxft's own bfloat16, in the same process: matmuls, and whole BERT encoders with random weights.

`sustained_us` is the wall time per call over at least `--seconds` of queued calls, in which the card draws up to its
power limit. Its note has the power and the clock. `--quick` and batches of few tokens leave it out. The card
first warms up for a third of `--seconds`, and for a tenth where it has just run another case. Every row is written as
soon as it is measured.

With `--lengths FILE`, BERT-large with its question-answering head is timed on packed texts of these lengths.
"""

import argparse
import functools
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import bench_encoder
import jaxft
import shapes
import timing
from jaxft import dispatch, reference
from jaxft.models import quantize
from jaxft.models.bert import BertConfig, BertModel
from jaxft.models.question_answering import BertForQuestionAnswering
from jaxft.ops.dense import dense
from jaxft.tuning import dense as tuning
from jaxft.tuning import profiler

FLOAT8 = reference.FLOAT8
Variants = dict[str, tuple[jax.stages.Wrapped, tuple[Any, ...]]]  # a jitted function and its arguments, by name


# --- Matmuls -----------------------------------------------------------------------------------------------------


def dense_inputs(rows: int, depth: int, width: int, seed: int) -> tuple[jax.Array, ...]:
    """Makes float8 x, the stored kernel `[F, K]`, its scales and a bias, and x and kernel in bfloat16."""
    keys = jax.random.split(jax.random.key(seed), 4)
    x = jax.random.normal(keys[0], (rows, depth), jnp.float32).astype(FLOAT8)
    stored = (64 * jax.random.normal(keys[1], (width, depth), jnp.float32)).astype(FLOAT8)
    scale = jax.random.uniform(keys[2], (width,), jnp.float32, 0.5, 1.5) / (64 * depth**0.5)
    bias = jax.random.normal(keys[3], (width,), jnp.bfloat16)
    kernel = (stored.astype(jnp.float32) * scale[:, None]).T.astype(jnp.bfloat16)
    return x, stored, scale, bias, x.astype(jnp.bfloat16), kernel


def dense_variants(rows: int, depth: int, width: int, tiles: bool) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields ways to compute the layer. The first layer of a feed-forward network has GELU and a float8 result."""
    activation = "gelu" if width == 4 * depth else None
    options: dict[str, Any] = {"activation": activation, "float8_scale": None if activation is None else 1.0}

    def in_float8(x: Any, stored: Any, scale: Any, bias: Any, *_: Any, implementation: str | None = None) -> Any:
        return dense(x, stored.T, bias, kernel_scale=scale, implementation=implementation, **options)

    def in_bfloat16(x8: Any, stored: Any, scale: Any, bias: Any, x: Any, kernel: Any) -> Any:
        return dense(x, kernel, bias, activation=activation)

    yield "jaxft", in_float8
    yield "jaxft, bfloat16", in_bfloat16
    yield "xla", functools.partial(in_float8, implementation="xla")
    if rows <= 1024:
        yield "jaxft, triton", functools.partial(in_float8, implementation="triton")
    if not tiles or dispatch.platform() != "cuda":
        return

    def direct(x: Any, stored: Any, scale: Any, bias: Any, *_: Any) -> Any:
        y = jax.lax.dot_general(x, stored, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        y = y * scale + bias
        y = y if activation is None else reference.ACTIVATIONS[activation](y)
        return y.astype(jnp.bfloat16) if activation is None else reference.to_float8(y, 1.0)

    yield "xla, one dot of float8", direct
    itemsize = 2 if activation is None else 1
    for config in tuning.float8_dense_mosaic_candidates(rows=rows, result_itemsize=itemsize, device=dispatch.device()):
        name = f"jaxft, {config.tile_m}x{config.tile_n}{config.split}"
        name += f"c{config.cluster_m}{config.minor}{config.group}s{config.stages}"
        yield name, functools.partial(with_config, config=config, **options)


def with_config(
    x: Any, stored: Any, scale: Any, bias: Any, *_: Any, config: Any, activation: Any, float8_scale: Any
) -> Any:  # fmt: skip
    """Computes the layer by the Mosaic GPU kernel with one of its configurations."""
    from jaxft.kernels.mosaic_gpu import dense as mosaic

    (y,) = mosaic.forward(
        x, stored.T, bias, kernel_scale=scale, config=config, activation=activation, float8_scale=float8_scale,
        dtype=jnp.bfloat16,
    )  # fmt: skip
    return y


def check_dense(name: str, got: jax.Array, inputs: Sequence[jax.Array], activation: bool) -> None:
    """Exits if the result errs more than twice as much as rounding the exact result once, plus 2 ulp."""
    x, stored, scale, bias, *_ = (np.asarray(a.astype(jnp.float32), np.float64) for a in inputs)
    rows = np.linspace(0, len(x) - 1, 64).astype(int)  # a sample: float64 takes a CPU long
    y = x[rows] @ (stored * scale[:, None]).T + bias
    if activation:
        y = np.asarray(timing.float64(functools.partial(jax.nn.gelu, approximate=False), jnp.asarray(y, jnp.float32)))
    exact = jnp.asarray(y, jnp.float32)
    plain = reference.to_float8(exact, 1.0) if got.dtype == FLOAT8 else exact.astype(got.dtype)
    timing.check(name, got[rows], plain, exact)


def run_dense(shape: tuple[int, int, int], args: argparse.Namespace) -> list[timing.Row]:
    """Checks and times the layers of one shape."""
    sets = [dense_inputs(*shape, seed=0)]
    sets += [dense_inputs(*shape, seed) for seed in range(1, timing.rotation(sum(x.nbytes for x in sets[0][:2])))]
    jitted = {name: jax.jit(f) for name, f in dense_variants(*shape, args.tiles)}
    timing.compile_all((f.lower(*sets[0]), None) for f in jitted.values())
    for name, f in jitted.items():
        if name != "jaxft, bfloat16":
            got = f(*sets[0])
            check_dense(f"dense {shape}, {name}", got, sets[0], shape[2] == 4 * shape[1])
    variants = {name: (f, sets) for name, f in jitted.items()}
    return timing.measure(
        variants, work=2 * np.prod(shape, dtype=float), unit="TFLOP/s", args=args, op="dense, fp8",
        direction="forward", shape=shape, dtype="float8_e4m3fn",
    )  # fmt: skip


# --- Encoders ----------------------------------------------------------------------------------------------------


def encoder(model: BertModel, case: shapes.Encoder) -> tuple[jax.stages.Wrapped, tuple[Any, ...]]:
    """Returns a function of arrays and ids that computes the hidden states, and its arguments."""
    arrays, rebuild = jaxft.bundle(model)
    ids = jax.random.randint(jax.random.key(1), (case.batch, case.length), 1000, model.config.vocab_size)
    lengths = bench_encoder.random_lengths(case)

    @jax.jit
    def encode(arrays: list[jax.Array], ids: jax.Array) -> jax.Array:
        return rebuild(arrays)(ids).last_hidden_state

    @jax.jit
    def encode_packed(arrays: list[jax.Array], ids: jax.Array, lengths: jax.Array) -> jax.Array:
        capacity = -(-(case.valid or ids.size) // 128) * 128
        rows, _, starts = jaxft.remove_padding(ids[..., None], bench_encoder.keep(case, lengths), capacity=capacity)
        return rebuild(arrays)(rows[:, 0], cu_seqlens=starts, max_seqlen=case.length).last_hidden_state

    return (encode, (arrays, ids)) if lengths is None else (encode_packed, (arrays, ids, lengths))


def both_precisions(name: str) -> dict[str, BertModel]:
    """Returns an encoder with random weights in both precisions, by the name of the variant."""
    layers, width, heads, inner = shapes.MODELS[name]
    config = BertConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner
    )  # fmt: skip
    dtype: dict[str, Any] = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    wide = nnx.jit(lambda: BertModel(config, **dtype, add_pooling_layer=False, rngs=nnx.Rngs(0)))()
    return {"jaxft": quantize(wide), "jaxft, bfloat16": wide}


def check_encoder(case: shapes.Encoder, variants: Variants) -> None:
    """Exits if the hidden states of the two precisions differ by more than the rounding of float8 explains."""
    width = shapes.MODELS[case.model].width
    found = [np.asarray(f(*inputs).astype(jnp.float32)) for f, inputs in variants.values()]
    ours, wide = (y.reshape(-1, width)[: case.valid or y.size // width] for y in found)
    cosine = np.mean(np.sum(ours * wide, -1) / np.linalg.norm(ours, axis=-1) / np.linalg.norm(wide, axis=-1))
    if not cosine >= 0.98:
        raise SystemExit(f"{case}: the cosine of float8 and bfloat16 is {cosine:.4f}; nothing is timed")


def run_encoders(cases: Sequence[shapes.Encoder], args: argparse.Namespace) -> list[timing.Row]:
    """Checks and times encoders in both precisions: device times of all cases first, then sustained times."""
    models = {name: both_precisions(name) for name in {case.model for case in cases}}
    cases_variants = [(case, {name: encoder(m, case) for name, m in models[case.model].items()}) for case in cases]
    timing.compile_all((f.lower(*inputs), None) for _, vs in cases_variants for f, inputs in vs.values())
    rows, keys = [], []
    for case, variants in cases_variants:
        check_encoder(case, variants)
        lengths = bench_encoder.random_lengths(case)
        counted = [case.length] * case.batch if lengths is None else lengths.tolist()
        key: dict[str, Any] = {"op": f"{case.op('gelu')}, fp8", "direction": "forward", "dtype": "float8_e4m3fn"}
        keys.append((key | {"shape": (case.batch, case.length)}, shapes.encoder_flops(case.model, counted)))
        sets = {name: (f, [inputs]) for name, (f, inputs) in variants.items()}
        rows += timing.measure(sets, work=keys[-1][1], unit="TFLOP/s", args=args, **keys[-1][0])
    if args.quick:
        return rows
    runs = [
        (*key, *run)
        for key, (case, variants) in zip(keys, cases_variants, strict=True) if case not in shapes.FP8_FEW
        for run in variants.items()
    ]  # fmt: skip
    for i, (key, work, name, (f, inputs)) in enumerate(runs):
        rows.append(sustained_row(functools.partial(f, *inputs), key, name, work, args, warm=i > 0))
    return rows


# --- Question answering ------------------------------------------------------------------------------------------

TOKENS, TEXTS = 16384, 128  # capacity of a packed batch
NOTE = (
    "throughput beside MLPerf's published figures; not an MLPerf result, not verified by MLCommons; accuracy on SQuAD "
    "not measured; random weights"
)


def packed_batches(lengths: np.ndarray, tokens: int, texts: int) -> Iterator[np.ndarray]:
    """Yields `cu_seqlens` `[texts + 1]` of batches, filled in the order of the lengths, with empty texts at the end."""
    starts = [0]
    for length in [*lengths.tolist(), tokens + 1]:
        if starts[-1] + length > tokens or len(starts) > texts:
            yield np.asarray(starts + [starts[-1]] * (texts + 1 - len(starts)), np.int32)
            starts = [0]
        starts.append(starts[-1] + length)


def run_answers(model: str, lengths: np.ndarray, args: argparse.Namespace) -> list[timing.Row]:
    """Times question answering on packed texts of these lengths, in samples per second, in both precisions."""
    layers, width, heads, inner = shapes.MODELS[model]
    config = BertConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner
    )  # fmt: skip
    dtype: dict[str, Any] = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    wide = nnx.jit(lambda: BertForQuestionAnswering(config, **dtype, rngs=nnx.Rngs(0)))()
    longest, rng = int(lengths.max()), np.random.default_rng(0)
    batches = [
        (jnp.asarray(rng.integers(1000, config.vocab_size, TOKENS), jnp.int32), jnp.asarray(starts))
        for starts in packed_batches(lengths, TOKENS, TEXTS)
    ]
    key: dict[str, Any] = {"op": f"question answering {model}, packed, fp8", "direction": "forward"}
    key |= {"shape": (len(lengths), longest), "dtype": "float8_e4m3fn"}
    work = shapes.encoder_flops(model, lengths.tolist())
    variants: Variants = {}
    for name, module in (("jaxft", quantize(wide)), ("jaxft, bfloat16", wide)):
        arrays, rebuild = jaxft.bundle(module)

        @jax.jit
        def answer(arrays: list[jax.Array], ids: jax.Array, starts: jax.Array, rebuild: Any = rebuild) -> Any:
            return rebuild(arrays)(ids, cu_seqlens=starts, max_seqlen=longest)

        variants[name] = answer, (arrays,)
    timing.compile_all((f.lower(*arrays, *batches[0]), None) for f, arrays in variants.values())
    used = int(batches[0][1][-1])
    results = [np.asarray(f(*a, *batches[0]).start[:used].astype(jnp.float32)) for f, a in variants.values()]
    if not (likeness := np.corrcoef(np.stack(results))[0, 1]) >= 0.9:
        raise SystemExit(f"{key['op']}: the logits of float8 and bfloat16 have a correlation of {likeness:.3f}")
    rows: list[timing.Row] = []
    for name, (f, inputs) in variants.items():

        def every(answer: Any = f, inputs: Any = inputs) -> Any:
            for batch in batches:
                out = answer(*inputs, *batch)
            return out

        rows.append(sustained_row(every, key, name, work, args, warm=bool(rows), samples=len(lengths)))
    return rows


def sustained_row(
    call: Callable[[], Any], key: dict[str, Any], name: str, work: float, args: argparse.Namespace, *, warm: bool,
    samples: int = 0,
) -> timing.Row:  # fmt: skip
    """Times a call at the power limit. Prints and writes the row. With `samples` per call, the note has their rate.

    `warm` says that the card has just run something else for long.
    """
    times, note = sustained(call, args.seconds, args.seconds / (10 if warm else 3))
    if samples:
        note = f"{samples / np.median(times) * 1e6:,.0f} samples/s; {note}; lengths of {args.lengths.name}; {NOTE}"
    row = timing.as_row(key, name, "sustained_us", times, work, "TFLOP/s", note) | timing.origin()
    print(f"{row['op']} {row['shape']}, {name}: sustained {row['p50']} us; {note}", flush=True)
    timing.write_rows([row], args.out)
    return row


def sustained(call: Callable[[], Any], seconds: float, warm_up: float) -> tuple[list[float], str]:
    """Returns samples of the wall time per call, in microseconds, and the power and clock at the end."""
    begin, samples, note = time.perf_counter(), [], ""
    calls = max(1, int(5e5 / profiler.queued_us(call, 3)))  # half a second
    while time.perf_counter() - begin < warm_up:
        profiler.queued_us(call, calls)
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        out = call()  # queued while the card is asked
        note = card_state() if time.perf_counter() - begin < 0.8 * seconds else note
        jax.block_until_ready(out)
        samples.append(profiler.queued_us(call, calls))
    return samples, note


def card_state() -> str:
    """Returns the power and the clock of the card, or nothing without an NVIDIA card."""
    card = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").partition(",")[0]
    query = f"nvidia-smi --id={card} --query-gpu=power.draw,clocks.sm --format=csv,noheader"
    try:
        return subprocess.run(query.split(), capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__)
    parser.add_argument("--tiles", action="store_true", help="time all candidate tiles of the matmuls")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a sustained run (default: 30)")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="cases with a TEXT in their name")
    parser.add_argument("--lengths", type=Path, metavar="FILE", help="lengths of texts (.npy) for question answering")
    args = parser.parse_args(argv)
    results: list[timing.Row] = []

    def chosen(name: str) -> bool:
        return any(text in name for text in args.only)

    for shape in shapes.FP8_DENSE[:3] if args.quick else shapes.FP8_DENSE:
        if chosen(f"dense {'x'.join(map(str, shape))}"):
            results += run_dense(shape, args)
    cases = shapes.FP8_FEW[:1] + shapes.FP8_ENCODER[:2] if args.quick else shapes.FP8_FEW + shapes.FP8_ENCODER
    cases = [case for case in cases if chosen(case.label("gelu"))]
    results += run_encoders(cases, args) if cases else []
    if args.lengths is not None:
        results += run_answers("BERT-large", np.load(args.lengths), args)
    timing.print_tables(results)


if __name__ == "__main__":
    main()
