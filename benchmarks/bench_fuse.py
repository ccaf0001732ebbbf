"""`jaxft.fuse` on networks as users of Flax write them, in bfloat16: forward, and a training step (loss and gradients).

BERT-base is written in Flax Linen in the manner of Hugging Face, with separate queries, keys and values, an additive
mask and the GELU with the error function; ViT-B/16 with Linen's own attention. Each runs under XLA as it is, fused,
and, for BERT, as jaxft's own model with the same sizes. `temporary` is the memory that XLA plans for a call besides
arguments and results. Correctness comes first: a fused result may be twice as far from float32 as the original.

`--only corpus` times the functions of tests/fusion_cases.py at the sizes of BERT-base instead, the original and the
fused one in turns. It prints the cases that are slower by more than 2 % at the end.
"""

import argparse
import dataclasses
import functools
import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxft
import shapes
import timing
from jaxft.models.bert import BertConfig, BertModel
from jaxft.tuning import profiler

DTYPE = jnp.bfloat16
OF_CORPUS = "fuse corpus"  # the op in the rows
CORPUS_SIZES = "32,128,768,12,64,3072,30522"  # batch, length, width, heads, size of a head, of the feed-forward, words
SLOWER = 1.02  # a fused function may take this many times as long as the original
TOGETHER = 32  # functions of the corpus that are compiled, then timed: a run that is cut off has timed the earlier ones


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a network and of its input."""

    name: str
    batch: int
    length: int
    layers: int = 12
    width: int = 768
    heads: int = 12

    @property
    def shape(self) -> str:
        """The name of the case in the table."""
        return f"{self.name} {self.batch}x{self.length}"


CASES = (Sizes("BERT-base", 32, 128), Sizes("BERT-base", 32, 512), Sizes("ViT-B/16", 128, 197))


class BertLayer(nn.Module):
    """A layer as Hugging Face's Flax models have it."""

    sizes: Sizes
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        """Computes the layer of `[B, T, D]` with an additive mask `[B, 1, 1, T]`."""
        width, heads = self.sizes.width, self.sizes.heads
        split = (*x.shape[:2], heads, width // heads)
        q, k, v = (nn.Dense(width, dtype=self.dtype, name=name)(x).reshape(split) for name in "qkv")
        weights = nn.dot_product_attention_weights(q, k, bias=bias, dtype=self.dtype)
        y = jnp.einsum("...hqk,...khd->...qhd", weights, v).reshape(x.shape)
        x = nn.LayerNorm(epsilon=1e-12, dtype=self.dtype)(nn.Dense(width, dtype=self.dtype)(y) + x)
        y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(x), approximate=False)
        return nn.LayerNorm(epsilon=1e-12, dtype=self.dtype)(nn.Dense(width, dtype=self.dtype)(y) + x)


class Bert(nn.Module):
    """The layers of BERT."""

    sizes: Sizes
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Computes the layers of `[B, T, D]` with a mask `[B, T]`."""
        zeros, low = jnp.zeros(mask.shape, self.dtype), jnp.full(mask.shape, jnp.finfo(self.dtype).min, self.dtype)
        bias = jax.lax.select(mask, zeros, low)[:, None, None]
        for _ in range(self.sizes.layers):
            x = BertLayer(self.sizes, self.dtype)(x, bias)
        return x


class ViT(nn.Module):
    """The layers of a vision transformer."""

    sizes: Sizes
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Computes the layers of `[B, T, D]`. There is no padding."""
        for _ in range(self.sizes.layers):
            y = nn.LayerNorm(dtype=self.dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(self.sizes.heads, dtype=self.dtype)(y, y)
            y = nn.Dense(4 * self.sizes.width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
            x = x + nn.Dense(self.sizes.width, dtype=self.dtype)(nn.gelu(y, approximate=False))
        return nn.LayerNorm(dtype=self.dtype)(x)


def network(sizes: Sizes, dtype: Any) -> nn.Module:
    """Returns the network of a case."""
    return (ViT if sizes.name.startswith("ViT") else Bert)(sizes, dtype)


def own_model(sizes: Sizes) -> tuple[Callable[..., jax.Array], Any]:
    """Returns jaxft's layers of these sizes as a function of (parameters, x, mask), and random parameters."""
    config = BertConfig(
        vocab_size=8, hidden_size=sizes.width, num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads,
        intermediate_size=4 * sizes.width, max_position_embeddings=8, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertModel(config, dtype=DTYPE, param_dtype=DTYPE, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model.layers)

    def apply(state: Any, x: jax.Array, mask: jax.Array) -> jax.Array:
        for layer in nnx.merge(graph, state):
            x = layer(x, mask[:, None, None])
        return x

    return apply, state


def directed(apply: Callable[..., jax.Array], direction: str) -> Callable[..., Any]:
    """Returns a function of (parameters, x, mask): the result, or a loss and the gradients of the parameters."""
    if direction == shapes.FORWARD:
        return apply

    def step(params: Any, x: jax.Array, mask: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            return jnp.mean(jnp.square(apply(params, x, mask).astype(jnp.float32)))

        return jax.value_and_grad(loss_of)(params)

    return step


@jax.jit
def _distances(found: Any, exact: Any) -> jax.Array:
    """Returns the largest difference of all arrays, relative to the largest number."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True))
    top = jnp.max(jnp.stack([jnp.max(jnp.abs(y)) for _, y in pairs]))
    return jnp.max(jnp.stack([jnp.max(jnp.abs(x.astype(jnp.float32) - y)) for x, y in pairs])) / top


def excess(fused: Any, original: Any, exact: Any) -> str:
    """Says by how much a fused result errs if it is more than twice as far from float32 as the original, else ""."""
    ours, theirs = (float(_distances(found, exact)) for found in (fused, original))
    is_exact = ours <= 2 * theirs + 2 * float(jnp.finfo(DTYPE).eps)
    return "" if is_exact else f"fused errs by {ours:.3g}, the original by {theirs:.3g}: not timed"


def wide(tree: Any) -> Any:
    """Converts the arrays of dtype `DTYPE` to float32. Other arrays stay as they are."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == DTYPE else x, tree)


def lower_exact(f: Callable[..., Any], *inputs: Any) -> jax.stages.Lowered:
    """Lowers `f` for inputs in float32, with matmuls in float32."""
    with jax.default_matmul_precision("highest"):
        return jax.jit(f).lower(*wide(inputs))


# --- Networks ----------------------------------------------------------------------------------------------------


def random_parameters(model: nn.Module, x: jax.Array, mask: jax.Array) -> Any:
    """Returns parameters as for training: kernels at random, scales 1, shifts 0. Nothing is compiled for them."""
    rng = np.random.default_rng(0)

    def value(path: Any, p: Any) -> jax.Array:
        if p.ndim > 1:
            return jnp.asarray(0.02 * rng.standard_normal(p.shape, np.float32), DTYPE)
        return jnp.full(p.shape, path[-1].key == "scale", DTYPE)

    return jax.tree_util.tree_map_with_path(value, jax.eval_shape(model.init, jax.random.key(0), x, mask))


def seconds_of(f: Callable[..., Any], *args: Any) -> float:
    """Returns the wall time of one call."""
    start = time.perf_counter()
    f(*args)
    return time.perf_counter() - start


class Network:
    """One network and direction: its programs, lowered."""

    def __init__(self, sizes: Sizes, direction: str, args: argparse.Namespace) -> None:
        self.sizes, self.direction = sizes, direction
        x = jax.random.normal(jax.random.key(0), (sizes.batch, sizes.length, sizes.width), DTYPE)
        lengths = jax.random.randint(jax.random.key(1), (sizes.batch, 1), sizes.length // 2, sizes.length + 1)
        mask = jnp.arange(sizes.length) < lengths
        model = network(sizes, DTYPE)
        params = random_parameters(model, x, mask)
        apply: Callable[..., Any] = model.apply
        fused = jaxft.fuse(apply, force=args.force)
        traces = [jax.make_jaxpr(lambda *args: apply(*args)) for _ in range(2)]  # each traces anew
        _, traced, *planned = [seconds_of(f, params, x, mask) for f in (*traces, fused.report, fused.report)]
        first, again = (f"{seconds - traced:.2f} s" for seconds in planned)
        counts = fused.report(params, x, mask).counts
        print(f"{self.name}: {counts}; traced in {traced:.2f} s, planned in {again}, first in {first}", flush=True)
        self.variants: dict[str, tuple[Any, Any]] = {"xla": (apply, params), "fused": (fused, params)}
        if not sizes.name.startswith("ViT"):
            self.variants["jaxft"] = own_model(sizes)
        self.rest = x, mask
        self.lowered = {name: jax.jit(directed(f, direction)).lower(p, x, mask)
                        for name, (f, p) in self.variants.items()}  # fmt: skip
        self.inputs = params, x, mask
        exact: Callable[..., Any] = network(sizes, jnp.float32).apply
        self.lowered["exact"] = lower_exact(directed(exact, direction), *self.inputs)

    @property
    def name(self) -> str:
        """The name of the case."""
        return f"{self.sizes.shape}, {self.direction}"

    def run(self, compiled: dict[str, Any], args: argparse.Namespace) -> list[timing.Row]:
        """Checks and times the programs."""
        fused, original = (compiled[name](*self.inputs) for name in ("fused", "xla"))
        message = excess(fused, original, compiled["exact"](*wide(self.inputs)))
        del fused, original
        if message:
            raise SystemExit(f"{self.name}: {message}")
        key: dict[str, Any] = {"op": f"fuse, {self.sizes.name}", "direction": self.direction, "dtype": "bfloat16",
                               "shape": (self.sizes.batch, self.sizes.length)}  # fmt: skip
        mib = {name: compiled[name].memory_analysis().temp_size_in_bytes / 2**20 for name in self.variants}
        print(f"{self.name}: MiB of temporary memory: { {name: round(size) for name, size in mib.items()} }")
        rows = timing.as_rows({(name, "temporary_mib"): [size] for name, size in mib.items()}, 0.0, "", args, **key)
        inputs: dict[str, timing.Variant] = {
            name: (compiled[name], [(p, *self.rest)]) for name, (_, p) in self.variants.items()
        }
        rows += timing.measure(inputs, unit="", args=args, work=0, **key)
        for metric in sorted({row["metric"] for row in rows}):
            medians = {row["implementation"]: float(row["p50"]) for row in rows if row["metric"] == metric}
            share = medians["fused"] / medians["xla"]
            text = (
                f"needs {share:.0%} of it"
                if metric == "temporary_mib"
                else f"is {1 / share:.2f}x as fast as the original"
            )
            print(f"  {metric}: fused {text}", flush=True)
        return rows


# --- The corpus --------------------------------------------------------------------------------------------------


def corpus() -> dict[str, Any]:
    """Returns the functions of the tests, at the sizes of BERT-base, or at $FUSION_SIZES."""
    os.environ.setdefault("FUSION_SIZES", CORPUS_SIZES)
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    return importlib.import_module("fusion_cases").CASES


def pulled_back(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """Returns a function with the results and gradients of `fn`, and its arguments.

    The arguments are the floats among `args`, and cotangents, which are random. Cotangents that the function computed
    from its results would be fused with the forward pass, and the sum of a softmax has no gradient.
    """
    leaves, tree = jax.tree.flatten(args)
    at = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]
    results, outs = jax.tree.flatten(jax.eval_shape(fn, *args))
    keys = jax.random.split(jax.random.key(0), len(results))
    cotangents = [jax.random.normal(key, x.shape).astype(x.dtype) for key, x in zip(keys, results, strict=True)]

    def run(*values: Any) -> Any:
        def of_floats(*values: Any) -> Any:
            every = list(leaves)
            for i, value in zip(at, values, strict=True):
                every[i] = value
            return fn(*jax.tree.unflatten(tree, every))

        out, pull_back = jax.vjp(of_floats, *values[: len(at)])
        return out, pull_back(jax.tree.unflatten(outs, values[len(at) :]))

    return run, [leaves[i] for i in at] + cotangents


class CorpusCase:
    """One function of the corpus and direction: its programs, lowered. There are none if nothing is replaced."""

    def __init__(self, name: str, case: Any, direction: str, args: argparse.Namespace) -> None:
        self.name, self.direction, self.error = name, direction, ""
        fn, inputs = case.make(DTYPE)
        fused = jaxft.fuse(fn, force=args.force)
        self.lowered: dict[str, jax.stages.Lowered] = {}
        if not fused.report(*inputs).counts:
            return
        functions = {"xla": fn, "fused": fused}
        if direction != shapes.FORWARD:
            functions = {way: pulled_back(f, inputs)[0] for way, f in functions.items()}
            inputs = tuple(pulled_back(fn, inputs)[1])
        self.inputs = inputs
        self.lowered = {way: jax.jit(f).lower(*inputs) for way, f in functions.items()}
        self.lowered["exact"] = lower_exact(functions["xla"], *inputs)

    def run(self, compiled: dict[str, Any], args: argparse.Namespace) -> list[timing.Row]:
        """Checks and times the programs, and prints the ratios. If the check fails, it notes an error instead."""
        label = f"corpus, {self.direction}: {self.name}"
        fused, original = (compiled[way](*self.inputs) for way in ("fused", "xla"))
        message = excess(fused, original, compiled["exact"](*wide(self.inputs)))
        if message:
            self.error = f"{label}: {message}"
            return []
        nbytes = sum(x.nbytes for x in jax.tree.leaves(self.inputs))
        sets = [jax.tree.map(jnp.copy, self.inputs) for _ in range(min(64, timing.rotation(nbytes)))]
        calls = {way: timing.rotating(compiled[way], sets) for way in ("xla", "fused")}
        for call in calls.values():
            profiler.queued_us(call, 3)
        repeats = int(np.clip(1e4 / profiler.queued_us(calls["xla"], 5), 10, 200))
        samplers: dict[str, tuple[Callable[..., float], int, int]] = {
            "queued_us": (profiler.queued_us, repeats, 5 if args.quick else 15)
        }
        if jax.default_backend() == "gpu":
            samplers["device_us"] = profiler.device_us, min(repeats, timing.DEVICE_CALLS), 3
        samples: dict[tuple[str, str], list[float]] = {}
        for metric, (sample, n, rounds) in samplers.items():
            times = profiler.turns([*calls.values()], rounds, functools.partial(sample, calls=n))
            samples |= {(way, metric): column.tolist() for way, column in zip(calls, times.T, strict=True)}
            before, after = np.median(times, axis=0)
            print(f"{label}: {metric} {before:.1f} -> {after:.1f}, {after / before:.3f} of it", flush=True)
        cases = importlib.import_module("fusion_cases")
        key = {"op": f"{OF_CORPUS}: {self.name}", "direction": self.direction, "dtype": "bfloat16"}
        return timing.as_rows(samples, 0.0, "", args, shape=(cases.B, cases.T), **key)


def run_corpus(names: Sequence[str], args: argparse.Namespace) -> None:
    """Times the corpus in both directions, and prints the cases that become slower."""
    cases = corpus()
    every = [CorpusCase(name, cases[name], direction, args)
             for direction in shapes.DIRECTIONS for name in cases
             if any(text in f"corpus, {direction}: {name}" for text in names)]  # fmt: skip
    replaced = [case for case in every if case.lowered]
    print(f"{len(every)} functions, {len(replaced)} with replacements", flush=True)
    rows: list[timing.Row] = []
    for first in range(0, len(replaced), TOGETHER):
        for case, compiled in compile_each(replaced[first : first + TOGETHER]):
            rows += case.run(compiled, args)
    for metric in sorted({row["metric"] for row in rows}):
        times = {(row["direction"], row["op"], row["implementation"]): float(row["p50"])
                 for row in rows if row["metric"] == metric}  # fmt: skip
        ratios = {(direction, name): us / times[direction, name, "xla"]
                  for (direction, name, way), us in times.items() if way == "fused"}  # fmt: skip
        slower = {", ".join(case): ratio for case, ratio in ratios.items() if not ratio <= SLOWER}
        print(f"\n{metric}: {len(slower)} of {len(ratios)} ratios are above {SLOWER}")
        print("".join(f"  {ratio:.3f} {case}\n" for case, ratio in slower.items()), flush=True)
    if errors := [case.error for case in replaced if case.error]:
        raise SystemExit("\n".join(errors))


def compile_each(cases: Sequence[Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Compiles the programs of all cases in parallel. XLA searches no faster algorithms for the exact ones."""
    options = {"exact": {"xla_gpu_autotune_level": "0"} if jax.default_backend() == "gpu" else None}
    programs = iter(
        timing.compile_all((lowered, options.get(name)) for case in cases for name, lowered in case.lowered.items())
    )
    return [(case, {name: next(programs) for name in case.lowered}) for case in cases]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = timing.arguments(__doc__)
    parser.add_argument("--force", action="store_true", help="fuse also where it is not faster, as on a CPU")
    parser.add_argument(
        "--only", nargs="+", default=["BERT", "ViT"], metavar="TEXT",
        help="cases with one of these in their name, as 'BERT-base 32x512', corpus or 'corpus, forward: linen'",
    )  # fmt: skip
    args = parser.parse_args(argv)
    names = [text for text in args.only if text.startswith("corpus")]
    if names:
        run_corpus(names, args)
    networks = [Network(sizes, direction, args)
                for sizes in (CASES[:1] if args.quick else CASES) for direction in shapes.DIRECTIONS
                if any(text in f"{sizes.shape}, {direction}" for text in args.only)]  # fmt: skip
    results = [row for case, compiled in compile_each(networks) for row in case.run(compiled, args)] if networks else []
    if networks or not names:
        timing.print_tables(results)


if __name__ == "__main__":
    main()
