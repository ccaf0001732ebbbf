"""join_kernels: a model with one parameter for the four kernels of a layer."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxft
import tiny
from jaxft import BertConfig, BertForSequenceClassification, BertModel, CrossEncoder, SentenceEncoder
from jaxft.models import join_kernels, partition_specs, quantize

SIZES = {
    "vocab_size": 50, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512,
    "max_position_embeddings": 32,
}  # fmt: skip
IDS = np.arange(14).reshape(2, 7)
NAMES = "qkv", "out", "ffn_in", "ffn_out"


def model_of(kind=BertModel, dtype="bfloat16", param_dtype="bfloat16", implementation="triton", **options):
    options = SIZES | {"pad_token_id": 0} | options
    config = BertConfig.from_dict({"model_type": "bert"} | options)
    return kind(config, dtype=dtype, param_dtype=param_dtype, implementation=implementation, rngs=nnx.Rngs(0))


def hidden(model):
    return nnx.jit(lambda model: model(IDS).last_hidden_state)(model)


@pytest.mark.parametrize("model_type", ["bert", "modernbert", "nomic_bert", "deberta-v2"])
def test_joined_model_gives_the_same_bits(model_type):
    """The types have other ways to multiply by the kernel of queries, keys and values, and a feed-forward gate."""
    deberta = {
        "relative_attention": True, "position_buckets": 8, "pos_att_type": "p2c|c2p", "share_att_key": True,
        "norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0,
    }  # fmt: skip
    options = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    model = model_of(model_type=model_type, **options, **(deberta if model_type == "deberta-v2" else {}))
    np.testing.assert_array_equal(hidden(join_kernels(model)), hidden(model))


@pytest.mark.parametrize(("dtype", "param_dtype"), [("float32", "float32"), ("bfloat16", "float32")])
def test_other_dtypes_give_the_same_bits(dtype, param_dtype):
    model = model_of(dtype=dtype, param_dtype=param_dtype, implementation="xla")
    np.testing.assert_array_equal(hidden(join_kernels(model)), hidden(model))


def test_packed_sequences_give_the_same_bits():
    model, starts = model_of(num_hidden_layers=1, intermediate_size=128), np.array([0, 5, 14])

    def packed(model):
        return model(IDS.reshape(-1), cu_seqlens=starts, max_seqlen=9).last_hidden_state

    np.testing.assert_array_equal(nnx.jit(packed)(join_kernels(model)), nnx.jit(packed)(model))


def test_layer_is_one_parameter():
    model = model_of(implementation="xla")
    joined = join_kernels(model)
    assert len(jax.tree.leaves(model)) - len(jax.tree.leaves(joined)) == 3 * len(model.layers)
    assert sum(x.size for x in jax.tree.leaves(joined)) == sum(x.size for x in jax.tree.leaves(model))
    doubled = jax.tree.map(lambda x: 2 * x, joined)
    np.testing.assert_array_equal(doubled.layers[1].kernels[...], 2 * joined.layers[1].kernels[...])
    again = nnx.merge(*nnx.split(joined))
    np.testing.assert_array_equal(hidden(again), hidden(model))
    arrays, rebuild = jaxft.bundle(joined, implementation="triton")
    assert len(arrays) == len(jaxft.bundle(model, implementation="triton")[0]) - 3 * len(model.layers)
    np.testing.assert_array_equal(hidden(rebuild(arrays)), hidden(model))


def test_model_stays_and_its_kernels_are_freed():
    model = model_of()
    state = jax.tree.map(np.asarray, nnx.state(model))
    kernel, table = (weakref.ref(p.get_raw_value()) for p in (model.layers[0].out_kernel, model.embeddings.word))
    joined = join_kernels(model)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), state)
    del model
    gc.collect()
    assert kernel() is None and table() is joined.embeddings.word.get_raw_value()


@pytest.mark.parametrize("change", [join_kernels, quantize])
def test_changes_of_copies_do_not_change_the_model(change):
    model = model_of(implementation="xla")
    state = jax.tree.map(np.asarray, nnx.state(model))
    copy = change(model)
    table = copy.embeddings.word.get_raw_value()
    nnx.update(copy, jax.tree.map(lambda x: x + 1, nnx.state(copy)))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), state)
    assert model.embeddings.word.get_raw_value() is table


def test_explain_names_the_same_plans():
    model = model_of(num_hidden_layers=1)
    assert str(jaxft.explain(hidden, join_kernels(model))) == str(jaxft.explain(hidden, model))


@pytest.mark.parametrize("kind", [BertModel, BertForSequenceClassification])
def test_joined_model_is_saved_with_the_usual_names(kind, tmp_path):
    model = model_of(kind)
    for folder, saved in (("joined", join_kernels(model)), ("usual", model)):
        saved.save_pretrained(tmp_path / folder)
    for file in (tmp_path / "usual").iterdir():
        assert (tmp_path / "joined" / file.name).read_bytes() == file.read_bytes()


def test_joined_model_is_quantized():
    model = model_of(implementation="xla")
    found = quantize(join_kernels(model))
    np.testing.assert_array_equal(hidden(found), hidden(quantize(model)))
    assert jax.tree.structure(found) == jax.tree.structure(quantize(model))


def test_gradient_of_a_joined_model():
    model = model_of(implementation="xla", dtype="float32", param_dtype="float32")

    def gradients(model):
        return nnx.jit(nnx.grad(lambda model: jnp.sum(model(IDS).last_hidden_state ** 2)))(model)

    found, expected = gradients(join_kernels(model)), gradients(model)
    for own, others in zip(found["layers"].values(), expected["layers"].values(), strict=True):
        parts = [others[f"{name}_kernel"][...].reshape(-1) for name in NAMES]
        np.testing.assert_allclose(own["kernels"][...], np.concatenate(parts), rtol=1e-4, atol=1e-4)


def test_joined_kernels_stay_whole_on_each_device():
    joined = join_kernels(model_of())
    specs = partition_specs(joined)
    assert specs["layers"][0]["kernels"] == PartitionSpec(None)
    for options in ({"model_axis": "model"}, {"fsdp": True}):
        with pytest.raises(ValueError, match="join_kernels has joined cannot be divided"):
            partition_specs(joined, **options)


def test_model_on_mesh_of_one_device_is_joined():
    model, mesh = model_of(implementation="xla"), jax.make_mesh((1,), ("model",), devices=jax.devices()[:1])
    graph, params = nnx.split(model)
    specs = partition_specs(model, model_axis="model")
    placed = jax.device_put(params, jax.tree.map(functools.partial(NamedSharding, mesh), specs))
    joined = join_kernels(nnx.merge(graph, placed))
    assert joined.layers[0].kernels.get_value().committed
    np.testing.assert_array_equal(hidden(joined), hidden(model))


def test_encoder_of_a_joined_model(tmp_path):
    encoder = SentenceEncoder.from_pretrained(tiny.write_sentence_model(tmp_path))
    texts = tiny.texts(3)
    expected = encoder.encode(texts)
    encoder.embedder = join_kernels(encoder.embedder)
    np.testing.assert_array_equal(encoder.encode(texts), expected)
    with pytest.raises(ValueError, match="export: a model of jaxft.models.join_kernels cannot be exported"):
        encoder.export(tmp_path / "exported")
    kernels = encoder.model.layers[0].kernels
    kernels.set_value(kernels[...].at[0].set(jnp.nan))
    with pytest.raises(ValueError, match=r"parameter layers.0.kernels has NaN or infinite values"):
        encoder.encode(texts)


def test_reranker_of_a_joined_model(tmp_path):
    reranker = CrossEncoder.from_pretrained(tiny.write_classifier(tmp_path))
    pairs = [*zip(tiny.texts(3), tiny.texts(3), strict=True)]
    expected = reranker.predict(pairs)
    reranker.model = join_kernels(reranker.model)
    np.testing.assert_array_equal(reranker.predict(pairs), expected)


def test_errors():
    with pytest.raises(TypeError, match="must be or contain a BertModel, got Linear"):
        join_kernels(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="the kernels of the model are joined already"):
        join_kernels(join_kernels(model_of()))
    with pytest.raises(ValueError, match="the kernels of the model are in float8"):
        join_kernels(quantize(model_of()))
    with pytest.raises(ValueError, match="the kernels of the model have no values yet"):
        join_kernels(BertModel(BertConfig(**SIZES), rngs=None))
    with pytest.raises(ValueError, match=r"the kernels of the model are traced: join them outside of jax\.jit"):
        nnx.jit(join_kernels)(model_of())
    model = model_of()
    model.layers[0].out_kernel.set_value(model.layers[0].out_kernel[...].astype("float32"))
    with pytest.raises(ValueError, match="the kernels of the model have several dtypes"):
        join_kernels(model)
