"""Matmuls of float8_e4m3fn arrays, and the ops that write such arrays for them."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
import oracle
from cases import jit, lower, normal, slow, slow_cases
from compare import assert_matches_oracle
from jaxft import dispatch, reference
from jaxft.kernels.mosaic_gpu import activations as act
from jaxft.kernels.mosaic_gpu import dense as mosaic
from jaxft.ops import dense_layer_norm
from jaxft.tuning import dense as tuning_dense
from jaxft.tuning.dense import MosaicDenseConfig
from lowered import TRITON, of, operations
from test_dense_mosaic import INTERPRET, assert_no_races, finds_races, run, runs

FLOAT8 = jnp.float8_e4m3fn
IMPLEMENTATIONS = ["triton", "xla"]


def rounded(exact, scale=1.0):
    """Rounds a float64 array / scale by the definition of float8_e4m3fn: 3 bits, steps from 2^-9 on, at most 448."""
    x = np.clip(np.asarray(exact, np.float64) / scale, -448.0, 448.0)
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 2.0**-20))), -6.0) - 3.0)
    return np.round(x / step) * step


def dense_arrays(rows, depth, width, seed=0):
    rng = np.random.default_rng(seed)
    arrays = normal(rng, FLOAT8, x=(rows, depth), kernel=(width, depth))
    arrays["kernel"] = arrays["kernel"].T
    scale = jnp.asarray(rng.uniform(0.5, 1.5, width) / np.sqrt(depth), jnp.float32)
    return arrays | {"kernel_scale": scale} | normal(rng, jnp.bfloat16, bias=(width,))


def exact_dense(x, kernel, kernel_scale, bias=None, residual=None, activation=None, x_scale=1.0):
    scaled = np.float64(kernel) * np.float64(kernel_scale) * x_scale
    return oracle.dense(np.float64(x), scaled, bias, activation=activation, residual=residual)


def assert_close(got, plain, exact, float8_scale=None):
    """Asserts the rule of the test suite. In float8, the plain version is the float64 result, rounded once."""
    if float8_scale is None:
        return assert_matches_oracle(got, plain, exact)
    clipped = np.clip(np.asarray(exact) / float8_scale, -448.0, 448.0)
    return assert_matches_oracle(got, jnp.asarray(rounded(clipped), jnp.float32).astype(FLOAT8), clipped)


# --- Rounding ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 0.25, 3.0])
def test_reference_rounds_as_the_definition(scale):
    x = np.concatenate([np.linspace(-2000, 2000, 4001), np.geomspace(1e-4, 500, 4001)]).astype(np.float32)
    got = np.float64(reference.to_float8(jnp.asarray(x), scale))
    expected = rounded(np.float64(jnp.asarray(x) * (1.0 / scale)))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_results_clip_and_nan_stays(implementation):
    x = jnp.zeros((4, 128), FLOAT8).at[0].set(448).at[1].set(-448).at[2, 3].set(jnp.nan).at[3, 0].set(1)
    arguments = {"kernel_scale": jnp.full(3, 2.0), "float8_scale": 1.0, "implementation": implementation}
    y = jaxft.dense(x, jnp.ones((128, 3), FLOAT8), **arguments)
    np.testing.assert_array_equal(np.float32(y), [[448] * 3, [-448] * 3, [np.nan] * 3, [2] * 3])
    rows = jnp.asarray([[1.0, jnp.nan], [-3.0, 3.0]])
    gamma = jnp.full(2, 1000.0)
    copy = jaxft.layer_norm(rows, gamma, float8_scale=1.0, implementation=implementation)[1]
    np.testing.assert_array_equal(np.float32(copy), [[np.nan] * 2, [-448, 448]])
    qkv = jnp.full((1, 2, 3, 1, 16), 1e4, jnp.bfloat16).at[0, :, :2].set(0)
    out = jaxft.qkv_attention(qkv, float8_scale=2.0, implementation=implementation)
    assert out.dtype == FLOAT8 and (np.float32(out) == 448).all()
    out = jaxft.qkv_attention(qkv.at[0, 0, 2].set(jnp.nan), float8_scale=2.0, implementation=implementation)
    assert np.isnan(np.float32(out)).all()


# --- dense -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, None])
@pytest.mark.parametrize(
    "options", [{}, {"activation": "gelu", "float8_scale": 1.0}, {"x_scale": 2.0, "float8_scale": 0.01},
                {"activation": "gelu_tanh", "dtype": jnp.float16}], ids=str
)  # fmt: skip
@pytest.mark.parametrize("shape", [(5, 33, 17), *slow((70, 128, 192))], ids=str)
def test_dense(shape, options, implementation):
    arrays = dense_arrays(*shape)
    got = jit(lambda f: jaxft.dense(**f, **options, implementation=implementation))(arrays)
    plain = jit(lambda f: reference.float8_dense(**f, **options))(arrays)
    exact = exact_dense(**arrays, **{n: o for n, o in options.items() if n in ("activation", "x_scale")})
    assert_close(got, plain, exact, options.get("float8_scale"))


def test_dense_has_optional_operands():
    arrays = dense_arrays(6, 24, 32)
    arrays["bias"] = None
    residual = normal(np.random.default_rng(1), jnp.float16, residual=(6, 32))["residual"]
    for implementation in IMPLEMENTATIONS:
        got = jaxft.dense(**arrays, residual=residual, dtype=jnp.float16, implementation=implementation)
        plain = reference.float8_dense(**arrays, residual=residual, dtype=jnp.float16)
        assert_matches_oracle(got, plain, exact_dense(**arrays, residual=residual))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 3), (2, 3, 0)], ids=str)
def test_empty_dense(shape, implementation):
    arrays = dense_arrays(*shape[:1], max(shape[1], 1), shape[2]) if shape[1] else {
        "x": jnp.zeros((2, 0), FLOAT8), "kernel": jnp.zeros((0, 3), FLOAT8), "kernel_scale": jnp.ones(3)}  # fmt: skip
    y = jaxft.dense(**arrays, implementation=implementation)
    assert (y.shape, y.dtype) == ((shape[0], shape[2]), jnp.bfloat16)


def test_arguments_of_float8_are_checked():
    f = dense_arrays(4, 16, 8)
    wide = {"x": f["x"].astype(jnp.bfloat16), "kernel": f["kernel"].astype(jnp.bfloat16)}
    for change, error, message in (
        ({"kernel_scale": None}, ValueError, r"needs kernel_scale of shape \(8,\), got None"),
        ({"kernel_scale": jnp.ones(7)}, ValueError, r"kernel_scale must have shape \(8,\), got \(7,\)"),
        ({"kernel": wide["kernel"]}, TypeError, "kernel .*float8_e4m3fn"),
        ({"float8_scale": 0.0}, ValueError, "float8_scale must"),
        ({"x_scale": -1.0}, ValueError, "x_scale must"),
        ({"dtype": jnp.float32}, ValueError, "dtype must be bfloat16 or float16"),
        ({"residual": jnp.ones((4, 8))}, TypeError, "residual"),
        ({"gate": "first", "activation": "gelu"}, NotImplementedError, "there is no gate with float8_e4m3fn"),
        (wide, ValueError, "kernel_scale is for x of float8_e4m3fn, got x of bfloat16"),
        (wide | {"kernel_scale": None, "float8_scale": 1.0}, ValueError, "float8_scale is for x of float8_e4m3fn"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            jaxft.dense(**f | change)


@pytest.mark.parametrize(
    ("residual", "error", "message"),
    [
        (jnp.ones((4, 8)), TypeError, "residual must be bfloat16 or float16 with x of float8_e4m3fn, got float32"),
        (jnp.ones((4, 7), jnp.bfloat16), ValueError, r"residual must have shape \(4, 8\), got \(4, 7\)"),
    ],
)
def test_residual_beside_float8_is_checked(residual, error, message):
    f = dense_arrays(4, 8, 8)
    vectors = {"gamma": jnp.ones(8), "beta": jnp.ones(8), "residual": residual}
    with pytest.raises(error, match=f"dense_residual_layer_norm: {message}"):
        jaxft.dense_residual_layer_norm(**f, **vectors)
    with pytest.raises(error, match=f"feed_forward_residual_layer_norm: {message}"):
        jaxft.feed_forward_residual_layer_norm(
            f["x"], f["kernel"], None, f["kernel"], None, **vectors, in_kernel_scale=f["kernel_scale"],
            out_kernel_scale=f["kernel_scale"], inner_scale=1.0,
        )  # fmt: skip


def test_kernel_refuses_sizes_beyond_32_bits():
    run = functools.partial(jaxft.dense, dtype=jnp.bfloat16, implementation="triton")
    with pytest.raises(NotImplementedError, match="x has 1073741825 rows, the kernels take at most 2"):
        jax.eval_shape(run, of((2**30 + 1, 16), FLOAT8), of((16, 32), FLOAT8), kernel_scale=of((32,), jnp.float32))


def test_gradient_raises_by_name():
    f = dense_arrays(4, 16, 8)

    def of_dense(bias):
        return jaxft.dense(**f | {"bias": bias}).astype(jnp.float32).sum()

    def of_norm(bias):
        return jaxft.layer_norm(jnp.ones((2, 8)), bias, float8_scale=1.0)[0].sum()

    def of_attention(bias):
        return jaxft.qkv_attention(jnp.ones((1, 4, 3, 1, 8)) * bias, float8_scale=1.0).astype(jnp.float32).sum()

    for op, function in (("dense", of_dense), ("layer_norm", of_norm), ("attention", of_attention)):
        with pytest.raises(NotImplementedError, match=f"{op}: there is no gradient with float8_e4m3fn"):
            jax.grad(jax.jit(function))(jnp.ones(8))


def test_vmap_of_dense():
    f = dense_arrays(12, 16, 8)
    x = f.pop("x").reshape(3, 4, 16)
    for implementation in IMPLEMENTATIONS:
        one = functools.partial(jaxft.dense, **f, implementation=implementation)
        np.testing.assert_array_equal(np.float32(jax.vmap(one)(x)), np.float32(one(x)))


def test_transposed_storage_is_no_copy():
    """The compiled program of plain jnp has no transpose of the kernel, and the kernels read the stored array."""
    f = dense_arrays(128, 256, 384)
    stored = f.pop("kernel").T

    def op(x, stored, kernel_scale, bias, implementation=None):
        return jaxft.dense(x, stored.T, bias, kernel_scale=kernel_scale, implementation=implementation)

    arrays = f["x"], stored, f["kernel_scale"], f["bias"]
    compiled = jax.jit(functools.partial(op, implementation="xla")).lower(*arrays).compile().as_text()
    assert " transpose(" not in compiled
    for implementation, kernel in (("triton", TRITON), ("mosaic_gpu", "custom_call @mosaic_gpu_v2")):
        text = lower(functools.partial(op, implementation=implementation), *arrays)
        # Two transposes in a row are none for XLA.
        assert text.count(kernel) == 1 and operations(text)["transpose"] == 2 and operations(text)["convert"] == 0


# --- Mosaic GPU --------------------------------------------------------------------------------------------------

CONFIGS = {
    "m": MosaicDenseConfig(64, 64, 128, stages=2, programs=2),
    "n": MosaicDenseConfig(64, 64, 128, stages=2, split="n", programs=2),
    "none": MosaicDenseConfig(64, 128, 128, stages=3, split="none", programs=2),
    "cluster": MosaicDenseConfig(64, 64, 128, stages=2, programs=4, cluster_m=2, minor="m", group=2),
}


@runs
@pytest.mark.parametrize("float8_scale", [None, 0.5])
@pytest.mark.parametrize("config", ["m", "none", *slow("n", "cluster")])
@pytest.mark.parametrize("shape", [(70, 256, 128), *slow((259, 128, 320))], ids=str)
def test_mosaic_gpu(shape, config, float8_scale):
    """With a 16-bit result, there is a residual."""
    arrays = dense_arrays(*shape)
    if float8_scale is None:
        arrays |= normal(np.random.default_rng(1), jnp.bfloat16, residual=(shape[0], shape[2]))
    options = {"activation": None if float8_scale is None else "gelu", "float8_scale": float8_scale}
    (got,) = run(**arrays, x_scale=2.0, dtype=jnp.bfloat16, config=CONFIGS[config], **options)
    plain = jit(lambda f: reference.float8_dense(**f, x_scale=2.0, **options))(arrays)
    exact = exact_dense(**arrays, activation=options["activation"], x_scale=2.0)
    assert_close(got, plain, exact, float8_scale)


@finds_races
@pytest.mark.parametrize("config", ["none", *slow("m", "cluster")])
def test_mosaic_gpu_has_no_races(config):
    arrays = dense_arrays(264, 256, 320) | normal(np.random.default_rng(1), jnp.bfloat16, residual=(264, 320))
    options = {"activation": "gelu", "dtype": jnp.bfloat16, "config": CONFIGS[config]}
    assert_no_races(functools.partial(mosaic.forward, **arrays, **options))
    del arrays["residual"]
    assert_no_races(functools.partial(mosaic.forward, **arrays, **options, float8_scale=1.0))


@runs
def test_mosaic_gpu_clips_and_keeps_nan():
    """The conversion clips. Mosaic's interpreter converts as XLA does, and gives NaN."""
    x = jnp.zeros((64, 128), FLOAT8).at[0].set(448).at[1].set(-448).at[2, 3].set(jnp.nan)
    kernel, options = jnp.ones((128, 128), FLOAT8), {"kernel_scale": jnp.ones(128), "float8_scale": 1.0}
    (y,) = run(x, kernel, None, **options, activation=None, config=CONFIGS["m"])
    np.testing.assert_array_equal(np.float32(y)[2:4, 0], [np.nan, 0])
    if not INTERPRET:
        np.testing.assert_array_equal(np.float32(y)[:2, 0], [448, -448])


def test_mosaic_gpu_converts_with_clipping():
    arrays = of((64, 128), FLOAT8), of((128, 128), FLOAT8), of((128,), jnp.float32)
    options = {"activation": None, "dtype": jnp.bfloat16, "config": CONFIGS["m"]}
    for float8_scale in (1.0, None):
        text = lower(
            lambda x, stored, scale, float8_scale=float8_scale: mosaic.forward(
                x, stored.T, None, kernel_scale=scale, float8_scale=float8_scale, **options
            ),
            *arrays,
        )  # fmt: skip
        assert ("cvt.rn.satfinite.e4m3x2.f32" in text) == (float8_scale is not None)


@pytest.mark.cpu
@pytest.mark.parametrize("tanh_error", [-(2.0**-11), 2.0**-11])  # relative error of the hardware's tanh
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_mosaic_gpu_activations_are_accurate(activation, tanh_error, monkeypatch):
    """The error is at most 3e-4, a third of the smallest rounding error, beside the error of the hardware's tanh."""
    x = np.linspace(-400, 400, 40001)
    exact = oracle._activate(x, activation)
    with monkeypatch.context() as patch:
        patch.setattr(jnp, "tanh", lambda x, tanh=jnp.tanh: tanh(x) * (1.0 + tanh_error))
        got = act.activation(activation, jnp.asarray(x, jnp.float32), FLOAT8)
    assert np.max(np.abs(np.float64(got) - exact) - np.maximum(np.abs(x), 2.0) * 2.0**-12) <= 3e-4
    for scale in (1.0, 0.25):
        part = np.abs(x) < 10.0
        assert_close(reference.to_float8(got, scale)[part], None, exact[part], scale)


@pytest.mark.parametrize(
    ("rows", "depth", "width"),
    [(4096, 768, 3072), *slow_cases((4096, 3072, 768), (16384, 1024, 4096), (100, 384, 1536))],
)
@pytest.mark.parametrize("float8_scale", [None, 1.0])
def test_mosaic_gpu_lowers(rows, depth, width, float8_scale):
    """All candidates fit into shared memory with float32 vectors."""
    itemsize = 2 if float8_scale is None else 1
    with dispatch.target():
        device = dispatch.device()
    candidates = tuning_dense.float8_dense_mosaic_candidates(rows=rows, result_itemsize=itemsize, device=device)
    arrays = of((rows, depth), FLOAT8), of((width, depth), FLOAT8), *[of((width,), jnp.float32)] * 2
    for config in candidates:
        assert config.stages >= 3
        text = lower(
            lambda x, stored, scale, bias, config=config: mosaic.forward(
                x, stored.T, bias, kernel_scale=scale, dtype=jnp.bfloat16, float8_scale=float8_scale,
                activation="gelu", config=config,
            ),
            *arrays,
        )  # fmt: skip
        assert text.count("custom_call @mosaic_gpu") == 1


def test_implementation_depends_on_device_and_rows():
    def backend(rows, depth=768):
        arrays = of((rows, depth), FLOAT8), of((depth, 768), FLOAT8), of((768,), jnp.float32)
        (record,) = jaxft.explain(lambda x, k, s: jaxft.dense(x, k, kernel_scale=s), *arrays)
        return record.forward.backend, record.why

    with dispatch.target():
        assert backend(16)[0] == "triton" and backend(4096)[0] == "mosaic_gpu"
        assert "K is 760" in backend(4096, 760)[1]
    with dispatch.target("NVIDIA A100", (8, 0)):
        assert "float8_e4m3fn needs compute capability 8.9, NVIDIA A100 has 8.0" in backend(4096)[1]
    with dispatch.target("NVIDIA L40", (8, 9)):
        assert backend(4096)[0] == "triton"


# --- Ops that write float8 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("return_sum", [False, True])
@pytest.mark.parametrize("shape", [(5, 33), *slow((3, 2000))], ids=str)
def test_layer_norm_returns_a_float8_copy(shape, return_sum, implementation):
    rng = np.random.default_rng(0)
    f = normal(rng, jnp.bfloat16, x=shape, residual=shape, bias=shape[-1:], gamma=shape[-1:], beta=shape[-1:])
    op = functools.partial(jaxft.bias_residual_layer_norm, implementation=implementation, return_sum=return_sum)
    both = jit(lambda f: op(**f, float8_scale=0.5))(f)
    alone = jit(lambda f: op(**f))(f)
    assert len(both) == 2 + return_sum
    for x, y in zip(both, alone if return_sum else (alone,), strict=False):
        np.testing.assert_array_equal(np.float32(x), np.float32(y))
    exact = oracle.bias_residual_layer_norm(**f)
    assert_close(both[-1], None, exact, 0.5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("packed", [False, True])
def test_attention_returns_float8(packed, implementation):
    rng = np.random.default_rng(0)
    qkv = normal(rng, jnp.bfloat16, qkv=(2, 20, 3, 2, 16))["qkv"]
    op, arguments = jaxft.qkv_attention, (qkv, None, jnp.arange(20)[None, None, None] < 17)
    options = {}
    if packed:
        op, arguments = jaxft.varlen_qkv_attention, (qkv.reshape(40, 3, 2, 16), jnp.array([0, 7, 30]))
        options = {"max_seqlen": 23}
    got = op(*arguments, **options, float8_scale=0.5, implementation=implementation)
    wide = op(arguments[0].astype(jnp.float32), *arguments[1:], **options, implementation="xla")
    assert_close(got, None, np.float64(wide), 0.5)
    out, lse = op(*arguments, **options, float8_scale=0.5, return_residual=True, implementation=implementation)
    assert (np.float32(out) == np.float32(got)).all() and lse.dtype == jnp.float32


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, None])
def test_half_of_a_layer(implementation):
    """The halves equal the ops that they consist of."""
    f = dense_arrays(6, 48, 32)
    rng = np.random.default_rng(3)
    more = normal(rng, jnp.bfloat16, residual=(6, 32), gamma=(32,), beta=(32,))
    run_op = functools.partial(jaxft.dense, implementation=implementation)
    y = run_op(f["x"], f["kernel"], kernel_scale=f["kernel_scale"], x_scale=2.0)
    norm = functools.partial(jaxft.bias_residual_layer_norm, implementation=implementation, float8_scale=0.5)
    expected = norm(y, f["bias"], **more)
    got = jaxft.dense_residual_layer_norm(**f, **more, x_scale=2.0, float8_scale=0.5, implementation=implementation)
    for x, z in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.float32(x), np.float32(z))

    inner = dense_arrays(6, 48, 64, seed=1)
    outer = dense_arrays(6, 64, 48, seed=2)
    more = normal(rng, jnp.bfloat16, residual=(6, 48), gamma=(48,), beta=(48,))
    h = run_op(**inner, activation="gelu", float8_scale=0.25)
    y = run_op(h, outer["kernel"], kernel_scale=outer["kernel_scale"], x_scale=0.25)
    expected = norm(y, outer["bias"], **more)
    got = jaxft.feed_forward_residual_layer_norm(
        inner["x"], inner["kernel"], inner["bias"], outer["kernel"], outer["bias"], more["gamma"], more["beta"],
        residual=more["residual"], in_kernel_scale=inner["kernel_scale"], out_kernel_scale=outer["kernel_scale"],
        inner_scale=0.25, float8_scale=0.5, implementation=implementation,
    )  # fmt: skip
    for x, z in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.float32(x), np.float32(z))


@pytest.mark.parametrize("rows", [5, *slow(64, 100, 200)])
@pytest.mark.parametrize(
    ("float8_scale", "options"), [(0.5, {}), (None, {"return_sum": True}), (0.5, {"dropout_rate": 0.3})]
)
def test_few_rows_split_the_depth(rows, float8_scale, options):
    """The partial sums are float32: nothing is rounded before the LayerNorm."""
    depth, width = 2304, 64
    f = dense_arrays(rows, depth, width)
    more = normal(np.random.default_rng(3), jnp.bfloat16, residual=(rows, width), gamma=(width,), beta=(width,))
    rng = {"dropout_rng": jax.random.key(2)} if "dropout_rate" in options else {}
    op = functools.partial(
        jaxft.dense_residual_layer_norm, **f, **more, x_scale=2.0, epsilon=1e-5, float8_scale=float8_scale, **options,
        **rng,
    )  # fmt: skip
    (record,) = jaxft.explain(functools.partial(op, implementation="triton"))
    assert record.forward.backend == "triton" and record.forward.config[0].splits > 1
    (y, *others), (z, *_) = (jax.tree.leaves(op(implementation=name)) for name in IMPLEMENTATIONS)
    product = exact_dense(f["x"], f["kernel"], f["kernel_scale"], x_scale=2.0) + np.float64(f["bias"])
    ones = jnp.ones((rows, width), jnp.float32)
    kept = reference.dropout(ones, options.get("dropout_rate", 0.0), rng.get("dropout_rng"))
    total = product * np.float64(kept) + np.float64(more["residual"])
    exact = oracle.layer_norm(total, more["gamma"], more["beta"], epsilon=1e-5)
    assert_matches_oracle(y, z, exact)
    if "return_sum" in options:
        assert_matches_oracle(others[0], jnp.asarray(total, jnp.bfloat16), total)
    if float8_scale is not None:
        assert_close(others[-1], None, exact, float8_scale)
    again = jax.tree.leaves(op(implementation="triton"))
    for x, w in zip((y, *others), again, strict=True):
        np.testing.assert_array_equal(np.float32(x), np.float32(w))


def test_arrays_made_before_a_mesh_take_the_kernels():
    """Inside of a mesh with Explicit axes, the plan of arrays that are not in the mesh is as without it."""
    f = dense_arrays(4, 1024, 32)
    more = normal(np.random.default_rng(3), jnp.bfloat16, residual=(4, 32), gamma=(32,), beta=(32,))
    op = functools.partial(jaxft.dense_residual_layer_norm, **f, **more, implementation="triton")
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    (alone,) = jaxft.explain(op)
    with jax.set_mesh(mesh):
        (inside,) = jaxft.explain(op)
    assert inside.forward == alone.forward and alone.forward.backend == "triton"


def test_split_depth_under_transformations():
    rows, depth, width = 4, 1024, 32
    f = dense_arrays(rows, depth, width)
    more = normal(np.random.default_rng(3), jnp.bfloat16, residual=(rows, width), gamma=(width,), beta=(width,))
    op = functools.partial(
        jaxft.dense_residual_layer_norm, bias=f["bias"], **more, kernel=f["kernel"], kernel_scale=f["kernel_scale"],
        float8_scale=1.0, implementation="triton",
    )  # fmt: skip
    many = jnp.stack([f["x"], f["x"][::-1]])
    for got, expected in zip(jax.vmap(op)(many), zip(*map(op, many), strict=True), strict=True):
        np.testing.assert_array_equal(np.float32(got), np.float32(jnp.stack(expected)))
    with pytest.raises(NotImplementedError, match="dense_residual_layer_norm: there is no gradient with float8"):
        jax.grad(lambda x: op(x)[0].astype(jnp.float32).sum(), allow_int=True)(f["x"])
    f["x"] = f["x"].at[0, :3].set(448.0)
    (count,) = jaxft.models.count_clipped(op, f["x"])
    assert count == ("dense_residual_layer_norm", (rows, depth), 3)


def test_matmul_adds_the_residual():
    """The matmul or the LayerNorm adds bias and residual. The results differ by one rounding of the sum."""
    f = dense_arrays(6, 48, 32)
    more = normal(np.random.default_rng(3), jnp.bfloat16, residual=(6, 32), gamma=(32,), beta=(32,))
    options = {"x_scale": 2.0, "float8_scale": 0.5, "epsilon": 1e-5, "dropout_rate": 0.0, "return_sum": False}
    arrays = f["x"], f["kernel"], more["residual"], f["bias"], more["gamma"], more["beta"], f["kernel_scale"]
    plan = dense_layer_norm.float8_plan_of("op", *arrays, **options, precision=None, implementation="xla")
    assert not plan.matmul_adds
    plans = [dataclasses.replace(plan, matmul_adds=adds) for adds in (False, True)]
    (y, y8), (z, z8) = (dense_layer_norm.run_float8(*arrays, None, plan) for plan in plans)
    sums = exact_dense(**f, residual=more["residual"], x_scale=2.0)
    exact = oracle.layer_norm(sums, more["gamma"], more["beta"], epsilon=1e-5)
    assert_matches_oracle(z, y, exact)
    assert_close(y8, None, exact, 0.5)
    assert_close(z8, None, exact, 0.5)


@pytest.mark.parametrize(
    ("rows", "depth", "width", "options", "adds"),
    [(16384, 1024, 1024, {}, True), (16384, 1024, 1024, {"dropout_rate": 0.1}, False),
     (16384, 1024, 1024, {"return_sum": True}, False), (128, 1024, 1024, {}, False), (4096, 1024, 1024, {}, False),
     (16384, 4096, 1024, {}, False), (16384, 768, 768, {}, False)],
)  # fmt: skip
def test_who_adds_the_residual(rows, depth, width, options, adds):
    """For many rows of a width of 1,024, the matmul adds. On an H100 this is faster."""
    half = functools.partial(of, dtype=jnp.bfloat16)
    arrays = of((rows, depth), FLOAT8), of((width, depth), FLOAT8), half((rows, width)), half((width,))
    options = options | ({"dropout_rng": jax.random.key(0)} if "dropout_rate" in options else {})

    def op(x, stored, residual, vector):
        return jaxft.dense_residual_layer_norm(
            x, stored.T, vector, residual, vector, vector, kernel_scale=vector, float8_scale=1.0, **options
        )

    with dispatch.target(), mock.patch.object(dense_layer_norm, "run_float8", wraps=dense_layer_norm.run_float8) as run:
        (record,) = records = jaxft.explain(op, *arrays)
    assert run.call_args.args[-1].matmul_adds == adds
    backend = "triton SplitConfig" if rows == 128 else "mosaic_gpu MosaicDenseConfig"
    assert backend in str(records) and record.forward.backend == ("triton" if rows == 128 else "ops")
    if adds:
        text = lower(op, *arrays)
        assert operations(text)[TRITON] == text.count("custom_call @mosaic_gpu") == 1


def test_a_layer_on_hopper_is_six_kernels():
    """No kernel quantises: matmuls, attention and LayerNorm write float8 themselves."""
    rows, width, inner = 4096, 768, 3072
    half = functools.partial(of, dtype=jnp.bfloat16)
    arrays = [half((rows, width)), of((rows, width), FLOAT8)]
    for depth, columns in ((width, 3 * width), (width, width), (width, inner), (inner, width)):
        arrays += [of((columns, depth), FLOAT8), of((columns,), jnp.float32), half((columns,))]
    arrays += [half((width,))] * 2

    def layer(x, x8, wq, sq, bq, wo, so, bo, wi, si, bi, wf, sf, bf, gamma, beta):
        qkv = jaxft.dense(x8, wq.T, bq, kernel_scale=sq).reshape(32, 128, 3, 12, 64)
        attended = jaxft.qkv_attention(qkv, float8_scale=1.0).reshape(rows, width)
        x, x8 = jaxft.dense_residual_layer_norm(attended, wo.T, bo, x, gamma, beta, kernel_scale=so, float8_scale=1.0)
        return jaxft.feed_forward_residual_layer_norm(
            x8, wi.T, bi, wf.T, bf, gamma, beta, residual=x, in_kernel_scale=si, out_kernel_scale=sf, float8_scale=1.0
        )

    text = lower(layer, *arrays)
    assert operations(text)[TRITON] == 3 and text.count("custom_call @mosaic_gpu") == 4
    assert operations(text)["convert"] == operations(text)["dot_general"] == 0
