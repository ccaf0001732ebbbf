"""Custom Flax NNX and Flax Linen modules that use the fused operations. Both learn to sort digits.

python examples/custom_modules.py
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

import jaxft
from jaxft.models import attention_fn

DIGITS, LENGTH, WIDTH, HEADS, STEPS = 10, 8, 64, 4, 60


class NNXBlock(nnx.Module):
    """A transformer layer made of jaxft operations.

    Attention reads Q, K and V in place, GELU runs in the matmul kernel, residual and LayerNorm are one pass.
    """

    def __init__(self, rngs: nnx.Rngs) -> None:
        def normal(*shape: int) -> nnx.Param[jax.Array]:
            return nnx.Param(jax.nn.initializers.lecun_normal()(rngs.params(), shape))

        self.qkv, self.qkv_bias = normal(WIDTH, 3 * WIDTH), nnx.Param(jnp.zeros(3 * WIDTH))
        self.out, self.out_bias = normal(WIDTH, WIDTH), nnx.Param(jnp.zeros(WIDTH))
        self.up, self.up_bias = normal(WIDTH, 4 * WIDTH), nnx.Param(jnp.zeros(4 * WIDTH))
        self.down, self.down_bias = normal(4 * WIDTH, WIDTH), nnx.Param(jnp.zeros(WIDTH))
        self.gamma, self.beta = nnx.Param(jnp.ones((2, WIDTH))), nnx.Param(jnp.zeros((2, WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        qkv = jaxft.dense(x, self.qkv[...], self.qkv_bias[...]).reshape(*x.shape[:-1], 3, HEADS, WIDTH // HEADS)
        attended = jaxft.qkv_attention(qkv).reshape(x.shape)
        first, second = zip(self.gamma[...], self.beta[...], strict=True)
        x = jaxft.dense_residual_layer_norm(attended, self.out[...], self.out_bias[...], x, *first)
        up, down = (self.up[...], self.up_bias[...]), (self.down[...], self.down_bias[...])
        return jaxft.feed_forward_residual_layer_norm(x, *up, *down, *second, activation="gelu")


class NNXSorter(nnx.Module):
    """A model from digits `[B, T]` to logits `[B, T, DIGITS]` of the same digits in ascending order."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.digits, self.places = nnx.Embed(DIGITS, WIDTH, rngs=rngs), nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([NNXBlock(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, DIGITS, rngs=rngs)

    def __call__(self, digits: jax.Array) -> jax.Array:
        x = self.digits(digits) + self.places(jnp.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LinenBlock(linen.Module):
    """A transformer layer made of Linen modules, with the attention, bias + GELU and LayerNorm operations of jaxft."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        attention = linen.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn, broadcast_dropout=False)
        x = self.norm("attention", attention(x), x)
        h = linen.Dense(4 * WIDTH, use_bias=False)(x)
        h = jaxft.bias_activation(h, self.param("up_bias", linen.initializers.zeros, (4 * WIDTH,)), activation="gelu")
        return self.norm("ffn", linen.Dense(WIDTH, use_bias=False)(h), x)

    def norm(self, name: str, x: jax.Array, residual: jax.Array) -> jax.Array:
        zeros, ones = linen.initializers.zeros, linen.initializers.ones
        bias, beta = self.param(f"{name}_bias", zeros, (WIDTH,)), self.param(f"{name}_beta", zeros, (WIDTH,))
        gamma = self.param(f"{name}_gamma", ones, (WIDTH,))
        return jaxft.bias_residual_layer_norm(x, bias, residual, gamma, beta)


class LinenSorter(linen.Module):
    """A Linen model with the same task as `NNXSorter`."""

    @linen.compact
    def __call__(self, digits: jax.Array) -> jax.Array:
        x = linen.Embed(DIGITS, WIDTH)(digits) + linen.Embed(LENGTH, WIDTH)(jnp.arange(LENGTH))
        for _ in range(2):
            x = LinenBlock()(x)
        return linen.Dense(DIGITS)(x)


def train(name: str, forward: Callable[[Any, jax.Array], Any], params: Any) -> list[float]:
    """Trains a pure function (params, digits) -> logits for `STEPS` steps, and returns the losses."""
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(params: Any, state: Any, digits: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            logits, labels = forward(params, digits), jnp.sort(digits)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    for key in jax.random.split(jax.random.key(1), STEPS):
        params, state, loss = step(params, state, jax.random.randint(key, (64, LENGTH), 0, DIGITS))
        losses.append(float(loss))
    print(f"{name}: the loss falls from {losses[0]:.2f} to {losses[-1]:.2f} in {STEPS} steps")
    assert losses[-1] < losses[0] / 2, losses
    return losses


def main() -> None:
    graph, params = nnx.split(NNXSorter(nnx.Rngs(0)))
    train("NNX", lambda params, digits: nnx.merge(graph, params)(digits), params)
    sorter = LinenSorter()
    train("Linen", sorter.apply, sorter.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32)))


if __name__ == "__main__":
    main()
