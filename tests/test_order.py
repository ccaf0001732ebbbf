"""Rows that a kernel begins or ends with. No result depends on them, only the speed."""

import jax.numpy as jnp
import numpy as np
import pytest

from cases import slow
from checked import first_stores
from jaxft.kernels.mosaic_gpu import matmul
from jaxft.kernels.triton import attention, bias_activation, layer_norm
from jaxft.kernels.triton.attention_problem import Options, Rules
from jaxft.tuning.dense import MosaicDenseConfig
from jaxft.tuning.table import AttentionConfig, ElementwiseConfig, GradientConfig, RowConfig


def test_layer_norm_starts_with_the_last_rows():
    x, config = jnp.ones((10, 8)), RowConfig(2, 8, 1)
    options = {"epsilon": 1e-6, "dropout_rate": 0.0, "return_sum": False, "save": False, "in_place": False}
    arrays = (x, *[None] * 5)
    ((rows, _),) = first_stores(lambda: layer_norm.forward(*arrays, **options, config=config, interpret=True))
    assert set(rows) == {8, 9}


@pytest.mark.parametrize(("programs", "width", "expected"), [(2, 8, [[8, 9], [4, 5], [0, 1]]), (5, 8, [[8, 9]]),
                                                             (2, 4, [[8, 9], [8, 9]])])  # fmt: skip
def test_layer_norm_backward_starts_with_the_last_rows(programs, width, expected):
    """A program starts with the last of its blocks, and with the last rows in each chunk of long rows."""
    x, saved = jnp.ones((10, 8)), jnp.ones((2, 10))
    arrays = (x, None, x, None, None, jnp.ones(8), None, saved)
    options = {"dropout_rate": 0.0, "config": GradientConfig(2, width, programs, 1), "interpret": True}
    for vectors in ({}, {"gamma": jnp.float32}):
        stores = first_stores(lambda: layer_norm.backward(*arrays, vectors=vectors, **options))  # noqa: B023
        assert [sorted(set(rows)) for rows, _ in stores[: len(expected)]] == expected


def test_bias_activation_starts_with_the_last_rows():
    x, config = jnp.ones((10, 8)), ElementwiseConfig(2, 8, 1)
    options = {"activation": "gelu", "in_place": False, "config": config, "interpret": True}
    ((rows, _),) = first_stores(lambda: bias_activation.forward(x, None, **options))
    assert set(rows) == {8, 9}


def attention_stores(qkv, rules, options, programs=0):
    arrays, config = (qkv, None, None, rules, options), AttentionConfig(16, 16, 4, 1, programs)
    return first_stores(lambda: attention.forward(*arrays, return_residual=False, config=config, interpret=True))


@pytest.mark.parametrize(("programs", "sequences"), [(0, [[3]]), (2, [[3], [1]])])
def test_attention_starts_with_the_last_sequence(programs, sequences):
    """If two programs share the sequences, each has every second one."""
    stores = attention_stores(jnp.ones((4, 16, 3, 1, 8)), Rules(), Options(1.0), programs)
    assert [sorted(set(index[0])) for index in stores] == sequences


def test_packed_attention_starts_with_the_longest_sequence():
    rules = Rules(cu_seqlens=jnp.array([0, 3, 13, 18]))
    ((_, rows, *_),) = attention_stores(jnp.ones((18, 3, 1, 8)), rules, Options(1.0, max_seqlen=16))
    assert set(rows) == set(range(3, 13))


@pytest.mark.parametrize("minor", ["n", "m"])
@pytest.mark.parametrize("blocks", [(7, 3), *slow((7, 5), (6, 4))], ids=str)
def test_mosaic_matmul_visits_every_tile_once(blocks, minor):
    """The blocks of the first rows come at the beginning, or at the end. The next block lies along the axis `minor`."""
    config = MosaicDenseConfig(64, 64, minor=minor, group=4, programs=132)
    count = blocks[0] * blocks[1]

    def order(backwards):
        return [tuple(map(int, matmul.block_at(jnp.int32(i), blocks, config, backwards))) for i in range(count)]

    assert sorted(order(False)) == list(np.ndindex(blocks)) and order(False)[0][0] == 0
    assert sorted(order(True)) == list(np.ndindex(blocks)) and order(True)[-1][0] == 0
    assert order(False)[1] == ((1, 0) if minor == "m" else (0, 1))


@pytest.mark.parametrize(("steps", "stages"), [(4, 3), (2, 4), (6, 3)])
def test_mosaic_matmul_fills_its_buffers_in_turn(steps, stages):
    got = [matmul.buffer_at(i, k, steps, stages) for i in range(5) for k in range(steps)]
    assert got == [step % stages for step in range(5 * steps)]
