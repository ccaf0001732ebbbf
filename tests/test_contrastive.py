"""Losses of embeddings against sentence-transformers' values and full matrices; gradient caching against whole batches.

tests/data/contrastive.npz has the losses and gradients that sentence-transformers 6.2 computes in float64 for the
embeddings of `embeddings()`.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cases import jit, pytest_on, slow
from jaxft.training import LossScale, accumulate_gradients, cached_gradients, contrastive_loss, matryoshka_loss

STORED = Path(__file__).parent / "data" / "contrastive.npz"
EVERY = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
SYMMETRIC = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
OPTIONS = {
    "default": {},
    "pairs": {},
    "scale": {"temperature": 0.02},
    "dot": {"temperature": 1.0, "similarity": "dot"},
    "symmetric": SYMMETRIC,
    "gte": {"directions": EVERY},
    "in_batch_negatives": {"hardness_mode": "in_batch_negatives", "hardness_strength": 5.0},
    "hard_negatives": {"hardness_mode": "hard_negatives", "hardness_strength": 5.0},
    "all_negatives": {"hardness_mode": "all_negatives", "hardness_strength": 5.0},
    "gte_hard": {"directions": EVERY, "hardness_mode": "all_negatives", "hardness_strength": 9.0},
    "matryoshka": {},
    "matryoshka_dot": {"temperature": 0.5, "similarity": "dot"},
}
MATRYOSHKA = {
    "matryoshka": functools.partial(matryoshka_loss, dims=[8, 3, 5], weights=[1.0, 0.25, 0.5]),
    "matryoshka_dot": functools.partial(matryoshka_loss, dims=(8, 4)),
}


def embeddings(dtype=jnp.float32, pairs=6, negatives=2, width=8):
    """Returns queries, documents and negatives."""
    rng = np.random.default_rng(0)
    queries, documents, *others = (rng.standard_normal((pairs, width)) for _ in range(2 + negatives))
    return [jnp.asarray(x, dtype) for x in (queries, documents, np.stack(others, 1))]


def mean_and_gradients(loss, *arrays):
    # One program compiles faster than a hundred operations.
    return jit(jax.value_and_grad(lambda *arrays: loss(*arrays).mean, tuple(range(len(arrays)))))(*arrays)


def full(queries, documents, negatives, *, temperature=0.05, directions=("query_to_doc",), partition_mode="joint"):
    """Returns the sum of the losses, from full matrices in the dtype of the arguments."""
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    rows = queries.shape[0]
    ends = {"query": unit(queries), "doc": unit(jnp.concatenate([documents, *jnp.moveaxis(negatives, 1, 0)]))}
    own = jnp.eye(rows, dtype=bool)
    logits = []
    for start, _, end in (direction.partition("_to_") for direction in directions):
        scores = ends[start][:rows] @ ends[end].T / temperature
        if start == end:
            scores = jnp.where(jnp.tile(own, (1, scores.shape[1] // rows)), -jnp.inf, scores)
        logits.append(scores)
    if partition_mode == "joint":
        logits = [jnp.concatenate(logits, axis=1)]
    positive = jnp.diagonal(ends["query"] @ ends["doc"][:rows].T) / temperature
    return jnp.sum(jnp.stack([jax.nn.logsumexp(x, axis=1) for x in logits]).mean(0) - positive)


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_sentence_transformers(name):
    loss = MATRYOSHKA.get(name, lambda loss: loss)(functools.partial(contrastive_loss, **OPTIONS[name]))
    arrays = embeddings()[: 2 if name == "pairs" else 3]
    value, gradients = mean_and_gradients(loss, *arrays)
    with np.load(STORED) as stored:
        np.testing.assert_allclose(value, stored[f"{name}.loss"], rtol=3e-7)
        columns = [stored[f"{name}.{i}"] for i in range(2 if name == "pairs" else 4)]
    expected = [*columns[:2], *([np.stack(columns[2:], 1)] if len(columns) > 2 else [])]
    for got, exact in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(got, exact, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("pairs", [300, *slow(1, 128, 513)])
@pytest.mark.parametrize("options", [OPTIONS["gte"], SYMMETRIC], ids=["gte", "symmetric"])
def test_chunks_equal_the_full_matrix(pairs, options):
    """300 pairs are three chunks, and 84 rows of padding."""
    with jax.enable_x64(True):
        arrays = embeddings(jnp.float64, pairs=pairs, negatives=1)
        value, gradients = jit(jax.value_and_grad(functools.partial(full, **options), (0, 1, 2)))(*arrays)
        loss = functools.partial(contrastive_loss, **options)
        both = jax.value_and_grad(lambda *arrays: tuple(loss(*arrays)), (0, 1, 2), has_aux=True)
        (found, labelled), own = jit(both)(*arrays)
        assert labelled == pairs
    np.testing.assert_allclose(found, value, rtol=1e-12)
    for got, exact in zip(own, gradients, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
def test_sixteen_bits_compute_in_float32(dtype):
    narrow = embeddings(dtype)
    value, gradients = mean_and_gradients(contrastive_loss, *narrow)
    wide_value, wide = mean_and_gradients(contrastive_loss, *(x.astype(jnp.float32) for x in narrow))
    assert value == wide_value and value.dtype == jnp.float32
    for got, exact in zip(gradients, wide, strict=True):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, exact.astype(dtype))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16], ids=["float32", "float16", "bfloat16"])
def test_rows_of_zeros_have_finite_gradients(dtype):
    queries, documents, negatives = embeddings(dtype)
    queries, documents, negatives = queries.at[0].set(0), documents.at[1].set(0), negatives.at[2].set(0)
    loss = matryoshka_loss(functools.partial(contrastive_loss, directions=EVERY), (8, 4))
    value, gradients = mean_and_gradients(loss, queries, documents, negatives)
    assert np.isfinite(value) and all(jnp.isfinite(x).all() for x in gradients)
    for place, x in enumerate(gradients):
        assert not x[place].any() and jnp.any(jnp.delete(x, place, axis=0) != 0)


def test_short_rows_have_length_1():
    queries, documents, _ = embeddings()
    expected = contrastive_loss(queries, documents).total
    np.testing.assert_allclose(contrastive_loss(queries * 1e-10, documents).total, expected, rtol=1e-5)
    shorter = contrastive_loss(queries * 1e-16, documents).total  # divided by 1e-12
    np.testing.assert_allclose(shorter, 6 * np.log(6), rtol=1e-2)


def test_nan_of_an_embedding_reaches_the_loss():
    queries, documents, _ = embeddings()
    assert np.isnan(contrastive_loss(queries.at[1, 2].set(jnp.nan), documents).total)


def test_second_derivatives():
    with jax.enable_x64(True):
        arrays = embeddings(jnp.float64, pairs=5, width=3)
        direction = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), arrays)

        def along(f):
            return jit(lambda *pair: jax.jvp(jax.grad(f, (0, 1, 2)), *pair)[1])(arrays, direction)

        options = {"directions": ("query_to_doc", "query_to_query")}
        expected = along(functools.partial(full, **options))
        found = along(lambda *x: contrastive_loss(*x, **options).total)
    for got, exact in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-8, atol=1e-8 * np.abs(exact).max())


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint])
def test_transforms_keep_the_numbers(transform):
    arrays = embeddings()
    value, gradients = mean_and_gradients(contrastive_loss, *arrays)
    found, own = mean_and_gradients(transform(contrastive_loss), *arrays)
    np.testing.assert_allclose(found, value, rtol=1e-6)
    for got, exact in zip(own, gradients, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-7)


def test_vmap_equals_a_loop():
    queries, documents, negatives = (jnp.stack([x, x[::-1] * 2 + 1]) for x in embeddings())
    gradient = lambda *x: mean_and_gradients(contrastive_loss, *x)  # noqa: E731
    found = jax.vmap(gradient, in_axes=(0, None, 0))(queries, documents[0], negatives)
    each = [gradient(queries[i], documents[0], negatives[i]) for i in range(2)]
    for got, *exact in zip(*map(jax.tree.leaves, (found, *each)), strict=True):
        np.testing.assert_allclose(got, jnp.stack(exact), rtol=1e-5, atol=1e-6)


def test_temperature_can_be_trained():
    arrays = embeddings()
    gradient = jax.grad(lambda t: contrastive_loss(*arrays, temperature=t).mean)(jnp.float32(0.05))
    values = [contrastive_loss(*arrays, temperature=t).mean for t in (0.0501, 0.0499)]
    np.testing.assert_allclose(gradient, (values[0] - values[1]) / 2e-4, rtol=1e-3)


def test_similarities_are_never_stored_twice():
    """A similarity matrix of all pairs takes 16 MiB in float32. All chunks share the memory of one."""
    x = jax.ShapeDtypeStruct((2048, 16), jnp.float32)
    gradient = jax.grad(lambda q, d: contrastive_loss(q, d, **SYMMETRIC).mean, (0, 1))
    memory = jax.jit(gradient).lower(x, x).compile().memory_analysis()
    assert 2**20 < memory.temp_size_in_bytes < 2 * 4 * 2048**2


def test_no_pairs_have_the_loss_0():
    value, gradients = mean_and_gradients(contrastive_loss, jnp.zeros((0, 4)), jnp.zeros((0, 4)))
    assert value == 0 and gradients[0].shape == (0, 4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"queries": jnp.zeros((6, 8), jnp.int32)}, TypeError, "queries must be an array of floats, got int32"),
        ({"queries": jnp.zeros((5, 8))}, ValueError, r"the same shape \[B, D\], got \(5, 8\) and \(6, 8\)"),
        ({"documents": [0.0]}, TypeError, "documents must be an array, got list"),
        ({"negatives": jnp.zeros((6, 8))}, ValueError, r"negatives must have shape .* here \(6, H, 8\), got \(6, 8\)"),
        ({"temperature": 0}, ValueError, "temperature must be positive, got 0"),
        ({"temperature": "low"}, TypeError, "temperature must be an array, got str"),
        ({"temperature": jnp.ones(6)}, ValueError, r"temperature must have shape \(\), got \(6,\)"),
        ({"similarity": "cos"}, ValueError, "similarity must be 'cosine' or 'dot', got 'cos'"),
        ({"directions": ()}, ValueError, r"directions must be some of .*'query_to_doc' among them, got \(\)"),
        ({"directions": None}, ValueError, "directions must be some of .* got None"),
        ({"directions": [["query_to_doc"]]}, ValueError, r"directions must be some of .* got \[\['query_to_doc'\]\]"),
        (
            {"negatives": None, "hardness_mode": "hard_negatives"},
            ValueError,
            "'hard_negatives' needs negatives, got None",
        ),
        ({"directions": "doc_to_query"}, ValueError, r"got \('doc_to_query',\)"),
        ({"directions": ("query_to_doc", "doc")}, ValueError, r"got \('query_to_doc', 'doc'\)"),
        ({"partition_mode": "both"}, ValueError, "partition_mode must be one of .*'per_direction'.*, got 'both'"),
        *(
            ({"partition_mode": "per_direction", "directions": EVERY[:1] + (own,)}, ValueError, "needs the positive")
            for own in ("query_to_query", "doc_to_doc")
        ),
        ({"hardness_mode": "all"}, ValueError, "hardness_mode must be one of .*'all_negatives'.*, got 'all'"),
        ({"hardness_strength": 1.0}, ValueError, "hardness_strength must be .* 0 without a hardness_mode, got 1.0"),
        ({"hardness_strength": -1.0, "hardness_mode": "all_negatives"}, ValueError, "hardness_strength .* got -1.0"),
        ({"axis_name": "data"}, ValueError, "axis_name must be an axis of the surrounding shard_map, got 'data'"),
        (
            {"axis_name": ["data"]},
            ValueError,
            r"axis_name must be an axis of the surrounding shard_map, got \['data'\]",
        ),
        ({"precision": "best"}, ValueError, "precision must be one that jnp.matmul takes, got 'best'"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(change, error, message):
    queries, documents, negatives = embeddings()
    given = {"queries": queries, "documents": documents, "negatives": negatives} | change
    with pytest.raises(error, match=f"contrastive_loss: .*{message}"):
        contrastive_loss(**given)


# --- Matryoshka --------------------------------------------------------------------------------------------------


def test_some_dimensions_count_in_a_step():
    arrays, dims = embeddings(), (8, 6, 4, 2)
    each = {dim: jit(matryoshka_loss(contrastive_loss, [dim]))(*arrays).total for dim in dims}
    loss, seen = jit(matryoshka_loss(contrastive_loss, dims, n_dims_per_step=2)), set()
    for seed in range(20):
        total = loss(*arrays, key=jax.random.key(seed)).total
        (pair,) = [(a, b) for a in dims for b in dims if a > b and np.isclose(total, each[a] + each[b], rtol=1e-6)]
        seen.add(pair)
    assert len(seen) > 3
    whole = matryoshka_loss(contrastive_loss, dims, n_dims_per_step=9)(*arrays, key=jax.random.key(0))
    np.testing.assert_allclose(whole.total, sum(each.values()), rtol=1e-6)


def test_matryoshka_passes_none_on():
    queries, documents, _ = embeddings()
    loss = matryoshka_loss(contrastive_loss, [8])
    np.testing.assert_allclose(
        loss(queries, documents, None).mean, contrastive_loss(queries, documents).mean, rtol=1e-6
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dims": ()}, r"dims must be positive integers, at least one, got \(\)"),
        ({"dims": (4, 0)}, r"dims must be positive integers.* got \(4, 0\)"),
        ({"dims": (4, 2), "weights": [1.0]}, "weights must have one number for each of the 2 dims, got 1"),
        ({"dims": (4, 2), "weights": 1.0}, "weights must have one number for each of the 2 dims, got 1.0"),
        ({"dims": 4}, "dims must be positive integers, at least one, got 4"),
        ({"dims": (4, 2), "weights": [1.0, float("nan")]}, "weights must be finite, got nan"),
        ({"dims": (4, 2), "n_dims_per_step": 0}, "n_dims_per_step must be None or a positive integer, got 0"),
        ({"dims": (9, 4)}, r"embeddings must have at least 9 components, got \(6, 8\)"),
        ({"dims": (4,), "n_dims_per_step": 1}, "a key is needed with n_dims_per_step, and only then"),
        ({"dims": (4,), "loss_fn": lambda *x: 1.0}, "loss_fn must return two scalars, total and an integer labelled"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_bad_matryoshka_is_named(options, message):
    with pytest.raises(ValueError, match=f"matryoshka_loss: {message}"):
        matryoshka_loss(**{"loss_fn": contrastive_loss} | options)(*embeddings())


# --- Gradient caching --------------------------------------------------------------------------------------------


def embed(params, batch):
    """Returns the embeddings of a micro-batch (texts, key) under dropout."""
    texts, key = batch
    keep = jax.random.bernoulli(key, 0.8, texts.shape).astype(params["kernel"].dtype)
    found = jnp.tanh(texts.astype(params["kernel"].dtype) * keep @ params["kernel"] + params["bias"])
    return found[:, 0], found[:, 1], found[:, 2:]


def texts_and_params(micro_batches=3, size=4, dtype=jnp.float32):
    rng = np.random.default_rng(1)
    params = {"kernel": jnp.asarray(rng.standard_normal((5, 8)), dtype), "bias": jnp.zeros(8, dtype)}
    texts = jnp.asarray(rng.standard_normal((micro_batches, size, 4, 5)), jnp.float32)
    return params, (texts, jax.random.split(jax.random.key(2), micro_batches))


def whole_batch(loss, params, batches):
    parts = [embed(params, jax.tree.map(lambda x: x[i], batches)) for i in range(batches[0].shape[0])]  # noqa: B023
    return loss(*(jnp.concatenate(part) for part in zip(*parts, strict=True))).mean


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    "loss", [contrastive_loss, matryoshka_loss(functools.partial(contrastive_loss, **SYMMETRIC), (8, 4))],
    ids=["contrastive", "matryoshka"],
)  # fmt: skip
def test_cached_gradients_equal_the_whole_batch(loss, scaled):
    params, batches = texts_and_params()
    expected, gradients = jit(jax.value_and_grad(functools.partial(whole_batch, loss)))(params, batches)
    scale = LossScale.create(2.0**10) if scaled else None
    found, own = jax.jit(functools.partial(cached_gradients, embed, loss))(params, batches, loss_scale=scale)
    assert found.labelled == 12 and found.labelled.dtype == jnp.int32
    np.testing.assert_allclose(found.mean, expected, rtol=1e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(own[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scaled", [False, True])
def test_single_micro_batch_runs_once(scaled):
    params, batches = texts_and_params(micro_batches=1)
    expected, gradients = jax.value_and_grad(functools.partial(whole_batch, contrastive_loss))(params, batches)
    scale = LossScale.create(2.0**10) if scaled else None
    gradient = jax.jit(functools.partial(cached_gradients, embed, contrastive_loss))
    found, own = gradient(params, batches, loss_scale=scale)
    np.testing.assert_allclose(found.mean, expected, rtol=1e-6)
    for name, value in gradients.items():
        np.testing.assert_allclose(own[name], value, rtol=1e-5, atol=1e-6)
    assert str(gradient.trace(params, batches).jaxpr).count("= tanh ") == 1


def test_cached_gradients_without_rows_are_0():
    params, batches = texts_and_params()

    def none(*arrays):
        return jnp.float32(0) * arrays[0].sum(), jnp.int32(0)

    loss, gradients = cached_gradients(embed, none, params, batches)
    assert loss.labelled == 0 and not any(x.any() for x in jax.tree.leaves(gradients))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_single_row_counts_once(micro_batches):
    params, batches = texts_and_params(micro_batches)

    def single(*arrays):
        return sum(array.astype(jnp.float32).sum() for array in arrays), jnp.int32(1)

    def total(params):
        parts = [embed(params, jax.tree.map(lambda x: x[i], batches)) for i in range(micro_batches)]  # noqa: B023
        return sum(array.sum() for part in parts for array in part)

    loss, gradients = cached_gradients(embed, single, params, batches)
    assert loss.labelled == 1 and loss.mean == loss.total
    for name, value in jax.grad(total)(params).items():
        np.testing.assert_allclose(gradients[name], value, rtol=1e-5, atol=1e-5)


def test_cached_gradients_have_the_dtype_of_the_parameters():
    params, batches = texts_and_params(dtype=jnp.bfloat16)
    loss, gradients = cached_gradients(embed, contrastive_loss, params, batches)
    assert loss.total.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(gradients)} == {jnp.dtype("bfloat16")}


def test_cached_gradients_show_overflow():
    """The loss scale multiplies the cotangents of float16 embeddings. Gradients are infinite where they overflow."""
    params, batches = texts_and_params()
    half = lambda params, batch: jax.tree.map(lambda x: x.astype(jnp.float16), embed(params, batch))  # noqa: E731
    fine, too_large = (
        cached_gradients(half, contrastive_loss, params, batches, loss_scale=LossScale.create(scale))[1]
        for scale in (2.0**8, 2.0**24)
    )
    assert jnp.isfinite(fine["kernel"]).all() and not jnp.isfinite(too_large["kernel"]).all()


def test_cached_gradients_keep_one_micro_batch():
    params, _ = texts_and_params()
    texts = jax.ShapeDtypeStruct((32, 4, 256, 5), jnp.float32)

    def deep(params, texts):
        x = texts @ params["kernel"] + params["bias"]
        for _ in range(8):
            x = jnp.sin(x)
        return x[:, :128].sum(1), x[:, 128:].sum(1)

    def at_once(params, texts):
        return contrastive_loss(*deep(params, texts.reshape(-1, *texts.shape[2:]))).mean

    cached, whole = (
        jax.jit(f).lower(params, texts).compile().memory_analysis().temp_size_in_bytes
        for f in (functools.partial(cached_gradients, deep, contrastive_loss), jax.grad(at_once))
    )
    assert 8 * cached < whole


@pytest.mark.parametrize(
    ("embed_fn", "error", "message"),
    [
        (lambda params, batch: batch[0].astype(jnp.int32), TypeError, "the result of embed_fn must be an array of"),
        (lambda params, batch: batch[0].sum(), ValueError, r"the result of embed_fn must be arrays \[B, ...\], got "),
    ],
    ids=["integers", "scalar"],
)  # fmt: skip
def test_bad_embeddings_are_named(embed_fn, error, message):
    with pytest.raises(error, match=f"cached_gradients: {message}"):
        cached_gradients(embed_fn, contrastive_loss, *texts_and_params())


def test_losses_must_be_functions():
    params, batches = texts_and_params()
    with pytest.raises(TypeError, match="matryoshka_loss: loss_fn must be a function, got 3"):
        matryoshka_loss(3, (4, 2))
    with pytest.raises(TypeError, match="cached_gradients: loss_fn must be a function, got None"):
        cached_gradients(embed, None, params, batches)
    with pytest.raises(TypeError, match=r"cached_gradients: embed_fn must be a function, got \{"):
        cached_gradients(params, contrastive_loss, params, batches)


def test_cached_gradients_check_their_arguments():
    params, batches = texts_and_params()
    for arguments, error, message in (
        ((embed, contrastive_loss, {"kernel": jnp.ones(2, jnp.int32)}, batches), TypeError, "params must be arrays of"),
        ((embed, contrastive_loss, params, (batches[0], batches[1][:1])), ValueError, "batches must be arrays of the"),
        ((embed, lambda *x: 1.0, params, batches), ValueError, "loss_fn must return two scalars"),
    ):
        with pytest.raises(error, match=f"cached_gradients: {message}"):
            cached_gradients(*arguments)
    with pytest.raises(TypeError, match="cached_gradients: loss_scale must be a LossScale or None, got 8"):
        cached_gradients(embed, contrastive_loss, params, batches, loss_scale=8)


# --- Several devices ---------------------------------------------------------------------------------------------


def meshes():
    """Returns a mesh of all devices and, if there are four, one of two axes, each with the name of its axes."""
    count = min(jax.device_count(), 8)
    shapes = [((count,), ("data",)), *([((2, 2), ("rows", "columns"))] if count >= 4 else [])]
    for shape, names in shapes:
        kinds = (jax.sharding.AxisType.Auto,) * len(shape)
        yield jax.make_mesh(shape, names, kinds, devices=jax.devices()[: np.prod(shape)]), names


@pytest.mark.parametrize("name", ["gte_hard", "symmetric"])
def test_devices_share_their_pairs(name):
    arrays = embeddings(pairs=16)
    value, gradients = mean_and_gradients(functools.partial(contrastive_loss, **OPTIONS[name]), *arrays)
    for mesh, names in meshes():
        axis_name = names if len(names) > 1 else names[0]

        def own(*arrays, names=names, axis_name=axis_name):
            loss = contrastive_loss(*arrays, axis_name=axis_name, **OPTIONS[name])
            return jax.lax.psum(loss, names).mean

        for check_vma in (True, *([False] if name == "symmetric" else [])):
            each = jax.shard_map(own, mesh=mesh, in_specs=P(names), out_specs=P(), check_vma=check_vma)
            found, sharded = jax.jit(jax.value_and_grad(each, (0, 1, 2)))(*arrays)
            np.testing.assert_allclose(found, value, rtol=1e-6)
            for got, exact in zip(sharded, gradients, strict=True):
                np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-6)


def still(params, texts):
    """Returns the embeddings of a micro-batch without dropout."""
    found = jnp.tanh(texts @ params["kernel"] + params["bias"])
    return found[:, 0], found[:, 1], found[:, 2:]


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "accumulated"])
def test_devices_have_gradients_of_the_whole_batch(cached):
    """Each device has its own part of each micro-batch. The result is the same on all of them."""
    params, (texts, _) = texts_and_params(2 if cached else 1, 16)

    def gradients(params, texts, axis_name=None):
        loss = functools.partial(contrastive_loss, directions=EVERY, axis_name=axis_name)
        scale = LossScale.create(2.0**10)
        if cached:
            return cached_gradients(still, matryoshka_loss(loss, (8, 4)), params, texts, loss_scale=scale)
        return accumulate_gradients(lambda p, x: loss(*still(p, x)), params, texts, loss_scale=scale)

    loss, expected = jit(gradients)(params, texts)
    for mesh, names in meshes():
        each = jax.shard_map(
            functools.partial(gradients, axis_name=names), mesh=mesh, in_specs=(P(), P(None, names)), out_specs=P()
        )
        found, own = jax.jit(each)(params, texts)
        assert found.labelled == loss.labelled == texts.shape[0] * texts.shape[1]
        np.testing.assert_allclose(found.total, loss.total, rtol=1e-6)
        for name, gradient in expected.items():
            np.testing.assert_allclose(own[name], gradient, rtol=1e-5, atol=2e-6)


@pytest.mark.skipif(jax.device_count() > 1, reason="the other tests have several devices already")
@pytest.mark.parametrize("count", [4, *slow(2, 8)])
def test_losses_over_several_devices(count):
    assert "4 passed" in pytest_on(count, "-k", "test_devices", __file__)
