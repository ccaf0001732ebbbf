"""feed_forward_residual_layer_norm: LN(dropout(act(x @ W1 + b1) @ W2 + b2) + x)."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
import oracle
from cases import ONE_DTYPE, check, jit, lower, normal, seeds, slow, slow_cases
from jaxft import dispatch, reference
from jaxft.dropout import dropout_mask
from jaxft.ops import dense as dense_op
from jaxft.ops import layer_norm
from jaxft.tuning import search as tuning_search
from jaxft.tuning import table as tuning_table
from test_dense_mosaic import interpreted, of, runs

FEED_FORWARD = jaxft.feed_forward_residual_layer_norm
VECTORS = ("in_bias", "out_bias", "gamma", "beta")


def floats_of(rng, rows, width, inner, dtype=jnp.bfloat16, vectors=jnp.float32, missing=()):
    floats = normal(rng, dtype, x=(*rows, width), in_kernel=(width, inner), out_kernel=(inner, width))
    sizes = {name: (inner if name == "in_bias" else width,) for name in VECTORS if name not in missing}
    return {
        **floats, **normal(rng, vectors, **sizes), "in_kernel": floats["in_kernel"] * max(width, 1) ** -0.5,
        "out_kernel": floats["out_kernel"] * max(inner, 1) ** -0.5,
    }  # fmt: skip


def exact(x, in_kernel, in_bias, out_kernel, out_bias, gamma, beta, *, activation="gelu", gate=None, residual=None,
          **options):  # fmt: skip
    h = oracle.dense(x, in_kernel, in_bias, activation=activation, gate=gate)
    residual = x if residual is None else residual
    return oracle.bias_residual_layer_norm(oracle.dense(h, out_kernel), out_bias, residual, gamma, beta, **options)


def check_op(floats, implementations=("triton",), seed=None, **options):
    missing = {name: None for name in VECTORS if name not in floats}
    check(
        lambda implementation, **f: FEED_FORWARD(**f, **missing, **options, implementation=implementation),
        lambda **f: reference.feed_forward_residual_layer_norm(**f, **missing, **options),
        lambda **f: exact(**f, **missing, **options),
        floats, implementations=implementations, seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize("activation", ["gelu", *slow("silu")])
def test_values(activation, dtype):
    floats = floats_of(np.random.default_rng(0), (2, 5), 40, 530, dtype)
    check_op(floats, activation=activation, epsilon=1e-12)


@pytest.mark.parametrize("missing", [VECTORS, *slow(*((name,) for name in VECTORS))], ids=str)
def test_optional_vectors(missing):
    check_op(floats_of(np.random.default_rng(1), (5,), 17, 40, missing=missing))


def test_half_of_a_pre_norm_layer():
    """The residual is not the input, the sum is returned, and the LayerNorm has no beta."""
    rng = np.random.default_rng(2)
    floats = floats_of(rng, (2, 5), 17, 40, missing=("in_bias", "out_bias", "beta"))
    floats |= normal(rng, jnp.bfloat16, residual=(2, 5, 17))
    check_op(floats, implementations=("triton", "xla"), return_sum=True)


@pytest.mark.parametrize("gate", ["first", *slow("second")])
def test_gate(gate):
    """The second layer of ModernBERT's half has half of the columns of the first."""
    rng = np.random.default_rng(3)
    floats = floats_of(rng, (2, 5), 17, 80, missing=("in_bias", "out_bias", "beta"))
    floats["out_kernel"] = floats["out_kernel"][:40]
    floats |= normal(rng, jnp.bfloat16, residual=(2, 5, 17))
    check_op(floats, implementations=("triton", "xla"), gate=gate, return_sum=True)
    with dispatch.target():
        (record,) = jaxft.explain(
            lambda x, w, v: FEED_FORWARD(x, w, None, v, None, None, None, gate=gate),
            *(of(shape, jnp.bfloat16) for shape in ((4096, 768), (768, 2304), (1152, 768))),
        )  # fmt: skip
    assert [plan.forward.backend for plan in record.forward.config] == ["mosaic_gpu", "ops"]
    assert record.backward.backend == "ops"  # no kernel stores the derivatives of a gate


@pytest.mark.parametrize("seed", seeds(2))
def test_random(seed):
    rng = np.random.default_rng(seed)
    rows = tuple(int(n) for n in rng.choice([1, 2, 5, 13], rng.integers(0, 3)))
    width, inner = int(rng.choice([3, 17, 64, 100])), int(rng.choice([1, 3, 512, 601]))
    dtype, vectors = (jnp.dtype(str(rng.choice(["float32", "float16", "bfloat16"]))) for _ in range(2))
    missing = [name for name in VECTORS if rng.random() < 0.2]
    activation = str(rng.choice(list(reference.ACTIVATIONS)))
    floats = floats_of(rng, rows, width, inner, dtype, vectors, missing)
    if rng.random() < 0.5:
        floats |= normal(rng, dtype, residual=(*rows, width))
    check_op(floats, activation=activation, seed=seed, return_sum=bool(rng.random() < 0.5))


@pytest.mark.parametrize("rows", [(0,), (2, 0)], ids=str)
def test_empty(rows):
    floats = floats_of(np.random.default_rng(0), rows, 4, 3)
    for implementation in ("triton", "xla", None):
        assert FEED_FORWARD(**floats, implementation=implementation).shape == (*rows, 4)


def dropped(key, shape, **options):
    """Returns the mask of dropped elements. Normalised elements are 1 where they are dropped, else 0."""
    rows, width = shape
    floats = {"x": (rows, width), "in_kernel": (width, 128), "in_bias": (128,), "out_kernel": (128, width)}
    floats = {name: jnp.zeros(sizes, jnp.bfloat16) for name, sizes in floats.items()}
    y = FEED_FORWARD(
        **floats, out_bias=jnp.ones(width), gamma=None, beta=None, dropout_rate=0.3, dropout_rng=key, **options
    )
    return np.asarray(y < 0)


def test_dropout(key):
    """The op drops the elements that `bias_residual_layer_norm` drops."""
    zeros = jnp.zeros((66, 64), jnp.bfloat16)
    y = jaxft.bias_residual_layer_norm(
        zeros, jnp.ones(64), zeros, None, None, dropout_rate=0.3, dropout_rng=key, implementation="xla"
    )
    assert 1000 < (y < 0).sum() < 1500
    for implementation in ("triton", "xla"):
        np.testing.assert_array_equal(dropped(key, zeros.shape, implementation=implementation), y < 0)


# --- By Mosaic GPU, on a Hopper GPU or in its interpreter --------------------------------------------------------


@pytest.fixture
def mosaic(monkeypatch):
    """Runs the pair of kernels under test on a CPU. XLA runs everything else."""
    with interpreted():
        if dispatch.platform() == "cuda" and jax.default_backend() != "gpu":
            plan_of_norm, plan_of_dense = layer_norm.plan_of, dense_op.plan_of

            def norm_by_xla(*arrays, **options):
                return plan_of_norm(*arrays, **options | {"implementation": "xla"})

            def second_by_xla(*arguments, **more):
                *others, activation, precision, implementation = arguments
                return plan_of_dense(*others, activation, precision, implementation if activation else "xla", **more)

            monkeypatch.setattr(layer_norm, "plan_of", norm_by_xla)
            monkeypatch.setattr(dense_op, "plan_of", second_by_xla)
        yield


@runs
@pytest.mark.parametrize(
    ("activation", "dtype", "missing"),
    [("gelu", jnp.bfloat16, ()), ("gelu_tanh", jnp.float16, VECTORS),
     *slow_cases(*((a, jnp.bfloat16, ()) for a in reference.ACTIVATIONS if a != "gelu"),
                 ("gelu", jnp.float16, ("out_bias",)), ("gelu", jnp.float16, ("in_bias",)))],
)  # fmt: skip
def test_mosaic_gradient_matches_the_oracle(activation, dtype, missing, mosaic):
    rng = np.random.default_rng(4)
    floats = floats_of(rng, (3, 66), 64, 208, dtype, missing=missing)
    check_op(floats, ("mosaic_gpu",), activation=activation)
    if missing:
        floats |= normal(rng, dtype, residual=(3, 66, 64))
        check_op(floats, ("mosaic_gpu",), activation=activation, return_sum=True)


@runs
def test_nan_stays_in_its_row(mosaic):
    """The stored 8-bit derivatives of a NaN are numbers."""
    floats = floats_of(np.random.default_rng(4), (66,), 64, 128)

    def gradient(x):
        rest = {name: a for name, a in floats.items() if name != "x"}
        return jax.grad(
            lambda x: jnp.sum(FEED_FORWARD(x, **rest, implementation="mosaic_gpu").astype(jnp.float32) ** 2)
        )(x)

    got, clean = gradient(floats["x"].at[3, 5].set(jnp.nan)), gradient(floats["x"])
    assert jnp.isnan(got[3]).all()
    assert (jnp.delete(got, 3, axis=0) == jnp.delete(clean, 3, axis=0)).all()


@pytest.mark.slow
@runs
def test_gradient_with_dropout(key, mosaic):
    """The gradient drops the elements that the reference drops for the same key."""
    expected = dropped(key, (66, 64), implementation="xla")
    np.testing.assert_array_equal(dropped(key, (66, 64), implementation="mosaic_gpu"), expected)
    floats = floats_of(np.random.default_rng(5), (66,), 64, 128)
    options = {"dropout_rate": 0.3, "dropout_rng": key}
    check(
        lambda implementation, **f: FEED_FORWARD(**f, **options, implementation=implementation),
        lambda **f: reference.feed_forward_residual_layer_norm(**f, **options),
        lambda **f: exact(**f, rate=0.3, keep=np.asarray(dropout_mask(key, 0.3, (66, 64)))),
        floats, implementations=("mosaic_gpu",),
    )  # fmt: skip


@runs
def test_second_derivatives(mosaic):
    """The 8-bit derivatives of the activation have no derivatives of their own."""
    floats = floats_of(np.random.default_rng(6), (66,), 64, 128)
    floats["out_kernel"] = 4 * floats["out_kernel"]  # otherwise the residual would dominate

    def twice(f, floats):
        def loss(f32):
            arrays = {name: a.astype(floats[name].dtype) for name, a in f32.items()}
            return jnp.sum(jnp.sin(f(**arrays).astype(jnp.float32)))

        def of_gradients(f32):
            return sum(jnp.sum(g * g) for g in jax.tree.leaves(jax.grad(loss)(f32)))

        return jax.grad(of_gradients)(jax.tree.map(lambda a: a.astype(jnp.float32), floats))

    got = twice(functools.partial(FEED_FORWARD, activation="gelu", implementation="mosaic_gpu"), floats)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), floats)
    expected = twice(functools.partial(reference.feed_forward_residual_layer_norm, activation="gelu"), wide)
    for name, exact in expected.items():
        assert jnp.linalg.norm(got[name] - exact) < 0.02 * jnp.linalg.norm(exact), name


def gradients(activation="gelu", **options):
    def loss(*arrays):
        return jnp.sum(FEED_FORWARD(*arrays, activation=activation, **options).astype(jnp.float32))

    return jax.grad(loss, argnums=tuple(range(7)))


def arrays_of(rows, width, inner, dtype=jnp.bfloat16):
    return (of((rows, width), dtype), of((width, inner), dtype), of((inner,), dtype), of((inner, width), dtype),
            of((width,), dtype), of((width,), dtype), of((width,), dtype))  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "dtype", "kernels"),
    [
        *slow_cases(((16384, 1024, 4096), jnp.float16, 2)),  # the first layer and its gradient
        ((4096, 768, 3072), jnp.bfloat16, 3),  # the second layer, too
        ((4096, 768, 3072), jnp.float32, 0),
        ((128, 768, 3072), jnp.bfloat16, 0),  # Triton is faster
        ((4100, 768, 3072), jnp.bfloat16, 0),  # would cost copies
    ],
)
def test_selection_follows_shape_and_dtype(shape, dtype, kernels):
    text = lower(gradients(), *arrays_of(*shape, dtype))
    assert text.count("@mosaic_gpu_v2") == kernels
    assert ("bias_activation_bwd" in text) == (kernels == 0)


def test_both_layers_use_the_devices_table(monkeypatch):
    """A second device of the process has a table that differs in the second layer only."""
    second = {"rows=4096,depth=3072,width=768,activation=1,itemsize=2": {"implementation": "xla"}}
    tables = {"other": {"dense_implementation": second}}
    monkeypatch.setattr(tuning_table, "_table", lambda kind: tables.get(kind, {}))
    found = []
    for kind in ("one", "other"):
        with dispatch.target(kind):
            traced = jax.jit(lambda *a: FEED_FORWARD(*a)).trace(*arrays_of(4096, 768, 3072))
            found.append(str(traced.jaxpr).count("dot_general"))
    assert found == [0, 1]


def test_autotune_tunes_the_gradient_kernel():
    arrays = arrays_of(4096, 768, 3072)
    with dispatch.target():
        for fn, launched in ((FEED_FORWARD, False), (gradients(), True)):
            _, asked = tuning_search._trace(fn, arrays, {})
            (entry,) = (entry for entry in asked if entry[0] == "dense_mosaic_gradient")
            assert tuning_search._matters(fn, arrays, {}, entry, asked[entry][0]) == launched


def test_forward_pass_equals_the_two_ops():
    def two(x, in_kernel, in_bias, out_kernel, *rest):
        h = jaxft.dense(x, in_kernel, in_bias, activation="gelu")
        return jaxft.dense_residual_layer_norm(h, out_kernel, rest[0], x, *rest[1:])

    for rows in (128, 4096):
        texts = [lower(run, *arrays_of(rows, 768, 3072)) for run in (FEED_FORWARD, two)]
        for call in ("@mosaic_gpu_v2", "triton", "dot_general"):
            assert texts[0].count(call) == texts[1].count(call)


def test_second_derivatives_lower():
    def twice(*arrays):
        return jax.grad(lambda *a: sum(jnp.sum(g.astype(jnp.float32)) for g in gradients()(*a)))(*arrays)

    lower(twice, *arrays_of(4096, 256, 1024))


def test_gradients_of_shared_kernels_multiply_in_16_bits():
    """The products are added up in float32. TF32 factors would take four times as long."""
    x, *others = arrays_of(4096, 256, 1024)

    def loss(*arrays):
        run = jax.vmap(lambda x: FEED_FORWARD(x, *arrays[1:]))
        return jnp.sum(run(arrays[0]).astype(jnp.float32))

    text = lower(jax.grad(loss, argnums=tuple(range(7))), of((2, *x.shape), x.dtype), *others)
    factors = re.findall(r"dot_general .* : \((tensor<\S+>, tensor<\S+>)\) -> tensor<(?:2x)?1024x256xf32>", text)
    assert factors
    assert all("f32" not in both for both in factors)


def test_shards():
    specs = jax.sharding.PartitionSpec("x"), *[jax.sharding.PartitionSpec()] * 6
    text = lower(
        lambda *a: jax.shard_map(gradients("silu"), in_specs=specs, out_specs=specs)(*a), *arrays_of(4096, 256, 1024)
    )
    assert text.count("@mosaic_gpu_v2") == 3


# --- Errors ------------------------------------------------------------------------------------------------------

GOOD = {
    "x": np.ones((2, 4), np.float32), "in_kernel": np.ones((4, 6), np.float32), "in_bias": None,
    "out_kernel": np.ones((6, 4), np.float32), "out_bias": None, "gamma": None, "beta": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"in_kernel": np.ones((5, 6), np.float32)}, ValueError,
         "x and in_kernel must have shapes [..., K] and [K, F], got (2, 4) and (5, 6)"),
        ({"in_kernel": np.ones((4, 6), np.float16)}, TypeError, "in_kernel must have the dtype of x, float32"),
        ({"out_kernel": np.ones((6, 5), np.float32)}, ValueError, "out_kernel must have shape (6, 4), got (6, 5)"),
        ({"out_kernel": np.ones((6, 4), np.float16)}, TypeError, "out_kernel must have the dtype of x, float32"),
        ({"gate": "both"}, ValueError, "gate must be None, 'first' or 'second', got 'both'"),
        ({"gate": "first"}, ValueError, "out_kernel must have shape (3, 4), got (6, 4)"),
        ({"gate": "first", "in_kernel": np.ones((4, 5), np.float32)}, ValueError,
         "with a gate, the columns of in_kernel must have two halves, got (4, 5)"),
        ({"in_bias": np.ones(4, np.float32)}, ValueError, "in_bias must have shape (6,), got (4,)"),
        ({"out_bias": np.ones(6, np.float32)}, ValueError, "out_bias must have shape (4,), got (6,)"),
        ({"gamma": np.ones(6, np.float32)}, ValueError, "gamma must have shape (4,), got (6,)"),
        ({"beta": [1, 2, 3, 4]}, TypeError, "beta"),
        ({"activation": "swish"}, ValueError,
         "activation must be one of ('gelu', 'gelu_tanh', 'relu', 'silu', 'tanh'), got 'swish'"),
        ({"activation": None}, ValueError, "activation must be one of ('gelu',"),
        ({"residual": np.ones((2, 5), np.float32)}, ValueError, "residual must have shape (2, 4), got (2, 5)"),
        ({"residual": np.ones((2, 4), np.float16)}, TypeError, "residual must have the dtype of x, float32"),
        ({"return_sum": None}, TypeError, "return_sum must be True or False, got NoneType"),
        ({"epsilon": 0}, ValueError, "epsilon must be positive, got 0"),
        ({"dropout_rate": 1.0}, ValueError, "dropout_rate must be in [0, 1), got 1.0"),
        ({"precision": "most"}, ValueError, "precision must be one that jnp.matmul takes, got 'most'"),
        ({"implementation": "cuda"}, ValueError, "implementation must be None or one of"),
    ],
)  # fmt: skip
def test_errors(changes, error, message):
    with pytest.raises(error, match=re.escape("feed_forward_residual_layer_norm: ") + ".*" + re.escape(message)):
        FEED_FORWARD(**{**GOOD, **changes})


@pytest.mark.parametrize("name", ["in_bias", "out_bias", "gamma", "beta"])
@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
def test_named_implementation_names_the_unsupported_argument(name, implementation):
    with jax.enable_x64(True), dispatch.target():
        values = {**GOOD, name: jnp.ones(6 if name == "in_bias" else 4, jnp.float64)}
        with pytest.raises(NotImplementedError, match=f"^feed_forward_residual_layer_norm: .* {name} is float64"):
            FEED_FORWARD(**values, implementation=implementation)


def test_implementation_reaches_both_layers(monkeypatch):
    seen = []
    original = dense_op.plan_of

    def plan_of(*arguments, **more):
        seen.append(arguments[-1])
        return original(*arguments, **more)

    monkeypatch.setattr(dense_op, "plan_of", plan_of)
    jit(functools.partial(FEED_FORWARD, implementation="triton"))(**GOOD)
    assert seen == ["triton"] * 2
