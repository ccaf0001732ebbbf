"""The Mosaic GPU kernel of dense in float32, which multiplies in TF32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
import oracle
from cases import lower, normal, slow
from jaxft import dispatch, reference
from jaxft.kernels.mosaic_gpu import activations as act
from jaxft.tuning import dense as tuning_dense
from jaxft.tuning import search as tuning_search
from jaxft.tuning.dense import MosaicDenseConfig
from lowered import COPIES, operations
from test_dense_mosaic import CARD, FLOAT32, SPLITS, check, hopper, of, run, runs


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_activations_are_accurate_in_float32(activation):
    x = jnp.asarray(np.concatenate([np.linspace(-20, 20, 40001), np.geomspace(1e-30, 6e4, 999)]), jnp.float32)
    got = act.activation(activation, x, jnp.float32)
    exact = oracle._activate(np.float64(x), activation)
    np.testing.assert_allclose(got, exact, rtol=2e-7, atol=2e-6)
    near = np.abs(x) < 0.5
    np.testing.assert_allclose(got[near], exact[near], rtol=2e-6)


@runs
@pytest.mark.parametrize("config", [*SPLITS.values(), FLOAT32], ids=[*SPLITS, "float32"])
@pytest.mark.parametrize("bias", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(65, 24, 208), (259, 328, 320)], ids=str)
def test_float32_matches_the_oracle(shape, bias, config):
    """The depth is one line of shared memory, or more."""
    check(*shape, config, dtype=jnp.float32, bias=bias)


@hopper
@pytest.mark.parametrize("activation", ["gelu", *slow(None)])
def test_tf32_errors_are_small_and_reproducible(activation):
    """x is truncated to TF32's 10 bits, which makes results 0.036 % smaller on average. kernel is rounded."""
    rows, depth, width = shape = (4099, 768, 3072)
    floats = normal(np.random.default_rng(0), jnp.float32, x=(rows, depth), kernel=(depth, width))
    exact = oracle.dense(**floats, activation=activation)
    config = tuning_dense.dense_mosaic(*shape, activation, 4, CARD)
    (y,) = run(**floats, bias=None, activation=activation, config=config)
    error = np.float64(y) - exact
    assert np.sqrt(np.mean(error**2) / np.mean(exact**2)) < 6e-4
    assert -4.5e-4 < np.sum(error * exact) / np.sum(exact**2) < -2.5e-4
    for _ in range(10):
        assert (run(**floats, bias=None, activation=activation, config=config)[0] == y).all()


def test_float32_copies_only_the_transposed_kernel():
    arrays = of((4096, 768), jnp.float32), of((768, 512), jnp.float32), of((512,), jnp.float32)
    with jax.default_matmul_precision("tensorfloat32"):
        found = operations(lower(lambda *a: jaxft.dense(*a, activation="gelu"), *arrays))
    assert found["transpose"] == found["reduce_precision"] == found["custom_call @mosaic_gpu_v2"] == 1
    assert not any(found[name] for name in (*COPIES, "dot_general") if name != "transpose")
    with dispatch.target(), jax.default_matmul_precision("tensorfloat32"):
        assert tuning_search._is_coarse(jax.make_jaxpr(jaxft.dense)(*arrays).jaxpr)


@pytest.mark.parametrize(
    "precision",
    ["highest", ("default", "highest"), jax.lax.DotAlgorithm(np.float32, np.float32, np.float32),
     jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3],
    ids=str,
)  # fmt: skip
def test_higher_precision_excludes_tf32(precision):
    arrays = of((128, 128), jnp.float32), of((128, 128), jnp.float32)
    with (
        dispatch.target(),
        pytest.raises(NotImplementedError, match="a matmul in full float32 was asked for"),
    ):
        jax.eval_shape(lambda *a: jaxft.dense(*a, precision=precision, implementation="mosaic_gpu"), *arrays)
    arrays = of((4096, 768), jnp.float32), of((768, 512), jnp.float32)
    assert "@mosaic_gpu_v2" not in lower(lambda *a: jaxft.dense(*a, precision=precision), *arrays)


def test_residual_in_float32_is_refused():
    arrays = of((128, 128), jnp.float32), of((128, 128), jnp.float32)
    with (
        dispatch.target(),
        jax.default_matmul_precision("tensorfloat32"),
        pytest.raises(NotImplementedError, match="it adds no residual in float32"),
    ):
        jax.eval_shape(lambda x, k: jaxft.dense(x, k, residual=x, implementation="mosaic_gpu"), *arrays)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("rows", [300, 4096])
def test_candidates_fit_into_shared_memory(rows, itemsize):
    sizes = {"rows": rows, "depth": 768, "width": 3072, "activation": 2, "itemsize": itemsize}
    found = list(tuning_search.candidates("dense_mosaic", MosaicDenseConfig(64, 64, programs=132), CARD, **sizes))
    for config in found:
        pieces = 4 * 64 * 64 * itemsize + 2 * config.tile_n * 4
        assert config.stages >= 3 and config.tile_k * itemsize == 128
        assert config.stages * sum(config.block) * config.tile_k * itemsize + pieces < 227 * 1024 - 512
