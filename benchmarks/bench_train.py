"""A training step of whole BERT encoders, value and gradients: jaxft beside plain XLA and XLA with cuDNN attention.

The value is the sum of the last hidden states times random weights, in float32. The gradients are for the first
hidden states and all parameters, which have the dtype of the computation.

Each case is timed without and with dropout. The peers' dropout masks come from JAX's "rbg" generator, the faster of its
two. The masks of cuDNN's attention come from cuDNN. With dropout, cuDNN's kernels are not in a CUDA graph, because XLA
ends the process otherwise ("Check failed: local_device_ordinal.has_value()", JAX 0.11.2).

Every program is compiled with XLA's defaults and with `jaxft.training.COMPILER_OPTIONS`, and the faster one counts.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import bench_encoder
import shapes
import timing
from bench_encoder import PEERS
from jaxft.comparison import Attention, plain_layer
from jaxft.models.bert import Places, run_layer
from jaxft.training import COMPILER_OPTIONS

Encoder = Callable[[Any, jax.Array, Any], jax.Array]  # (parameters, x, None or a key) -> y


# What XLA puts into a CUDA graph by default, except for cuDNN's kernels.
WITHOUT_CUDNN = {"xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL"}


def step(encode: Encoder) -> jax.stages.Wrapped:
    """Returns a function (parameters, x, key, weights) -> value, (gradients of the parameters, of x)."""

    def value(params: Any, x: jax.Array, key: Any, weights: jax.Array) -> jax.Array:
        return jnp.sum(encode(params, x, key).astype(weights.dtype) * weights)

    return jax.jit(jax.value_and_grad(value, (0, 1)))


def fastest(name: str, programs: Sequence[jax.stages.Compiled], inputs: tuple[Any, ...]) -> timing.Variant:
    """Returns the faster of a step with XLA's defaults and the same step with COMPILER_OPTIONS."""
    found: list[tuple[float, timing.Variant]] = []
    for program, own in zip(programs, ("defaults", COMPILER_OPTIONS), strict=True):
        variant = program, [inputs]
        timing.queued_us(variant, 1)
        found.append((min(timing.queued_us(variant, 5) for _ in range(3)), variant))
        print(f"{name}, {own}: {found[-1][0]:.0f} us")
    return min(found, key=lambda timed: timed[0])[1]


def temporary_mib(variant: timing.Variant) -> float:
    """Returns the memory that a compiled program takes beside its arguments and results, in MiB."""
    compiled: Any = variant[0]
    return compiled.memory_analysis().temp_size_in_bytes / 2**20


# --- The peers, with dropout -------------------------------------------------------------------------------------


def drop(x: jax.Array, key: jax.Array, rate: float) -> jax.Array:
    """Computes dropout in plain JAX."""
    return jnp.where(jax.random.bernoulli(key, 1.0 - rate, x.shape), x / (1.0 - rate), jnp.zeros((), x.dtype))


def xla_attention(q: jax.Array, k: jax.Array, v: jax.Array, key: jax.Array, rate: float) -> jax.Array:
    """Computes attention with dropout in plain JAX."""
    logits = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(logits / math.sqrt(q.shape[-1]), axis=-1).astype(q.dtype)
    return jnp.einsum("bnts,bsnh->btnh", drop(weights, key, rate), v)


def cudnn_attention(q: jax.Array, k: jax.Array, v: jax.Array, seed: int, rate: float) -> jax.Array:
    """Computes cuDNN's attention with dropout."""
    from jax._src.cudnn.fused_attention_stablehlo import dot_product_attention  # jax.nn's has no dropout

    return dot_product_attention(q, k, v, scale=1.0 / math.sqrt(q.shape[-1]), seed=seed, dropout_rate=rate)


def plain_encoder(
    params: bench_encoder.Params, x: jax.Array, key: Any, *, attention: Attention, rate: float, **options: Any
) -> jax.Array:
    """Computes the peer: a stack of layers in plain JAX, with dropout."""
    for i, p in enumerate(params):
        if rate == 0.0:
            x = plain_layer(p, x, None, attention=attention, **options)
            continue
        of_weights, *of_hidden = jax.random.split(jax.random.fold_in(key, i), 3)
        attend: Any = functools.partial(xla_attention, key=of_weights, rate=rate)
        if attention == "cudnn":
            attend = functools.partial(cudnn_attention, seed=i, rate=rate)
        keys = iter(of_hidden)

        def drop_hidden(y: jax.Array, keys: Iterator[jax.Array] = keys) -> jax.Array:
            return drop(y, next(keys), rate)

        x = plain_layer(p, x, None, attention=attend, drop=drop_hidden, **options)
    return x


# --- The comparison ----------------------------------------------------------------------------------------------


def jaxft_encoder(layers_of: Callable[[Any], Any], *, remat: bool) -> Encoder:
    """Returns the encoder of jaxft's layers."""

    def encode(leaves: Any, x: jax.Array, key: Any) -> jax.Array:
        layers = layers_of(leaves)
        keys = [None] * len(layers) if key is None else jax.random.split(key, (len(layers), 3))
        for layer, own in zip(layers, keys, strict=True):
            norms = layer.attention_norm(), layer.ffn_norm()
            x, _ = run_layer(layer, x, x, Places(), norms, own, remat=remat)
        return x

    return encode


def run(case: shapes.Encoder, gelu: str, rate: float, args: argparse.Namespace) -> list[timing.Row]:
    """Checks and times one case."""
    layers, width, heads, ff = shapes.MODELS[case.model]
    params = bench_encoder.random_params(case.model, case.dtype)
    shape = (case.batch, case.length, width)
    x = jax.random.normal(jax.random.key(1), shape, case.dtype)
    weights = jax.random.normal(jax.random.key(2), shape, jnp.float32)
    key, label = (jax.random.key(3) if rate else None), f"{case.label(gelu)}, dropout {rate}"

    def ours(
        case: shapes.Encoder, params: bench_encoder.Params, implementation: str | None, remat: bool
    ) -> tuple[Encoder, tuple[Any, ...]]:
        options: dict[str, Any] = {"implementation": implementation, "dropout": rate}
        layers_of, leaves = bench_encoder.jaxft_layers(case, params, gelu, **options)
        return jaxft_encoder(layers_of, remat=remat), (leaves, x.astype(case.dtype), key, weights)

    activation = "gelu_tanh" if gelu == "gelu_new" else "gelu"
    options: dict[str, Any] = {"heads": heads, "activation": activation, "epsilon": 1e-12, "rate": rate}
    steps: dict[str, tuple[Encoder, tuple[Any, ...], dict[str, Any]]] = {
        name: (*ours(case, params, None, remat), {}) for name, remat in (("jaxft", False), ("jaxft, remat", True))
    }
    for name, (attention, packed) in PEERS.items():
        if attention == "cudnn" and jax.default_backend() != "gpu":
            continue
        in_graph = WITHOUT_CUDNN if rate and attention == "cudnn" else {}
        encode: Encoder = functools.partial(plain_encoder, attention=attention, **options)
        own = params if packed else bench_encoder.separate(params)
        steps[name] = encode, (own, x, jax.random.key(3, impl="rbg") if rate else None, weights), in_graph
    # Only jaxft in plain JAX drops the same elements. It is not timed, so XLA need not search its matmuls.
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), params)
    of_exact = ours(dataclasses.replace(case, dtype="float32"), wide, "xla", False)
    of_plain = ours(case, params, "xla", False)

    def lowered() -> Iterator[tuple[jax.stages.Lowered, dict[str, Any]]]:
        for encode, inputs, in_graph in steps.values():
            program = step(encode).lower(*inputs)
            yield from ((program, {**own, **in_graph}) for own in ({}, COMPILER_OPTIONS))
        yield step(of_plain[0]).lower(*of_plain[1]), COMPILER_OPTIONS
        with jax.default_matmul_precision("highest"):
            program = step(of_exact[0]).lower(*of_exact[1])
        yield program, COMPILER_OPTIONS

    *programs, plain_step, exact_step = timing.compile_all(lowered())
    plain, exact = (
        jax.tree.leaves(program(*inputs)[1])
        for program, (_, inputs) in ((plain_step, of_plain), (exact_step, of_exact))
    )
    each = iter(programs)
    variants = {
        name: fastest(f"{label}, {name}", (next(each), next(each)), inputs) for name, (_, inputs, _) in steps.items()
    }
    for name in ("jaxft", "jaxft, remat"):
        f, (inputs,) = variants[name]
        for gradients in zip(jax.tree.leaves(f(*inputs)[1]), plain, exact, strict=True):
            timing.check(f"{label}, {name}, a gradient {list(gradients[0].shape)}", *gradients)
    mib = {name: round(temporary_mib(variant)) for name, variant in variants.items()}
    print(f"{label}: MiB of temporary memory: {mib}")
    if args.kernels:
        for name, variant in variants.items():
            bench_encoder.print_kernels(f"{label}, {name}", variant, layers)
    key_of_rows: dict[str, Any] = {
        "op": case.op(gelu).replace("encoder", "training step") + (f", dropout {rate}" if rate else ""),
        "direction": "value and gradient", "shape": (case.batch, case.length), "dtype": case.dtype,
    }  # fmt: skip
    samples = {(name, "temporary_mib"): [float(size)] for name, size in mib.items()}
    rows = timing.as_rows(samples, 0.0, "", args, **key_of_rows) if jax.default_backend() == "gpu" else []
    work = 3 * shapes.encoder_flops(case.model, [case.length] * case.batch)
    return rows + timing.measure(variants, work=work, unit="TFLOP/s", args=args, **key_of_rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__)
    parser.add_argument("--kernels", action="store_true", help="list the kernels of each program as well")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="cases with TEXT in their name, as '32x512 bfloat16'"
    )
    args = parser.parse_args(argv)
    results: list[timing.Row] = []
    for case in shapes.TRAINING[:1] if args.quick else shapes.TRAINING:
        for gelu in shapes.GELUS:
            for rate in shapes.TRAINING_DROPOUT:
                if args.only in f"{case.label(gelu)}, dropout {rate}":
                    results += run(case, gelu, rate, args)
    timing.print_tables(results)


if __name__ == "__main__":
    main()
