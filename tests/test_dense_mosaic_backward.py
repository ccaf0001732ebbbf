"""The Mosaic GPU kernel of the gradient of dense's input, which it multiplies by the activation's derivatives."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from cases import INTERPRET, lower, normal, slow
from compare import assert_matches_oracle
from jaxft import reference
from jaxft.kernels.mosaic_gpu import activations as act
from jaxft.kernels.mosaic_gpu import dense_backward, support
from jaxft.tuning import dense as tuning_dense
from jaxft.tuning.dense import MosaicDenseConfig
from test_dense_mosaic import CARD, DTYPES, SPLITS, assert_no_races, finds_races, hopper, of, runs

GRADIENTS = {
    "64x128": MosaicDenseConfig(64, 128, stages=3, split="none", programs=2),
    "m": MosaicDenseConfig(64, 64, stages=2, programs=2),
    "192x64": MosaicDenseConfig(192, 64, stages=2, split="none", programs=3, minor="m", group=1),
    "cluster": MosaicDenseConfig(64, 64, stages=2, split="none", programs=4, cluster_m=2),
    "128x128": SPLITS["128x128"],  # four pieces, in two places
    "n": MosaicDenseConfig(128, 64, stages=2, split="n", programs=2),
}


def gradient_floats(rows, depth, width, dtype=jnp.bfloat16):
    floats = normal(np.random.default_rng(3), dtype, dy=(rows, depth), kernel=(width, depth))
    z = jnp.asarray(np.random.default_rng(4).normal(size=(rows, width)), jnp.float32)
    derivative = act.activation_and_derivative("gelu", z, jnp.dtype(dtype))[1]
    return floats | {"kernel": floats["kernel"] / 8, "derivative": derivative}


def check_gradient(rows, depth, width, config, dtype=jnp.bfloat16):
    """Checks the kernel. Returns its arguments and results."""
    floats = gradient_floats(rows, depth, width, dtype)
    mode = plgpu.force_gpu_interpret_mode() if INTERPRET else contextlib.nullcontext()
    with mode:
        dx, sums = dense_backward.backward(**floats, config=config)
    dy, kernel = (np.float64(floats[name]) for name in ("dy", "kernel"))
    derivative = act.kept_derivative(floats["derivative"])
    plain = (reference.dense(floats["dy"], floats["kernel"].T).astype(jnp.float32) * derivative).astype(dtype)
    assert_matches_oracle(dx, plain, dy @ kernel.T * np.float64(derivative))
    assert sums.shape == (width,) and sums.dtype == jnp.float32
    np.testing.assert_allclose(sums, np.float64(dx).sum(axis=0), rtol=1e-5, atol=1e-5 * np.abs(dx).sum(axis=0).max())
    return floats, (dx, sums)


@runs
@pytest.mark.parametrize("dtype", [DTYPES[1], *slow(DTYPES[0])])
@pytest.mark.parametrize("config", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("shape", [(65, 80, 208), *slow((264, 96, 320))], ids=str)
def test_gradient(shape, config, dtype):
    check_gradient(*shape, config, dtype)


@pytest.mark.parametrize("config", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("shape", [(65, 80, 208), (264, 96, 320)], ids=str)
def test_sums_hold_tiles_beyond_the_edges(shape, config, monkeypatch):
    """On a GPU, sums beyond the last column are copied to the next row. The interpreter leaves them out."""

    def launch(body, inputs, results, config):
        seen.extend(results)
        return original(body, inputs, results, config)

    seen, original = [], dense_backward.matmul.launch
    monkeypatch.setattr(dense_backward.matmul, "launch", launch)
    jax.eval_shape(functools.partial(dense_backward.backward, config=config), **gradient_floats(*shape))
    (_, sums), (block_m, block_n) = seen, config.block
    assert sums.shape[0] * config.tile_m >= shape[0] and sums.shape[1] >= shape[2]
    assert sums.shape[0] * config.tile_m % (block_m * config.cluster_m) == sums.shape[1] % block_n == 0


@pytest.mark.parametrize("sizes", [(768, 3072), *slow((80, 208), (512, 1056), (768, 768), (1024, 4096), (384, 1536))])
@pytest.mark.parametrize("rows", [264, 16384, *slow(100, 4096)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, *slow(jnp.float16)])
def test_gradient_defaults_lower(dtype, rows, sizes):
    """The default configurations fit into shared memory."""
    depth, width = sizes
    kept = support.derivative_dtype(jnp.dtype(dtype))
    forward = tuning_dense.dense_mosaic(rows, depth, width, "gelu", 2, CARD)
    _, config = tuning_dense.dense_mosaic_derivatives(forward, rows, depth, width, 2, kept.itemsize, CARD)
    arrays = of((rows, depth), dtype), of((width, depth), dtype), of((rows, width), kept)
    text = lower(lambda *a: dense_backward.backward(*a, config=config), *arrays)
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("config", GRADIENTS.values(), ids=GRADIENTS)
def test_pieces_wait_for_their_matmuls(config):
    """A piece is added up before the next but one is written to its place, and the last before sums are read.

    In the interpreter a product is done when it is asked for.
    """
    run = functools.partial(dense_backward.backward, config=config)
    jaxpr = str(jax.make_jaxpr(run)(**gradient_floats(65, 80, 208)))
    steps = re.findall(r"wgmma_ref|wgmma_wait(?: |\[n=)\d|copy_gmem_to_smem|:bf16\[64,64\], .* <- ", jaxpr)
    got = ["write" if "<-" in step else f"wait {step[-1]}" if "wait" in step else step for step in steps]
    pieces, expected = config.tile_m * config.tile_n // 64**2, []
    for i in range(pieces):
        expected += [*["wait 1"] * (i > 1), "write", "wgmma_ref", *["copy_gmem_to_smem"] * (i + 2 < pieces)]
    assert " ".join([*expected, "wait 0"]) in " ".join(got)


@finds_races
@pytest.mark.parametrize(
    "config",
    [GRADIENTS["64x128"], *slow(*list(dict.fromkeys((*GRADIENTS.values(), *SPLITS.values())))[1:])],
    ids=str,
)  # fmt: skip
def test_gradient_kernel_has_no_races(config):
    """The forward kernel has some of the configurations. Others have more pieces than places."""
    assert_no_races(functools.partial(dense_backward.backward, **gradient_floats(264, 192, 320), config=config))


@hopper
@pytest.mark.parametrize("rows", [4099, *slow(520, 16384)])
def test_large_gradient_is_reproducible(rows):
    config = tuning_dense.dense_mosaic_gradient(rows, 768, 3072, 2, CARD)
    floats, results = check_gradient(rows, 768, 3072, config)
    for _ in range(10):
        for again, first in zip(dense_backward.backward(**floats, config=config), results, strict=True):
            assert (again == first).all()
