"""linear_cross_entropy: values and gradients, rows without a label, memory and work."""

import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
import oracle
from cases import DTYPES, check, check_padding, jit, lower, normal, seeds, slow, slow_cases, some
from jaxft import reference
from jaxft.tuning import rows as tuning_rows
from jaxft.tuning.table import ChunkConfig

IGNORED = -100


@pytest.fixture
def chunks_of(monkeypatch):
    """Sets the number of rows in a chunk."""
    return lambda rows: monkeypatch.setattr(tuning_rows, "linear_cross_entropy", lambda *_: ChunkConfig(rows))


def some_floats(rng, shape=(2, 7), width=24, classes=37, dtype=jnp.float32, params=None):
    floats = normal(rng, dtype, x=(*shape, width))
    return floats | normal(rng, params or dtype, embedding=(classes, width), bias=(classes,))


def some_labels(rng, shape=(2, 7), classes=37, share=0.5):
    return jnp.asarray(np.where(rng.random(shape) < share, rng.integers(0, classes, shape), IGNORED), jnp.int32)


def check_op(floats, labels, seed=None, **options):
    def plain(**floats):
        return reference.linear_cross_entropy(labels=labels, **floats, **options)[0]

    def exact(**floats):
        precise = {name: value for name, value in options.items() if name != "precision"}
        return oracle.linear_cross_entropy(labels=np.asarray(labels), **floats, **precise)[0]

    def op(implementation, **floats):
        found = jaxft.linear_cross_entropy(labels=labels, **floats, **options, implementation=implementation)
        return found.total

    check(op, plain, exact, floats, implementations=("xla",), seed=seed)


def gradients(floats, labels, cotangent=1.0, **options):
    """Returns the total, and its gradients for a cotangent."""

    @jit
    def run(floats, labels, cotangent):
        total, pull_back = jax.vjp(lambda f: jaxft.linear_cross_entropy(labels=labels, **f, **options).total, floats)
        return total, pull_back(cotangent)[0]

    return run(floats, labels, jnp.float32(cotangent))


# --- Values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "width", "classes"),
    [((), 5, 3), ((9,), 17, 1), ((2, 2, 3), 7, 130),
     *slow_cases(((1,), 1, 1), ((5,), 1, 2), ((3, 11), 33, 101))],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("chunk", [4, *slow(1, 64)])
def test_shapes(shape, width, classes, chunk, chunks_of):
    chunks_of(chunk)
    rng = np.random.default_rng(0)
    check_op(some_floats(rng, shape, width, classes), some_labels(rng, shape, classes, 0.8))


@pytest.mark.parametrize("dtype", [*DTYPES[1:], *slow(DTYPES[0])])
@pytest.mark.parametrize("params", [DTYPES[0], *slow(*DTYPES[1:])])
def test_dtypes(dtype, params, chunks_of):
    chunks_of(4)
    rng = np.random.default_rng(1)
    check_op(some_floats(rng, dtype=dtype, params=params), some_labels(rng))


@pytest.mark.parametrize("precision", ["highest", *slow(None)])
def test_precision(precision, chunks_of):
    """On a GPU, the default precision of float32 matmuls is TF32."""
    chunks_of(4)
    rng = np.random.default_rng(1)
    with jax.default_matmul_precision("default"):
        floats, labels = some_floats(rng), some_labels(rng)
        check_op(floats, labels, precision=precision)
        text = lower(jax.value_and_grad(lambda f: total(f, labels, precision=precision)), floats)
    assert text.count("precision = [HIGHEST, HIGHEST]") == (3 if precision else 0)


def test_no_bias():
    rng = np.random.default_rng(2)
    floats = some_floats(rng)
    del floats["bias"]
    check_op(floats, some_labels(rng))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_or_no_rows_have_labels(share, chunks_of):
    """Without labels, the loss, its mean and its gradients are 0, not NaN."""
    chunks_of(3)
    rng = np.random.default_rng(3)
    floats, labels = some_floats(rng), some_labels(rng, share=share)
    check_op(floats, labels)
    if not share:
        run = jax.value_and_grad(lambda f: jaxft.linear_cross_entropy(labels=labels, **f).mean)
        chex.assert_trees_all_equal(run(floats), (jnp.float32(0.0), jax.tree.map(jnp.zeros_like, floats)))


@pytest.mark.parametrize(("shape", "width"), [((0,), 5), ((2, 0), 5), ((3,), 0), ((0,), 0)], ids=str)
def test_empty(shape, width):
    rng = np.random.default_rng(4)
    floats, labels = some_floats(rng, shape, width), some_labels(rng, shape, share=1.0)
    check_op(floats, labels)
    assert jaxft.linear_cross_entropy(labels=labels, **floats).labelled == labels.size


def test_result():
    """The result has the number of labels, the mean over the labels, and the right dtypes."""
    rng = np.random.default_rng(5)
    floats, labels = some_floats(rng, dtype=jnp.bfloat16), some_labels(rng)
    found = jax.jit(lambda f: jaxft.linear_cross_entropy(labels=labels, **f))(floats)
    assert (found.total.dtype, found.labelled.dtype, found.mean.dtype) == (jnp.float32, jnp.int32, jnp.float32)
    assert found.total.shape == found.labelled.shape == ()
    count = int((np.asarray(labels) != IGNORED).sum())
    assert 0 < count < labels.size and found.labelled == count
    np.testing.assert_allclose(found.mean, found.total / count, rtol=1e-7)


def test_large_logits():
    """Exponentials are taken of the differences from the largest logit."""
    rng = np.random.default_rng(6)
    floats = some_floats(rng)
    check_op(floats | {"x": floats["x"] * 1e3, "bias": floats["bias"] + 1e4}, some_labels(rng))


def test_bias_of_minus_infinity_excludes_a_class():
    rng = np.random.default_rng(7)
    floats, labels = some_floats(rng), jnp.zeros((2, 7), jnp.int32)
    check_op(floats | {"bias": floats["bias"].at[5].set(-jnp.inf)}, labels)


def test_ignore_index_is_no_saturated_label():
    """Labels of 64 bits beyond int32 become the largest and the smallest int32, which may not be ignored."""
    x, table, labels = jnp.ones((2, 4)), jnp.ones((3, 4)), jnp.array([0, 1])
    for ignored in (2**31 - 1, -(2**31 - 1)):
        with pytest.raises(ValueError, match="ignore_index must be a Python integer of 32 bits"):
            jaxft.linear_cross_entropy(x, table, labels, ignore_index=ignored)
    assert jaxft.linear_cross_entropy(x, table, labels, ignore_index=2**31 - 2).labelled == 2


@pytest.mark.parametrize("ignore_index", [-1, 36, *slow(0, 1000)])
def test_ignore_index(ignore_index):
    """`ignore_index` may be a class, such as the class of padding. Then -100 is an unknown label."""
    rng = np.random.default_rng(8)
    floats, labels = some_floats(rng), some_labels(rng)
    labels = jnp.where(labels == IGNORED, ignore_index, labels)
    check_op(floats, labels, ignore_index=ignore_index)
    got = jaxft.linear_cross_entropy(labels=labels.at[0, 0].set(IGNORED), **floats, ignore_index=ignore_index)
    assert np.isnan(got.total)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint32", "uint64"])
def test_dtypes_of_labels(dtype):
    """Numbers beyond int32 do not wrap around to another label or to -100."""
    rng = np.random.default_rng(9)
    floats, labels = some_floats(rng), np.asarray(some_labels(rng, share=1.0))
    expected = jaxft.linear_cross_entropy(labels=labels, **floats)
    chex.assert_trees_all_equal(jaxft.linear_cross_entropy(labels=labels.astype(dtype), **floats), expected)
    if np.dtype(dtype).itemsize >= 4:
        labels = labels.astype(dtype)
        labels[1, 2] = 2**32 - 100
        found = jaxft.linear_cross_entropy(labels=labels, **floats)
        assert np.isnan(found.total) and found.labelled == labels.size


@pytest.mark.parametrize("seed", seeds(6))
def test_random(seed, chunks_of):
    rng = np.random.default_rng(seed)
    dtype, params = (jnp.dtype(str(rng.choice(["float32", "float16", "bfloat16"]))) for _ in range(2))
    shape = tuple(int(n) for n in rng.choice([1, 2, 5, 13, 40], rng.integers(1, 3)))
    width, classes = int(rng.choice([1, 8, 17, 64])), int(rng.choice([1, 2, 29, 64, 257]))
    floats = some_floats(rng, shape, width, classes, dtype, params)
    if rng.random() < 0.3:
        del floats["bias"]
    chunks_of(min(int(rng.integers(1, 70)), math.prod(shape)))
    labels = some_labels(rng, shape, classes, float(rng.choice([0.0, 0.15, 0.6, 1.0])))
    check_op(floats, labels, seed, precision=some(rng, "highest"))


# --- Rows without a label, and labels without a class ---------------------------------------------------------------


@pytest.mark.parametrize("chunk", [5, *slow(1, 14)])
def test_rows_without_a_label(chunk, chunks_of):
    """Rows without a label change no bit of the result, and their gradient is 0, whatever the cotangent."""
    chunks_of(chunk)
    rng = np.random.default_rng(10)
    floats, labels = some_floats(rng), some_labels(rng)
    poison = jnp.resize(jnp.array([jnp.nan, jnp.inf, -jnp.inf, 3e38]), floats["x"].shape)
    unlabelled = np.asarray(labels == IGNORED)
    poisoned = floats | {"x": jnp.where(unlabelled[..., None], poison, floats["x"])}
    expected, got = gradients(floats, labels), gradients(poisoned, labels)
    chex.assert_trees_all_equal(got, expected)
    for cotangent in (1.0, np.nan):
        assert (np.asarray(gradients(poisoned, labels, cotangent)[1]["x"])[unlabelled] == 0.0).all()
    assert (np.asarray(got[1]["x"])[~unlabelled] != 0.0).all()


def test_rows_without_a_label_in_plain_jnp():
    rng = np.random.default_rng(10)
    floats, labels = some_floats(rng), some_labels(rng)
    valid = {"x": np.asarray(labels != IGNORED)[..., None], "embedding": True, "bias": True}
    check_padding(lambda **f: reference.linear_cross_entropy(labels=labels, **f)[0], floats, valid)


@pytest.mark.parametrize("label", [-1, 37, 2**31 - 1, -(2**31)])
def test_unknown_label_makes_the_loss_nan(label):
    """The gradients of the row, of the embedding and of the bias are NaN, too."""
    rng = np.random.default_rng(11)
    floats, labels = some_floats(rng), some_labels(rng).at[1, 3].set(label)
    for run in (gradients, lambda f, y: jax.value_and_grad(
        lambda f: reference.linear_cross_entropy(labels=y, **f)[0])(f)):  # fmt: skip
        total, found = run(floats, labels)
        assert np.isnan(total) and np.isnan(found["embedding"]).all() and np.isnan(found["bias"]).all()
        assert np.argwhere(np.isnan(found["x"]).any(axis=-1)).tolist() == [[1, 3]]


def test_last_chunk_ignores_its_padding(chunks_of):
    """Padding rows have logits, which are infinite where the bias is."""
    chunks_of(16)
    rng = np.random.default_rng(12)
    floats, labels = some_floats(rng), some_labels(rng)
    floats["embedding"] = floats["embedding"].at[3].set(jnp.inf)
    floats["x"] = -jnp.abs(floats["x"])  # so that every real logit of that class is -inf
    total = jaxft.linear_cross_entropy(labels=jnp.where(labels == 3, 4, labels), **floats).total
    assert np.isfinite(total)


# --- float16 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [2.0**-12, *slow(1.0, 2.0**12)])
def test_small_gradients_in_float16(scale):
    """Probabilities below float16's smallest number add up, and a loss scale only scales."""
    rng = np.random.default_rng(13)
    floats = some_floats(rng, (64,), 16, 512, jnp.float16, jnp.float32)
    floats["x"] = floats["x"] * 0.1
    floats["bias"] = floats["bias"].at[1].set(20.0)  # the other probabilities are some 1e-9
    labels = jnp.ones((64,), jnp.int32)
    _, got = gradients(floats, labels, scale)
    wide = {name: x.astype(jnp.float32) for name, x in floats.items()}
    wide["embedding"] = wide["embedding"].astype(jnp.float16).astype(jnp.float32)
    _, expected = gradients(wide, labels, scale)
    assert 0.0 < np.abs(expected["embedding"]).max() < 1e-4 * scale
    for name in ("embedding", "bias"):
        np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=4e-3 * np.abs(expected[name]).max())


def test_large_gradients_in_float16(chunks_of):
    """Sums over many rows stay float32 until the cotangent of the mean has scaled them down."""
    chunks_of(512)
    x, labels = jnp.full((2048, 4), 64.0, jnp.float16), jnp.zeros((2048,), jnp.int32)
    embedding = jnp.zeros((3, 4), jnp.float16)
    got = jax.grad(lambda e: jaxft.linear_cross_entropy(x, e, labels).mean)(embedding)
    expected = np.array([[-2 / 3], [1 / 3], [1 / 3]]) * np.full((1, 4), 64.0)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=2e-3)


# --- Transformations (the usual ones: test_transforms.py) ------------------------------------------------------------


def test_vmap_over_labels(chunks_of):
    """Each mapped call has its own number of labels and of chunks."""
    chunks_of(2)
    rng = np.random.default_rng(14)
    floats = some_floats(rng)
    labels = jnp.stack([some_labels(rng, share=share) for share in (0.0, 0.3, 1.0)])
    run = jax.value_and_grad(lambda f, y: jaxft.linear_cross_entropy(labels=y, **f).mean)
    got = jit(jax.vmap(run, in_axes=(None, 0)))(floats, labels)
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(jit(run)(floats, y) for y in labels))
    chex.assert_trees_all_close(got, expected, rtol=0, atol=1e-6)


def test_second_derivatives(chunks_of):
    chunks_of(3)
    rng = np.random.default_rng(15)
    floats, labels = some_floats(rng, (5,), 4, 6), some_labels(rng, (5,), 6)

    def second(loss):
        inner = jax.grad(lambda f: loss(labels=labels, **f)[0] ** 2)
        return jit(jax.grad(lambda f: sum(jnp.sum(g**2) for g in jax.tree.leaves(inner(f)))))(floats)

    chex.assert_trees_all_close(second(jaxft.linear_cross_entropy), second(reference.linear_cross_entropy), rtol=1e-4)


def test_gradient_accumulation():
    """Totals and numbers of labels add up over micro-batches. Means would not."""
    rng = np.random.default_rng(16)
    floats, labels = some_floats(rng, (4, 6)), some_labels(rng, (4, 6))
    labels = labels.at[0].set(IGNORED)

    def loss(table, parts):
        x, y = (z.reshape(parts, -1, *z.shape[2:]) for z in (floats["x"], labels))
        found = [jaxft.linear_cross_entropy(*part, floats["bias"])
                 for part in zip(x, [table] * parts, y, strict=True)]  # fmt: skip
        return sum(f.total for f in found) / sum(f.labelled for f in found).astype(jnp.float32)

    whole, parts = (jit(jax.value_and_grad(functools.partial(loss, parts=n)))(floats["embedding"]) for n in (1, 4))
    chex.assert_trees_all_close(parts, whole, rtol=1e-5, atol=1e-7)


def test_reruns_are_bitwise_equal(chunks_of):
    chunks_of(4)
    rng = np.random.default_rng(17)
    floats, labels = some_floats(rng), some_labels(rng)
    chex.assert_trees_all_equal(gradients(floats, labels), gradients(floats, labels))


# --- Memory and work -----------------------------------------------------------------------------------------------

ROWS, CLASSES, WIDTH = 16384, 30522, 64


def big(dtype=jnp.float32):
    floats = {"x": (ROWS, WIDTH), "embedding": (CLASSES, WIDTH), "bias": (CLASSES,)}
    floats = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in floats.items()}
    return floats, jax.ShapeDtypeStruct((ROWS,), jnp.int32)


def total(floats, labels, **options):
    return jaxft.linear_cross_entropy(labels=labels, **floats, **options).total


@pytest.mark.parametrize("function", [total, jax.value_and_grad(total)], ids=["value", "gradient"])
def test_memory_stays_below_all_logits(function):
    """All logits take 1.9 GiB. A few chunks of at most 128 MiB exist at a time."""
    memory = jax.jit(function).lower(*big()).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.25 * 4 * ROWS * CLASSES


@pytest.mark.parametrize(
    ("function", "products"), [(total, 1), (jax.value_and_grad(total), 3)], ids=["value", "gradient"]
)
def test_loss_computes_few_matmuls(function, products):
    """The logits are computed once. Each matmul has the dtype of x and a float32 result."""
    dots = re.findall(r"stablehlo.dot_general .* : \((.*)\) -> (.*)", lower(function, *big(jnp.bfloat16)))
    assert len(dots) == products
    for operands, result in dots:
        assert operands.count("xbf16>") == 2 and "xf32>" in result


def test_work_follows_the_labels(chunks_of, monkeypatch):
    """The number of chunks that compute logits follows the number of labels."""
    chunks_of(4)
    seen = []

    def exp(x):
        jax.debug.callback(lambda: seen.append(x.shape))
        return original(x)

    original = jnp.exp
    monkeypatch.setattr(jnp, "exp", exp)
    rng = np.random.default_rng(18)
    floats = some_floats(rng, (40,), 8, 11)
    for labels, chunks in ((0, 0), (1, 1), (4, 1), (9, 3), (40, 10)):
        seen.clear()
        places = jnp.asarray(rng.permutation(40) < labels)
        jax.block_until_ready(jax.grad(total)(floats, jnp.where(places, 2, IGNORED)))
        jax.effects_barrier()
        assert seen == [(4, 16)] * chunks  # 11 classes, and what makes them a multiple of 8


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [((16384, 30522, 768), 1024), ((4096, 30522, 768), 1024), ((2048, 30522, 768), 512), ((100, 30522, 768), 100),
     ((16384, 250002, 768), 768), ((16384, 250002, 64), 128), ((200, 5, 8), 128), ((129, 2**24, 1), 128)],
    ids=str,
)  # fmt: skip
def test_chunk_sizes_follow_the_heuristic(sizes, rows):
    assert tuning_rows.linear_cross_entropy(*sizes) == ChunkConfig(rows)


# --- Errors ------------------------------------------------------------------------------------------------------

GOOD = {"x": jnp.ones((2, 5, 8)), "embedding": jnp.ones((6, 8)), "labels": jnp.zeros((2, 5), jnp.int32)}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "x must be an array, got list"),
        ({"x": jnp.ones((2, 5, 8), jnp.int32)}, TypeError, "x must be an array of floats, got int32"),
        ({"x": jnp.float32(1.0)}, ValueError,
         "x and embedding must have shapes [..., D] and [V, D], V > 0, got () and (6, 8)"),
        ({"embedding": jnp.ones((8, 6))}, ValueError,
         "x and embedding must have shapes [..., D] and [V, D], V > 0, got (2, 5, 8) and (8, 6)"),
        ({"embedding": jnp.ones((0, 8))}, ValueError, "V > 0, got (2, 5, 8) and (0, 8)"),
        ({"embedding": jnp.ones((8,))}, ValueError, "V > 0, got (2, 5, 8) and (8,)"),
        ({"embedding": jnp.ones((6, 8), jnp.int8)}, TypeError, "embedding must be an array of floats, got int8"),
        ({"labels": [0]}, TypeError, "labels must be an array, got list"),
        ({"labels": jnp.zeros((2, 5))}, TypeError, "labels must be an array of integers, got float32"),
        ({"labels": jnp.zeros((2, 5), bool)}, TypeError, "labels must be an array of integers, got bool"),
        ({"labels": jnp.zeros((2, 4), jnp.int32)}, ValueError, "labels must have shape (2, 5), got (2, 4)"),
        ({"bias": jnp.ones((8,))}, ValueError, "bias must have shape (6,), got (8,)"),
        ({"bias": 1.0}, TypeError, "bias must be an array, got float"),
        ({"ignore_index": True}, ValueError, "ignore_index must be a Python integer of 32 bits, got True"),
        ({"ignore_index": 2**31}, ValueError, "ignore_index must be a Python integer of 32 bits, got 2147483648"),
        ({"ignore_index": None}, ValueError, "ignore_index must be a Python integer of 32 bits, got None"),
        ({"precision": "exact"}, ValueError, "precision must be one that jnp.matmul takes, got 'exact'"),
        ({"implementation": "cuda"}, ValueError, "implementation must be None or one of ('triton', 'mosaic_gpu',"
         " 'cudnn', 'xla'), got 'cuda'"),
        ({"implementation": "triton"}, NotImplementedError, "there is no 'triton' implementation, only ('xla',)"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)  # fmt: skip
def test_errors(changes, error, message):
    with pytest.raises(error, match="linear_cross_entropy: .*" + re.escape(message)):
        jaxft.linear_cross_entropy(**{**GOOD, **changes})
