"""What XLA makes of an encoder layer on a GPU: the kernels of the compiled program. Needs an NVIDIA GPU."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from bench_encoder import kernels
from jaxft import dispatch
from jaxft.models.bert import BertConfig, BertModel

pytestmark = pytest.mark.skipif(dispatch.platform() != "cuda", reason="reads a program compiled for an NVIDIA GPU")

LAYERS = 3
SIZES = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}


def launched(batch, length, dtype, masked):
    config = BertConfig(num_hidden_layers=LAYERS, vocab_size=100, **SIZES)
    model = BertModel(config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model.layers)
    keep = jnp.ones((batch, 1, 1, length), bool) if masked else None

    def run(params, x, keep):
        for layer in nnx.merge(graph, params):
            x = layer(x, keep)
        return x

    x = jnp.zeros((batch, length, SIZES["hidden_size"]), dtype)
    return kernels(jax.jit(run).lower(params, x, keep).compile().as_text())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize(("batch", "length"), [(1, 128), (8, 128), (32, 128), (32, 512)])
def test_layer_is_at_most_so_many_kernels(batch, length, dtype, masked):
    found = launched(batch, length, dtype, masked)
    moved = [kind for kind in found if any(word in kind for word in ("copy", "slice", "transpose", "concatenate"))]
    assert not moved, found
    if dtype == jnp.float32 and batch * length <= 1024:
        return  # XLA splits its products and adds the parts in kernels of their own
    # Four products, attention and two LayerNorms; one more for the activation where no kernel of ours is the product.
    fused = dtype != jnp.float32 and dispatch.device().compute_capability == (9, 0)
    # The mask is looked at once, before the first layer: where it begins and where it ends.
    assert found.total() <= (7 if fused else 8) * LAYERS + 2 * masked, found
