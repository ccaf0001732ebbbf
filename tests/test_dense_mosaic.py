"""The Mosaic GPU kernel of dense, and its activations in plain jnp.

It runs compiled on a Hopper GPU, and on a CPU in Mosaic's interpreter, which knows of copies, barriers and races.
"""

import contextlib
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import cases
import jaxft
import oracle
from cases import INTERPRET, card, jit, lower, normal, slow, slow_cases
from compare import assert_matches_oracle
from jaxft import dispatch, reference
from jaxft.kernels.mosaic_gpu import activations as act
from jaxft.kernels.mosaic_gpu import dense, support
from jaxft.kernels.triton import bias_activation, gated_activation, rotary
from jaxft.tuning import dense as tuning_dense
from jaxft.tuning.dense import MosaicDenseConfig

ACTIVATIONS = [None, *reference.ACTIVATIONS]
DTYPES = [pytest.param(dtype, id=dtype.__name__) for dtype in (jnp.float16, jnp.bfloat16)]
WITH_FLOAT32 = [pytest.param(jnp.float32, id="float32"), *DTYPES]
BY_TURNS = MosaicDenseConfig(128, 128, stages=6, split="none", programs=132)
FLOAT32 = MosaicDenseConfig(128, 192, tile_k=32, stages=4, split="none", programs=132)
CARD = card("a Hopper card without a table")
SPLITS = {
    "m": MosaicDenseConfig(64, 64, stages=3, programs=2),
    "n": MosaicDenseConfig(64, 64, stages=2, split="n", programs=2),
    "none": MosaicDenseConfig(64, 128, stages=3, split="none", programs=2),
    "cluster": MosaicDenseConfig(64, 64, stages=3, programs=4, cluster_m=2, minor="m", group=2),
    "none, cluster": MosaicDenseConfig(64, 64, stages=2, split="none", programs=4, cluster_m=2),
    "128x128": MosaicDenseConfig(128, 128, stages=2, split="none", programs=2),  # four pieces, in two places
}
# `make test` has tiles below each other, tiles in turns, and a cluster.
SOME_SPLITS = [
    pytest.param(config, id=name, marks=[pytest.mark.slow] * (name not in ("m", "none", "cluster")))
    for name, config in SPLITS.items()
]

hopper = pytest.mark.skipif(not dispatch.device().is_hopper, reason="needs a Hopper GPU")
runs = pytest.mark.skipif(
    jax.__version_info__ < (0, 11) if INTERPRET else not dispatch.device().is_hopper,
    reason="needs a Hopper GPU, or a CPU and the interpreter of JAX 0.11",
)


def of(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def run(x, kernel, bias, residual=None, **options):
    mode = plgpu.force_gpu_interpret_mode() if INTERPRET else contextlib.nullcontext()
    with mode:
        return dense.forward(x, kernel, bias, residual, **options)


def as_tf32(floats):
    """Rounds float32 numbers so that TF32 keeps all their bits. Matmuls on a CPU then equal those in TF32."""
    return {n: x if x is None else x.astype(jnp.bfloat16).astype(x.dtype) for n, x in floats.items()}


def check(
    rows, depth, width, config, *, dtype=jnp.bfloat16, bias=jnp.float32, activation=None, residual=False, gate=None,
    seed=0,
):  # fmt: skip
    rng = np.random.default_rng(seed)
    floats = normal(rng, dtype, x=(rows, depth)) | {"kernel": normal(rng, dtype, kernel=(depth, width))["kernel"] / 8}
    floats["bias"] = None if bias is None else normal(rng, bias, bias=(width,))["bias"]
    assert support.dense_unsupported(**floats, gate=gate) is None
    floats |= normal(rng, dtype, residual=(rows, width if gate is None else width // 2)) if residual else {}
    floats = as_tf32(floats) if dtype == jnp.float32 else floats
    inputs = floats
    if dtype == jnp.float32:  # for few rows, XLA on a GPU splits the depth, and shorter sums err less
        inputs = floats | {"x": np.pad(floats["x"], ((0, 4096 - rows), (0, 0)))}
    with jax.default_matmul_precision("tensorfloat32" if dtype == jnp.float32 else "highest"):
        plain = jit(functools.partial(reference.dense, activation=activation, gate=gate))(**inputs)[:rows]
    (got,) = run(**floats, activation=activation, config=config, gate=gate)
    assert_matches_oracle(got, plain, oracle.dense(**floats, activation=activation, gate=gate), seed=seed)
    return floats, got


# --- Activations -------------------------------------------------------------------------------------------------


@pytest.mark.cpu
@pytest.mark.parametrize("tanh_error", [-(2.0**-11), 2.0**-11, *slow(0.0)])  # relative error of the hardware's tanh
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_activations_are_accurate(activation, dtype, tanh_error, monkeypatch):
    x = jnp.asarray(np.concatenate([np.linspace(-20, 20, 40001), np.geomspace(1e-30, 6e4, 999)]), jnp.float32)
    plain = np.asarray(reference.ACTIVATIONS[activation](x).astype(dtype))
    with monkeypatch.context() as patch:
        patch.setattr(jnp, "tanh", lambda x, tanh=jnp.tanh: tanh(x) * (1.0 + tanh_error))
        got = np.asarray(act.activation(activation, x, dtype).astype(dtype))
    exact = oracle._activate(np.float64(x), activation)
    for below in (np.inf, 3.0, 0.1):
        part = np.abs(x) < below
        assert_matches_oracle(got[part], plain[part], exact[part])


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_negative_tails_are_accurate_in_float16(activation):
    for start in np.arange(-12.0, 12.0, 0.5):
        x = jnp.linspace(start, start + 0.5, 501, dtype=jnp.float32)
        plain = reference.ACTIVATIONS[activation](x).astype(jnp.float16)
        got = act.activation(activation, x, jnp.float16).astype(jnp.float16)
        assert_matches_oracle(got, plain, oracle._activate(np.float64(x), activation))


@pytest.mark.parametrize("dtype", WITH_FLOAT32)
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_activations_handle_nan_and_infinity(activation, dtype):
    x = jnp.array([jnp.nan, jnp.inf, 3e38, -3e38, 0.0], jnp.float32)
    got, plain = (f(x).astype(dtype).astype(jnp.float32) for f in (
        lambda x: act.activation(activation, x, dtype), reference.ACTIVATIONS[activation]))  # fmt: skip
    np.testing.assert_array_equal(got, plain)


def test_unknown_activation():
    with pytest.raises(ValueError, match="no kernel has the activation 'swish'"):
        act.activation("swish", jnp.ones(3), jnp.bfloat16)


def exact_derivative(activation, x):
    return jax.jvp(reference.ACTIVATIONS[activation], (x,), (jnp.ones_like(x),))[1]


SLOPE_BOUNDS: dict[Any, dict[str, float]] = {
    jnp.bfloat16: {"rtol": 0.0, "atol": 3e-3},
    jnp.float16: {"rtol": 5e-4, "atol": 2e-4},
}


@pytest.mark.cpu
@pytest.mark.parametrize("tanh_error", [-2e-5, 2e-5, *slow(0.0)])  # twice what was measured on a Hopper GPU
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_derivatives_are_accurate(activation, dtype, tanh_error, monkeypatch):
    ends = np.geomspace(1e-30, 6e4 if dtype == jnp.float16 else 3e38, 999)
    x = jnp.asarray(np.concatenate([np.linspace(-20, 20, 40001), ends, -ends]), jnp.float32)
    with jax.enable_x64(True):
        derivatives = jax.jit(functools.partial(exact_derivative, activation))(jnp.float64(x))
    with monkeypatch.context() as patch:
        exact = jnp.tanh
        patch.setattr(jnp, "tanh", lambda y: jnp.where(jnp.abs(y) < 8.25, exact(y) * (1.0 + tanh_error), jnp.sign(y)))
        got, derivative = jax.jit(lambda x: act.activation_and_derivative(activation, x, dtype))(x)
    np.testing.assert_allclose(act.kept_derivative(derivative), derivatives, **SLOPE_BOUNDS[dtype])
    plain = reference.ACTIVATIONS[activation](x).astype(dtype)
    assert_matches_oracle(got.astype(dtype), plain, oracle._activate(np.float64(x), activation))
    # Where the activation is the identity or 0, the derivative is exactly 1 or 0.
    for far, flat in ((30.0, activation == "tanh"), (-30.0, True)):
        _, derivative = act.activation_and_derivative(activation, jnp.full((), far, jnp.float32), dtype)
        assert act.kept_derivative(derivative) == (0.0 if flat else 1.0)


# --- Refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "bias", "reason"),
    [
        ((64, 64, 128), jnp.float64, None, "x is float64"),
        ((64, 36, 128), jnp.float32, None, "K is 36 and F is 128: above 32 they must be multiples of 8, below of 8"),
        ((64, 64, 64), jnp.bfloat16, jnp.float64, "bias is float64"),
        ((0, 64, 64), jnp.bfloat16, None, "empty"),
        ((63, 64, 128), jnp.bfloat16, None, "M is 63"),
        ((64, 64, 64), jnp.bfloat16, None, "F is 64: they must be at least 64 and above"),
        ((64, 72, 128), jnp.bfloat16, None, "K is 72 and F is 128"),
        ((64, 768, 200), jnp.bfloat16, None, "multiples of 16"),
        ((64, 7, 768), jnp.bfloat16, None, "multiples of 16, below of 8"),
        ((64, 768, 30522), jnp.bfloat16, None, "F is 30522"),
        ((2**30 + 1, 64, 64), jnp.bfloat16, None, "above 2^30"),
    ],
)
def test_unsupported_shapes_are_refused(shape, dtype, bias, reason):
    rows, depth, width = shape
    with jax.enable_x64(True):
        vector = None if bias is None else of((width,), bias)
        assert reason in support.dense_unsupported(of((rows, depth), dtype), of((depth, width), dtype), vector)


@pytest.mark.parametrize(
    "shape", [(64, 8, 80), (65, 24, 96), (100, 768, 2304), (77, 80, 208), (75, 1024, 1040)], ids=str
)
def test_supported_shapes_are_accepted(shape):
    rows, depth, width = shape
    assert support.dense_unsupported(of((rows, depth)), of((depth, width)), None) is None


@pytest.mark.parametrize(
    ("dtype", "width", "options", "reason"),
    [
        (jnp.float32, 128, {"gate": "first"}, "no gate in float32"),
        (jnp.float32, 128, {"head_size": 64}, "no rotation in float32"),
        (jnp.bfloat16, 128, {"head_size": 32}, "the head size is 32"),
        (jnp.bfloat16, 192, {"gate": "first"}, "F is 96: with a gate"),
        (jnp.bfloat16, 256, {"gate": "first"}, None),
        (jnp.bfloat16, 192, {"head_size": 64}, None),
    ],
)
def test_options_are_refused_where_the_kernel_lacks_them(dtype, width, options, reason):
    refused = support.dense_unsupported(of((64, 64), dtype), of((64, width), dtype), None, **options)
    assert refused is None if reason is None else reason in refused


@pytest.mark.parametrize(
    ("shape", "dtypes", "reason"),
    [
        ((64, 128, 128), (None, None, None), None),
        ((64, 128, 128), (jnp.float32, jnp.bfloat16, jnp.float32), None),
        ((64, 128, 128), (jnp.float64, None, None), "bias is float64"),
        ((64, 128, 128), (None, None, jnp.float64), "kernel_scale is float64"),
        ((64, 128, 128), (None, jnp.float32, None), "residual is float32"),
        ((64, 64, 128), (None, None, None), "K is 64"),
        ((64, 128, 160), (None, None, None), "F is 160"),
        ((63, 128, 128), (None, None, None), "M is 63"),
    ],
)
def test_float8_is_refused_where_the_kernel_lacks_it(shape, dtypes, reason):
    (rows, depth, width), (bias, residual, scale) = shape, dtypes
    with jax.enable_x64(True):
        arrays = [
            None if dtype is None else of(own, dtype)
            for own, dtype in (((width,), bias), ((rows, width), residual), ((width,), scale))
        ]
        float8 = jnp.float8_e4m3fn
        refused = support.float8_dense_unsupported(of((rows, depth), float8), of((depth, width), float8), *arrays)
    assert refused is None if reason is None else reason in refused


@pytest.mark.parametrize(
    ("dtype", "width", "elements"), [(jnp.bfloat16, 64, 64), (jnp.bfloat16, 56, 64), (jnp.bfloat16, 32, 64),
                                     (jnp.bfloat16, 96, 32), (jnp.bfloat16, 72, 0), (jnp.float32, 40, 8)]
)  # fmt: skip
def test_rows_end_where_a_line_ends(dtype, width, elements):
    assert support.line(dtype, width) == elements


# --- Lowering ----------------------------------------------------------------------------------------------------


def lower_kernel(rows, depth, width, config, *, dtype=jnp.bfloat16, bias=jnp.float32, **options):
    arrays = [of((rows, depth), dtype), of((depth, width), dtype), of((width,), bias or dtype)]
    text = lower(
        lambda x, kernel, b: dense.forward(x, kernel, bias and b, **{"activation": None} | options, config=config),
        *arrays,
    )
    assert text.count("custom_call @mosaic_gpu") == 1
    return text


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [
        ("gelu", jnp.bfloat16),
        *slow_cases(
            *((activation, jnp.bfloat16) for activation in ACTIVATIONS if activation != "gelu"),
            *((activation, dtype) for activation in ACTIVATIONS for dtype in (jnp.float32, jnp.float16)),
        ),
    ],
)
def test_lowers(activation, dtype):
    by_dtype = {jnp.float32: (SPLITS["m"], FLOAT32)}
    wide, narrow = by_dtype.get(dtype, (MosaicDenseConfig(64, 192, programs=132), BY_TURNS))
    for bias, config in ((None, wide), (jnp.float32, narrow)):
        lower_kernel(4096, 768, 768, config, dtype=dtype, bias=bias, activation=activation)


@pytest.mark.parametrize("cluster_m", [1, *slow(2)])
@pytest.mark.parametrize(
    "config",
    [MosaicDenseConfig(128, 128, split="n", programs=132), BY_TURNS,
     *slow(MosaicDenseConfig(64, 256, programs=132), MosaicDenseConfig(64, 256, split="none", programs=132),
           MosaicDenseConfig(64, 64, split="none", minor="m", group=1, programs=132))],
    ids=lambda c: f"{c.tile_m}x{c.tile_n}{c.split}",
)  # fmt: skip
def test_configs_lower(config, cluster_m):
    config = MosaicDenseConfig(**{**vars(config), "cluster_m": cluster_m})
    also = "sum" if cluster_m == 1 else None
    text = lower_kernel(1000, 96, 208, config, bias=jnp.bfloat16, activation="gelu", also=also)
    assert text.count("tensor<1000x208xbf16>") >= 3 - cluster_m


@pytest.mark.parametrize("dtype", [jnp.bfloat16, *slow(jnp.float32)])
@pytest.mark.parametrize("sizes", [(768, 3072), *slow((384, 1152), (768, 768), (1024, 4096))])
@pytest.mark.parametrize("rows", [264, 16384, *slow(100)])
def test_defaults_lower(rows, sizes, dtype):
    """The default configurations fit into shared memory with any bias."""
    config = tuning_dense.dense_mosaic(rows, *sizes, "gelu", jnp.dtype(dtype).itemsize, CARD)
    lower_kernel(rows, *sizes, config, dtype=dtype, activation="gelu", also="sum")


def test_rows_are_padded_to_multiples_of_8():
    for rows in (96, 100):
        text = lower_kernel(rows, 64, 128, MosaicDenseConfig(64, 64, programs=132))
        assert ("stablehlo.pad" in text) == ("stablehlo.slice" in text) == (rows % 8 > 0)


# --- Numbers -----------------------------------------------------------------------------------------------------


@runs
@pytest.mark.parametrize("config", SOME_SPLITS)
@pytest.mark.parametrize("shape", [(65, 80, 208), (259, 320, 320)], ids=str)
def test_shapes(shape, config):
    check(*shape, config)


@runs
@pytest.mark.parametrize("dtype", [DTYPES[1], *slow(DTYPES[0], WITH_FLOAT32[0])])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, dtype):
    config, bias = (SPLITS["none"], None) if dtype == jnp.bfloat16 else (SPLITS["m"], dtype)
    check(70, 64, 128, config, dtype=dtype, bias=bias, activation=activation)


@runs
@pytest.mark.parametrize("dtype", [DTYPES[1], *slow(DTYPES[0])])
@pytest.mark.parametrize("config", SOME_SPLITS)
@pytest.mark.parametrize("shape", [(65, 80, 208), *slow((264, 96, 320))], ids=str)
def test_residual_is_added(shape, config, dtype):
    check(*shape, config, dtype=dtype, activation="gelu" if dtype == jnp.float16 else None, residual=True)


@pytest.mark.parametrize("sizes", [(768, 768), *slow((384, 1152), (768, 3072), (1024, 4096))])
@pytest.mark.parametrize("rows", [100, 4096, *slow(264, 1024)])
def test_residual_lowers(rows, sizes):
    """The kernel fits into shared memory with a residual and with a second result."""
    depth, width = sizes
    config = tuning_dense.dense_mosaic(rows, *sizes, "gelu", 2, card(), True)
    arrays = of((rows, depth)), of((depth, width)), of((width,), jnp.float32), of((rows, width))
    lower(lambda *a: dense.forward(*a, activation="gelu", config=config, also="sum"), *arrays)


@runs
@pytest.mark.parametrize("residual", [True, *slow(False)])
def test_second_result_is_the_sum(residual):
    floats, y = check(72, 64, 192, SPLITS["none"], activation="gelu", residual=residual)
    both = run(**floats, activation="gelu", config=SPLITS["none"], also="sum")
    assert (both[0] == y).all()
    floats.pop("residual", None)
    assert (both[1] == run(**floats, activation=None, config=SPLITS["none"])[0]).all()


GATED = {
    "m": MosaicDenseConfig(64, 128, stages=2, minor="m", programs=2),
    "none": MosaicDenseConfig(128, 128, stages=2, split="none", programs=2),
    "wide": MosaicDenseConfig(64, 256, stages=2, split="none", programs=2),
    "cluster": MosaicDenseConfig(64, 128, stages=2, programs=4, cluster_m=2),
}


@runs
@pytest.mark.parametrize("dtype", [DTYPES[1], *slow(DTYPES[0])])
@pytest.mark.parametrize(("gate", "bias", "residual"), [("first", None, False), ("second", jnp.float32, True)])
@pytest.mark.parametrize("config", ["m", "none", *slow("wide", "cluster")])
def test_gates(config, gate, bias, residual, dtype):
    """A tile has columns of both halves. The sums of both halves may be kept."""
    options = {"activation": "gelu", "config": GATED[config], "gate": gate}
    floats, y = check(136, 80, 512, **options, dtype=dtype, bias=bias, residual=residual)
    both = run(**floats, **options, also="sum")
    assert (both[0] == y).all()
    floats.pop("residual", None)
    assert (both[1] == run(**floats, activation=None, config=SPLITS["none"])[0]).all()


@pytest.mark.parametrize(("depth", "width"), [(768, 2304), *slow_cases((1024, 5248), (768, 6144))])
@pytest.mark.parametrize("rows", [16384, *slow(1024, 4096)])
def test_gate_lowers(rows, depth, width):
    """One kernel without a gradient. With one, the kernel keeps the sums of both halves."""
    arrays = of((rows, depth)), of((depth, width)), of((rows, width // 2))

    def op(x, kernel, residual):
        return jaxft.dense(x, kernel, residual=residual, activation="gelu", gate="first")

    with jax.default_matmul_precision(None):
        assert lower(op, *arrays).count("@mosaic_gpu_v2") == 1
        text = lower(lambda *a: jax.vjp(op, *a)[1](a[-1]), *arrays)
    assert text.count("@mosaic_gpu_v2") == 1 and text.count("dot_general") == 2


@runs
@pytest.mark.parametrize("dtype", [DTYPES[1], *slow(DTYPES[0])])
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_second_result_is_the_derivative(activation, dtype):
    """The derivatives are those at the float32 sum, and the first result stays the same."""
    floats, y = check(66, 64, 208, SPLITS["none"], dtype=dtype, activation=activation)  # edges of both kinds
    both = run(**floats, activation=activation, config=SPLITS["none"], also="derivative")
    coarse = dtype == jnp.bfloat16
    assert both[1].dtype == (jnp.uint8 if coarse else dtype) and both[1].shape == y.shape
    if coarse or activation in ("gelu", "relu", "tanh"):
        assert (both[0] == y).all()
    plain = reference.dense(**{name: x.astype(jnp.float32) for name, x in floats.items()})
    assert_matches_oracle(both[0], y, oracle.dense(**floats, activation=activation))
    np.testing.assert_allclose(act.kept_derivative(both[1]), exact_derivative(activation, plain), **SLOPE_BOUNDS[dtype])


@runs
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_stored_derivatives_cover_all_inputs(activation):
    """The derivatives need a hardware tanh that is more accurate than its documentation says."""
    every = jnp.asarray(np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16))
    x = every[jnp.isfinite(every) & ((jnp.abs(every) > 1e-4) | (every == 0))]
    x = jnp.pad(x, (0, -x.size % 64)).reshape(-1, 64)
    kernel = jnp.concatenate([jnp.eye(64, dtype=jnp.bfloat16)] * 2, axis=1)
    _, derivative = run(x, kernel, None, activation=activation, config=SPLITS["none"], also="derivative")
    with jax.enable_x64(True):
        derivatives = exact_derivative(activation, jnp.float64(jnp.concatenate([x, x], axis=1)))
    np.testing.assert_allclose(act.kept_derivative(derivative), derivatives, **SLOPE_BOUNDS[jnp.bfloat16])


@runs
def test_nan_stays_in_its_row():
    floats, clean = check(72, 64, 128, SPLITS["m"], activation="relu")
    (y,) = run(**floats | {"x": floats["x"].at[3, 5].set(jnp.nan)}, activation="relu", config=SPLITS["m"])
    assert jnp.isnan(y[3]).all()
    assert (jnp.delete(y, 3, axis=0) == jnp.delete(clean, 3, axis=0)).all()


@contextlib.contextmanager
def interpreted():
    """Makes a CPU pass for a Hopper GPU. The kernel runs in Mosaic's interpreter.

    The gradients of activation, bias and rotation are Triton kernels, which run in Pallas' interpreter.
    """
    if not INTERPRET:
        yield
        return

    def in_triton(kernel, module=bias_activation):
        def interpret(*arrays, **options):
            with plgpu.force_gpu_interpret_mode(None):
                return kernel(*arrays, **options | {"interpret": True})

        return mock.patch.object(module, kernel.__name__, interpret)

    with (
        dispatch.target(),
        plgpu.force_gpu_interpret_mode(),
        in_triton(bias_activation.backward),
        in_triton(bias_activation.sum_of_rows),
        in_triton(gated_activation.backward, gated_activation),
        in_triton(rotary.rotate, rotary),
    ):
        yield


@runs
@pytest.mark.parametrize(
    ("activation", "dtype", "bias", "residual"),
    [*((a, jnp.bfloat16, jnp.float32, False) for a in ACTIVATIONS), ("gelu", jnp.float16, jnp.float16, True),
     ("gelu", jnp.float16, None, False), ("gelu", jnp.float32, jnp.float32, False), (None, jnp.float32, None, False),
     (None, jnp.bfloat16, None, True)],
)  # fmt: skip
def test_op_runs_the_kernel(activation, dtype, bias, residual):
    """The op has the right values and gradients."""
    rng = np.random.default_rng(1)
    floats = normal(rng, dtype, x=(200, 128), kernel=(128, 192))
    floats |= {} if bias is None else normal(rng, bias, bias=(192,))
    floats |= normal(rng, dtype, residual=(200, 192)) if residual else {}
    floats = as_tf32(floats) if dtype == jnp.float32 else floats
    with interpreted(), jax.default_matmul_precision("tensorfloat32"):
        cases.check(
            lambda implementation, **f: jaxft.dense(**f, activation=activation, implementation=implementation),
            lambda **f: reference.dense(**f, activation=activation),
            lambda **f: oracle.dense(**f, activation=activation),
            floats, implementations=("mosaic_gpu",),
        )  # fmt: skip


@runs
@pytest.mark.parametrize(
    ("gate", "bias", "residual"), [("first", jnp.float32, True), *slow_cases(("second", None, False))]
)
def test_op_runs_the_kernel_with_a_gate(gate, bias, residual):
    """The op has the right values and gradients, which the kernel's sums of both halves give."""
    rng, options = np.random.default_rng(1), {"activation": "gelu", "gate": gate}
    floats = normal(rng, jnp.bfloat16, x=(200, 128), kernel=(128, 256))
    floats |= {} if bias is None else normal(rng, bias, bias=(256,))
    floats |= normal(rng, jnp.bfloat16, residual=(200, 128)) if residual else {}
    with interpreted():
        cases.check(
            lambda implementation, **f: jaxft.dense(**f, **options, implementation=implementation),
            lambda **f: reference.dense(**f, **options),
            lambda **f: oracle.dense(**f, **options),
            floats, implementations=("mosaic_gpu",),
        )  # fmt: skip


@runs
def test_infinite_bias_reaches_one_column():
    floats = normal(np.random.default_rng(2), jnp.bfloat16, x=(64, 64), kernel=(64, 128), bias=(128,))
    floats["bias"] = floats["bias"].at[3].set(jnp.inf)

    def gradients(implementation):
        def loss(f):
            return jnp.sum(jaxft.dense(**f, activation="tanh", implementation=implementation).astype(jnp.float32))

        return jax.jit(jax.grad(loss))(floats)

    with interpreted():
        got = gradients("mosaic_gpu")
    assert all(jnp.isfinite(g).all() for g in got.values())


def mosaic_dense(x, kernel, bias):
    return jaxft.dense(x, kernel, bias, activation="silu", implementation="mosaic_gpu")


ARRAYS = (of((256, 128)), of((128, 256)), of((256,)))


def test_lowers_in_64_bit_mode():
    with jax.enable_x64(True):
        assert "@mosaic_gpu_v2" in lower(mosaic_dense, *ARRAYS)


def test_second_derivatives_lower():
    def loss(x, kernel, bias):
        return jnp.sum(mosaic_dense(x, kernel, bias).astype(jnp.float32))

    lower(jax.grad(lambda *a: jnp.sum(jax.grad(loss)(*a).astype(jnp.float32))), *ARRAYS)


def test_shards():
    """Results vary over the mesh axes that the inputs vary over."""

    def loss(x, kernel, bias):
        return jax.lax.psum(jnp.sum(mosaic_dense(x, kernel, bias).astype(jnp.float32)), "x")

    specs = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec()
    text = lower(
        lambda *a: jax.grad(jax.shard_map(loss, in_specs=specs, out_specs=specs[1]), argnums=(1, 2))(*a), *ARRAYS
    )
    assert "@mosaic_gpu_v2" in text
    with pytest.raises(ValueError, match="out_specs"):
        lower(lambda *a: jax.shard_map(mosaic_dense, in_specs=specs, out_specs=specs[1])(*a), *ARRAYS)


@pytest.mark.parametrize(
    ("shape", "activation", "dtype", "taken"),
    [
        ((4096, 768, 3072), "gelu", jnp.bfloat16, True),
        ((4096, 768, 768), None, jnp.float16, True),
        ((16384, 768, 768), None, jnp.bfloat16, True),
        ((16384, 3072, 768), None, jnp.bfloat16, False),  # cuBLAS is as fast
        ((1024, 768, 3072), "gelu", jnp.float32, True),
        ((1024, 768, 2304), None, jnp.float32, False),  # the kernel's transposition costs what is gained
        ((4096, 768, 2304), None, jnp.float32, True),
        ((512, 768, 3072), "gelu", jnp.float32, False),
        ((520, 768, 3072), "gelu", jnp.bfloat16, True),
        ((512, 768, 3072), "gelu", jnp.bfloat16, False),  # would cost the host more than it saves
        ((1024, 384, 1536), "gelu", jnp.bfloat16, False),
        ((2048, 384, 1536), "gelu", jnp.bfloat16, True),
        ((128, 768, 3072), "gelu", jnp.bfloat16, False),
        ((128, 3072, 768), None, jnp.bfloat16, False),
        ((256, 3072, 768), None, jnp.bfloat16, False),
        ((1024, 768, 768), None, jnp.bfloat16, True),
        ((320, 3072, 768), None, jnp.bfloat16, False),  # cuBLAS splits the depth
        ((4100, 768, 3072), "gelu", jnp.bfloat16, False),  # would cost copies
        ((4096, 776, 3072), "gelu", jnp.bfloat16, False),  # is not supported
    ],
)
def test_selection_follows_shape_and_precision(shape, activation, dtype, taken):
    rows, depth, width = shape
    arrays = of((rows, depth), dtype), of((depth, width), dtype), of((width,), dtype)
    for precision in ("tensorfloat32", "highest"):
        with jax.default_matmul_precision(precision):
            text = lower(lambda x, kernel, bias: jaxft.dense(x, kernel, bias, activation=activation), *arrays)
        assert text.count("@mosaic_gpu_v2") == (taken and (dtype != jnp.float32 or precision != "highest"))


@pytest.mark.parametrize(
    ("activation", "dtype", "taken"),
    [("gelu", jnp.bfloat16, True), ("gelu", jnp.float32, False), (None, jnp.bfloat16, True)],
)
def test_selection_with_a_residual(activation, dtype, taken):
    arrays = of((4096, 768), dtype), of((768, 3072), dtype), of((4096, 3072), dtype)
    for implementation in (None, "mosaic_gpu") if dtype == jnp.bfloat16 else (None,):

        def op(x, kernel, residual, i=implementation):
            return jaxft.dense(x, kernel, activation=activation, residual=residual, implementation=i)

        def gradients(*arrays, op=op):
            return jax.vjp(op, *arrays)[1](arrays[-1])

        assert lower(op, *arrays).count("@mosaic_gpu_v2") == taken
        needed = taken and activation is not None  # without an activation, gradients need no forward matmul
        assert lower(gradients, *arrays).count("@mosaic_gpu_v2") == needed


finds_races = pytest.mark.skipif(
    not INTERPRET or jax.__version_info__ < (0, 11),
    reason="Mosaic's interpreter, on a CPU, finds races of warp groups since JAX 0.11; a GPU does not tell",
)


def assert_no_races(run):
    """Asserts that the interpreter finds no races. Its copies to device memory, and its matmuls, complete at once."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        jax.block_until_ready(run())
    assert not interpret_pallas_call.get_races().races_found


@finds_races
@pytest.mark.parametrize("config", [SPLITS["m"], *slow(*(config for name, config in SPLITS.items() if name != "m"))])
def test_kernel_has_no_races(config):
    floats = normal(np.random.default_rng(0), jnp.bfloat16, x=(264, 192), kernel=(192, 320), bias=(320,))
    residual = normal(np.random.default_rng(1), jnp.bfloat16, residual=(264, 320))
    assert_no_races(functools.partial(dense.forward, **floats, **residual, activation=None, config=config))
    for also in ("derivative", "sum"):
        assert_no_races(functools.partial(dense.forward, **floats, activation="gelu", config=config, also=also))


@hopper
@pytest.mark.parametrize(
    "config",
    [None, MosaicDenseConfig(128, 128, split="n", cluster_m=2, programs=132),
     *slow(BY_TURNS, MosaicDenseConfig(64, 192, programs=132), MosaicDenseConfig(64, 256, programs=132),
           MosaicDenseConfig(64, 256, split="none", cluster_m=2, programs=132))],
    ids=str,
)  # fmt: skip
def test_large_matmul_is_reproducible(config):
    shape = (4099, 768, 3072)
    floats, y = check(*shape, config or tuning_dense.dense_mosaic(*shape, "gelu", 2, CARD), activation="gelu")
    for _ in range(10):
        (again,) = run(**floats, activation="gelu", config=config or tuning_dense.dense_mosaic(*shape, "gelu", 2, CARD))
        assert (again == y).all()
