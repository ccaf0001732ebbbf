"""Attention by cuDNN: named by the caller, and chosen where it is faster."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

import jaxft
import oracle
from cases import check, check_padding, jit, lower, normal, slow
from compare import assert_matches_oracle
from jaxft import dispatch, reference
from jaxft.kernels.cudnn import attention as cudnn
from jaxft.ops import attention_vjp
from jaxft.tuning import attention as tuning_attention

needs_hopper = pytest.mark.skipif(not dispatch.device().is_hopper, reason="runs cuDNN, which is taken on Hopper GPUs")


def separate(b, t, s, n, h, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    return normal(rng, dtype, query=(b, t, n, h), key=(b, s, n, h), value=(b, s, n, h))


OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": (20, 0)},
    "key lengths": {"key_value_seq_lengths": np.array([128, 37, 0], np.int32)},
    "lengths": {
        "query_seq_lengths": np.array([100, 0, 64], np.int32),
        "key_value_seq_lengths": np.array([128, 37, 0], np.int32),
    },
}


@needs_hopper
@pytest.mark.parametrize("dtype", [jnp.bfloat16, *slow(jnp.float16)])
@pytest.mark.parametrize("name", OPTIONS)
def test_named_cudnn_matches_the_oracle(name, dtype):
    """The cases include rows without anything to attend to."""
    options = OPTIONS[name]
    check(
        lambda implementation, **f: jaxft.dot_product_attention(**f, **options, implementation=implementation),
        lambda **f: reference.dot_product_attention(**f, **options),
        lambda **f: oracle.dot_product_attention(**f, **options),
        separate(3, 128, 128, 2, 64, dtype), implementations=("cudnn",), gradients=True,
    )  # fmt: skip


@pytest.fixture
def by_xla(monkeypatch):
    """Makes a CPU pass for a Hopper GPU, where XLA computes what cuDNN is asked for.

    As in cuDNN, rows beyond the query lengths hold anything.
    """

    def attend(*arrays, implementation, **options):
        assert implementation == "cudnn"
        asked.append(options)
        wide = (x.astype(jnp.float32) for x in arrays)  # on a CPU, jax.nn lacks some 16-bit matmuls
        return plainly(*wide, **options | {"query_seq_lengths": None}, implementation="xla").astype(arrays[0].dtype)

    plainly, asked = jax.nn.dot_product_attention, []
    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    with dispatch.target(), jax.numpy_dtype_promotion("standard"):
        yield asked
    jax.clear_caches()  # drops what was traced with the other function


BY_XLA = {
    "scale": {"scale": 0.3, "is_causal": True},
    "window": {"local_window_size": (5, 0)},
    "lengths": {
        "query_seq_lengths": np.array([20, 0, 24, 9], np.int32),
        "key_value_seq_lengths": np.array([24, 13, 0, 1], np.int32),
    },
    "key lengths": {"key_value_seq_lengths": np.array([24, 13, 0, 1], np.int32)},
}


@pytest.mark.parametrize("name", BY_XLA)
def test_arguments_reach_cudnn(name, by_xla):
    """The numbers are right if cuDNN is. NaN and infinities in padding reach nothing."""
    options = BY_XLA[name]
    floats = separate(4, 24, 24, 2, 16)

    def attend(implementation="cudnn", **floats):
        return jaxft.dot_product_attention(**floats, **options, implementation=implementation)

    check(attend, lambda **f: reference.dot_product_attention(**f, **options),
          lambda **f: oracle.dot_product_attention(**f, **options), floats, implementations=("cudnn",))  # fmt: skip
    assert all(("is_causal", True) in asked.items() for asked in by_xla) == (name in ("scale", "window"))
    if "lengths" in name:
        attends = np.asarray(reference.attention_mask(24, 24, **options))[:, 0]
        attends = np.broadcast_to(attends, (4, 24, 24))
        queries, keys = attends.any(axis=2)[:, :, None, None], attends.any(axis=1)[:, :, None, None]
        check_padding(attend, floats, {"query": queries, "key": keys, "value": keys})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"query": jax.ShapeDtypeStruct((1, 8, 2, 136), jnp.bfloat16)}, "head size is 136"),
        ({"query": jax.ShapeDtypeStruct((1, 8, 2, 12), jnp.bfloat16)}, "head size is 12"),
        ({"query": jax.ShapeDtypeStruct((1, 8, 2, 16), jnp.float32)}, "query is float32"),
        ({"return_residual": True}, "no float32 log-sum-exp"),
        ({"cu_seqlens": 1}, "no packed sequences"),
        ({"query_segment_ids": 1}, "no segment ids"),
        ({"dropout_rng": 1}, "no dropout"),
        ({"bias": 1}, "a bias may leave a row"),
        ({"mask": 1}, "a mask may leave a row"),
        ({"window": (3, 1)}, "no windows to the right"),
        ({"window": (3, 0), "query_seq_lengths": 1}, "a window may leave a row"),
        ({"window": (3, 0), "query_length": 9}, "a window may leave a row"),
        ({"window": (3, 0)}, None),
        ({"window": (3, 1), "is_causal": True}, None),
        ({"relative_bias": 1}, "no table of biases"),
        ({"query": jax.ShapeDtypeStruct((1, 8, 2, 128), jnp.float16)}, None),
        ({}, None),
    ],
)
def test_what_cudnn_lacks_is_refused(change, reason):
    case = {"query": jax.ShapeDtypeStruct((1, 8, 2, 128), jnp.bfloat16), "query_length": 8, "window": None} | change
    query, length, window = (case.pop(name) for name in ("query", "query_length", "window"))
    is_causal = case.pop("is_causal", False)
    found = cudnn.unsupported(length, 8, cudnn.Options(1.0, is_causal, window), query=query, **case)
    assert found is None if reason is None else reason in found


def test_cudnn_gets_lengths_that_the_arrays_have(monkeypatch):
    """At least one, because cuDNN has no rows without keys, and at most the length of the arrays."""
    asked = []

    def call(query, key, value, *lengths_and_options):
        asked.extend(lengths_and_options)
        return query

    monkeypatch.setattr(cudnn, "_call", call)
    arrays, options = [jnp.ones((3, n, 1, 8)) for n in (4, 5, 5)], cudnn.Options(1.0, False, None)
    out = cudnn.forward(*arrays, np.array([-2, 3, 9], np.int32), np.array([9, 0, 2], np.int32), options)
    np.testing.assert_array_equal(out[:, :, 0, 0], np.arange(4) < np.array([0, 0, 4])[:, None])
    assert [x.tolist() for x in asked[:2]] == [[1, 3, 4], [5, 1, 2]]


@needs_hopper
def test_padding():
    clean = separate(3, 128, 128, 2, 64)
    lengths = np.array([128, 37, 0], np.int32)
    padding = (np.arange(128) >= lengths[:, None])[:, :, None, None]
    poisoned = clean | {name: jnp.where(padding, jnp.nan, clean[name]) for name in ("key", "value")}

    def results(floats):
        def attend(floats):
            return jaxft.dot_product_attention(**floats, key_value_seq_lengths=lengths, implementation="cudnn")

        out, pull_back = jax.vjp(attend, floats)
        return out, pull_back(jnp.ones_like(out))[0]

    (got, gradients), (want, _) = (jit(results)(floats) for floats in (poisoned, clean))
    assert np.array_equal(got, want)
    chex.assert_tree_all_finite(gradients)  # they differ from run to run
    for name in ("key", "value"):
        assert (np.asarray(gradients[name])[np.broadcast_to(padding, clean[name].shape)] == 0.0).all()


@needs_hopper
@pytest.mark.parametrize("causal", [False, True])
def test_cudnn_runs_where_no_gradient_is_taken(causal, monkeypatch):
    monkeypatch.setattr(tuning_attention, "_CUDNN_FROM", {64: (1, 1)})
    floats = separate(4, 128, 128, 8, 64)

    def attend(floats, implementation=None, **masks):
        return jaxft.dot_product_attention(**floats, is_causal=causal, **masks, implementation=implementation)

    def program(f, *arguments):
        return jax.jit(f).lower(*arguments).compile().as_text()

    assert "__cudnn$" in program(attend, floats)
    assert "__cudnn$" not in program(jax.grad(lambda f: jnp.sum(attend(f).astype(jnp.float32))), floats)
    lengths = jnp.arange(4) * 30
    assert "__cudnn$" not in program(lambda f, x: attend(f, key_value_seq_lengths=x), floats, lengths)
    expected = jit(functools.partial(attend, implementation="xla"))(floats)
    exact = oracle.dot_product_attention(**floats, is_causal=causal)
    assert_matches_oracle(jit(attend)(floats), expected, exact)
    for axes in ({"query": 1, "key": 1, "value": 1}, {"query": 1, "key": None, "value": None}):
        mapped = {n: x if axes[n] is None else jnp.stack([x, x], axis=1) for n, x in floats.items()}
        run = jax.vmap(attend, in_axes=(axes,))
        assert "__cudnn$" in program(run, mapped)
        for out in jit(run)(mapped):
            assert_matches_oracle(out, expected, exact)
    jax.export.export(jax.jit(attend), disabled_checks=jaxft.EXPORT_DISABLED_CHECKS)(floats)


@pytest.fixture
def on_hopper(monkeypatch):
    """Makes jaxft and JAX trace for a Hopper GPU with cuDNN, which ops choose at any size."""
    for name in ("check_cudnn_version", "check_compute_capability"):
        monkeypatch.setattr(fused_attention_stablehlo, name, lambda *_, **__: 91000)
    monkeypatch.setattr(tuning_attention, "_CUDNN_FROM", {64: (1, 1)})
    cudnn.missing.cache_clear()
    yield
    cudnn.missing.cache_clear()


AXES = [0, 1, (0, None, None), (None, 0, 0), "twice"]


def mapped(attend, axes):
    """Returns `attend` of three arrays (4, 128, 8, 64) under vmap, and the shapes that it then takes."""

    def shape(axis):
        return (2, 4, 128, 8, 64) if axis == 0 else (4, 2, 128, 8, 64) if axis == 1 else (4, 128, 8, 64)

    if axes == "twice":
        return jax.vmap(jax.vmap(attend, in_axes=(None, 0, 1)), in_axes=(0, 1, None)), [
            (3, 4, 128, 8, 64), (2, 3, 4, 128, 8, 64), (4, 2, 128, 8, 64)
        ]  # fmt: skip
    return jax.vmap(attend, in_axes=axes), list(map(shape, axes if isinstance(axes, tuple) else [axes] * 3))


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("kind", ["automatic", "named", "lengths", "gradient"])
def test_vmap_lowers(kind, axes, on_hopper):
    """The cases map every axis, or some arrays only. cuDNN's own batching rule supports neither."""

    def attend(query, key, value):
        lengths = {} if kind != "lengths" else {"key_value_seq_lengths": jnp.arange(4, dtype=jnp.int32)}
        implementation = None if kind == "automatic" else "cudnn"
        return jaxft.dot_product_attention(query, key, value, **lengths, implementation=implementation)

    def run(*arrays):
        if kind != "gradient":
            return attend(*arrays)
        return jax.grad(lambda *a: jnp.sum(attend(*a).astype(jnp.float32)), argnums=(0, 1, 2))(*arrays)

    run, shapes = mapped(run, axes)
    text = lower(run, *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes))
    assert "__cudnn$" in text and "xla.gpu.triton" not in text
    assert ("Backward" in text) == (kind == "gradient")


def test_vmap_of_the_gradient_alone_lowers(on_hopper):
    """`jax.jacrev` maps a gradient in this way."""

    def run(dout, *arrays):
        pull_back = jax.vjp(functools.partial(jaxft.dot_product_attention, implementation="cudnn"), *arrays)[1]
        return jax.vmap(pull_back)(dout)

    shapes = (3, 4, 128, 8, 64), *[(4, 128, 8, 64)] * 3
    assert "Backward" in lower(run, *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))


@pytest.mark.parametrize("length", [4096, 8192])
def test_long_packed_arrays_lower(length, on_hopper):
    """From 8,192 positions on, an inference takes cuDNN. Packed sequences never do."""
    qkv, boundaries = jax.ShapeDtypeStruct((2, length, 3, 8, 64), jnp.bfloat16), np.array([0, length], np.int32)
    assert ("__cudnn$" in lower(jaxft.qkv_attention, qkv)) == (length == 8192)
    gradient = jax.grad(lambda qkv: jnp.sum(jaxft.qkv_attention(qkv).astype(jnp.float32)))
    assert "__cudnn$" not in lower(gradient, qkv)
    assert "__cudnn$" not in lower(lambda qkv: jaxft.varlen_qkv_attention(qkv[0], boundaries, max_seqlen=length), qkv)


@needs_hopper
@pytest.mark.parametrize("axes", [*AXES[-2:], *slow(*AXES[:-2])], ids=str)
def test_vmap(axes):
    """vmap of cuDNN attention has the right values and gradients."""

    def attend(query, key, value, implementation):
        def run(*floats):
            return jaxft.dot_product_attention(*floats, implementation=implementation)

        out, pull_back = jax.vjp(run, query, key, value)
        return out, pull_back(query)

    run, shapes = mapped(functools.partial(attend, implementation="cudnn"), axes)
    plain, _ = mapped(functools.partial(attend, implementation="xla"), axes)
    rng = np.random.default_rng(0)
    floats = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    with jax.default_matmul_precision("highest"):
        exact = jit(plain)(*(x.astype(jnp.float32) for x in floats))
    exact = jax.tree.map(lambda x: np.asarray(x, np.float64), exact)
    assert_matches_oracle(jit(run)(*floats), jit(plain)(*floats), exact)


CHANGES = {
    "none": {},
    "heads of 64": {"head_size": 64, "batch": 16, "length": 2048},
    "negative scale": {"scale": -1.0},
    "mask": {"mask": np.ones((1, 1, 1, 512), bool)},
    "window": {"window": (30, 0)},
    "grouped heads": {"kv_heads": 4},
    "float32": {"dtype": jnp.float32},
    "small heads": {"head_size": 32},
    "short heads of 64": {"head_size": 64},
    "little work": {"batch": 1},
    "ragged length": {"length": 1000},
    "packed": {"packed": True, "head_size": 64, "batch": 4, "length": 8192},
    "short packed": {"packed": True, "head_size": 64, "batch": 64, "length": 4096},
    "packed with lengths": {"packed": True, "batch": 4, "length": 8192, "key_lengths": np.ones((4,), np.int32)},
}


def takes_cudnn(inputs, options):
    return attention_vjp.plan_of("dot_product_attention", inputs, options, None).forward.backend == "cudnn"


@pytest.mark.parametrize("name", CHANGES)
def test_selection_follows_device_and_arguments(name, monkeypatch):
    case = {"kv_heads": 8, "dtype": jnp.bfloat16, "head_size": 128, "batch": 64, "length": 512, "scale": 1.0}
    case |= CHANGES[name]
    monkeypatch.setattr(cudnn, "missing", lambda: None)
    query, key = (
        jax.ShapeDtypeStruct((case["batch"], case["length"], heads, case["head_size"]), case["dtype"])
        for heads in (8, case["kv_heads"])
    )
    inputs = attention_vjp.Inputs(query, key, key, mask=case.get("mask"))
    if "packed" in case:
        qkv = jax.ShapeDtypeStruct((*query.shape[:2], 3, *query.shape[2:]), query.dtype)
        inputs = attention_vjp.Inputs(qkv, key_value_seq_lengths=case.get("key_lengths"))
    options = attention_vjp.Options(case["scale"], False, case.get("window"), 0.0, False)
    with dispatch.target():
        assert takes_cudnn(inputs, options) == (name in ("none", "heads of 64", "packed"))
    with dispatch.target("NVIDIA A100", (8, 0)):
        assert not takes_cudnn(inputs, options)
