"""A training step of whole BERT encoders, value and gradients: jaxft beside plain XLA and XLA with cuDNN attention.

The value is the sum of the last hidden states times random weights, in float32; the gradients are those of all the
parameters and of the first hidden states. With dropout the peers draw their masks with JAX's "rbg" generator, the
faster of its two.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import bench_encoder
import timing
from bench_encoder import GELUS, MODELS, PEERS, Case
from jaxft.models.comparison import plain_encoder

CASES = [Case("BERT-base", 32, 128), Case("BERT-base", 32, 512)]
EPSILON = 1e-12

Encoder = Callable[..., jax.Array]  # (parameters, x, lengths, ...) -> y


def step(encode: Encoder) -> jax.stages.Wrapped:
    """(parameters, x, weights) -> value, (gradients of parameters, of x)."""

    def value(params: Any, x: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sum(encode(params, x, None).astype(weights.dtype) * weights)

    return jax.jit(jax.value_and_grad(value, (0, 1)))


def temporary_bytes(variant: timing.Variant) -> int:
    """What a compiled program takes beside its arguments and results."""
    f, inputs = variant
    analysis: Any = f.lower(*inputs[0]).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def run(case: Case, gelu: str, args: argparse.Namespace) -> list[timing.Row]:
    layers, width, heads, ff = MODELS[case.model]
    params = bench_encoder.random_params(case.model, case.dtype)
    shape = (case.batch, case.length, width)
    x = jax.random.normal(jax.random.key(1), shape, case.dtype)
    weights = jax.random.normal(jax.random.key(2), shape, jnp.float32)
    ours, leaves = bench_encoder.jaxft_encoder(case, params, gelu, packed=False)
    variants: dict[str, timing.Variant] = {"jaxft": (step(ours), [(leaves, x, weights)])}
    activation = "gelu_tanh" if gelu == "gelu_new" else "gelu"
    for name, (attention, packed) in PEERS.items():
        if attention == "cudnn" and jax.default_backend() != "gpu":
            continue
        f = functools.partial(plain_encoder, heads=heads, activation=activation, epsilon=EPSILON, attention=attention)
        own = params if packed else bench_encoder.separate(params)
        variants[name] = (step(f), [(own, x, weights)])

    plain = variants["xla"][0](params, x, weights)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (params, x))
    with jax.default_matmul_precision("highest"):
        exact = variants["xla"][0](*wide, weights)
    _, (got, dx) = variants["jaxft"][0](leaves, x, weights)
    order = [id(leaf) for leaf in jax.tree.leaves(params)]
    timing.check(f"{case.label(gelu)}, gradient of x", dx, plain[1][1], exact[1][1])
    for leaf, d in zip(leaves, got, strict=True):
        place = order.index(id(leaf))
        timing.check(
            f"{case.label(gelu)}, gradient {place}", d, *(jax.tree.leaves(r[1][0])[place] for r in (plain, exact))
        )
    mib = {name: temporary_bytes(variant) / 2**20 for name, variant in variants.items()}
    print(f"{case.label(gelu)}: temporary MiB", {name: round(size) for name, size in mib.items()})
    if args.kernels:
        for name, variant in variants.items():
            bench_encoder.print_kernels(f"{case.label(gelu)}, {name}", variant, layers)
    return timing.measure(
        variants, work=3 * bench_encoder.flops(layers, width, ff, case.batch, case.length), unit="TFLOP/s", args=args,
        op=case.op(gelu), direction="value and gradient", shape=(case.batch, case.length), dtype=case.dtype,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__)
    parser.add_argument("--kernels", action="store_true", help="list the kernels of each program as well")
    args = parser.parse_args(argv)
    results: list[timing.Row] = []
    for case in CASES[:1] if args.quick else CASES:
        for gelu in GELUS:
            results += run(case, gelu, args)
    timing.print_tables(results)


if __name__ == "__main__":
    main()
