"""`jaxft.fuse` on networks as users of Flax write them, in bfloat16: forward, and a training step (loss and gradients).

BERT-base is written in Flax Linen in the manner of Hugging Face, with separate queries, keys and values, an additive
mask and the GELU with the error function; ViT-B/16 with Linen's own attention. Each runs under XLA as it is, fused,
and, for BERT, as jaxft's own model with the same sizes. `temporary` is the memory that XLA plans for a call besides
arguments and results. Correctness comes first: a fused result may be twice as far from float32 as the original.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import jaxft
import shapes
import timing
from jaxft.models.bert import BertConfig, BertModel

DTYPE = jnp.bfloat16


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


def check(name: str, fused: Any, original: Any, exact: Any) -> None:
    """Exits if the fused result is more than twice as far from float32 as the original, over all arrays together."""

    def distance(a: Any, b: Any) -> float:
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        top = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(b))
        return max(float(jnp.max(jnp.abs(x.astype(jnp.float32) - y))) for x, y in pairs) / top

    errors = distance(fused, exact), distance(original, exact)
    if not errors[0] <= 2 * errors[1] + 2 * float(jnp.finfo(DTYPE).eps):
        raise SystemExit(f"{name}: fused errs by {errors[0]:.3g}, the original by {errors[1]:.3g}; nothing is timed")


def run(sizes: Sizes, direction: str, args: argparse.Namespace) -> list[timing.Row]:
    """Checks and times one network."""
    model = network(sizes, DTYPE)
    x = jax.random.normal(jax.random.key(0), (sizes.batch, sizes.length, sizes.width), DTYPE)
    lengths = jax.random.randint(jax.random.key(1), (sizes.batch, 1), sizes.length // 2, sizes.length + 1)
    mask = jnp.arange(sizes.length) < lengths
    params = jax.tree.map(lambda p: p.astype(DTYPE), jax.jit(model.init)(jax.random.key(2), x, mask))
    apply: Callable[..., Any] = model.apply
    fused = jaxft.fuse(apply, force=args.force)
    start = time.perf_counter()
    report = fused.report(params, x, mask)
    print(f"{sizes.shape}, {direction}: {report.counts}; planned in {time.perf_counter() - start:.2f} s", flush=True)

    variants = {"xla": (directed(apply, direction), params), "fused": (directed(fused, direction), params)}
    if not sizes.name.startswith("ViT"):
        own, state = own_model(sizes)
        variants["jaxft"] = directed(own, direction), state
    compiled = {name: jax.jit(f).lower(p, x, mask).compile() for name, (f, p) in variants.items()}
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), (params, x))
    wide_apply: Callable[..., Any] = network(sizes, jnp.float32).apply
    exact_fn = jax.jit(directed(wide_apply, direction))
    with jax.default_matmul_precision("highest"):
        exact = exact_fn(wide[0], wide[1], mask)
    check(f"{direction} {sizes.shape}", compiled["fused"](params, x, mask), compiled["xla"](params, x, mask), exact)
    del exact
    for name, program in compiled.items():
        if (memory := program.memory_analysis()) is not None:
            print(f"  {name}: temporary {memory.temp_size_in_bytes / 2**20:,.0f} MiB", flush=True)
    inputs: dict[str, timing.Variant] = {
        name: (program, [(variants[name][1], x, mask)]) for name, program in compiled.items()
    }
    rows = timing.measure(inputs, unit="", args=args, direction=direction, work=0, op=f"fuse, {sizes.name}",
                          shape=(sizes.batch, sizes.length), dtype="bfloat16")  # fmt: skip
    for metric in sorted({row["metric"] for row in rows}):
        medians = {row["implementation"]: float(row["p50"]) for row in rows if row["metric"] == metric}
        print(f"  {metric}: fused is {medians['xla'] / medians['fused']:.2f}x as fast as the original", flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = timing.arguments(__doc__)
    parser.add_argument("--force", action="store_true", help="fuse also where it is not faster, as on a CPU")
    args = parser.parse_args(argv)
    results = []
    for sizes in CASES[:1] if args.quick else CASES:
        for direction in shapes.DIRECTIONS:
            results += run(sizes, direction, args)
    timing.print_tables(results)


if __name__ == "__main__":
    main()
