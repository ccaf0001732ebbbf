"""join_kernels: a model whose layers keep their matrices in one array each."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxft
from jaxft.models import bundled
from jaxft.models.bert import BertConfig, BertModel
from jaxft.ops.matrix_view import MatrixView

SIZES = {
    "vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256,
    "max_position_embeddings": 32,
}  # fmt: skip


OPTIONS = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "implementation": "triton"}


def model_of(dtype="bfloat16", param_dtype=None, **options):
    config = BertConfig(**SIZES | options)
    return BertModel(
        config, dtype=dtype, param_dtype=param_dtype or dtype, rngs=nnx.Rngs(0), implementation="triton"
    )  # fmt: skip


def hidden(model, *args):
    arrays, rebuild = jaxft.bundle(model, implementation="triton")
    return jax.jit(lambda arrays, *args: rebuild(arrays)(*args).last_hidden_state)(arrays, *args)


IDS = np.arange(14).reshape(2, 7)


@pytest.mark.parametrize("model_type", ["bert", "modernbert", "nomic_bert", "deberta-v2"])
def test_joined_model_gives_the_same_bits(model_type):
    """The types have other ways to multiply by the kernel of queries, keys and values, and a feed-forward gate."""
    deberta = {
        "relative_attention": True, "position_buckets": 8, "pos_att_type": "p2c|c2p", "share_att_key": True,
        "norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0,
    }  # fmt: skip
    config = {"model_type": model_type, **SIZES, "intermediate_size": 96, "num_hidden_layers": 1, "pad_token_id": 0}
    config |= deberta if model_type == "deberta-v2" else {}
    model = BertModel(BertConfig.from_dict(config), **OPTIONS, rngs=nnx.Rngs(0))
    joined = jaxft.models.join_kernels(model)
    np.testing.assert_array_equal(hidden(joined, IDS), hidden(model, IDS))
    assert isinstance(joined.layers[0].out_kernel.get_value(), MatrixView)
    assert isinstance(model.layers[0].out_kernel.get_value(), jax.Array)


def test_layer_is_one_array():
    model = model_of()  # the joined arrays are short: `bundle` leaves them alone
    joined = jaxft.models.join_kernels(model)
    arrays, others = (jaxft.bundle(m, implementation="triton")[0] for m in (joined, model))
    assert len(others) - len(arrays) == 3 * 2  # of two layers
    assert sum(x.size for x in arrays) == sum(x.size for x in others)


def test_kernels_are_freed_with_the_model():
    model = model_of()
    kernel, table = (weakref.ref(p.get_raw_value()) for p in (model.layers[0].out_kernel, model.embeddings.word))
    model = jaxft.models.join_kernels(model)
    gc.collect()
    assert kernel() is None and table() is model.embeddings.word.get_raw_value()


def test_joined_model_is_saved_as_ever(tmp_path):
    model = model_of()
    jaxft.models.join_kernels(model).save_pretrained(tmp_path)
    loaded = BertModel.from_pretrained(tmp_path, dtype="bfloat16")
    for name in ("qkv_kernel", "ffn_in_kernel"):
        found, expected = (getattr(m.layers[1], name).get_value() for m in (loaded, model))
        np.testing.assert_array_equal(found, expected)


def test_bundled_sees_a_replaced_view():
    model = jaxft.models.join_kernels(model_of())
    bundle = bundled.Bundled(None)
    arrays, rebuild = bundle(model)
    again, _ = bundle(model)
    assert all(x is y for x, y in zip(arrays, again, strict=True))
    view = model.layers[1].ffn_out_kernel.get_value()
    model.layers[1].ffn_out_kernel.set_value(MatrixView(view.joined * 2, view.first, view.shape))
    changed, rebuild = bundle(model)
    np.testing.assert_array_equal(rebuild(changed).layers[1].ffn_out_kernel.get_value().array(), view.array() * 2)


def test_errors():
    with pytest.raises(TypeError, match="must be or contain a BertModel, got Linear"):
        jaxft.models.join_kernels(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="must be both bfloat16 or both float16, got bfloat16, float32"):
        jaxft.models.join_kernels(model_of("bfloat16", "float32"))
    with pytest.raises(ValueError, match="got float32"):
        jaxft.models.join_kernels(model_of("float32"))
    with pytest.raises(ValueError, match="are joined already"):
        jaxft.models.join_kernels(jaxft.models.join_kernels(model_of()))
