"""SpladeModel: pooled logits of a masked language model, a part of the vocabulary at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tiny
from jaxft import BertForMaskedLM, SpladeModel
from jaxft.models import splade

MASK = np.arange(9)[None] < np.array([9, 1, 0, 4])[:, None]
IDS = np.where(MASK, np.random.default_rng(0).integers(5, len(tiny.VOCAB), MASK.shape), 0)


@pytest.fixture(scope="module")
def mlm():
    return BertForMaskedLM(tiny.config(initializer_range=1.0), rngs=nnx.Rngs(0))


@pytest.fixture(params=[False, True], ids=["whole", "parts"])
def parts(request, monkeypatch):
    """Cuts the vocabulary of 70 tokens into parts of 24."""
    if request.param:
        monkeypatch.setattr(splade, "_LOGITS", 1)
        monkeypatch.setattr(splade, "_LEAST_CLASSES", 24)


def plain(mlm, pooling, activation):
    """Returns the weights from the logits of all tokens."""
    weights = jnp.log1p(jnp.maximum(mlm(IDS, MASK), 0))
    weights = jnp.log1p(weights) if activation == "log1p_relu" else weights
    weights = jnp.where(MASK[:, :, None], weights, 0)
    return weights.max(axis=1) if pooling == "max" else weights.sum(axis=1)


@pytest.mark.parametrize("activation", splade.ACTIVATIONS)
@pytest.mark.parametrize("pooling", splade.POOLINGS)
def test_weights_are_pooled_logits(pooling, activation, mlm, parts):
    model = SpladeModel(mlm, pooling_strategy=pooling, activation_function=activation)
    expected = jax.jit(lambda: plain(mlm, pooling, activation))()
    starts = np.append(0, np.cumsum(MASK.sum(axis=1))).astype(np.int32)
    ids = np.append(IDS[MASK], [0, 0, 0]).astype(np.int32)  # with rows of no sequence
    for run in (lambda: model(IDS, MASK), lambda: model(ids, cu_seqlens=starts, max_seqlen=9)):
        found = jax.jit(run)()
        assert found.shape == (4, len(tiny.VOCAB)) and found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert (np.asarray(found)[2] == 0).all() and (np.asarray(found)[0] > 0).any()


@pytest.mark.parametrize("pooling", splade.POOLINGS)
def test_gradients_equal_those_of_all_logits(pooling, mlm, parts):
    model = SpladeModel(mlm, pooling_strategy=pooling)
    weight = jnp.asarray(np.random.default_rng(1).standard_normal((4, len(tiny.VOCAB))), jnp.float32)
    found = nnx.jit(nnx.grad(lambda m: jnp.sum(m(IDS, MASK) * weight)))(model)["mlm"]
    expected = nnx.jit(nnx.grad(lambda m: jnp.sum(plain(m, pooling, "relu") * weight)))(mlm)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-4)


def test_parts_of_the_vocabulary_add_gradients_in_float32(monkeypatch):
    """Rows of the table that are alike make gradients of tokens that do not cancel."""
    config = tiny.config(vocab_size=4096)
    model = SpladeModel(BertForMaskedLM(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    table = model.encoder.embeddings.word
    table[...] = jnp.ones_like(table[...]).at[:, ::2].set(0.5) + 0.1 * table[...]
    graph, state = nnx.split(model)
    found = {}
    for classes in (4096, 16):
        monkeypatch.setattr(splade, "_LOGITS", 1)
        monkeypatch.setattr(splade, "_LEAST_CLASSES", classes)
        gradients = jax.jit(jax.grad(lambda state: nnx.merge(graph, state)(IDS, MASK).sum()))(state)  # noqa: B023
        found[classes] = np.float32(gradients["mlm"]["lm_head"]["norm_beta"][...])
    assert np.linalg.norm(found[16] - found[4096]) <= 2e-3 * np.linalg.norm(found[4096])


def test_logits_of_all_tokens_are_not_in_memory(mlm, monkeypatch):
    monkeypatch.setattr(splade, "_LOGITS", 1)
    monkeypatch.setattr(splade, "_LEAST_CLASSES", 16)
    graph, state = nnx.split(SpladeModel(mlm))

    def total(state):
        return nnx.merge(graph, state)(IDS, MASK).sum()

    for function in (total, jax.grad(total)):
        text = str(jax.make_jaxpr(function)(state))
        part = f"{IDS.shape[0]},{IDS.shape[1]},16]"
        assert f"[{part}" in text and f",{part}" not in text  # neither at once nor one part after the other
        assert f"{IDS.shape[0]},{IDS.shape[1]},{len(tiny.VOCAB)}]" not in text


def test_broken_parameters_give_infinite_weights(mlm):
    graph, state = nnx.split(mlm)
    broken = nnx.merge(graph, jax.tree.map(lambda x: x * jnp.nan, state))
    for pooling in splade.POOLINGS:
        assert np.isinf(SpladeModel(broken, pooling_strategy=pooling)(IDS, MASK))[0].all()


def test_wrong_arguments_are_named(mlm):
    with pytest.raises(TypeError, match="mlm must be a BertForMaskedLM, got BertModel"):
        SpladeModel(mlm.bert)
    with pytest.raises(ValueError, match="pooling_strategy must be one of max, sum, got 'mean'"):
        SpladeModel(mlm, pooling_strategy="mean")
    with pytest.raises(ValueError, match="activation_function must be one of relu, log1p_relu, got 'gelu'"):
        SpladeModel(mlm, activation_function="gelu")
