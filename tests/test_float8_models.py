"""Encoders in float8: quantize, accuracy on a real checkpoint, files, and what is refused."""

import importlib
import inspect
import json
import logging
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer

import encoders
import jaxft
import tiny
from cases import INTERPRET, lower, slow
from jaxft import (
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    CrossEncoder,
    MultiVectorEncoder,
    SentenceEncoder,
    SparseEncoder,
)
from jaxft.checkpoint.files import CheckpointError
from jaxft.models import Float8Recipe, count_clipped, quantize
from lowered import TRITON, of, operations

FLOAT8 = jnp.float8_e4m3fn
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
DTYPES = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}


def encoder(cls=BertModel, implementation=None, **options):
    config = tiny.config(**{**SIZES, "initializer_range": 0.05} | options)
    return cls(config, **DTYPES, implementation=implementation, rngs=nnx.Rngs(0))


def ids(batch=3, length=9):
    return jnp.asarray(np.random.default_rng(0).integers(5, 40, (batch, length)))


def texts(count):
    """Returns the first sentences of docstrings of the standard library."""
    found: dict[str, None] = {}
    for name in ("builtins", "os", "statistics", "random", "math", "datetime", "pathlib", "socket", "subprocess",
                 "threading", "asyncio", "tarfile", "zipfile", "argparse", "collections", "email.message"):  # fmt: skip
        for owner in [
            module := importlib.import_module(name),
            *(o for o in vars(module).values() if isinstance(o, type)),
        ]:
            for member in vars(owner).values():
                sentence = (inspect.getdoc(member) or "").split("\n\n")[0].replace("\n", " ").split(". ")[0]
                if 30 < len(sentence) < 200:
                    found[sentence] = None
    return [*found][:: len(found) // count][:count]


def ranks(x):
    return np.argsort(np.argsort(x))


@pytest.mark.slow
def test_accuracy_on_minilm(minilm):
    """The targets of FP8: cosine with float32, and the order of the similarities of all pairs."""
    sentences = texts(300)
    wide = SentenceEncoder.from_pretrained(minilm).encode(sentences)
    narrow = SentenceEncoder.from_pretrained(minilm, dtype=jnp.bfloat16, quantization="fp8").encode(sentences)
    cosines = np.sum(wide * narrow, axis=1)
    upper = np.triu_indices(len(sentences), 1)
    spearman = np.corrcoef(ranks((wide @ wide.T)[upper]), ranks((narrow @ narrow.T)[upper]))[0, 1]
    print(f"cosine {cosines.mean():.4f}, least {cosines.min():.4f}; Spearman {spearman:.4f}")
    assert 0.9970 <= cosines.mean() < 0.9995 and spearman >= 0.996
    # Queries in float8 and an index in float32, and both in float8; the table of docs/float8.md.
    changes = [np.abs(index @ narrow.T - wide @ wide.T)[upper] for index in (wide, narrow)]
    (mixed, both), largest = [x.mean() for x in changes], [x.max() for x in changes]
    print(f"similarities change by {mixed:.4f} and {both:.4f}, at most by {largest[0]:.3f} and {largest[1]:.3f}")
    assert mixed < 0.005 and mixed < both < 0.008 and max(largest) < 0.05


def test_kernels_have_a_scale_for_each_column():
    numbers = np.random.default_rng(0).standard_normal((128, 5)) * np.array([1, 100, 1e-4, 0, 1])
    kernel = jnp.asarray(numbers, jnp.bfloat16)
    stored, scale = Float8Recipe().kernel(kernel)
    assert stored.shape == (5, 128) and stored.dtype == FLOAT8 and scale.dtype == jnp.float32
    assert np.abs(np.float32(stored)).max(axis=1).tolist() == [448, 448, 448, 0, 448]
    back, expected = np.float32(stored).T * np.float32(scale), np.float32(kernel)
    np.testing.assert_allclose(back, expected, rtol=2**-4, atol=1e-9)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_packed_and_padded_sequences_agree(scale):
    model = quantize(encoder(), Float8Recipe(activation_scale=scale))
    mask = np.arange(9) < np.array([9, 4, 6])[:, None]
    padded = np.float32(jax.jit(lambda: model(ids(), mask).last_hidden_state)())
    starts = jnp.array([0, 9, 13, 19])
    packed = jax.jit(lambda: model(ids()[mask], cu_seqlens=starts, max_seqlen=9).last_hidden_state)()
    np.testing.assert_array_equal(padded[mask], np.float32(packed))
    wide = np.float32(encoder()(ids(), mask).last_hidden_state)
    cosine = np.sum(wide * padded, -1) / np.linalg.norm(wide, axis=-1) / np.linalg.norm(padded, axis=-1)
    assert 0.99 < cosine[mask].min() < cosine[mask].mean() < 0.99999


def test_results_do_not_depend_on_the_batch():
    model = quantize(encoder())
    run = jax.jit(lambda x: model(x).last_hidden_state)
    alone = [np.float32(run(row[None]))[0] for row in ids()]
    np.testing.assert_array_equal(np.stack(alone), np.float32(run(ids())))


def test_reruns_are_bitwise_equal():
    model, x = quantize(encoder()), ids(3 if INTERPRET else 500)
    run = jax.jit(lambda x: model(x).last_hidden_state)
    expected = np.float32(run(x))
    for _ in range(1 if INTERPRET else 20):
        np.testing.assert_array_equal(np.float32(run(x)), expected)


def test_quantize_returns_a_copy():
    model = encoder(BertForSequenceClassification)
    copy = quantize(model)
    assert type(copy) is type(model) and model.bert.recipe is None and copy.bert.recipe == Float8Recipe()
    dtypes = {name: p.get_value().dtype for name, p in jaxft.models.bert.named_parameters(copy).items()}
    in_float8 = {name for name, dtype in dtypes.items() if dtype == FLOAT8}
    assert in_float8 == {f"layers.{i}.{n}_kernel" for i in range(2) for n in ("qkv", "out", "ffn_in", "ffn_out")}
    assert {dtypes[n] for n in dtypes.keys() - in_float8} == {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}
    assert copy.bert.embeddings.word.get_value() is model.bert.embeddings.word.get_value()
    with pytest.raises(ValueError, match="the model is in float8 already"):
        quantize(copy)


def test_wrong_arguments_of_quantize():
    with pytest.raises(TypeError, match=r"must be a BertModel or an nnx.Module that contains one, got int"):
        quantize(3)
    with pytest.raises(TypeError, match=r"must be a BertModel or an nnx.Module that contains one, got Linear"):
        quantize(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="quantize: dtype of the model must be bfloat16 or float16 .*, got float32"):
        quantize(BertModel(tiny.config(**SIZES), rngs=nnx.Rngs(0)))
    for recipe in ("int8", None, Float8Recipe):
        with pytest.raises(ValueError, match=r"quantize: recipe must be 'fp8' or a jaxft.models.Float8Recipe, got"):
            quantize(encoder(), recipe)
    with pytest.raises(ValueError, match=r"from_pretrained: quantization must be 'fp8' or .*, got 'int8'"):
        BertModel.from_pretrained("no/model", quantization="int8")  # before anything is downloaded
    with pytest.raises(ValueError, match="activation_scale must be positive"):
        Float8Recipe(activation_scale=-1.0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model_type": "modernbert"}, "norms come before attention"),
        ({"model_type": "nomic_bert"}, "its feed-forward network is gated"),
        (encoders._DEBERTA | {"model_type": "deberta-v2"}, "its attention is disentangled"),
        ({"hidden_size": 64}, "hidden_size 64 is not a multiple of 128"),
    ],
)
def test_other_layers_stay_in_16_bits(options, reason, caplog):
    sizes = {"vocab_size": 64, "num_attention_heads": 2, "pad_token_id": 0, "model_type": "bert"} | SIZES | options
    model = BertModel(jaxft.BertConfig.from_dict(sizes), **DTYPES, rngs=nnx.Rngs(0))
    with caplog.at_level(logging.WARNING, "jaxft"):
        copy = quantize(model)
    assert reason in caplog.text
    np.testing.assert_array_equal(np.float32(copy(ids()).last_hidden_state), np.float32(model(ids()).last_hidden_state))
    assert not any("float8" in shape for record in jaxft.explain(copy, ids()) for shape in record.shapes)
    assert copy.recipe is None  # it can be trained, and is saved for all


@pytest.mark.parametrize(
    "kind", ["albert", *slow("roberta", "distilbert", "electra", "mpnet", "ernie", "jina_embeddings_v3")]
)
def test_other_types_run_in_float8(kind):
    """ALBERT runs one layer several times. Jina v3 has rotary positions."""
    sizes = {"vocab_size": 64, "num_attention_heads": 2, "model_type": kind, "pad_token_id": 1} | SIZES
    sizes |= {"dim": 128, "n_layers": 2, "n_heads": 2, "hidden_dim": 256, "embedding_size": 64, "hidden_act": "gelu"}
    model = BertModel(jaxft.BertConfig.from_dict(sizes), **DTYPES, rngs=nnx.Rngs(0))
    copy = quantize(model)
    wide, narrow = (np.float32(m(ids()).last_hidden_state) for m in (model, copy))
    cosine = np.sum(wide * narrow, -1) / np.linalg.norm(wide, axis=-1) / np.linalg.norm(narrow, axis=-1)
    assert 0.99 < cosine.min() and cosine.mean() < 0.99999
    assert sum("float8" in record.shapes[0] for record in jaxft.explain(copy, ids())) == 6


def test_float8_composes_with_transformations():
    """jax.export with a symbolic batch, shard_map, vmap and checkpoint give the numbers of the plain call."""
    model = quantize(encoder())
    graph, params = nnx.split(model)

    def run(params, x):
        return nnx.merge(graph, params)(x).last_hidden_state

    expected = np.float32(jax.jit(run)(params, ids()))
    np.testing.assert_array_equal(np.float32(jax.jit(jax.checkpoint(run))(params, ids())), expected)
    mapped = jax.jit(jax.vmap(lambda x: run(params, x[None])[0]))(ids())
    np.testing.assert_array_equal(np.float32(mapped), expected)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(spec(), spec("x")), out_specs=spec("x"))
    np.testing.assert_array_equal(np.float32(jax.jit(sharded)(params, ids())), expected)
    (batch,) = jax.export.symbolic_shape("batch")
    symbolic = jax.ShapeDtypeStruct((batch, 9), jnp.int32)
    exported = jax.export.export(jax.jit(lambda x: run(params, x)))(symbolic)
    plain, _ = nnx.split(quantize(encoder(implementation="xla")))  # the implementation of symbolic sizes
    same = jax.jit(lambda x: nnx.merge(plain, params)(x).last_hidden_state)(ids())
    np.testing.assert_allclose(np.float32(exported.call(ids())), np.float32(same), atol=2e-2)


def test_explain_shows_float8():
    found = jaxft.explain(quantize(encoder()), ids())
    matmuls = [record for record in found if record.op in ("dense", "dense_residual_layer_norm",
                                                           "feed_forward_residual_layer_norm")]  # fmt: skip
    assert [record.shapes[0].startswith("float8_e4m3fn") for record in matmuls] == [True] * 6 + [False]  # the pooler


def test_training_is_refused():
    model = quantize(encoder(BertForSequenceClassification))
    for call in (model.train, lambda: model(ids(), deterministic=False, rngs=jax.random.key(0))):
        with pytest.raises(NotImplementedError, match="a model in float8 cannot be trained"):
            call()
    with pytest.raises(NotImplementedError, match="there is no gradient with float8_e4m3fn"):
        nnx.grad(lambda model: model(ids()).astype(jnp.float32).sum())(model)
    model.eval()
    assert np.isfinite(np.float32(model(ids()))).all()


def test_round_trip_of_files(tmp_path):
    model = quantize(encoder(BertForSequenceClassification), Float8Recipe(activation_scale=2.0))
    folder = tmp_path / "model"
    encoder(BertForSequenceClassification).save_pretrained(folder)
    model.save_pretrained(folder)
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model_float8.safetensors"]
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "jaxft_float8" and settings["activation_scale"] == 2.0
    again = BertForSequenceClassification.from_pretrained(folder, **DTYPES)
    assert again.bert.recipe == Float8Recipe(activation_scale=2.0)
    np.testing.assert_array_equal(np.float32(again(ids())), np.float32(model(ids())))
    alone = BertModel.from_pretrained(folder, **DTYPES)  # without the tensors of the head
    expected = model.bert(ids()).last_hidden_state
    np.testing.assert_array_equal(np.float32(alone(ids()).last_hidden_state), np.float32(expected))
    with pytest.raises(ValueError, match=r"saved in float8 with Float8Recipe\(activation_scale=2.0\)"):
        BertModel.from_pretrained(folder, **DTYPES, quantization="fp8")
    with pytest.raises(ValueError, match="from_pretrained: dtype must be bfloat16 or float16 for a model in float8"):
        BertModel.from_pretrained(folder, dtype="float32")
    encoder(BertForSequenceClassification).save_pretrained(folder)
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_damaged_files_are_refused(tmp_path):
    import safetensors.numpy

    model = quantize(encoder())
    model.save_pretrained(tmp_path)
    file = tmp_path / "model_float8.safetensors"
    tensors = safetensors.numpy.load_file(file)
    name = "layers.0.qkv_kernel"
    nan = np.full_like(tensors[name], 0x7F)
    for change, message in (
        ({name: None}, "'layers.0.qkv_kernel' is missing"),
        ({name: tensors[name][:5]}, r"shape \[5, 128\], expected \[384, 128\]"),
        ({name: tensors[name].astype(np.float32)}, "has dtype F32, expected one of U8"),
        ({name: nan}, "'layers.0.qkv_kernel': has values that are not finite"),
        ({"embeddings.word": tensors[name]}, "'embeddings.word': has dtype U8"),
    ):
        changed = {n: x for n, x in (tensors | change).items() if x is not None}
        safetensors.numpy.save_file(changed, file)
        with pytest.raises(CheckpointError, match=message):
            BertModel.from_pretrained(tmp_path, **DTYPES)
    for data in (b"", file.read_bytes()[:-1], b"x" * 1000):
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match="is not a usable checkpoint:\n  model_float8.safetensors: "):
            BertModel.from_pretrained(tmp_path, **DTYPES)
    settings = json.loads((tmp_path / "config.json").read_text())
    for scale, message in (("1", "must be a Python number, got str"), (-1, "must be positive"), (10**400, "too large")):
        tiny.write_json(
            tmp_path / "config.json",
            settings | {"quantization_config": settings["quantization_config"] | {"activation_scale": scale}},
        )
        with pytest.raises(CheckpointError, match=message):
            BertModel.from_pretrained(tmp_path, **DTYPES)
    newer = settings | {"quantization_config": settings["quantization_config"] | {"row_scales": True}}
    tiny.write_json(tmp_path / "config.json", newer)
    with pytest.raises(CheckpointError, match="quantization_config: row_scales is not supported"):
        BertModel.from_pretrained(tmp_path, **DTYPES)
    tiny.write_json(tmp_path / "config.json", settings)
    file.unlink()
    with pytest.raises(CheckpointError, match="has no model_float8.safetensors, which config.json says"):
        BertModel.from_pretrained(tmp_path, **DTYPES)


def test_other_parameters_get_the_dtype_of_the_model(tmp_path):
    import safetensors.numpy

    model = quantize(encoder())
    model.save_pretrained(tmp_path)
    file = tmp_path / "model_float8.safetensors"
    tensors = safetensors.numpy.load_file(file)
    safetensors.numpy.save_file(tensors | {"embeddings.word": tensors["embeddings.word"].astype(np.float32)}, file)
    word = BertModel.from_pretrained(tmp_path, **DTYPES).embeddings.word[...]
    assert word.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float32(word), np.float32(model.embeddings.word[...]))


def test_sentence_encoder_and_cross_encoder(tmp_path):
    words = ["a bird sings", "the old tree in the rain .", "rain"]
    options = {"quantization": "fp8"}
    tiny.write_model(tmp_path / "plain", **SIZES)
    ours = SentenceEncoder.from_pretrained(tmp_path / "plain", **options)
    assert ours.model.recipe == Float8Recipe()
    ours.save_pretrained(tmp_path / "saved")
    again = SentenceEncoder.from_pretrained(tmp_path / "saved")
    np.testing.assert_array_equal(again.encode(words), ours.encode(words))
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "library_name: jaxft\n" in card and "tags:\n- sentence-similarity\n" in card
    assert "which only jaxft loads" in card and "sentence-transformers](" not in card

    config = tiny.config(**SIZES)
    BertForSequenceClassification(config, num_labels=1, rngs=nnx.Rngs(0)).save_pretrained(tmp_path / "scorer")
    tiny.write_tokenizer(tmp_path / "scorer")
    pairs = [("a bird sings", "rain"), ("the old tree", "a bird sings")]
    ours = CrossEncoder.from_pretrained(tmp_path / "scorer", **options)
    ours.save_pretrained(tmp_path / "saved_scorer")
    again = CrossEncoder.from_pretrained(tmp_path / "saved_scorer")
    np.testing.assert_array_equal(again.predict(pairs), ours.predict(pairs))


@pytest.mark.parametrize("cls", [BertModel, BertForSequenceClassification])
def test_models_in_float8_are_bfloat16_by_default(cls, tmp_path):
    encoder(cls).save_pretrained(tmp_path / "wide")
    for options in ({}, {"dtype": "float16"}):
        model = cls.from_pretrained(tmp_path / "wide", quantization="fp8", **options)
        model.save_pretrained(tmp_path / "narrow")
        again = cls.from_pretrained(tmp_path / "narrow", **options)
        for found in (model, again):
            dtypes = {array.dtype for array in jax.tree.leaves(nnx.state(found, nnx.Param))}
            assert dtypes == {jnp.dtype(FLOAT8), jnp.dtype("float32"), jnp.dtype(options.get("dtype", "bfloat16"))}
    wide = cls.from_pretrained(tmp_path / "wide")
    assert {array.dtype for array in jax.tree.leaves(nnx.state(wide, nnx.Param))} == {jnp.dtype("float32")}


@pytest.mark.slow
@pytest.mark.parametrize("cls", [BertForMaskedLM, BertForQuestionAnswering, BertForTokenClassification])
def test_models_with_heads_take_float8_from_files(cls, tmp_path):
    encoder(cls).save_pretrained(tmp_path / "wide")
    model = cls.from_pretrained(tmp_path / "wide", **DTYPES, quantization="fp8")
    assert model.bert.recipe == Float8Recipe()
    model.save_pretrained(tmp_path / "narrow")
    again = cls.from_pretrained(tmp_path / "narrow", **DTYPES)
    for x, y in zip(*(jax.tree.leaves(nnx.state(m)) for m in (again, model)), strict=True):
        np.testing.assert_array_equal(np.float32(x), np.float32(y))


@pytest.mark.slow
def test_sparse_and_multi_vector_encoders_take_float8(tmp_path):
    words = ["a bird sings", "the old tree in the rain .", "rain"]
    tiny.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.no_padding()
    options = {"quantization": "fp8"}
    for cls, model in ((SparseEncoder, BertForMaskedLM), (MultiVectorEncoder, BertModel)):
        wide, narrow = (tmp_path / f"{cls.__name__} {kind}" for kind in ("wide", "narrow"))
        cls(encoder(model), tokenizer, max_seq_length=16).save_pretrained(wide)
        ours = cls.from_pretrained(wide, **options)
        ours.save_pretrained(narrow)
        assert list(narrow.glob("model*.safetensors")) == [narrow / "model_float8.safetensors"]
        again = cls.from_pretrained(narrow)
        found, expected = (e.encode(words) for e in (again, ours))
        if cls is SparseEncoder:
            found, expected = found.toarray(), expected.toarray()
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_array_equal(x, y)


def test_clipped_activations_are_counted():
    model = encoder()
    model.layers[0].ffn_in_bias.set_value(model.layers[0].ffn_in_bias[...].at[:2].set(600))
    counts = count_clipped(quantize(model), ids(), np.ones((3, 9), int))
    assert [count.clipped for count in counts] == [0, 0, 0, 54, 0, 0, 0, 0]
    assert [count.op for count in counts[:2]] == ["dense", "dense_residual_layer_norm"]
    assert counts[3].shape == (27, 256)
    larger = quantize(model, Float8Recipe(activation_scale=2.0))
    assert not any(count.clipped for count in count_clipped(larger, ids()))


def test_matmuls_that_cannot_be_counted_are_an_error():
    """A jitted function that has run before does not trace its matmuls again."""
    model = quantize(encoder())
    jitted = jax.jit(lambda x: model(x).last_hidden_state)
    with pytest.raises(ValueError, match=r"count_clipped: fn must not have its matmuls inside of jax\.jit"):
        count_clipped(jitted, ids())
    jitted(ids())
    for fn in (jitted, encoder()):
        with pytest.raises(ValueError, match="count_clipped: fn must have matmuls of float8_e4m3fn, .* none is seen"):
            count_clipped(fn, ids())
    packed = count_clipped(lambda x: model(x, cu_seqlens=np.array([0, 9]), max_seqlen=9), ids()[0])
    assert len(packed) == 8 and packed[0].shape == (9, 128)


def test_layers_on_hopper_have_no_quantization_kernel():
    """In a model, only the output of the embeddings is converted by XLA. The weights are transposed by no kernel."""
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "max_position_embeddings": 128}
    model = quantize(encoder(**sizes, num_hidden_layers=2))
    graph, params = nnx.split(model)
    text = lower(lambda params, x: nnx.merge(graph, params)(x).last_hidden_state, params, of((32, 128), jnp.int32))
    found = operations(text)
    assert found["custom_call @mosaic_gpu_v2"] == 2 * 4 and found["dot_general"] == 0
    assert found[TRITON] == 1 + 2 * 3  # embeddings; attention and two LayerNorms
    assert found["transpose"] == 2 * 2 * 4  # pairs that cancel
    assert len(re.findall(r"= stablehlo.convert .* -> tensor<[0-9x]+xf8E4M3FN>$", text, re.MULTILINE)) == 1
