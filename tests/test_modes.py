"""Ops, models, text encoders and training under JAX's modes: rank promotion, dtype promotion, x64, leaks, NaN, jit.

Also models with symbolic sizes. `test_transforms.py` has the ops.
"""

import contextlib
import functools
import gc

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxft
import tiny
from calls import CALLS, public_ops
from cases import slow, slow_cases
from jaxft import training
from jaxft.models import splade
from jaxft.models.bert import BertModel
from jaxft.models.classification import BertForSequenceClassification, BertForTokenClassification
from jaxft.models.masked_lm import BertForMaskedLM
from jaxft.models.multi_vector import MultiVectorModel, max_sim
from jaxft.models.pooling import l2_normalize, pool, pool_packed
from jaxft.models.question_answering import BertForQuestionAnswering
from jaxft.models.splade import SpladeModel
from jaxft.text import quantization
from jaxft.text.quantization import starts_and_steps
from jaxft.text.similarities import SIMILARITIES


@contextlib.contextmanager
def strict(x64=False):
    """Modes that matter to a trace, all at once."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"), jax.enable_x64(x64):
        yield


@contextlib.contextmanager
def debug_nans(disable_jit=False):
    """Checks every compiled program for NaN or, without jit, every single operation."""
    with jax.debug_nans(True), jax.disable_jit(disable_jit):
        yield


@contextlib.contextmanager
def checking_leaks():
    """Finds tracers that outlive their trace. JAX searches all objects, so objects of earlier tests are frozen."""
    gc.collect()
    gc.freeze()
    try:
        with jax.checking_leaks():
            yield
    finally:
        gc.unfreeze()


def run(function, *arguments):
    return jax.block_until_ready(function(*jax.tree.map(jnp.asarray, arguments)))


def trace(function, *arguments):
    return jax.eval_shape(lambda *a: function(*a), *jax.tree.map(jnp.asarray, arguments))


MODES = {
    "strict": (strict, trace),
    "x64": (functools.partial(strict, x64=True), trace),
    "leaks": (checking_leaks, trace),  # traces everything anew, so it takes ten times as long
    "debug_nans": (debug_nans, run),
    "disable_jit": (functools.partial(debug_nans, disable_jit=True), run),
}
# Pallas' interpreter fills memory with NaN, which is reported without jit.
CASES = [
    (mode, name, implementation)
    for mode in MODES for name, call in CALLS.items() for implementation in ("triton", "xla")[not call.kernel :]
    if (mode, implementation) != ("disable_jit", "triton")
]  # fmt: skip
# Ops that make values NaN on purpose where an argument is wrong.
SPOILING = ("linear_cross_entropy", "remove_padding", "restore_padding")


X64 = ("layer_norm", "softmax", "embeddings_layer_norm", "dense", "qkv_attention", "varlen_qkv_attention", "rotary",
       "linear_cross_entropy")  # fmt: skip


def is_slow(mode, name, implementation):
    is_variant = "(" in name
    if mode == "x64":
        return implementation == "triton" or name not in X64
    if mode == "leaks":
        return name not in ("layer_norm", "qkv_attention", "dense", "linear_cross_entropy")
    if mode == "strict":
        return is_variant
    return not (implementation == "xla" and name in SPOILING)


def test_calls_cover_every_public_op():
    assert {name.partition(" ")[0] for name in CALLS} == public_ops()


@pytest.mark.parametrize(
    ("mode", "name", "implementation"),
    [pytest.param(*case, marks=[pytest.mark.slow] * is_slow(*case), id="-".join(case)) for case in CASES],
)
def test_op_works_under_mode(mode, name, implementation):
    """Forward and gradient, with rows that have nothing to attend to and with padding."""
    context, apply = MODES[mode]
    with context():
        apply(functools.partial(CALLS[name].run, implementation), CALLS[name].arrays())


FEW = ("layer_norm", "bias_activation", "softmax")


@pytest.mark.parametrize("name", [*FEW, *slow(*(name for name in CALLS if name not in FEW))])
def test_16_bit_op_works_under_strict_promotion(name):
    """Sums in float32 meet parameters of 16 bits."""
    arrays = CALLS[name].arrays()
    arrays = {n: x.astype(jnp.bfloat16) if x.dtype == np.float32 else x for n, x in arrays.items()}
    with strict():
        trace(functools.partial(CALLS[name].run, "xla"), arrays)


# --- Models, pooling, text and training --------------------------------------------------------------------------

KEY = jax.random.key(0)
IDS, TOKENS = np.ones((3, 5), np.int32), np.ones(9, np.int32)
PADDED = {"attention_mask": np.array([[1, 1, 1, 0, 0], [0] * 5, [1] * 5], np.int32)}  # the second has no token
PACKED = {"cu_seqlens": np.array([0, 3, 3, 7], np.int32)}
LABELS = {
    BertForMaskedLM: (np.where(IDS == 1, 2, 0), TOKENS * 2),
    BertForTokenClassification: (np.where(IDS == 1, 1, 0), TOKENS),
    BertForSequenceClassification: (np.array([0, -100, 1]),) * 2,
    BertForQuestionAnswering: (np.array([[0, 1], [0, 0], [2, 9]]),) * 2,
}


def make(model, config):
    rngs = nnx.Rngs(0)
    if model is SpladeModel:
        return model(BertForMaskedLM(config, rngs=rngs), pooling_strategy="sum", activation_function="log1p_relu")
    return model(BertModel(config, rngs=rngs)) if model is MultiVectorModel else model(config, rngs=rngs)


def with_gradients(function, params, *arguments):
    """Computes the sum of all results and its gradients."""

    def total(params):
        return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(function(params, *arguments)))

    return jax.value_and_grad(total)(params)


@pytest.mark.parametrize("mode", ["strict", *slow("x64", "leaks", "debug_nans", "disable_jit")])
@pytest.mark.parametrize(
    ("model", "packed"),
    [(BertForMaskedLM, True), (BertForSequenceClassification, False), (BertForQuestionAnswering, True),
     (SpladeModel, False),
     *slow_cases((BertModel, False), (BertModel, True), (BertForMaskedLM, False), (BertForSequenceClassification, True),
                 (BertForTokenClassification, False), (BertForTokenClassification, True), (SpladeModel, True),
                 (BertForQuestionAnswering, False), (MultiVectorModel, False), (MultiVectorModel, True))],
)  # fmt: skip
def test_model_works_under_mode(model, packed, mode):
    context, apply = MODES[mode]
    with context():
        rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
        graph, params = nnx.split(make(model, tiny.config(**rates)))
        options = {"deterministic": False, "rngs": KEY} | ({"max_seqlen": 5} if packed else {})

        def call(params, ids, others):
            return nnx.merge(graph, params)(ids, **others, **options)

        def loss(params, ids, others, labels):
            return nnx.merge(graph, params).loss(ids, labels, **others, **options).mean

        arguments = (TOKENS, PACKED) if packed else (IDS, PADDED)
        apply(functools.partial(with_gradients, call), params, *arguments)
        if model in LABELS:
            labels = LABELS[model][packed].astype(np.int32)
            apply(functools.partial(with_gradients, loss), params, *arguments, labels)


@pytest.mark.parametrize("mode", ["strict", "disable_jit", *slow("x64", "leaks", "debug_nans")])
def test_pooling_works_under_mode(mode):
    """A sequence without tokens has no NaN, and a normalised vector of zeros has a gradient."""
    context, apply = MODES[mode]
    modes = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")

    def pooled(x, mask, tokens, limits):
        prompts = jnp.array([1, 0, 9], jnp.int32)
        parts = [pool(x, mask, modes), pool_packed(tokens, limits, modes, 5)]
        parts += [pool(x, mask, modes, prompts), pool_packed(tokens, limits, modes, 5, prompts)]
        return [*parts, *map(l2_normalize, parts)]

    arguments = np.ones((3, 5, 4), np.float32), PADDED["attention_mask"] != 0
    with context():
        apply(functools.partial(with_gradients, pooled), *arguments, np.ones((9, 4), np.float32), PACKED["cu_seqlens"])


def test_pooling_of_an_empty_sequence_has_gradient_zero():
    x, mask = jnp.ones((1, 3, 4)), jnp.zeros((1, 3), bool)
    gradient = jax.grad(lambda x: jnp.sum(l2_normalize(pool(x, mask, ("mean",)))))(x)
    np.testing.assert_array_equal(gradient, jnp.zeros_like(x))


@pytest.mark.parametrize("mode", ["strict", *slow("x64", "leaks", "debug_nans", "disable_jit")])
def test_text_encoders_work_under_mode(mode, tmp_path):
    modes = {f"pooling_mode_{name}_token{s}": True for name, s in (("cls", ""), ("max", "s"), ("mean", "s"))}
    with MODES[mode][0]():
        encoder = jaxft.SentenceEncoder.from_pretrained(
            tiny.write_sentence_model(tmp_path / "s", modes, normalize=True)
        )
        assert np.isfinite(encoder.encode(["a bird", "rain falls on the old tree .", ""])).all()
        ranges = np.stack([np.full(encoder.embedding_dimension, limit) for limit in (-1, 1)])
        assert encoder.encode(["a bird", "rain"], precision="int8", ranges=ranges).dtype == np.int8
        ranker = jaxft.CrossEncoder.from_pretrained(tiny.write_classifier(tmp_path / "c"))
        assert np.isfinite(ranker.predict([("a bird", "rain"), ("the", "tree")])).all()


@pytest.mark.parametrize("mode", ["strict", *slow("x64", "leaks", "debug_nans", "disable_jit")])
def test_vectors_work_under_mode(mode):
    """Search, similarities and quantization of vectors on the device, and MaxSim."""
    x = np.linspace(-2, 3, 12, dtype=np.float32).reshape(3, 4)
    ranges = np.array([[-3.0] * 4, [3.0] * 4], np.float32)
    codes = jaxft.quantize_embeddings(x, "int8", ranges=ranges)
    with MODES[mode][0]():
        np.testing.assert_array_equal(
            quantization.codes(jnp.asarray(x), "int8", jnp.asarray(starts_and_steps(ranges))), codes
        )
        for rows in (np.asarray, jnp.asarray):
            (found, *_) = jaxft.semantic_search(
                rows(x), rows(codes), corpus_precision="int8", ranges=ranges, score_function="dot", query_chunk_size=2
            )
            assert found[0]["corpus_id"] == 0
            for name, similarity in SIMILARITIES.items():
                assert np.isfinite(similarity.full(rows(x), rows(x[:2]))).all()
                assert np.isfinite(similarity.pairwise(rows(x), rows(x))).all()
                assert jaxft.semantic_search(rows(x), rows(x), score_function=name)[2][0]["corpus_id"] == 2
        tokens, mask = jnp.asarray(x)[None], jnp.ones((1, 3), bool)
        assert np.isfinite(max_sim(tokens, tokens, mask, mask)).all()


@pytest.mark.parametrize("mode", ["strict", *slow("x64", "leaks", "debug_nans", "disable_jit")])
def test_training_works_under_mode(mode):
    context, apply = MODES[mode]

    def step(params, batches, loss_scale):
        def loss(params, batch):
            return jaxft.linear_cross_entropy(batch["x"], params, batch["labels"])

        def update(gradients, params):
            return params - jnp.float32(0.1) * gradients

        _, gradients = training.accumulate_gradients(loss, params, batches, loss_scale=loss_scale)
        return training.update_if_finite(update, gradients, params, loss_scale)

    labels = np.array([[1, -100, 2, 3], [-100] * 4], np.int32)
    with context():
        apply(step, jnp.ones((5, 8), jnp.float32), {"x": np.ones((2, 4, 8), np.float32), "labels": labels}, None)
        apply(
            step, jnp.ones((5, 8), jnp.float32), {"x": np.ones((2, 4, 8), np.float32), "labels": labels},
            training.LossScale.create(),
        )  # fmt: skip


# --- Symbolic sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, *slow(False)])
@pytest.mark.parametrize("classes", [16, 512])
def test_splade_exports_with_symbolic_sizes(packed, classes, monkeypatch):
    monkeypatch.setattr(splade, "_LEAST_CLASSES", classes)  # of the vocabulary, in a part
    graph, params = nnx.split(make(SpladeModel, tiny.config()))

    def call(ids, other, long):
        options = {"cu_seqlens": other, "max_seqlen": long.size} if packed else {"attention_mask": other}
        return nnx.merge(graph, params)(ids, **options)

    shapes = ("m", "b + 1", "t") if packed else ("b, t", "b, t", "t")
    structs = tuple(jax.ShapeDtypeStruct((1,) * (shape.count(",") + 1), jnp.int32) for shape in shapes)
    exported = jax.export.export(jax.jit(call))(*jax.export.symbolic_args_specs(structs, shapes))
    assert str(exported.out_avals[0].shape) == f"(b, {len(tiny.VOCAB)})"
    ids, other, long = (TOKENS, PACKED["cu_seqlens"], np.zeros(5, np.int32)) if packed else (
        IDS, PADDED["attention_mask"], np.zeros(5, np.int32))  # fmt: skip
    np.testing.assert_allclose(exported.call(ids, other, long), jax.jit(call)(ids, other, long), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "packed"),
    [(BertForMaskedLM, True), (BertForSequenceClassification, False),
     *slow_cases((BertForMaskedLM, False), (BertForSequenceClassification, True),
                 (BertForTokenClassification, False), (BertForTokenClassification, True))],
)  # fmt: skip
def test_model_exports_with_symbolic_sizes(model, packed):
    """The length is neither bounded by the number of positions nor known in a packed call."""
    graph, params = nnx.split(model(tiny.config(), rngs=nnx.Rngs(0)))
    each = model is BertForSequenceClassification
    shapes = {"ids": "m" if packed else "b, t", "other": "b + 1" if packed else "b, t", "long": "t"}
    shapes["labels"] = "b" if each else shapes["ids"]

    def call(ids, other, long, labels):
        options = {"cu_seqlens": other, "max_seqlen": long.size} if packed else {"attention_mask": other}

        def loss(params):
            return nnx.merge(graph, params).loss(ids, labels, **options).mean

        return nnx.merge(graph, params)(ids, **options), jax.grad(loss)(params)

    structs = {name: jax.ShapeDtypeStruct((1,) * (shape.count(",") + 1), jnp.int32) for name, shape in shapes.items()}
    exported = jax.export.export(jax.jit(call))(**jax.export.symbolic_args_specs(structs, shapes))
    rows = "b" if each else shapes["ids"]
    assert str(exported.out_avals[0].shape) == f"({rows}, {len(tiny.VOCAB) if model is BertForMaskedLM else 2})"
