"""Arrays of more than 2^31 elements: their last rows equal the same rows in a small array. Needs a large GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from jaxft import dispatch

pytestmark = pytest.mark.skipif(dispatch.platform() != "cuda", reason="needs 24 GB of a GPU's memory")

ROWS, WIDTH = 2**21 + 3, 1024
VECTOR = np.linspace(-1.0, 1.0, WIDTH, dtype=np.float32)
OPS = {
    "layer_norm": lambda x: jaxft.layer_norm(x, VECTOR, VECTOR),
    "rms_norm": lambda x: jaxft.rms_norm(x, VECTOR),
    "bias_activation": lambda x: jaxft.bias_activation(x, VECTOR),
    "gated_activation": lambda x: jaxft.gated_activation(x, VECTOR),
    "softmax": lambda x: jaxft.softmax(x, bias=VECTOR),
}


@pytest.mark.parametrize("op", OPS)
def test_rows_past_32_bit_offsets(op):
    small = jax.random.normal(jax.random.key(0), (3, WIDTH), jnp.bfloat16)

    @jax.jit
    def run(small):
        x = jnp.broadcast_to(small[0], (ROWS, WIDTH)).at[-3:].set(small)
        out, pull_back = jax.vjp(OPS[op], x)
        (dx,) = pull_back(x[:, : out.shape[1]])
        return [(y[:1], y[-3:]) for y in (out, dx)]

    out, pull_back = jax.vjp(OPS[op], small)
    for (first, last), expected in zip(run(small), (out, pull_back(small[:, : out.shape[1]])[0]), strict=True):
        np.testing.assert_array_equal(first, expected[:1])
        np.testing.assert_array_equal(last, expected)


def test_embeddings_past_32_bit_offsets():
    """The ids name a table's last rows."""
    small = jax.random.normal(jax.random.key(0), (3, WIDTH), jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=1)
    def run(small, first):
        word = jnp.zeros((first + 3, WIDTH), small.dtype).at[-3:].set(small)
        ids = first + jnp.array([[2, 0, 2]], jnp.int32)
        out, pull_back = jax.vjp(lambda word: jaxft.embeddings_layer_norm(ids, word, small), word)
        return out, pull_back(out)[0][-3:]

    for got, expected in zip(run(small, ROWS), run(small, 0), strict=True):
        np.testing.assert_array_equal(got, expected)
