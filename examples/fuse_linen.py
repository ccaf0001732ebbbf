"""`jaxft.fuse` on a training step of a BERT in Flax Linen, in the manner of Hugging Face's Flax models.

The model is ordinary Flax. The only line of jaxft is the one that fuses `model.apply`. The example prints what is
replaced, takes the same steps with and without it, and prints losses and times. `--force` replaces also on a CPU, where
it is not faster.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxft

VOCABULARY = 1000


class Layer(nn.Module):
    """One layer: separate projections of queries, keys and values, GELU with the error function, LayerNorm last."""

    width: int
    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        def dense(features: int, name: str) -> nn.Dense:
            return nn.Dense(features, dtype=self.dtype, name=name)

        split = (*x.shape[:2], self.heads, self.width // self.heads)
        query, key, value = (dense(self.width, name)(x).reshape(split) for name in ("query", "key", "value"))
        weights = nn.dot_product_attention_weights(query, key, bias=bias, dtype=self.dtype)
        attended = jnp.einsum("...hqk,...khd->...qhd", weights, value).reshape(x.shape)
        x = nn.LayerNorm(epsilon=1e-12, dtype=self.dtype)(dense(self.width, "output")(attended) + x)
        hidden = nn.gelu(dense(4 * self.width, "intermediate")(x), approximate=False)
        return nn.LayerNorm(epsilon=1e-12, dtype=self.dtype)(dense(self.width, "final")(hidden) + x)


class Bert(nn.Module):
    """Embeddings, layers and a masked-language-modelling head with the word embeddings."""

    layers: int
    width: int
    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        words = nn.Embed(VOCABULARY, self.width, dtype=self.dtype, name="words")
        positions = nn.Embed(512, self.width, dtype=self.dtype, name="positions")
        x = words(ids) + positions(jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape))
        x = nn.LayerNorm(epsilon=1e-12, dtype=self.dtype)(x)
        low = jnp.finfo(self.dtype).min
        bias = jax.lax.select(mask, jnp.zeros(mask.shape, self.dtype), jnp.full(mask.shape, low, self.dtype))
        for _ in range(self.layers):
            x = Layer(self.width, self.heads, self.dtype)(x, bias[:, None, None])
        return words.attend(x)


def batch(seed: int, size: int, length: int) -> tuple[jax.Array, jax.Array]:
    """Returns token ids that count up from a random number, and which tokens are valid."""
    starts, lengths = jax.random.split(jax.random.key(seed))
    ids = jax.random.randint(starts, (size, 1), 5, VOCABULARY) + jnp.arange(length)
    valid = jnp.arange(length) < jax.random.randint(lengths, (size, 1), length // 2, length + 1)
    return ids % VOCABULARY, valid


def training(apply: Callable[..., jax.Array], optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """Returns a step: every seventh token is hidden, and the model has to say which token it was."""

    @jax.jit
    def step(params: Any, state: Any, ids: jax.Array, valid: jax.Array) -> tuple[Any, Any, jax.Array]:
        hidden = (jnp.arange(ids.shape[1]) % 7 == 3) & valid

        def loss_of(params: Any) -> jax.Array:
            logits = apply(params, jnp.where(hidden, 0, ids), valid).astype(jnp.float32)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids)
            return jnp.sum(jnp.where(hidden, losses, 0)) / jnp.sum(hidden)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 12), ("width", 768), ("heads", 12), ("batch", 32), ("length", 128), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--force", action="store_true", help="fuse also where it is not faster, as on a CPU")
    args = parser.parse_args(argv)

    model = Bert(args.layers, args.width, args.heads, jnp.dtype(args.dtype))
    ids, valid = batch(0, args.batch, args.length)
    params = model.init(jax.random.key(0), ids, valid)
    apply: Callable[..., Any] = model.apply
    fused = jaxft.fuse(apply, force=args.force)
    print(fused.report(params, ids, valid))
    optimizer = optax.adamw(1e-4)
    for name, function in (("original", apply), ("fused", fused)):
        step, values, state = training(function, optimizer), params, optimizer.init(params)
        for i in range(args.steps):
            values, state, loss = step(values, state, *batch(i, args.batch, args.length))
            if i == 0:
                first = float(loss)
                start = time.perf_counter()
        last = float(loss)
        each = 1e3 * (time.perf_counter() - start) / max(1, args.steps - 1)
        print(f"{name}: loss {first:.4f} -> {last:.4f}, {each:.1f} ms a step")


if __name__ == "__main__":
    main()
