"""How `partition_specs` divides the parameters of an encoder. tests/test_sharding.py trains with them."""

import jax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jaxft import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel
from jaxft.models import partition_specs, quantize

SIZES = dict(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)


def model(kind=BertModel, **config):
    return kind(BertConfig(**SIZES, max_position_embeddings=8, **config), rngs=nnx.Rngs(0))


def by_name(specs):
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): spec for path, spec in jax.tree.leaves_with_path(specs)
    }


def divided(specs):
    """Returns the specs that divide something, by the last part of their names."""
    found = {name.removesuffix(".value").split(".")[-1]: spec for name, spec in by_name(specs).items()}
    return {name: tuple(spec) for name, spec in found.items() if any(axis is not None for axis in spec)}


def test_nothing_is_divided_by_default():
    specs = partition_specs(model())
    assert jax.tree.structure(specs) == jax.tree.structure(nnx.state(model()))
    assert divided(specs) == {} and all(isinstance(spec, PartitionSpec) for spec in jax.tree.leaves(specs))


@pytest.mark.parametrize("kind", [BertModel, BertForMaskedLM])
def test_a_model_axis_divides_the_feed_forward_network_and_the_output_projection(kind):
    assert divided(partition_specs(model(kind), model_axis="m")) == {
        "ffn_in_kernel": (None, "m"), "ffn_in_bias": ("m",), "ffn_out_kernel": ("m", None), "out_kernel": ("m", None)
    }  # fmt: skip


def test_a_model_axis_divides_kernels_of_float8():
    wide = BertConfig(**SIZES | {"hidden_size": 128, "intermediate_size": 256}, max_position_embeddings=8)
    quantized = quantize(BertModel(wide, dtype="bfloat16", rngs=nnx.Rngs(0)))
    assert divided(partition_specs(quantized, model_axis="m")) == {
        "ffn_in_kernel": ("m", None), "ffn_in_bias": ("m",), "ffn_in_scale": ("m",), "ffn_out_kernel": (None, "m"),
        "out_kernel": (None, "m"),
    }  # fmt: skip


def test_a_model_axis_leaves_a_head_whole():
    specs = by_name(partition_specs(model(BertForSequenceClassification), model_axis="m"))
    names = {name.removesuffix(".value") for name, spec in specs.items() if "m" in tuple(spec)}
    assert "head.out_kernel" in {name.removesuffix(".value") for name in specs}  # named as a parameter of a layer
    assert names == {f"bert.layers.0.{n}" for n in ("ffn_in_kernel", "ffn_in_bias", "ffn_out_kernel", "out_kernel")}


def test_fsdp_divides_what_the_model_axis_leaves():
    found = divided(partition_specs(model(), data_axis="d", model_axis="m", fsdp=True))
    assert found["ffn_in_kernel"] == ("d", "m") and found["qkv_kernel"].count("d") == 1
    assert found["ffn_in_bias"] == ("m",) and "qkv_bias" not in found


def test_fsdp_divides_the_axis_with_most_factors_of_two():
    specs = {name: tuple(spec) for name, spec in by_name(partition_specs(model(), data_axis="d", fsdp=True)).items()}
    (word,) = (spec for name, spec in specs.items() if "word" in name)
    assert word == (None, "d")  # [40, 16]: 40 is the larger number, but 16 devices divide 16 only


def test_a_model_axis_leaves_a_gated_feed_forward_network_whole():
    config = BertConfig.from_dict(SIZES | {"model_type": "modernbert", "pad_token_id": 0, "mlp_bias": True})
    gated = BertModel(config, rngs=nnx.Rngs(0))
    assert divided(partition_specs(gated, model_axis="m")) == {"out_kernel": ("m", None)}


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"module": 3}, TypeError, "module must be an nnx.Module, got int"),
        ({"data_axis": 0}, TypeError, "data_axis must be the name of a mesh axis, got 0"),
        ({"model_axis": ("a",)}, TypeError, "model_axis must be the name of a mesh axis"),
        ({"fsdp": 1}, TypeError, "fsdp must be True or False, got int"),
        ({"model_axis": "data"}, ValueError, "must be different axes, got 'data' for both"),
    ],
)
def test_errors(options, error, text):
    with pytest.raises(error, match=text):
        partition_specs(**{"module": model(), **options})
