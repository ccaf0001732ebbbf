"""BertConfig and the fields of config.json: limits, fixed values, old and new names. Without a model."""

import dataclasses
import json
import logging

import pytest

import encoders
import jaxft
from jaxft.checkpoint import layouts
from jaxft.models import config as configs

SMALL = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 8}
DEBERTA = {
    "model_type": "deberta-v2", "relative_attention": True, "share_att_key": True, "position_biased_input": False,
    "norm_rel_ebd": "layer_norm", "pos_att_type": ["p2c", "c2p"],
}  # fmt: skip
MODERN = {"model_type": "modernbert", "pad_token_id": 0}
GTE = {"model_type": "new", "position_embedding_type": "rope"}
JINA = {"model_type": "bert", "position_embedding_type": "alibi", "feed_forward_type": "geglu"}


def read(**fields):
    return jaxft.BertConfig.from_dict(SMALL | {"model_type": "bert"} | fields)


@pytest.mark.parametrize("name", configs._LIMITS)
def test_sizes_have_limits(name):
    """The smallest and the largest size are no problem of their own. Beyond them, and of another type, they are."""
    least, most = {
        "vocab_size": (1, 2**24), "hidden_size": (1, 2**16), "num_hidden_layers": (1, 2**10),
        "num_attention_heads": (1, 2**16), "intermediate_size": (1, 2**18), "max_position_embeddings": (1, 2**20),
        "type_vocab_size": (0, 2**16), "pad_token_id": (0, 2**24), "embedding_size": (1, 2**16),
        "local_attention": (1, 2**24), "relative_attention_num_buckets": (32, 2**16), "position_buckets": (0, 2**16),
        "max_relative_positions": (1, 2**20),
    }[name]  # fmt: skip
    values = dataclasses.asdict(jaxft.BertConfig(**SMALL))
    for value in (least, most):
        assert not any(f"{name} must be an int" in problem for problem in configs._problems(values | {name: value}))
    for value in (least - 1, most + 1, True, float(least), str(least)):
        (problem,) = configs._problems(values | {name: value})
        assert problem == f"{name} must be an integer from {least} to {most}, got {value!r}"
    is_optional = name in ("embedding_size", "local_attention")
    assert (configs._problems(values | {name: None}) == []) == is_optional


@pytest.mark.parametrize("name", ["layer_norm_eps", "rope_theta", "local_rope_theta", "rope_factor"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan"), True, "1", 10**400])
def test_numbers_are_positive_and_finite(name, value):
    values = dataclasses.asdict(jaxft.BertConfig(**SMALL)) | {name: value}
    assert configs._problems(values)[0] == f"{name} must be a finite number above 0, got {value!r:.100}"


@pytest.mark.parametrize("name", [
    "norm_first", "relative_bias", "shared_layers", "qkv_bias", "out_bias", "ffn_in_bias", "ffn_out_bias", "norm_bias",
    "classifier_bias", "classifier_norm",
])  # fmt: skip
def test_flags_are_booleans(name):
    values = dataclasses.asdict(jaxft.BertConfig(**SMALL)) | {name: 1}
    assert f"{name} must be true or false, got 1" in configs._problems(values)


@pytest.mark.parametrize("name", ["is_decoder", "add_cross_attention", "is_causal", "quantization_config",
                                  "per_layer_config"])  # fmt: skip
def test_fields_of_other_kinds_of_models_are_refused(name):
    assert read(**{name: None}) == read(**{name: False}) == read()
    with pytest.raises(ValueError, match=rf"{name} is \{{'a': 1\}}; .* is not supported"):
        read(**{name: {"a": 1}})


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "num_attention_heads"), ({}, "num_hidden_layers"), ({}, "hidden_act"), ({}, "layer_norm_eps"),
        ({"model_type": "distilbert"}, "n_heads"), ({"model_type": "albert"}, "num_hidden_layers"),
        (MODERN, "local_attention"), (MODERN, "norm_eps"), (GTE, "num_attention_heads"),
    ],
)  # fmt: skip
def test_null_without_a_shape_to_show_is_refused(fields, name):
    sizes = {field: value for field, value in SMALL.items() if field != "num_attention_heads" or name != "n_heads"}
    with pytest.raises(ValueError, match=f"{name} must not be null"):
        jaxft.BertConfig.from_dict(sizes | {"model_type": "bert"} | fields | {name: None})


def test_null_beside_another_name_counts_as_absent():
    assert read(**MODERN, local_attention=None, sliding_window=64).local_attention == 128
    assert read(model_type="nomic_bert", num_attention_heads=None, n_head=4).num_attention_heads == 4
    assert read(model_type="distilbert", n_heads=None).num_attention_heads == 2


@pytest.mark.parametrize("fields", [MODERN, GTE, {"model_type": "nomic_bert"}, {"model_type": "jina_embeddings_v3"}])
def test_head_size_of_rotary_models_follows_the_width(fields):
    assert read(**fields, head_dim=8) == read(**fields, head_dim=None) == read(**fields)
    for wrong in (4, "8", [8]):
        with pytest.raises(ValueError, match="head_dim must be hidden_size / num_attention_heads, got"):
            read(**fields, head_dim=wrong)
    assert read(head_dim=4) == read()


def test_fixed_fields_of_a_type_are_not_overridden():
    assert jaxft.BertConfig("mpnet", **SMALL, type_vocab_size=0, pad_token_id=1).relative_bias
    assert read(model_type="mpnet", type_vocab_size=7, pad_token_id=3).pad_token_id == 1
    assert read(model_type="distilbert", dim=16, type_vocab_size=7).type_vocab_size == 0
    with pytest.raises(ValueError, match="of a bert model norm_first is always False, got True"):
        jaxft.BertConfig(**SMALL, norm_first=True)
    with pytest.raises(ValueError, match="of a modernbert model activated_half is always first, got 'second'"):
        jaxft.BertConfig("modernbert", **SMALL, pad_token_id=0, activated_half="second")


@pytest.mark.parametrize(
    ("kind", "offset"),
    [("bert", 0), ("roberta", 2), ("xlm-roberta", 2), ("camembert", 2), ("data2vec-text", 2), ("mpnet", 2),
     ("ernie", 0), ("electra", 0), ("jina_embeddings_v3", 0)],
)  # fmt: skip
def test_positions_of_each_type(kind, offset):
    config = read(model_type=kind, max_position_embeddings=20)
    assert config.position_offset == offset and config.max_sequence_length == 20 - offset
    assert config.most_tokens == (2**20 if kind == "jina_embeddings_v3" else 20 - offset)
    assert config.positions_count_padding == (offset == 0 and kind != "jina_embeddings_v3")
    if offset:
        with pytest.raises(ValueError, match="max_position_embeddings 2 leaves no position after pad_token_id 1"):
            read(model_type=kind, max_position_embeddings=2)
        assert read(model_type=kind, max_position_embeddings=3).max_sequence_length == 1


def test_width_of_tables_and_windows():
    assert read(model_type="electra", embedding_size=4).width_of_tables == 4
    assert read(model_type="electra", embedding_size=None).width_of_tables == 128 and read().width_of_tables == 16
    config = read(**MODERN, local_attention=7, global_attn_every_n_layers=2)
    assert [config.window(layer) for layer in range(3)] == [None, 3, None] and read().window(0) is None
    types = ("full_attention", "sliding_attention", "sliding_attention", "full_attention")
    assert read(**MODERN, num_hidden_layers=4).layer_types == types
    for types in (["full_attention"] * 2, ["full_attention"] * 4, ["full_attention", "x", "full_attention"], "abc"):
        with pytest.raises(ValueError, match="layer_types must name 3 times one of full_attention, sliding_attention"):
            read(**MODERN, layer_types=types)


def test_rotary_positions_need_an_even_head_size():
    assert read(**MODERN, hidden_size=18, num_attention_heads=1).hidden_size == 18
    with pytest.raises(ValueError, match="rotary positions need an even head size, got 3"):
        read(**MODERN, hidden_size=6, num_attention_heads=2)


def test_values_at_the_bounds_are_accepted():
    config = read(hidden_dropout_prob=1, attention_probs_dropout_prob=0, initializer_range=0, pad_token_id=30)
    assert (config.hidden_dropout_prob, config.initializer_range, config.pad_token_id) == (1, 0, 30)
    with pytest.raises(ValueError, match="pad_token_id 31 is not below vocab_size 31"):
        read(pad_token_id=31)
    for fields in ({"hidden_dropout_prob": True}, {"attention_probs_dropout_prob": 1.01}, {"initializer_range": -0.1}):
        with pytest.raises(ValueError, match=rf"{[*fields][0]} must be a .*number .*, got {[*fields.values()][0]}"):
            read(**fields)


@pytest.mark.parametrize(
    ("first", "second", "field"), [("qkv", "out", "attention_bias"), ("ffn_in", "ffn_out", "mlp_bias")]
)
def test_biases_that_are_one_field_are_equal(first, second, field):
    assert getattr(read(**MODERN, **{field: True}), f"{second}_bias")
    with pytest.raises(ValueError, match=f"{first}_bias and {second}_bias must be equal, they are one field, {field}"):
        dataclasses.replace(read(**MODERN), **{f"{second}_bias": True})


@pytest.mark.parametrize(
    ("kind", "layers", "inner", "accepted"),
    [("bert", 1, 2**18, True), ("bert", 2, 2**18, False), ("modernbert", 1, 2**18, False), ("albert", 2, 2**18, True),
     ("modernbert", 1, 2**17, True)],
)  # fmt: skip
def test_parameters_have_a_limit(kind, layers, inner, accepted):
    """Each of the matrices of attention, and each of the two or three of the feed-forward network, has 2^32 or more."""
    values = dataclasses.asdict(read(**(MODERN if kind == "modernbert" else {"model_type": kind})))
    values |= {"hidden_size": 2**16, "num_attention_heads": 2**10, "num_hidden_layers": layers, "layer_types": None}
    values |= {"intermediate_size": inner, "embedding_size": 2**16 if kind == "albert" else None}
    problems = [problem for problem in configs._problems(values) if "parameters, at most 68719476736" in problem]
    assert problems == [] if accepted else len(problems) == 1


def test_code_of_a_checkpoint_is_mentioned(caplog):
    caplog.set_level(logging.WARNING, "jaxft")
    read(auto_map={"AutoModel": "x"})
    assert "has code of its own, which is not run (auto_map is {'AutoModel': 'x'})" in caplog.text


def test_names_of_transformers_win_in_distilbert():
    assert read(model_type="distilbert", dim=8, n_heads=4).hidden_size == 16
    fields = {name: value for name, value in SMALL.items() if name not in ("hidden_size", "num_attention_heads")}
    config = jaxft.BertConfig.from_dict(fields | {"model_type": "distilbert", "dim": 8, "n_heads": 4})
    assert (config.hidden_size, config.num_attention_heads) == (8, 4)


@pytest.mark.parametrize(
    ("fields", "name", "good", "bad"),
    [
        *(({"model_type": "nomic_bert"}, name, [good, None], [bad]) for name, good, bad in (
            ("prenorm", False, True), ("use_rms_norm", False, True), ("rotary_emb_fraction", 1, 0.5),
            ("rotary_emb_interleaved", False, True), ("causal", False, True), ("parallel_block", False, True),
            ("qkv_proj_bias", False, True), ("mlp_fc1_bias", False, True), ("mlp_fc2_bias", False, True),
            ("num_experts", 0, 8), ("moe_every_n_layers", -1, 2), ("activation_function", "swiglu", "gelu"),
            ("rotary_emb_scale_base", None, 512), ("rotary_scaling_factor", None, 2),
        )),
        ({"model_type": "nomic_bert"}, "moe_every_n_layers", [0], [1]),
        (GTE, "logn_attention_scale", [False], [True]),
        (GTE, "layer_norm_type", ["layer_norm"], ["rms_norm"]),
        (GTE, "position_embedding_type", ["rope"], ["absolute"]),
        (MODERN, "embedding_dropout", [0, 0.0], [0.1]),
        (MODERN, "mlp_dropout", [0], [0.1]),
        (MODERN, "decoder_bias", [True], [False]),
        ({"model_type": "albert"}, "num_hidden_groups", [1], [2]),
        ({"model_type": "albert"}, "inner_group_num", [1], [2]),
        ({"model_type": "ernie"}, "use_task_id", [False], [True]),
        ({"model_type": "ernie"}, "position_embedding_type", ["absolute"], ["relative_key"]),
        ({}, "position_embedding_type", ["absolute", None], ["relative_key"]),
        *((DEBERTA, name, [good], [bad, None]) for name, good, bad in (
            ("relative_attention", True, False), ("share_att_key", True, False), ("position_biased_input", False, True),
            ("norm_rel_ebd", "layer_norm", "none"),
        )),
        *((DEBERTA, name, [good, None], [bad]) for name, good, bad in (
            ("conv_kernel_size", 0, 3), ("pooler_dropout", 0, 0.1), ("type_vocab_size", 0, 2),
            ("attention_head_size", None, 64), ("legacy", True, False),
            *((name, SMALL["hidden_size"], 3) for name in ("embedding_size", "pooler_hidden_size")),
        )),
        (DEBERTA, "pos_att_type", ["p2c|c2p", "C2P| p2c", [" c2p", "p2c"]], [None, "p2c", ["p2c"], 3]),
        (JINA, "feed_forward_type", ["geglu", "reglu"], [None, "original"]),
        *(({"model_type": kind}, "lora_adaptations", [None, []], [["retrieval.query"]])
          for kind in ("jina_embeddings_v3", "xlm-roberta")),
        *(({"model_type": kind}, "position_embedding_type", ["absolute", "rotary"], [])
          for kind in ("jina_embeddings_v3", "mpnet")),
        (MODERN, "rope_parameters", [{}, {"full_attention": {"rope_type": "default"}}],
         [{"x": {}}, {"sliding_attention": {"rope_type": "yarn"}}, [1]]),
        (MODERN, "rope_scaling", [{"type": "default"}], [{"type": "linear"}, "linear"]),
        (GTE, "rope_scaling", [{"type": "ntk", "factor": 2}, {"rope_type": "default"}],
         [{"type": "yarn"}, {"partial_rotary_factor": 0.5}, {"type": "ntk", "factor": 2, "mixed_b": 0.6},
          {"type": "ntk", "factor": 2, "partial_rotary_factor": 0.5}]),
        ({"model_type": "nomic_bert"}, "rope_parameters", [{"rope_theta": 7}], [{"rope_type": "ntk", "factor": 2}]),
    ],
)  # fmt: skip
def test_other_values_of_fields_are_refused(fields, name, good, bad):
    for value in good:
        read(**fields | {name: value})
    for value in bad:
        with pytest.raises(ValueError, match=f"{name.removesuffix('_parameters').removesuffix('_scaling')}|rotary"):
            read(**fields | {name: value})


@pytest.mark.parametrize("kind", ["dpr", "mobilebert", "roformer", "xlm-roberta-xl"])
def test_near_types_are_refused_with_a_reason(kind):
    with pytest.raises(ValueError, match=rf"model_type must be one of .*, got '{kind}' \(its "):
        read(model_type=kind)


def test_old_names_of_nomic_bert_are_read():
    old = {"n_embd": 8, "n_layer": 2, "n_head": 4, "n_inner": 12, "layer_norm_epsilon": 1e-3, "n_positions": 9,
           "resid_pdrop": 0.25, "attn_pdrop": 0.5, "rotary_emb_base": 77, "activation_function": "swiglu"}  # fmt: skip
    config = jaxft.BertConfig.from_dict({"model_type": "nomic_bert", "vocab_size": 31} | old)
    assert config == jaxft.BertConfig(
        "nomic_bert", 31, 8, 2, 4, 12, "silu", 0.25, 0.5, 9, layer_norm_eps=1e-3, rope_theta=77
    )
    assert read(model_type="nomic_bert", hidden_act="relu").hidden_act == "relu"


@pytest.mark.parametrize(
    ("name", "new", "old"),
    [
        ("hidden_size", 16, {"n_embd": 8}), ("num_hidden_layers", 1, {"n_layer": 2}),
        ("num_attention_heads", 2, {"n_head": 4}), ("layer_norm_eps", 1e-5, {"layer_norm_epsilon": 1e-3}),
        ("hidden_act", "gelu", {"activation_function": "swiglu"}), ("rope_theta", 5, {"rotary_emb_base": 7}),
    ],
)  # fmt: skip
def test_new_names_of_nomic_bert_win(name, new, old):
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}
    assert getattr(jaxft.BertConfig.from_dict({"model_type": "nomic_bert"} | sizes | {name: new} | old), name) == new


def test_rope_parameters_win_in_order():
    full, sliding = {"rope_theta": 5.0}, {"rope_theta": 6.0}
    config = read(
        **MODERN, global_rope_theta=7.0, rope_parameters={"full_attention": full, "sliding_attention": sliding}
    )
    assert (config.rope_theta, config.local_rope_theta) == (5.0, 6.0)
    config = read(**MODERN, rope_parameters={"full_attention": full}, rope_scaling={"rope_theta": 8.0})
    assert (config.rope_theta, config.local_rope_theta) == (8.0, 8.0)
    config = read(**MODERN, global_rope_theta=7.0)
    assert (config.rope_theta, config.local_rope_theta) == (7.0, 10_000.0)
    assert read(model_type="nomic_bert", rotary_emb_base=3, rope_parameters={"rope_theta": 4}).rope_theta == 4
    assert read(**GTE, rope_theta=3, rope_scaling={"factor": 2, "type": "ntk"}).rope_factor == 2
    assert read(**GTE, rope_scaling={"rope_type": "ntk"}, rope_parameters={"rope_theta": 4}).rope_factor == 1


def test_sliding_window_is_half_of_the_local_attention():
    assert read(**MODERN, sliding_window=64, local_attention=3).local_attention == 128
    assert read(**MODERN, local_attention=3).local_attention == 3


@pytest.mark.parametrize(
    ("change", "name", "expected"),
    [
        ({"max_relative_positions": -1, "max_position_embeddings": 40}, "max_relative_positions", 40),
        ({"max_relative_positions": 0, "max_position_embeddings": 40}, "max_relative_positions", 40),
        ({"max_relative_positions": 1}, "max_relative_positions", 1),
        ({"max_relative_positions": None}, "max_relative_positions", 512),
        ({"position_buckets": None}, "position_buckets", 0),
        ({"position_buckets": -1}, "position_buckets", 0),
        ({"position_buckets": 8}, "position_buckets", 8),
        ({"pooler_hidden_act": "relu"}, "classifier_activation", "relu"),
    ],
)
def test_fields_of_deberta(change, name, expected):
    assert getattr(read(**DEBERTA | change), name) == expected


@pytest.mark.parametrize("fields", [
    {}, DEBERTA, MODERN | {"rope_theta": 3.0, "layer_types": None}, GTE | {"rope_theta": 9.0}, JINA,
    GTE | {"rope_scaling": {"type": "ntk", "factor": 3}}, JINA | {"feed_forward_type": "reglu"},
    {"model_type": "nomic_bert", "rotary_emb_base": 9.0}, {"model_type": "jina_embeddings_v3", "rope_theta": 8.0},
    MODERN | {"rope_parameters": {"full_attention": {"rope_theta": 2.0}, "sliding_attention": {"rope_theta": 4.0}}},
    {"model_type": "distilbert"}, {"model_type": "mpnet"}, {"model_type": "albert"}, {"model_type": "electra"},
], ids=str)  # fmt: skip
def test_written_fields_are_read_again(fields):
    config = read(**fields)
    assert jaxft.BertConfig.from_dict(config.to_dict()) == config


def test_written_fields_are_those_of_transformers():
    written = read(**DEBERTA).to_dict()
    assert {name: written[name] for name in DEBERTA} == DEBERTA
    assert read(model_type="jina_embeddings_v3", rope_theta=8.0).to_dict()["rope_parameters"] == {
        "rope_type": "default", "rope_theta": 8.0
    }  # fmt: skip


def test_alibi_makes_a_bert_and_no_other_type_a_jina_bert():
    assert read(**JINA).model_type == "jina_bert"
    with pytest.raises(ValueError, match="position_embedding_type must be 'absolute', got 'alibi'"):
        read(model_type="roberta", position_embedding_type="alibi")


@pytest.mark.parametrize("kind", sorted({*layouts.LAYOUTS} - {"jina_bert"}))
def test_absent_fields_have_the_defaults_of_transformers(kind):
    """A config.json that names every field with transformers' default means the same as one that names none."""
    needed = {"model_type": kind} | (DEBERTA if kind == "deberta-v2" else {})
    every = json.loads(encoders.DEFAULTS.read_text())[kind]
    assert {"vocab_size", "pad_token_id", "initializer_range"} <= every.keys()
    assert jaxft.BertConfig.from_dict(needed) == jaxft.BertConfig.from_dict(every | needed)
