"""The product and the LayerNorm after it in one Mosaic GPU kernel; where it runs: see test_dense_mosaic.py."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jaxft
import oracle
from cases import INTERPRET, jit, lower, normal
from compare import assert_matches_oracle
from jaxft import dispatch, reference, tuning, tuning_candidates, tuning_dense
from jaxft.kernels.mosaic_gpu import dense_layer_norm
from jaxft.tuning_dense import MosaicDenseConfig
from lowered import COPIES, TRITON, operations
from test_dense_mosaic import DTYPES, assert_no_races, finds_races, hopper, interpreted, of, runs

NAMED = {"implementation": "mosaic_gpu"}
MOSAIC = "custom_call @mosaic_gpu_v2"
VECTORS = ("bias", "gamma", "beta")
CONFIGS = {
    "m": MosaicDenseConfig(64, 64, stages=2, group=1, programs=4),
    "none": MosaicDenseConfig(64, 64, stages=3, split="none", group=1, programs=4),
    "128 rows": MosaicDenseConfig(128, 64, stages=2, split="none", group=1, programs=8),
}


def floats_of(rows, depth, width, dtype=jnp.bfloat16, vectors=jnp.float32, missing=()):
    rng = np.random.default_rng(0)
    floats = normal(rng, dtype, x=(rows, depth), kernel=(depth, width), residual=(rows, width))
    floats |= normal(rng, vectors, **{name: (width,) for name in VECTORS})
    return floats | {"kernel": floats["kernel"] / 8} | dict.fromkeys(missing)


def run(floats, config, epsilon=1e-12):
    arrays = (floats[name] for name in ("x", "kernel", "bias", "residual", "gamma", "beta"))
    with plgpu.force_gpu_interpret_mode() if INTERPRET else contextlib.nullcontext():
        return dense_layer_norm.forward(*arrays, epsilon=epsilon, config=config)


def exact(x, kernel, **floats):
    return oracle.bias_residual_layer_norm(oracle.dense(x, kernel), **floats)


def check(floats, config, epsilon=1e-12):
    assert dense_layer_norm.unsupported(**floats) is None
    got = run(floats, config, epsilon)
    with jax.default_matmul_precision("highest"):
        plain = jit(functools.partial(reference.dense_residual_layer_norm, epsilon=epsilon))(**floats)
    assert_matches_oracle(got, plain, exact(**floats, epsilon=epsilon))
    return got


# --- The kernel --------------------------------------------------------------------------------------------------


@runs
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("rows", [64, 264])
def test_values(rows, config):
    check(floats_of(rows, 96, 256), config)  # a cluster of four


@runs
@pytest.mark.parametrize(("width", "tile_n"), [(128, 64), (384, 192), (512, 64)])
def test_clusters(width, tile_n):
    check(floats_of(136, 64, width), MosaicDenseConfig(64, tile_n, stages=2, split="none", group=1, programs=16))


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vectors", DTYPES)
def test_dtypes(dtype, vectors):
    check(floats_of(72, 64, 128, dtype, vectors), CONFIGS["none"])


@runs
@pytest.mark.parametrize("missing", [("bias",), ("gamma",), ("beta",), VECTORS], ids=str)
def test_optional_vectors(missing):
    check(floats_of(72, 64, 128, missing=missing), CONFIGS["m"], epsilon=0.5)


@runs
def test_rows_that_are_no_multiple_of_eight():
    assert check(floats_of(67, 64, 128), CONFIGS["m"]).shape == (67, 128)


@runs
@pytest.mark.parametrize("means", [(100, 100, 100, 100), (9, 9, -2, 0)], ids=str)
def test_means_of_the_parts(means):
    """Large beside the deviations, and different ones."""
    floats = floats_of(72, 64, 256, missing=VECTORS)
    check(floats | {"residual": floats["residual"] + jnp.repeat(jnp.bfloat16(means), 64)}, CONFIGS["none"])


@runs
def test_rows_do_not_meet():
    floats = floats_of(72, 64, 256)
    clean = run(floats, CONFIGS["m"])
    y = run(floats | {"x": floats["x"].at[3, 5].set(jnp.nan)}, CONFIGS["m"])
    assert jnp.isnan(y[3]).all()
    assert (jnp.delete(y, 3, axis=0) == jnp.delete(clean, 3, axis=0)).all()


@finds_races
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_no_races(config):
    floats = floats_of(200, 96, 128)
    arrays = [floats[name] for name in ("x", "kernel", "bias", "residual", "gamma", "beta")]
    assert_no_races(functools.partial(dense_layer_norm.forward, *arrays, epsilon=1e-12, config=config))


@hopper
@pytest.mark.parametrize("depth", [768, 3072])
@pytest.mark.parametrize(("width", "rows"), [(768, 4096), (1024, 4104), (384, 2048)])
def test_large(width, rows, depth):
    """Every config that is tried, ten times: on a GPU a race would show."""
    floats = floats_of(rows, depth, width)
    present = tuning_dense.dense_layer_norm(rows, depth, width, 2, dispatch.device_kind())
    sizes = {"rows": rows, "depth": depth, "width": width, "itemsize": 2}
    for config in (present, *tuning_candidates.candidates("dense_layer_norm", present, **sizes)):
        y = check(floats, config)
        for _ in range(10):
            assert (run(floats, config) == y).all()


@pytest.mark.parametrize("width", [384, 512, 768, 1024, 1536, 2048])
def test_configs(width):
    """Tiles that make up rows, in clusters that the machine has room for, with stages that fit into it."""
    present = tuning_dense.dense_layer_norm(4096, 1024, width, 2, "NVIDIA H200")
    sizes = {"rows": 4096, "depth": 1024, "width": width, "itemsize": 2}
    for config in (present, *tuning_candidates.candidates("dense_layer_norm", present, **sizes)):
        beside = width // config.block[1]
        assert config.split != "n" and beside * config.tile_n == width and beside in (2, 4, 8)
        assert config.block[0] // 8 % beside == 0  # rows of x by eights are shared among the copies
        assert config.stages >= 2 and config.programs == (132 if width == 384 else 128)
        operations(lower(functools.partial(call, config=config), *shapes(4096, 1024, width)))


@pytest.mark.parametrize(
    "change", [{"split": "n"}, {"cluster_m": 2}, {"tile_n": 128}, {"programs": 3}, {"stages": 12}, {}], ids=str
)
def test_entries_that_cannot_run(change, monkeypatch):
    """They would hang, or leave columns out."""
    present = tuning_dense.dense_layer_norm(4096, 768, 768, 2, "card")
    entry = dataclasses.asdict(dataclasses.replace(present, minor="m", **change))
    table = {"dense_layer_norm": {"rows=4096,depth=768,width=768,itemsize=2": entry}}
    monkeypatch.setattr(tuning, "_table", lambda device_kind: table)
    found = tuning_dense.dense_layer_norm(4096, 768, 768, 2, "card")
    assert found == (present if change else dataclasses.replace(present, minor="m"))


def call(*arrays, config):
    return dense_layer_norm.forward(*arrays, epsilon=1e-12, config=config)


def shapes(rows, depth, width, dtype=jnp.bfloat16):
    vector = of((width,), jnp.float32)
    return of((rows, depth), dtype), of((depth, width), dtype), vector, of((rows, width), dtype), vector, vector


# --- The op ------------------------------------------------------------------------------------------------------


def op(x, kernel, bias, residual, gamma, beta, **options):
    return jaxft.dense_residual_layer_norm(x, kernel, bias, residual, gamma, beta, epsilon=1e-12, **options)


def kernels(function, *arrays):
    """What a program launches, for an H200."""
    found = operations(lower(function, *arrays))
    return {name: found[name] for name in (MOSAIC, TRITON, "dot_general", *COPIES) if name in found}


@runs
def test_op():
    floats = floats_of(200, 64, 128)
    arrays = [floats[name] for name in ("x", "kernel", "bias", "residual", "gamma", "beta")]
    with interpreted():
        got = op(*(a.reshape(8, 25, -1) if a.shape[0] == 200 else a for a in arrays), implementation="mosaic_gpu")
    plain = reference.dense_residual_layer_norm(**floats, epsilon=1e-12)
    assert_matches_oracle(got.reshape(200, 128), plain, exact(**floats, epsilon=1e-12))


def test_gradients_are_those_of_two_ops():
    def gradients(*arrays, **options):
        return jax.grad(lambda *a: jnp.sum(op(*a, **options).astype(jnp.float32)), argnums=tuple(range(6)))(*arrays)

    found = [kernels(functools.partial(gradients, **o), *shapes(4096, 768, 768)) for o in ({}, NAMED)]
    assert found[0] == found[1] and found[0][TRITON] > 0


def test_one_kernel_where_it_is_named():
    named = functools.partial(op, **NAMED)
    assert kernels(named, *shapes(4096, 768, 768)) == {MOSAIC: 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": of((4096, 768), jnp.float32), "kernel": of((768, 768), jnp.float32),
          "residual": of((4096, 768), jnp.float32)}, "x is float32, the kernel takes float16 and bfloat16"),
        ({"kernel": of((768, 640)), "residual": of((4096, 640)), "bias": None, "gamma": None, "beta": None},
         "D is 640: it must be 2, 4 or 8 times 64, 128, 192 or 256"),
        ({"x": of((8, 768)), "residual": of((8, 768))}, "M is 8 and F is 768: they must be at least 64"),
        ({"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}, "it has no dropout"),
    ],
    ids=["float32", "width", "rows", "dropout"],
)  # fmt: skip
def test_refusals(change, message):
    arrays = dict(zip(("x", "kernel", "bias", "residual", "gamma", "beta"), shapes(4096, 768, 768), strict=True))
    options = {name: value for name, value in change.items() if name not in arrays}
    arrays |= {name: value for name, value in change.items() if name in arrays}
    with pytest.raises(NotImplementedError, match=message):
        lower(functools.partial(op, implementation="mosaic_gpu", **options), *arrays.values())


def test_on_another_card():
    arrays = [jnp.zeros(a.shape, a.dtype) for a in shapes(64, 64, 128)]
    with pytest.raises(NotImplementedError, match="needs compute capability 9.0"), dispatch.target("A100", (8, 0)):
        op(*arrays, implementation="mosaic_gpu")
