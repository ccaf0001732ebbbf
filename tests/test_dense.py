"""dense: activation(x @ kernel + bias) + residual."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
import oracle
from cases import DTYPES, INTERPRET, ONE_DTYPE, check, jit, lower, normal, seeds, slow, slow_cases, some
from compare import assert_matches_oracle
from jaxft import dispatch, reference
from jaxft.kernels.triton import dense as kernel
from jaxft.tuning.dense import DenseConfig
from lowered import TRITON, of, operations

ACTIVATIONS = [None, "gelu", "gelu_tanh", "relu", "silu", "tanh"]


def check_op(floats, seed=None, precision=None, implementations=("triton",), **options):
    for gradients in (False, True):  # a gradient may need another kernel, which stores the sum
        check(
            lambda implementation, **f: jaxft.dense(
                **f, **options, precision=precision, implementation=implementation),
            lambda **f: reference.dense(**f, **options, precision=precision),
            lambda **f: oracle.dense(**f, **options),
            floats, implementations=implementations, gradients=gradients, seed=seed,
        )  # fmt: skip


def dense_floats(rng, rows, inner, outer, dtype=jnp.float32, vectors=jnp.float32, bias=True, residual=True):
    floats = normal(rng, dtype, x=(*rows, inner), kernel=(inner, outer), residual=(*rows, outer) if residual else None)
    return floats | normal(rng, vectors, bias=(outer,) if bias else None)


def attend(x, kernel, implementation):
    query, key = x[None, :, None], kernel[None, :, None]
    return jaxft.dot_product_attention(query, key, key, implementation=implementation)


OPS = {
    "dense": lambda x, kernel, **how: jaxft.dense(x, kernel, activation="gelu", **how),
    "plain": jaxft.dense,
    "gate": lambda x, kernel, **how: jaxft.dense(x, kernel, activation="gelu", gate="first", **how),
    "layer_norm": lambda x, kernel, **how: jaxft.dense_residual_layer_norm(x, kernel, None, x, None, None, **how),
    "feed_forward": lambda x, kernel, **how: jaxft.feed_forward_residual_layer_norm(
        x, kernel, None, kernel, None, None, None, **how
    ),
    "rotary": lambda x, kernel, **how: jaxft.dense_rotary(
        x, jnp.tile(kernel, (1, 3)), None, positions=np.arange(2000), num_heads=1, **how
    ),
    "loss": lambda x, kernel, **how: jaxft.linear_cross_entropy(x, kernel, np.zeros(2000, np.int32), **how).total,
    "attention": attend,
}


def calls(way):
    """Returns (op, way, implementation). The loss has no Triton kernel, and attention no argument `precision`."""
    pairs = itertools.product(OPS, [None, "xla", "triton"])
    return [(op, way, implementation) for op, implementation in pairs
            if (op, implementation) != ("loss", "triton") and (op, way) != ("attention", "argument")]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "way", "implementation"), [*calls("argument"), *calls("context"), *slow_cases(*calls("context and jit"))]
)
def test_derivatives_have_the_precision_of_the_call(op, way, implementation):
    """First and second derivatives are traced later, when the context that set the precision has ended."""
    x, kernel = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2000, 64), (64, 64)))
    precision = {"precision": "highest"} if way == "argument" else {}

    def loss(x, kernel):
        with jax.default_matmul_precision(None if precision else "highest"):
            return jnp.sum(jnp.sin(OPS[op](x, kernel, implementation=implementation, **precision)))

    run = jax.jit(loss) if way == "context and jit" else loss

    def twice(x, kernel):
        return sum(jnp.sum(gradient**2) for gradient in jax.grad(run, argnums=(0, 1))(x, kernel))

    for function in (run, twice):
        with dispatch.target(), jax.default_matmul_precision(None):
            program = str(jax.make_jaxpr(jax.grad(function, argnums=(0, 1)))(x, kernel))
        matmuls = program.count("dot_general[")
        assert matmuls == program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)")
        assert matmuls >= (9 if function is twice else 2)


@pytest.mark.parametrize(
    ("rows", "inner", "outer"), [((), 7, 5), ((2, 3), 65, 129), *slow_cases(((1,), 1, 1), ((37,), 33, 17))], ids=str
)
def test_shapes(rows, inner, outer):
    check_op(dense_floats(np.random.default_rng(0), rows, inner, outer))


@pytest.mark.parametrize("implementation", ["triton", "xla", None])
@pytest.mark.parametrize(
    ("rows", "inner", "outer"), [((0,), 3, 2), ((2, 0), 3, 2), ((2,), 0, 3), ((2,), 3, 0)], ids=str
)
def test_empty(rows, inner, outer, implementation):
    floats = dense_floats(np.random.default_rng(0), rows, inner, outer, jnp.bfloat16)
    y = jaxft.dense(**floats, activation="gelu", implementation=implementation)
    assert (y.shape, y.dtype) == ((*rows, outer), jnp.bfloat16)
    y = jaxft.dense(floats["x"], floats["kernel"], implementation=implementation)
    assert y.shape == (*rows, outer) and (y == 0.0).all()


@pytest.mark.parametrize("dtype", [DTYPES[2], *slow(DTYPES[0])])
@pytest.mark.parametrize(
    "activation", [None, "gelu", *slow(*(name for name in ACTIVATIONS if name not in (None, "gelu")))]
)
def test_activations(activation, dtype):
    """The bias is float32, whatever the other dtypes."""
    check_op(dense_floats(np.random.default_rng(1), (5,), 33, 17, dtype), activation=activation,
             implementations=["triton", "xla"])  # fmt: skip


@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize(("bias", "residual"), [(False, False), (True, False), (False, True)])
def test_optional_operands(bias, residual, dtype):
    check_op(dense_floats(np.random.default_rng(2), (5,), 33, 17, dtype, bias=bias, residual=residual))


@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize(
    ("gate", "activation", "bias", "residual"),
    [("first", "gelu", False, False), ("second", "silu", True, True),
     *slow_cases(("first", "relu", True, False), ("second", "gelu_tanh", False, True))],
)  # fmt: skip
def test_gates(gate, activation, bias, residual, dtype):
    """The result has half of the columns of the kernel, and the bias is float32."""
    floats = dense_floats(np.random.default_rng(5), (2, 5), 33, 34, dtype, bias=bias, residual=False)
    floats |= normal(np.random.default_rng(6), dtype, residual=(2, 5, 17) if residual else None)
    check_op(floats, gate=gate, activation=activation, implementations=["triton", "xla"])


@pytest.mark.parametrize("config", range(4))
def test_gate_with_any_config(config):
    """A block has columns of both halves. With few columns, the least block of a matmul is wider than a half."""
    floats = dense_floats(np.random.default_rng(7), (21,), 101, 66, residual=False)
    options = {"activation": "tanh", "gate": "second", "precision": "float32", "config": CONFIGS[config]}

    def run(x, kernel_, bias, interpret=INTERPRET):
        return kernel.forward(x, kernel_, bias, None, **options, interpret=interpret, also_product=True)

    got = jit(run)(*floats.values())
    expected = jit(lambda f: [reference.dense(**f, activation="tanh", gate="second"),
                              reference.dense(f["x"], f["kernel"])])(floats)  # fmt: skip
    exact = [oracle.dense(**floats, activation="tanh", gate="second"), oracle.dense(floats["x"], floats["kernel"])]
    assert_matches_oracle(got, expected, exact)
    arrays = [of(x.shape, jnp.bfloat16) for x in floats.values()]
    assert operations(lower(lambda *a: run(*a, interpret=False), *arrays))[TRITON] == 1


def test_gate_is_in_the_matmul():
    """One kernel computes the layer: Triton's with few rows, Mosaic GPU's with many. Triton has the gradient."""
    for rows, kernels in ((32, (1, 0)), (16384, (0, 1))):
        arrays = [of(shape, jnp.bfloat16) for shape in ((rows, 768), (768, 2304))]

        def run(x, kernel_):
            return jaxft.dense(x, kernel_, activation="gelu", gate="first")

        def gradients(x, kernel_):
            out, pull_back = jax.vjp(run, x, kernel_)
            return out, pull_back(out)

        with jax.default_matmul_precision(None):
            texts = [lower(f, *arrays) for f in (run, gradients)]
        found, back = map(operations, texts)
        assert (found[TRITON], texts[0].count("@mosaic_gpu_v2")) == kernels and found["dot_general"] == 0
        assert (back[TRITON], texts[1].count("@mosaic_gpu_v2")) == (kernels[0] + 1, kernels[1])
        assert back["dot_general"] == 2 and not any(x[name] for x in (found, back) for name in ("slice", "concatenate"))


@pytest.mark.parametrize(
    ("width", "dtype", "reason"),
    [(2304, jnp.float32, "it has no gate in float32"), (400, jnp.bfloat16, "with a gate it must be a multiple of 64")],
)
def test_gates_that_mosaic_gpu_refuses(width, dtype, reason):
    options = {"activation": "gelu", "gate": "first", "implementation": "mosaic_gpu"}
    with dispatch.target(), pytest.raises(NotImplementedError, match=reason):
        with jax.default_matmul_precision(None):
            jax.eval_shape(lambda x, k: jaxft.dense(x, k, **options), of((128, 768), dtype), of((768, width), dtype))


def test_float32_at_the_default_precision():
    """On a GPU the default is TF32, at this size in plain jnp as well."""
    with jax.default_matmul_precision(None):
        check_op(dense_floats(np.random.default_rng(4), (256,), 512, 256))


@pytest.mark.parametrize("precision", ["highest", *slow("float32", jax.lax.Precision.HIGHEST)])
def test_precision(precision):
    """With TF32 devices the result is three digits better than the default, which the oracle rule would not notice."""
    floats = dense_floats(np.random.default_rng(3), (37,), 129, 17)
    with jax.default_matmul_precision(None):
        check_op(floats, precision=precision)
        for implementation in ("triton", "xla"):
            y = jaxft.dense(**floats, precision=precision, implementation=implementation)
            assert np.abs(y - oracle.dense(**floats)).max() < 1e-4  # TF32: 1e-2


CONFIGS = [DenseConfig(m, n, k, warps, stages) for m, n, k, warps, stages in
           ((16, 16, 16, 1, 1), (64, 32, 16, 4, 3), (16, 64, 128, 4, 2), (128, 128, 32, 8, 4))]  # fmt: skip


@pytest.mark.parametrize("dtype", ONE_DTYPE)
def test_any_config(dtype):
    floats = dense_floats(np.random.default_rng(5), (37,), 101, 67, dtype)
    factors = floats["x"], floats["kernel"]
    expected = jit(lambda: [reference.dense(**floats, activation="silu"), reference.dense(*factors)])()
    exact = [oracle.dense(**floats, activation="silu"), oracle.dense(*factors)]
    for config in CONFIGS:

        def run(f, config=config):
            return kernel.forward(**f, activation="silu", precision=dispatch.matmul_precision(), config=config,
                                  interpret=INTERPRET, also_product=True)  # fmt: skip

        assert_matches_oracle(jit(run)(floats), expected, exact, seed=config)


@pytest.mark.parametrize(
    ("dtype", "precision", "rows", "width", "groups", "chains"),
    [(jnp.float32, "float32", 1, 40, True, True), (jnp.float32, "float32", 9, 1, True, True),
     (jnp.float32, "float32", 9, 40, True, False), (jnp.float32, "tf32", 1, 40, False, False),
     (jnp.bfloat16, "float32", 1, 40, False, False)],
)  # fmt: skip
def test_only_matmuls_in_full_precision_add_in_groups(dtype, precision, rows, width, groups, chains, monkeypatch):
    """One long chain of additions would lose digits. If one side is a vector, each block is added in chains as well."""
    seen, own = [], kernel.common.dot_in_short_chains
    monkeypatch.setattr(kernel.common, "dot_in_short_chains", lambda *x, **how: seen.append(x) or own(*x, **how))

    def matmul(x, y):
        config = DenseConfig(16, 16, 16, 4, 1)
        return kernel.forward(x, y, None, None, activation=None, precision=precision, config=config, interpret=True)

    found = str(jax.make_jaxpr(matmul)(jnp.zeros((rows, 256), dtype), jnp.zeros((256, width), dtype)))
    assert found.count("while[") + found.count("scan[") == 1 + groups and bool(seen) == chains


@pytest.mark.parametrize("tiles", [kernel.BAND, kernel.BAND + 1, 2 * kernel.BAND, 3 * kernel.BAND - 1])
@pytest.mark.parametrize("x64", [True, *slow(False)])
def test_bands_visit_every_tile_once(tiles, x64):
    """There is a program for each tile. The last row and the last column of tiles are not whole."""
    floats = normal(np.random.default_rng(7), jnp.float32, x=(16 * tiles - 3, 17), kernel=(17, 37))

    def run(f):
        return kernel.forward(**f, bias=None, residual=None, activation=None, precision="float32",
                              config=DenseConfig(16, 16, 16, 1, 1), interpret=INTERPRET)[0]  # fmt: skip

    with jax.enable_x64(x64):
        got = jit(run)(floats)
    assert_matches_oracle(got, jit(lambda f: reference.dense(**f))(floats), oracle.dense(**floats))


@pytest.mark.parametrize(
    "activation", ["gelu", "silu", *slow(*(name for name in reference.ACTIVATIONS if name not in ("gelu", "silu")))]
)
def test_gradients_survive_an_overflowing_sum(activation):
    """The 16-bit matmul does not overflow, and the activation is finite."""
    x, kernel = jnp.full((16, 16), -60.0, jnp.float16), jnp.full((16, 16), 60.0, jnp.float16)
    bias = jnp.full(16, -20000.0, jnp.float32)
    for implementation in ("triton", "xla"):

        def run(*arrays, implementation=implementation):
            y = jaxft.dense(*arrays, activation=activation, implementation=implementation)
            return y.astype(jnp.float32).sum()

        assert all(not g.any() for g in jax.grad(run, (0, 1, 2))(x, kernel, bias))


def test_gradient_of_few_rows_repeats_no_matmul():
    """The forward kernel keeps the sum. XLA multiplies twice, for the gradients of x and kernel."""
    arrays = [of(shape, jnp.bfloat16) for shape in ((128, 768), (768, 3072), (3072,), (128, 3072))]

    def gradients(x, kernel, bias, dy):
        return jax.vjp(lambda *a: jaxft.dense(*a, activation="gelu"), x, kernel, bias)[1](dy)

    found = operations(lower(gradients, *arrays))
    assert (found["dot_general"], found[TRITON]) == (2, 2)


A100, L4, H100, B200 = (8, 0), (8, 9), (9, 0), (10, 0)


@pytest.mark.parametrize(
    ("capability", "rows", "depth", "width", "dtype", "found"),
    [
        (A100, 1025, 768, 3072, "bfloat16", "dense_fwd"),
        (L4, 16384, 768, 3072, "float16", "dense_fwd"),
        (H100, 4097, 768, 3072, "bfloat16", "dense_fwd"),
        (H100, 4096, 768, 3080, "bfloat16", "dense_fwd"),
        (H100, 16384, 128, 512, "bfloat16", "dense_fwd"),
        (H100, 4096, 768, 3072, "bfloat16", "mpmd_map"),
        (B200, 1024, 768, 3072, "bfloat16", "dense_fwd"),
        (B200, 1025, 768, 3072, "bfloat16", "bias_activation_fwd"),
        (A100, 1024, 768, 768, "bfloat16", "dense_fwd"),
        (A100, 1025, 768, 768, "bfloat16", "bias_activation_fwd"),
        (H100, 4097, 3072, 768, "bfloat16", "bias_activation_fwd"),
        (A100, 4096, 768, 3072, "float32", "bias_activation_fwd"),
        (H100, 4097, 768, 3072, "float32", "bias_activation_fwd"),
    ],
)
def test_activation_runs_in_the_faster_kernel(capability, rows, depth, width, dtype, found):
    arrays = [of(shape, dtype) for shape in ((rows, depth), (depth, width), (width,))]
    with dispatch.target("NVIDIA card", capability):
        program = str(jax.make_jaxpr(lambda *a: jaxft.dense(*a, activation="gelu"))(*arrays))
    kernels = "dense_fwd", "bias_activation_fwd", "mpmd_map"
    assert [name for name in kernels if name in program] == [found]


@pytest.mark.parametrize(
    ("rows", "precision", "forward", "both"),
    [(128, None, 0, 0), (129, None, 0, 1), (512, None, 0, 1), (513, None, 1, 2), (128, "highest", 1, 2)],
)
def test_few_tf32_rows_take_xla(rows, precision, forward, both):
    """XLA fuses the activation into its matmul; for more rows, a Triton kernel follows the matmul."""
    arrays = [of(shape, jnp.float32) for shape in ((rows, 768), (768, 3072), (3072,))]

    def dense(*a):
        return jaxft.dense(*a, activation="gelu")

    def gradients(*a):
        return jax.value_and_grad(lambda *a: dense(*a).sum(), (0, 1, 2))(*a)

    with jax.default_matmul_precision(precision):
        assert [operations(lower(f, *arrays))[TRITON] for f in (dense, gradients)] == [forward, both]


@pytest.mark.parametrize(("rows", "kernels"), [(1, 0), (128, 0), (129, 1)])
def test_few_rows_of_deep_matmuls_take_xla(rows, kernels):
    """The result and the gradients are XLA's. A backward pass then has one Triton kernel."""
    arrays = [of(shape, jnp.bfloat16) for shape in ((rows, 3072), (3072, 768), (768,))]

    def dense(*a, implementation=None):
        return jaxft.dense(*a, activation="gelu", implementation=implementation)

    def gradients(*a):
        return jax.value_and_grad(lambda *a: dense(*a).astype(jnp.float32).sum(), (0, 1, 2))(*a)

    assert [operations(lower(f, *arrays))[TRITON] for f in (dense, gradients)] == [kernels, 1 + kernels]
    assert operations(lower(lambda *a: dense(*a, implementation="triton"), *arrays))[TRITON] == 1


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_row_reaches_no_other_row(implementation):
    clean = dense_floats(np.random.default_rng(6), (37,), 33, 17)
    rows = np.array([0, 3, 36])
    poisoned = clean | {"x": clean["x"].at[rows, 5].set(jnp.array([np.nan, np.inf, -np.inf]))}
    run = jit(lambda floats: jaxft.dense(**floats, activation="gelu_tanh", implementation=implementation))
    expected, got = np.asarray(run(clean)), np.asarray(run(poisoned))
    np.testing.assert_array_equal(np.delete(got, rows, 0), np.delete(expected, rows, 0))
    assert np.isnan(got[0]).all()


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_reruns_are_bitwise_equal(implementation):
    floats = dense_floats(np.random.default_rng(4), (37,), 64, 33, jnp.bfloat16)
    run = jit(lambda floats: jaxft.dense(**floats, activation="gelu", implementation=implementation))
    np.testing.assert_array_equal(run(floats), run(floats))


@pytest.mark.parametrize("seed", seeds(4))
def test_random(seed):
    rng = np.random.default_rng(seed)
    rows = tuple(int(n) for n in rng.choice([1, 2, 5, 13], rng.integers(0, 3)))
    inner, outer = (int(n) for n in rng.choice([1, 3, 17, 64, 100], 2))
    dtype, vectors = (jnp.dtype(str(rng.choice(["float32", "float16", "bfloat16"]))) for _ in range(2))
    floats = dense_floats(rng, rows, inner, outer, dtype, vectors, *(bool(b) for b in rng.random(2) < 0.6))
    check_op(floats, seed, activation=some(rng, str(rng.choice(ACTIVATIONS[1:]))))


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_differentiation_keeps_the_value(implementation, activation):
    """256 + 1 needs the float32 sum of the kernel, so the kernel must run under differentiation, too."""
    x, kernel = jnp.array([[256.0, 1.0]], jnp.bfloat16), jnp.ones((2, 1), jnp.bfloat16)

    def run(x):
        return jaxft.dense(x, kernel, jnp.array([-256.0]), activation=activation, implementation=implementation)

    np.testing.assert_array_equal(jax.vjp(run, x)[0], run(x))
    assert implementation == "xla" or "pallas_call" in str(jax.make_jaxpr(jax.vjp, static_argnums=0)(run, x))


X, KERNEL = np.ones((2, 8), np.float32), np.ones((8, 4), np.float32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": None}, TypeError, "x must be an array, got NoneType"),
        ({"x": X.astype(np.int32)}, TypeError, "x must be an array of floats, got int32"),
        ({"x": np.ones((), np.float32)}, ValueError,
         "x and kernel must have shapes [..., K] and [K, F], got () and (8, 4)"),
        ({"x": X[:, :7]}, ValueError, "x and kernel must have shapes [..., K] and [K, F], got (2, 7) and (8, 4)"),
        ({"kernel": KERNEL[None]}, ValueError,
         "x and kernel must have shapes [..., K] and [K, F], got (2, 8) and (1, 8, 4)"),
        ({"kernel": KERNEL.astype(bool)}, TypeError, "kernel must be an array of floats, got bool"),
        ({"kernel": KERNEL.astype(np.float16)}, TypeError, "kernel must have the dtype of x, float32, got float16"),
        ({"bias": np.ones((8,), np.float32)}, ValueError, "bias must have shape (4,), got (8,)"),
        ({"bias": np.ones((4,), np.int32)}, TypeError, "bias must be an array of floats, got int32"),
        ({"activation": "swish"}, ValueError,
         "activation must be None or one of ('gelu', 'gelu_tanh', 'relu', 'silu', 'tanh'), got 'swish'"),
        ({"activation": np.array(["gelu", "relu"])}, ValueError, "activation must be None or one of ('gelu',"),
        ({"gate": "third", "activation": "gelu"}, ValueError, "gate must be None, 'first' or 'second', got 'third'"),
        ({"gate": "first"}, ValueError, "a gate needs an activation, got None"),
        ({"gate": "first", "activation": "gelu", "kernel": KERNEL[:, :3]}, ValueError,
         "with a gate, the columns of kernel must have two halves, got (8, 3)"),
        ({"gate": "first", "activation": "gelu", "residual": X[:, :4]}, ValueError,
         "residual must have shape (2, 2), got (2, 4)"),
        ({"residual": np.ones((4,), np.float32)}, ValueError, "residual must have shape (2, 4), got (4,)"),
        ({"residual": np.ones((2, 4), np.float16)}, TypeError,
         "residual must have the dtype of x, float32, got float16"),
        ({"residual": 1.0}, TypeError, "residual must be an array, got float"),
        ({"precision": "bogus"}, ValueError, "precision must be one that jnp.matmul takes, got 'bogus'"),
        ({"precision": "bogus", "implementation": "triton"}, ValueError, "precision must be one that jnp.matmul takes"),
        ({"implementation": "fast"}, ValueError,
         "implementation must be None or one of ('triton', 'mosaic_gpu', 'cudnn', 'xla'), got 'fast'"),
        ({"implementation": "cudnn"}, NotImplementedError,
         "there is no 'cudnn' implementation, only ('mosaic_gpu', 'triton', 'xla')"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)  # fmt: skip
def test_errors(changes, error, message):
    with pytest.raises(error, match=re.escape(f"dense: {message}")):
        jaxft.dense(**{"x": X, "kernel": KERNEL, **changes})


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_kernel_with_parts(implementation, has_bias):
    x, kernel, bias = (np.random.default_rng(0).standard_normal(s, np.float32) for s in ((2, 3, 8), (8, 3, 4), (3, 4)))
    bias = bias if has_bias else None

    def run(x, kernel, bias):
        return jnp.sum(jnp.sin(jaxft.dense(x, kernel, bias, implementation=implementation)))

    def plain(x, kernel, bias):
        y = jnp.einsum("btk,kpf->btpf", x, kernel, precision="highest")
        return jnp.sum(jnp.sin(y if bias is None else y + bias))

    arguments = (0, 1, 2) if has_bias else (0, 1)
    with jax.default_matmul_precision("highest"):
        found, expected = (jit(jax.value_and_grad(f, arguments))(x, kernel, bias) for f in (run, plain))
        shape = jaxft.dense(x, kernel, bias, implementation=implementation).shape
    assert shape == (2, 3, 3, 4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-6), found, expected)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"activation": "gelu"}, "takes no activation"), ({"bias": jnp.ones(12)}, r"bias must have shape \(3, 4\)"),
        ({"residual": jnp.ones((2, 12))}, "takes no activation, residual or"),
        ({"x": jnp.ones((2, 8), jnp.float8_e4m3fn), "kernel": jnp.ones((8, 3, 4), jnp.float8_e4m3fn),
          "kernel_scale": jnp.ones(12)}, "takes no .* float8 arrays"),
    ],
)  # fmt: skip
def test_errors_of_a_kernel_with_parts(options, text):
    with pytest.raises(ValueError, match=text):
        jaxft.dense(**{"x": jnp.ones((2, 8)), "kernel": jnp.ones((8, 3, 4)), **options})
