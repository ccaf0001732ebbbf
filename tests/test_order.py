"""Which rows a kernel begins with: the last ones (`common.from_the_end`). No result depends on it, only the speed."""

import jax.numpy as jnp
import pytest

from checked import written_first
from jaxft.kernels.triton import attention, bias_activation, layer_norm
from jaxft.kernels.triton.attention_common import Options, Rules
from jaxft.tuning import AttentionConfig, ElementwiseConfig, RowConfig


def test_layer_norm():
    x, config = jnp.ones((10, 8)), RowConfig(2, 8, 1)
    options = {"epsilon": 1e-6, "dropout_rate": 0.0, "return_sum": False, "save": False, "in_place": False}
    arrays = (x, *[None] * 5)
    written = written_first(lambda: layer_norm.forward(*arrays, **options, config=config, interpret=True))
    assert written[8:].all() and not written[:8].any()


def test_bias_activation():
    x, config = jnp.ones((10, 8)), ElementwiseConfig(2, 8, 1)
    options = {"activation": "gelu", "in_place": False, "config": config, "interpret": True}
    written = written_first(lambda: bias_activation.forward(x, None, **options))
    assert written[8:].all() and not written[:8].any()


@pytest.mark.parametrize("programs", [0, 2])
def test_attention(programs):
    """A head of the last sequence; of every second one where two programs share all of them."""
    qkv, config = jnp.ones((3, 16, 3, 2, 8)), AttentionConfig(16, 16, 4, 1, programs)
    rules, options = Rules(), Options(1.0)
    arrays = qkv, None, None, rules, options
    written = written_first(lambda: attention.forward(*arrays, return_residual=False, config=config, interpret=True))
    written = written.reshape(3, 16, 2, 8).any(axis=(1, 3))
    assert written.tolist() == ([[False, True]] * 3 if programs else [[False] * 2] * 2 + [[True, False]])
