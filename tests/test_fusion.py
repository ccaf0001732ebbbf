"""`jaxft.fuse` on functions as users write them: what is found, and how exact it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from cases import in_float64, slow
from compare import errors, magnitude, ulp
from fusion_cases import CASES, normal
from jaxft.fusion.report import Checked, Checks, _error

DTYPES = [pytest.param(jnp.float32, id="float32"), *slow(pytest.param(jnp.bfloat16, id="bfloat16"))]
# `make test` compares the results of these cases in bfloat16. `make test-all` compares all cases.
REPRESENTATIVE = ["linen.LayerNorm", "jax.nn.gelu, tanh", "linen attention, mask", "einsum, (1 - m) * -1e9, empty rows"]
# In float32, `make test` compares one spelling of each meaning. All spellings are recognised there, by one name.
COMPARED = [
    *REPRESENTATIVE, "nnx.RMSNorm", "scale 1 + w", "x * inv + shift", "a power of -0.5", "statistics in float32",
    "RMSNorm of a residual", "two norms of one array, in Flax", "jax.nn.gelu, erf", "x norm.cdf(x)",
    "tanh of x (1 + c x^2)", "jax.nn.silu", "jax.nn.relu", "a bias and tanh", "a straight-through GELU",
    "softmax by hand", "jax.nn.log_softmax", "linen attention, empty rows", "linen attention, bias",
    "linen attention, causal and padding", "jax.nn attention, grouped heads", "jax.nn attention, lengths",
    "matmul, scaled query", "T5's relative bias", "a mask of -inf", "exponentials times a mask",
    "a mask after the softmax too", "a temperature for each head", "a BERT layer", "a ViT block",
    "the loss of labels", "one-hot labels of optax", "a row and a label of each", "a LayerNorm of one row",
    "transposes that compose",
]  # fmt: skip
assert {*COMPARED} <= CASES.keys()
NUMBERS = [pytest.param(n, d, id=f"{n}-{jnp.dtype(d).name}", marks=() if quick else pytest.mark.slow)
           for n, case in CASES.items() for d in (jnp.float32, jnp.bfloat16)
           for quick in [n in (COMPARED if d == jnp.float32 else REPRESENTATIVE)]]  # fmt: skip


@pytest.fixture(autouse=True)
def standard_promotion():
    """Turns strict dtype promotion off: Flax does not run under it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def is_float(x):
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def with_gradients(fn, args):
    """Returns the results of `fn` and the gradients in all floats of `args`."""
    leaves, tree = jax.tree.flatten(args)
    floats = [i for i, x in enumerate(leaves) if is_float(x)]

    def of_floats(values):
        every = list(leaves)
        for i, value in zip(floats, values, strict=True):
            every[i] = value
        return fn(*jax.tree.unflatten(tree, every))

    def run(values):
        out, pull_back = jax.vjp(of_floats, values)
        wide = jax.tree.map(
            lambda y: jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape).astype(y.dtype), out
        )
        return out, pull_back(wide)[0]

    return jax.jit(run), [leaves[i] for i in floats]


def assert_as_exact(fn, fused, args, exact=None):
    """Results and gradients of `fused` err at most twice as much as those of `fn`, plus 2 ulp.

    `exact` is a function that computes in float64, where `fn` itself does not for arguments in float64.
    """
    plain, values = with_gradients(fn, args)
    found = with_gradients(fused, args)[0](values)
    exact = in_float64(plain if exact is None else with_gradients(exact, args)[0], values)
    for name, got, reference, true in zip(("result", "gradient"), found, plain(values), exact, strict=True):
        leaves = list(zip(*map(jax.tree.leaves, (got, reference, true)), strict=True))
        top = max((magnitude(z) for *_, z in leaves), default=0.0)
        # Relative to the largest element of an array, for gradients at least to 1 % of the largest of all.
        sizes = [max(magnitude(z), 1e-2 * top) for *_, z in leaves]
        worst = max(errors("of fn", y, z).max(initial=0) / n for (_, y, z), n in zip(leaves, sizes, strict=True))
        for (x, y, z), n in zip(leaves, sizes, strict=True):
            assert x.dtype == y.dtype and x.shape == y.shape
            assert errors(name, x, z).max(initial=0) <= 2 * worst * n + 2 * ulp(n, x.dtype), name


@pytest.mark.parametrize("name", CASES)
def test_corpus_is_recognised(name):
    fn, args = CASES[name].make(jnp.float32)
    report = jaxft.fuse(fn, force=True).report(*args)
    assert report.counts == CASES[name].wanted, report


@pytest.mark.parametrize(("name", "dtype"), NUMBERS)
def test_corpus_is_exact(name, dtype):
    fn, args = CASES[name].make(dtype)
    assert_as_exact(fn, jaxft.fuse(fn, force=True), args)


@pytest.mark.slow
def test_corpus_in_bfloat16_is_recognised():
    for name, case in CASES.items():
        fn, args = case.make(jnp.bfloat16)
        report = jaxft.fuse(fn, force=True).report(*args)
        assert report.counts == case.wanted, (name, str(report))


def test_check_measures_every_site():
    fn, args = CASES["a BERT layer"].make(jnp.float32)
    checks = jaxft.fuse(fn, force=True).check(*args)
    assert len(checks) == 3 and checks.is_exact, checks
    assert all(0 < check.original < 1e-5 for check in checks) and "within" in str(checks)


def test_check_looks_into_a_scan():
    fn, args = CASES["a scan of ViT blocks"].make(jnp.float32)
    checks = jaxft.fuse(fn, force=True).check(*args)
    assert len(checks) == 4 and checks.is_exact, checks


def norm_of_a_sum(x, y):
    """Returns a sum and its LayerNorm, with the variance as a difference of squares."""
    x = x + y
    mean = jnp.mean(x, -1, keepdims=True)
    return x, (x - mean) * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) - mean**2 + 1e-3)


def test_check_compares_with_float64():
    """The mean is far from 0: the squares lose their last digits, and the sum itself is exact to the last."""
    args = normal(0, 4, 32) + 100, normal(1, 4, 32)
    (check,) = jaxft.fuse(norm_of_a_sum, force=True).check(*args)
    assert 2**-23 < check.fused < check.original / 10
    np.testing.assert_allclose(check.allowed, 2 * check.original + 2**-22)


@pytest.mark.parametrize("op", [jax.nn.softmax, jax.nn.log_softmax])
def test_check_measures_beside_what_is_not_finite(op):
    """A row without an element is NaN, and the logarithm of a masked probability is -inf."""
    mask = jnp.arange(16) < jnp.array([16, 5, 0, 9])[:, None]
    (check,) = jaxft.fuse(lambda x, m: op(jnp.where(m, x, -jnp.inf)), force=True).check(normal(0, 4, 16), mask)
    assert check.is_exact and 0 < check.original < 1e-6 and 0 < check.fused < 1e-6


@pytest.mark.parametrize("way", [False, True])
def test_check_follows_the_branch_that_is_taken(way):
    def fn(way, x):
        return jax.lax.cond(way, lambda: jax.nn.softmax(x), lambda: jax.nn.log_softmax(x))

    (check,) = jaxft.fuse(fn, force=True).check(jnp.array(way), normal(0, 4, 16))
    assert check.op == ("softmax" if way else "log_softmax")


def test_check_looks_into_a_while_loop():
    def fn(x, steps):  # the condition reads an array of its own
        return jax.lax.while_loop(lambda c: c[0] < steps, lambda c: (c[0] + 1, jax.nn.softmax(c[1] * x)), (0, x))[1]

    (check,) = jaxft.fuse(fn, force=True).check(normal(0, 4, 16), jnp.int32(2))
    assert check.op == "softmax" and check.is_exact


@pytest.mark.parametrize(
    ("x", "true", "error"),
    [
        ([1.0, np.nan, np.inf], [1.0, np.nan, np.inf], 0),
        ([1.0, 3.0], [1.5, 3.25], 0.5),
        ([np.nan], [1.0], np.inf),
        ([1.0], [np.nan], np.inf),
        ([np.inf], [-np.inf], np.inf),
    ],
)
def test_error_of_a_check_is_the_largest(x, true, error):
    assert _error(np.array(x), np.array(true)) == error


def test_checks_are_exact_if_all_are():
    exact, wrong = (Checked("softmax", "", 1e-7, fused, 3e-7) for fused in (3e-7, 4e-7))
    assert Checks([exact]).is_exact and not Checks([exact, wrong]).is_exact
    assert str(Checks([wrong])).count("NO") == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("standard deviation plus epsilon", "no epsilon inside of the root"),
        ("ddof of 1", "divides by 31, not by 32"),
        ("a norm over two axes", "only the last axis is fused"),
        ("quick GELU", "no kernel for"),
        ("a maximum with 0", "only jax.nn.relu is relu"),
        ("softmax over axis 1", "axis 1 of 3"),
        ("probabilities returned", "the probabilities are also returned"),
        ("dropout", "dropout between softmax and values"),
        ("a mask after the softmax alone", "the probabilities are masked after the softmax"),
        ("a mask in the result alone", "the softmax is masked after its sum"),
        ("a mask in the sum alone", "a mask that its result has not"),
        ("a cap of the logits", "tanh between the matmul and the softmax"),
        ("smoothed labels", "a product that is not with one-hot labels"),
        ("a low mask", "masked logits are -100, which is no mask"),
    ],
)
def test_near_miss_says_why(name, reason):
    fn, args = CASES[name].make(jnp.float32)
    report = jaxft.fuse(fn, force=True).report(*args)
    assert any(reason in record.reason for record in report), report
    assert reason in str(report)


def test_returned_mean_is_a_near_miss():
    def norm(x):
        mean = x.mean(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6), mean

    (record,) = jaxft.fuse(norm, force=True).report(np.ones((4, 32), np.float32))
    assert record.reason == "the mean or the variance is also returned"


# --- Rewrites that keep the meaning ------------------------------------------------------------------------------


def rewrites(rng):
    """A LayerNorm, a GELU and attention, spelled at random."""

    def either(*choices):
        return choices[rng.integers(len(choices))]

    wrap = either(lambda f: f, jax.jit, lambda f: lambda *a: jax.jit(f)(*a))
    product = either(lambda a, b: a * b, lambda a, b: b * a, lambda a, b: jnp.multiply(b, a), lambda a, b: a / (1 / b))
    added = either(lambda a, b: a + b, lambda a, b: b + a, lambda a, b: a - (-b))
    mean = either(
        lambda x: jnp.mean(x, -1, keepdims=True), lambda x: jnp.sum(x, -1)[..., None] / x.shape[-1],
        lambda x: jnp.expand_dims(x.sum(-1) * (1 / x.shape[-1]), -1),
    )  # fmt: skip
    square = either(lambda x: x * x, jnp.square, lambda x: x**2, lambda x: jnp.power(x, 2))
    root = either(jax.lax.rsqrt, lambda x: 1 / jnp.sqrt(x), lambda x: x**-0.5, lambda x: jnp.reciprocal(jnp.sqrt(x)))
    half = either(lambda x: 0.5 * x, lambda x: x / 2, lambda x: x * 0.5)

    @wrap
    def norm(x, g, b):
        centered = added(x, -mean(x))
        return added(product(product(centered, root(mean(square(added(x, -mean(x)))) + 1e-5)), g), b)

    @wrap
    def gelu(x, b):
        y = added(x, b)
        return product(half(y), added(1.0, jax.lax.erf(product(y, jnp.float32(0.7071067811865476)))))

    layout = either("btnh", "bnth", "tbnh", "nbth")
    scale = either(lambda x: x / 3, lambda x: x * (1 / 3))
    scaled = either("q", "k", "logits")

    @wrap
    def attend(q, k, v, m):
        order = ["btnh".index(c) for c in layout]
        q, k, v = (x.transpose(order) for x in (q, k, v))
        keys = layout.replace("t", "s")
        q, k = scale(q) if scaled == "q" else q, scale(k) if scaled == "k" else k
        s = jnp.einsum(f"{layout},{keys}->bnts", q, k)
        s = scale(s) if scaled == "logits" else s
        s = either(lambda: jnp.where(m, s, -1e30), lambda: added(s, jnp.where(m, 0.0, -1e30)))()
        return jnp.einsum(f"bnts,{keys}->btnh", either(jax.nn.softmax, lambda s: jnp.exp(jax.nn.log_softmax(s)))(s), v)

    return norm, gelu, attend


@pytest.mark.parametrize("seed", [*range(6), *slow(*range(6, 100))])
def test_rewrites_are_recognised(seed):
    rng = np.random.default_rng(seed)
    norm, gelu, attend = rewrites(rng)
    x, g, b = np.float32(rng.standard_normal((2, 5, 16))), np.float32(rng.standard_normal(16)), np.ones(16, np.float32)
    qkv = np.float32(rng.standard_normal((3, 2, 5, 3, 9)))
    mask = rng.random((2, 1, 1, 5)) < 0.7
    mask[..., 0] = True
    for fn, args, op in (
        (norm, (x, g, b), "layer_norm"), (gelu, (x, b), "bias_activation"),
        (attend, (*qkv, mask), "dot_product_attention"),
    ):  # fmt: skip
        fused = jaxft.fuse(fn, force=True)
        assert fused.report(*args).counts == {op: 1}, (seed, str(fused.report(*args)))
        np.testing.assert_allclose(jax.jit(fused)(*args), jax.jit(fn)(*args), atol=2e-5, err_msg=f"seed {seed}")
