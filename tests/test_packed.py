"""The encoder gives the same results on packed tokens as on a padded batch, and so does pooling."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxft
from cases import BITWISE, INTERPRET, jit, slow, slow_cases
from jaxft.models import bert
from jaxft.models.pooling import l2_normalize, pool, pool_packed
from test_bert import CONFIG, DISTILBERT, ROBERTA, assert_close, make

BATCH, LENGTH, CAPACITY = 4, 7, 23
LENGTHS = np.array([7, 3, 0, 6])
MASK = np.arange(LENGTH) < LENGTHS[:, None]
HOLES = MASK & (np.arange(LENGTH) % 3 != 1)
TOKENS = int(LENGTHS.sum())
EMPTY = LENGTHS == 0
CONFIGS = pytest.mark.parametrize("config", [ROBERTA, *slow(CONFIG, DISTILBERT)], ids=lambda config: config.model_type)
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "triton"])


def some_ids():
    """Returns ids of the whole vocabulary, with the padding ids of all models inside of the sequences."""
    ids = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (BATCH, LENGTH)).astype(np.int32)
    ids[0, 2:4], ids[1, 0], ids[3, 5] = 1, 1, 0
    return ids


@functools.partial(jax.jit, static_argnums=(0, 2, 3), compiler_options=BITWISE)
def compiled(graph, params, max_seqlen, output_hidden_states, **inputs):
    return nnx.merge(graph, params)(**inputs, max_seqlen=max_seqlen, output_hidden_states=output_hidden_states)


def run(model, max_seqlen=None, output_hidden_states=False, **inputs):
    return compiled(*nnx.split(model), max_seqlen, output_hidden_states, **inputs)


def pack(x, mask=MASK, capacity=CAPACITY):
    return jaxft.remove_padding(x, mask, capacity=capacity)


def packed_inputs(ids, mask=MASK, capacity=CAPACITY, **others):
    packed = pack(ids, mask, capacity)
    others = {name: pack(x, mask, capacity).x for name, x in others.items()}
    return {"input_ids": packed.x, "cu_seqlens": packed.cu_seqlens, **others}


def assert_same(actual, expected):
    """Asserts bitwise equality on one CPU, whose matmuls do not depend on the number of rows."""
    if INTERPRET:
        np.testing.assert_array_equal(actual, expected)
    else:
        assert_close(actual, expected)


# --- Packed is padded --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "implementation", "capacity"),
    [(CONFIG, "triton", CAPACITY),
     *slow_cases((CONFIG, "xla", TOKENS), (ROBERTA, "xla", TOKENS), (DISTILBERT, "xla", TOKENS),
                 (ROBERTA, "triton", CAPACITY), (DISTILBERT, "triton", CAPACITY))],
    ids=lambda value: getattr(value, "model_type", str(value)),
)  # fmt: skip
def test_packed_equals_padded(config, implementation, capacity):
    model, ids = make(config, implementation=implementation), some_ids()
    padded = run(model, None, True, input_ids=ids, attention_mask=MASK)
    packed = run(model, LENGTH, True, **packed_inputs(ids, capacity=capacity))
    assert len(packed.hidden_states) == len(padded.hidden_states) == 3
    for got, expected in zip(packed.hidden_states, padded.hidden_states, strict=True):
        assert got.shape == (capacity, 16)
        assert_same(got[:TOKENS], expected[MASK])
        assert np.isfinite(got).all()
    np.testing.assert_array_equal(packed.last_hidden_state, packed.hidden_states[-1])
    if config is DISTILBERT:
        assert packed.pooler_output is None
    else:
        assert packed.pooler_output.shape == (BATCH, 16)
        assert_same(packed.pooler_output[~EMPTY], padded.pooler_output[~EMPTY])
        assert np.isfinite(packed.pooler_output).all()


@pytest.mark.slow
def test_packed_equals_padded_in_16_bits():
    model, ids = make(dtype=jnp.bfloat16, implementation="triton"), some_ids()
    padded = run(model, input_ids=ids, attention_mask=MASK).last_hidden_state.astype(jnp.float32)
    packed = run(model, LENGTH, **packed_inputs(ids)).last_hidden_state
    assert packed.dtype == jnp.bfloat16
    assert_close(packed[:TOKENS].astype(jnp.float32), padded[MASK], 4 * float(jnp.finfo(jnp.bfloat16).eps))


@CONFIGS
def test_explicit_position_ids_are_used(config):
    """Positions come in any order, with token types."""
    model, ids, rng = make(config), some_ids(), np.random.default_rng(2)
    others = {"position_ids": rng.integers(0, 20, ids.shape).astype(np.int32)}
    if config is CONFIG:
        others["token_type_ids"] = rng.integers(0, 2, ids.shape).astype(np.int32)
    padded = run(model, input_ids=ids, attention_mask=MASK, **others).last_hidden_state
    packed = run(model, LENGTH, **packed_inputs(ids, **others)).last_hidden_state
    assert_same(packed[:TOKENS], padded[MASK])
    for name in others:
        changed = others | {name: 1 - others[name] if name == "token_type_ids" else others[name] // 2}
        other = run(model, LENGTH, **packed_inputs(ids, **changed)).last_hidden_state
        assert np.abs(other - packed)[:TOKENS].max() > 0.1, name


@pytest.mark.parametrize("implementation", ["xla", *slow("triton")])
def test_masks_with_holes(implementation):
    """Tokens keep the positions that they have in the padded batch."""
    model, ids = make(implementation=implementation), some_ids()
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ids.shape)
    padded = run(model, input_ids=ids, attention_mask=HOLES).last_hidden_state
    packed = run(model, LENGTH, **packed_inputs(ids, HOLES, position_ids=positions)).last_hidden_state
    assert_close(packed[: HOLES.sum()], padded[HOLES])


def test_roberta_positions_are_spelled_out():
    """Padding ids inside a sequence have the padding position and do not count, as in a padded batch."""
    model = make(ROBERTA)
    ids = np.array([5, 1, 6, 1, 1, 7, 8, 9, 9, 1], np.int32)
    positions = np.array([2, 1, 3, 1, 1, 2, 3, 4, 0, 0], np.int32)  # two sequences of 4, then an unused row
    inputs = {"input_ids": ids, "cu_seqlens": np.array([0, 4, 8], np.int32)}
    out, same = run(model, 6, **inputs), run(model, 6, **inputs, position_ids=positions)
    np.testing.assert_array_equal(out.last_hidden_state, same.last_hidden_state)


@pytest.mark.parametrize(("config", "implementation"), [(CONFIG, "triton"), *slow_cases((ROBERTA, "xla"))])
def test_gradients(config, implementation):
    model, ids = make(dataclasses.replace(config, num_hidden_layers=1), implementation=implementation), some_ids()
    graph, params = nnx.split(model)
    inputs = packed_inputs(ids)
    cotangents = np.random.default_rng(3).standard_normal((BATCH, LENGTH, 16)).astype(np.float32)
    indices = pack(ids).indices

    def loss(out, hidden):
        pooled = jnp.sum(jnp.sin(out.pooler_output[~EMPTY]))
        return pooled + jnp.sum(jnp.where(MASK[..., None], jnp.sin(hidden) * cotangents, 0.0))

    def padded(params):
        out = nnx.merge(graph, params)(ids, MASK)
        return loss(out, out.last_hidden_state)

    def packed(params):
        out = nnx.merge(graph, params)(**inputs, max_seqlen=LENGTH)
        return loss(out, jaxft.restore_padding(out.last_hidden_state, indices, batch=BATCH, length=LENGTH))

    expected, got = (jit(jax.grad(f))(params) for f in (padded, packed))
    for (path, e), (_, g) in zip(nnx.to_flat_state(expected), nnx.to_flat_state(got), strict=True):
        assert np.abs(e[...]).max() > 1e-3, path
        assert_close(g[...], e[...], 5e-6)


# --- What a sequence does not depend on --------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["triton", *slow("xla")])
def test_unused_rows_reach_nothing(implementation):
    """Unused rows with unknown ids are NaN, and reach nothing either."""
    model, inputs = make(implementation=implementation), packed_inputs(some_ids())
    expected = run(model, LENGTH, **inputs)
    for fill in (5, -1):
        ids = inputs["input_ids"].at[TOKENS:].set(fill)
        out = run(model, LENGTH, **inputs | {"input_ids": ids})
        np.testing.assert_array_equal(out.last_hidden_state[:TOKENS], expected.last_hidden_state[:TOKENS])
        np.testing.assert_array_equal(out.pooler_output, expected.pooler_output)
        assert np.isnan(out.last_hidden_state[TOKENS:]).all() == (fill == -1)


def test_neighbours_change_no_bit():
    model, ids = make(implementation="triton"), some_ids()
    inputs = packed_inputs(ids)
    out = run(model, LENGTH, **inputs)
    for b, (start, end) in enumerate(zip(np.cumsum(LENGTHS) - LENGTHS, np.cumsum(LENGTHS), strict=True)):
        alone = np.zeros(CAPACITY, np.int32)
        alone[2 : 2 + LENGTHS[b]] = ids[b, : LENGTHS[b]]
        cu_seqlens = np.array([0, 2, *[2 + LENGTHS[b]] * 3], np.int32)
        got = run(model, LENGTH, input_ids=alone, cu_seqlens=cu_seqlens)
        np.testing.assert_array_equal(got.last_hidden_state[2 : 2 + LENGTHS[b]], out.last_hidden_state[start:end])
        np.testing.assert_array_equal(got.pooler_output[1], out.pooler_output[b])


@pytest.mark.parametrize("implementation", ["xla", *slow("triton")])
def test_overlong_sequences_raise_or_become_nan(implementation):
    """No token is dropped silently: under jit, which cannot raise, everything is NaN."""
    model = make(implementation=implementation)
    ids = np.random.default_rng(4).integers(2, CONFIG.vocab_size, 30).astype(np.int32)
    for cu_seqlens, message in (
        ([0, 25, 28], "max_seqlen must not be below the longest sequence's 25, got 4"),
        ([0, 3, 31], "cu_seqlens must not go beyond the 30 rows, got 31"),
        ([0, 4, 2], "cu_seqlens must ascend from 0"),
        ([2, 4, 5], "cu_seqlens must ascend from 0"),
    ):
        given = np.array(cu_seqlens, np.int32)
        with pytest.raises(ValueError, match=f"BertModel: {message}"):
            model(ids, cu_seqlens=given, max_seqlen=4)
        out = run(model, 4, input_ids=ids, cu_seqlens=given)
        assert np.isnan(out.last_hidden_state).all() and np.isnan(out.pooler_output[0]).all()


@pytest.mark.parametrize("implementation", ["xla", *slow("triton")])
def test_empty_inputs_have_finite_results(implementation):
    model = make(implementation=implementation)
    for ids, cu_seqlens in (([], [0]), ([], [0, 0, 0]), ([3, 4], [0, 0]), ([3, 4], [0])):
        out = run(model, 5, input_ids=np.array(ids, np.int32), cu_seqlens=np.array(cu_seqlens, np.int32))
        assert out.last_hidden_state.shape == (len(ids), 16)
        assert out.pooler_output.shape == (len(cu_seqlens) - 1, 16)
        assert np.isfinite(out.last_hidden_state).all() and np.isfinite(out.pooler_output).all()


def test_overflowing_tokens_make_everything_nan():
    graph, params = nnx.split(make())

    @jax.jit
    def forward(params, ids, mask):
        packed = pack(ids, mask, TOKENS - 1)
        out = nnx.merge(graph, params)(packed.x, cu_seqlens=packed.cu_seqlens, max_seqlen=LENGTH)
        hidden = out.last_hidden_state
        pooled = pool_packed(hidden, packed.cu_seqlens, ("cls", "mean"), LENGTH)
        restored = jaxft.restore_padding(hidden, packed.indices, batch=BATCH, length=LENGTH)
        return restored, out.pooler_output[~EMPTY], pooled[~EMPTY]

    for x in forward(params, some_ids(), MASK):
        assert np.isnan(x).all()


# --- Inputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input_ids": np.zeros((2, 5), np.int32)}, ValueError, r"input_ids must have a shape \[tokens\] .* \[2, 5\]"),
        ({"input_ids": np.zeros(10, np.float32)}, TypeError, "input_ids must be integers, got float32"),
        ({"cu_seqlens": np.zeros(3, np.float32)}, TypeError, "cu_seqlens must be integers, got float32"),
        ({"cu_seqlens": np.zeros((2, 2), np.int32)}, ValueError, r"cu_seqlens .* \[sequences \+ 1\], got \[2, 2\]"),
        ({"cu_seqlens": np.zeros(0, np.int32)}, ValueError, r"cu_seqlens .* \[sequences \+ 1\], got \[0\]"),
        ({"cu_seqlens": np.array([0, 2**32])}, ValueError, "cu_seqlens must fit int32, got 4294967296"),
        ({"cu_seqlens": None}, ValueError, "max_seqlen goes with cu_seqlens"),
        ({"max_seqlen": None}, ValueError, "max_seqlen must be a Python integer >= 0, got None"),
        ({"max_seqlen": 5.0}, ValueError, "max_seqlen must be a Python integer >= 0, got 5.0"),
        ({"max_seqlen": True}, ValueError, "max_seqlen must be a Python integer >= 0, got True"),
        ({"max_seqlen": -1}, ValueError, "max_seqlen must be a Python integer >= 0, got -1"),
        ({"max_seqlen": 21}, ValueError, "max_seqlen is 21, but the model has positions for at most 20"),
        ({"attention_mask": np.ones(10, np.int32)}, ValueError, "attention_mask must be None with cu_seqlens"),
        ({"token_type_ids": np.zeros(9, np.int32)}, ValueError, r"token_type_ids .* \[10\], got \[9\]"),
        ({"position_ids": np.zeros((1, 10), np.int32)}, ValueError, r"position_ids .* \[10\], got \[1, 10\]"),
    ],
)
def test_wrong_inputs(change, error, message):
    inputs = {"input_ids": np.zeros(10, np.int32), "cu_seqlens": np.array([0, 4, 9]), "max_seqlen": 5}
    with pytest.raises(error, match="BertModel: .*" + message):
        make()(**inputs | change)


def test_explicit_position_ids_lift_the_length_limit():
    model, ids = make(), np.full(30, 3, np.int32)
    positions = np.arange(30, dtype=np.int32) % 20
    packed = run(model, 30, input_ids=ids, cu_seqlens=np.array([0, 30], np.int32), position_ids=positions)
    padded = run(model, input_ids=ids[None], position_ids=positions[None])
    assert_close(packed.last_hidden_state, padded.last_hidden_state[0])


def test_kinds_of_inputs():
    model = make()
    expected = model(np.arange(2, 9), cu_seqlens=np.array([0, 3, 7]), max_seqlen=4).last_hidden_state
    for kind in (list, tuple, jnp.asarray):
        ids, cu_seqlens = kind([2, 3, 4, 5, 6, 7, 8]), kind([0, 3, 7])
        np.testing.assert_array_equal(model(ids, cu_seqlens=cu_seqlens, max_seqlen=4).last_hidden_state, expected)


def test_implementation_reaches_every_operation(monkeypatch):
    seen = collections.Counter()

    def recorder(name, original):
        def record(*args, implementation, **options):
            assert implementation == "mosaic_gpu"
            seen[name] += 1
            return original(*args, implementation="xla", **options)

        return record

    for name in (
        "dense",
        "qkv_attention",
        "varlen_qkv_attention",
        "dense_residual_layer_norm",
        "feed_forward_residual_layer_norm",
    ):
        monkeypatch.setattr(bert, name, recorder(name, getattr(bert, name)))
    monkeypatch.setattr(bert, "embeddings_layer_norm", recorder("embeddings_layer_norm", bert.embeddings_layer_norm))
    make(implementation="mosaic_gpu")(np.arange(5), cu_seqlens=[0, 5], max_seqlen=5)
    assert seen == {
        "dense": 3, "varlen_qkv_attention": 2, "dense_residual_layer_norm": 2, "feed_forward_residual_layer_norm": 2,
        "embeddings_layer_norm": 1,
    }  # fmt: skip


# --- Pooling -----------------------------------------------------------------------------------------------------

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


@pytest.fixture(scope="module")
def hidden():
    return jnp.asarray(np.random.default_rng(5).standard_normal((BATCH, LENGTH, 16)) - 3.0, jnp.float32)


@functools.partial(jax.jit, static_argnums=(2, 3))
def pooled(hidden, cu_seqlens, modes=MODES, max_seqlen=LENGTH, prompt_lengths=None):
    return pool_packed(hidden, cu_seqlens, modes, max_seqlen, prompt_lengths)


@pytest.mark.parametrize("prompts", [None, 1, [0, 2, 1, 1000]], ids=["all", "same", "each"])
@pytest.mark.parametrize("modes", [MODES, *slow(*((mode,) for mode in MODES))], ids="-".join)
def test_pooling(hidden, modes, prompts):
    packed, of_each = pack(hidden), np.broadcast_to(np.resize(0 if prompts is None else prompts, BATCH), BATCH)
    prompts = None if prompts is None else jnp.asarray(prompts if np.ndim(prompts) == 0 else of_each, jnp.int32)
    got = pooled(packed.x.at[TOKENS:].set(jnp.nan), packed.cu_seqlens, modes, LENGTH, prompts)
    expected = {
        "cls": lambda x, _: x[0],
        "max": lambda x, _: x.max(axis=0),
        "mean": lambda x, _: x.mean(axis=0),
        "mean_sqrt_len_tokens": lambda x, _: x.sum(axis=0) / len(x) ** 0.5,
        "weightedmean": lambda x, start: np.average(x, axis=0, weights=start + 1 + np.arange(len(x))),
        "lasttoken": lambda x, _: x[-1],
    }
    for b, (length, start) in enumerate(zip(LENGTHS, of_each, strict=True)):
        rows = np.asarray(hidden[b, :length], np.float64)
        kept = rows[start:]
        by_hand = [
            expected[mode](kept, start) if len(kept) else rows[0] if mode == "cls" and length else np.zeros(16)
            for mode in modes
        ]
        np.testing.assert_allclose(got[b], np.concatenate(by_hand), rtol=1e-6)
    same = jax.jit(lambda hidden, mask: pool(hidden, mask, modes, prompts))(hidden, MASK)
    if INTERPRET:
        np.testing.assert_array_equal(got, same)
    else:  # on a GPU, XLA adds up packed and padded rows in different orders
        np.testing.assert_allclose(got, same, rtol=1e-6)


def test_neighbours_change_no_bit_of_pooling(hidden):
    packed = pack(hidden)
    out = pooled(packed.x, packed.cu_seqlens)
    for b, length in enumerate(LENGTHS):
        alone = jnp.full((CAPACITY, 16), 1e3).at[5 : 5 + length].set(hidden[b, :length])
        got = pooled(alone, jnp.array([0, 5, 5 + length, 6 + length, CAPACITY], jnp.int32))
        np.testing.assert_array_equal(got[1], out[b])


def test_pooling_of_overlong_sequences(hidden):
    rows = hidden.reshape(-1, 16)[:10]
    out = pooled(rows, jnp.array([0, 4, 12, 15], jnp.int32))
    np.testing.assert_array_equal(out[0], pooled(rows, jnp.array([0, 4, 4, 4], jnp.int32))[0])
    np.testing.assert_array_equal(out[1, :16], rows[4])
    assert np.isnan(out[1, 16:]).all() and np.isnan(out[2]).all()
    longer = pooled(rows, jnp.array([0, 10, 10, 10], jnp.int32), MODES, 4)
    np.testing.assert_array_equal(longer, pooled(rows, jnp.array([0, 4, 4, 4], jnp.int32), MODES, 4))


def test_pooling_of_empty_inputs():
    assert (pooled(jnp.zeros((0, 16)), jnp.array([0, 0], jnp.int32)) == 0.0).all()
    assert pooled(jnp.ones((3, 16)), jnp.array([0], jnp.int32)).shape == (0, 16 * len(MODES))
    assert (pooled(jnp.full((3, 16), jnp.nan), jnp.array([0, 0, 0], jnp.int32)) == 0.0).all()


@pytest.mark.parametrize("place", [0, 2, 4])
def test_nan_in_a_token_makes_every_pooling_nan(place):
    """XLA's maximum ignores NaN on a CPU, depending on the shape."""
    rows = jnp.ones((3, 5, 384)).at[1, place].set(jnp.nan)
    modes = [mode for mode in MODES if mode not in ("cls", "lasttoken")]
    for mode in modes:
        padded = pool(rows, jnp.ones((3, 5), bool), (mode,))
        packed = pooled(rows.reshape(15, 384), jnp.array([0, 5, 10, 15], jnp.int32), (mode,), 5)
        for found in (padded, packed):
            assert np.isnan(found[1]).all() and np.isfinite(found[::2]).all(), mode
    grad = jax.grad(lambda rows: pool(rows, jnp.ones((3, 5), bool), ("max",)).sum())(rows)
    assert np.isnan(grad[1]).all() and np.isfinite(grad[::2]).all()


def test_gradient_of_pooling(hidden):
    packed, weights = (
        pack(hidden),
        np.random.default_rng(6).standard_normal((BATCH, 16 * len(MODES))).astype(np.float32),
    )
    got = jax.jit(jax.grad(lambda x: jnp.sum(pool_packed(x, packed.cu_seqlens, MODES, LENGTH) * weights)))(
        packed.x.at[TOKENS:].set(jnp.nan)
    )
    expected = jax.jit(jax.grad(lambda x: jnp.sum(pool(x, MASK, MODES) * weights)))(hidden)
    assert_close(got, pack(expected).x)
    text = str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(pool_packed(x, packed.cu_seqlens, MODES, 7))))(packed.x))
    assert "unique_indices=True" in text and "unique_indices=False" not in text  # no atomics on a GPU


def test_short_embeddings_are_scaled_to_length_1():
    """A length below 1e-12 counts as 1e-12, as in sentence-transformers."""
    x = jnp.array([[3e-5, 4e-5], [3.0, 4.0], [0.0, 0.0], [3e-14, 4e-14]])
    np.testing.assert_allclose(l2_normalize(x), [[0.6, 0.8], [0.6, 0.8], [0.0, 0.0], [0.03, 0.04]], rtol=1e-5)
