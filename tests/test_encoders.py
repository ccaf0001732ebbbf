"""Encoders that followed BERT, beside transformers' results of the same weights (see `encoders.py`)."""

import json
import re

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import encoders
from cases import slow, slow_cases
from jaxft import dispatch
from jaxft.checkpoint import layouts
from jaxft.checkpoint.files import CheckpointError
from jaxft.models import bert, dialects
from jaxft.models.bert import BertConfig, BertLayer, BertModel, Places
from jaxft.models.classification import BertForSequenceClassification, BertForTokenClassification
from jaxft.models.masked_lm import BertForMaskedLM
from jaxft.models.pooling import packed_rows_of, sequence_rows
from jaxft.models.positions import alibi_table, disentangled_attention, log_buckets
from jaxft.ops.rotary import rotary

STORED = np.load(encoders.DATA)
# BERT's own types are compared with transformers in `test_bert.py` and its neighbours too.
SLOW = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert")
CASES = [*slow(*SLOW), *(case for case in encoders.CASES if case not in SLOW)]
CLASSES = {
    "Model": BertModel,
    "ForMaskedLM": BertForMaskedLM,
    "ForSequenceClassification": BertForSequenceClassification,
    "ForTokenClassification": BertForTokenClassification,
}
SMALL = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24,
         "max_position_embeddings": 64}  # fmt: skip
MODERN = {"model_type": "modernbert", "pad_token_id": 0, "local_attention": 6} | SMALL
DEBERTA = {"model_type": "deberta-v2", "relative_attention": True, "position_buckets": 8, "pos_att_type": "p2c|c2p",
           "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False} | SMALL  # fmt: skip
JINA = {"model_type": "bert", "position_embedding_type": "alibi", "feed_forward_type": "geglu"} | SMALL
KINDS = {
    "modernbert": MODERN,
    "deberta-v2": DEBERTA,
    "jina_bert": JINA,
    **{kind: {"model_type": kind, "pad_token_id": 1} | SMALL for kind in ("mpnet", "gte", "jina_embeddings_v3")},
    **{kind: {"model_type": kind} | SMALL for kind in ("nomic_bert", "electra", "albert")},
}
TWO_LAYERS = {"num_hidden_layers": 2}  # of ModernBERT, the second one has a window
REFUSED = {
    "dpr": "question",
    "mobilebert": "bottlenecks",
    "roformer": "neighbouring",
    "xlm-roberta-xl": "norm first",
}


def results(model, ids, mask):
    """Returns the results of a padded and of a packed batch, without the padding."""
    lengths = mask.sum(axis=1)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    rows = np.concatenate([ids[mask], np.full(5, ids[0, 0])])  # the last five belong to no text
    padded, packed = model(ids, mask), model(rows, cu_seqlens=starts, max_seqlen=int(lengths.max()))
    if isinstance(model, BertModel):
        padded, packed = padded.last_hidden_state, packed.last_hidden_state
    if isinstance(model, BertForSequenceClassification):
        return np.asarray(padded), np.asarray(packed)
    return np.asarray(padded)[mask], np.asarray(packed)[: starts[-1]]


@pytest.mark.parametrize(
    ("case", "task"),
    [
        pytest.param(case, task, marks=[pytest.mark.slow] * (case in SLOW or (i + j) % 4 > 0))
        for i, case in enumerate(encoders.CASES) for j, task in enumerate(encoders.TASKS)
    ],
)  # fmt: skip
def test_transformers_results(tmp_path, case, task):
    encoders.write(tmp_path, STORED, case, task)
    model = CLASSES[task].from_pretrained(tmp_path)
    ids, mask = encoders.batch(model.config.pad_token_id)
    expected = STORED[f"{case} {task} result"]
    bound = 2 * STORED[f"{case} {task} error"] + 2e-6 * np.abs(expected).max()
    for found in results(model, ids, mask):
        if task in ("ForMaskedLM", "ForTokenClassification"):
            found = found[encoders.LENGTHS[0] :][: encoders.LENGTHS[1]]
        np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


@pytest.mark.cpu
@pytest.mark.parametrize("task", encoders.TASKS)
@pytest.mark.parametrize("case", CASES)
def test_saved_files(tmp_path, case, task):
    """The same tensors are written under the same names, and the fields of config.json keep their meaning."""
    encoders.write(tmp_path, STORED, case, task)
    model = CLASSES[task].from_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "saved")
    before, after = (
        safetensors.numpy.load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "saved")
    )
    layout = {"gte.": "new."}  # the older prefix is written
    before = {layout.get(name[:4], name[:4]) + name[4:]: tensor for name, tensor in before.items()}
    assert {*before} == {*after} and all(np.array_equal(before[name], after[name]) for name in before)
    again = CLASSES[task].from_pretrained(tmp_path / "saved")
    assert again.config == model.config


OF_BERT = ("cls.predictions.bias", "cls.seq_relationship.weight", "classifier.weight", "qa_outputs.weight")
OF_ROBERTA = ("lm_head.decoder.weight", "classifier.out_proj.weight", "qa_outputs.bias")
# Case -> the prefixes of its encoder's tensors in transformers' models with heads, and tensors of all these heads.
HEADS = {
    "bert": (("bert.",), (*OF_BERT, "linear.weight")),
    "ernie": (("ernie.",), OF_BERT),
    "data2vec-text": (("data2vec_text.",), OF_ROBERTA),
    "mpnet": (("mpnet.",), OF_ROBERTA),
    "jina_embeddings_v3": (("roberta.",), OF_ROBERTA),
    "modernbert": (("model.",), ("head.dense.weight", "decoder.bias", "classifier.bias")),
    "nomic_bert": (("nomic_bert.",), OF_BERT),
    "gte": (("new.", "gte."), ("lm_head.decoder.bias", "classifier.weight")),
    "electra": (("electra.",), ("generator_predictions.dense.bias", "generator_lm_head.bias", "qa_outputs.bias",
                                "discriminator_predictions.dense.bias", "sequence_summary.summary.bias")),
    "albert": (("albert.",), ("predictions.bias", "sop_classifier.classifier.bias", "classifier.bias", OF_BERT[-1])),
    "deberta-v2": (("deberta.",), (*OF_BERT, "lm_predictions.lm_head.bias", "mask_predictions.dense.bias",
                                   "pooler.dense.bias")),
}  # fmt: skip


@pytest.mark.cpu
@pytest.mark.parametrize("case", HEADS)
def test_encoder_ignores_heads_and_buffers(tmp_path, case):
    encoders.write(tmp_path, STORED, case, "Model")
    plain, file = BertModel.from_pretrained(tmp_path), tmp_path / "model.safetensors"
    tensors, (prefixes, head) = safetensors.numpy.load_file(file), HEADS[case]
    for prefix in prefixes:
        more = dict.fromkeys(head, np.ones((3, 5), np.int8))  # neither the shape nor the dtype matters
        more |= {f"{prefix}embeddings.{name}_ids": np.ones((1, 9), np.int8) for name in ("position", "token_type")}
        safetensors.numpy.save_file({prefix + name: x for name, x in tensors.items()} | more, file)
        chex.assert_trees_all_equal(nnx.state(plain), nnx.state(BertModel.from_pretrained(tmp_path)))


@pytest.mark.cpu
@pytest.mark.parametrize("case", ["bert", "roberta", "mpnet", "nomic_bert", "gte", "electra", "albert", "deberta-v2"])
def test_encoder_of_a_masked_lm_has_no_pooler(tmp_path, case):
    encoders.write(tmp_path, STORED, case, "ForMaskedLM")
    assert BertModel.from_pretrained(tmp_path).pooler is None


@pytest.mark.cpu
@pytest.mark.parametrize("case", ["bert", "roberta", "distilbert", "modernbert"])
def test_last_layer_with_other_labels_is_new(tmp_path, case):
    encoders.write(tmp_path, STORED, case, "ForSequenceClassification")
    model = BertForSequenceClassification.from_pretrained(tmp_path, num_labels=5, rngs=nnx.Rngs(0))
    assert model.num_labels == 5


TIED = {
    "gte": {"lm_head.decoder.weight": "new.embeddings.word_embeddings.weight"},
    "electra": {"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
    "modernbert": {"decoder.weight": "model.embeddings.tok_embeddings.weight"},
    "albert": {"predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
               "predictions.decoder.bias": "predictions.bias"},
    "mpnet": {"lm_head.decoder.weight": "mpnet.embeddings.word_embeddings.weight",
              "lm_head.decoder.bias": "lm_head.bias"},
}  # fmt: skip


@pytest.mark.cpu
@pytest.mark.parametrize("case", TIED)
def test_tied_tensors_may_have_either_name_or_both(tmp_path, case):
    encoders.write(tmp_path, STORED, case, "ForMaskedLM")
    plain, file = BertForMaskedLM.from_pretrained(tmp_path), tmp_path / "model.safetensors"
    plain.save_pretrained(tmp_path)  # each tensor once
    tensors = safetensors.numpy.load_file(file)
    for copy, original in TIED[case].items():
        moved = {copy if name == original else name: x for name, x in tensors.items()}
        for stored in (tensors | {copy: tensors[original]}, moved):
            safetensors.numpy.save_file(stored, file)
            chex.assert_trees_all_equal(nnx.state(plain), nnx.state(BertForMaskedLM.from_pretrained(tmp_path)))
        safetensors.numpy.save_file(tensors | {copy: tensors[original] + 1}, file)
        with pytest.raises(CheckpointError, match=re.escape(f"{copy!r}: differs from {original!r}")):
            BertForMaskedLM.from_pretrained(tmp_path)


def test_page_lists_exactly_the_supported_types():
    """The page has a row for each name that config.json may have, and errors of each type that transformers has."""
    table = encoders.PAGE.read_text().partition("<!-- table: types -->\n")[2].partition("<!-- end -->")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:] if line.startswith("|")]
    assert [row[0] for row in rows] == [*encoders.TYPES]
    listed = [kind for row in rows for kind in re.findall("`([^` ]*)`", row[1]) if " with " not in row[1]]
    assert sorted(listed) == sorted({*layouts.LAYOUTS, *dialects._ALIASES} - {"jina_bert"})
    compared = {json.loads(str(STORED[f"{case} Model"]))["config"]["model_type"] for case in encoders.CASES}
    assert compared == {*layouts.LAYOUTS} - {"jina_bert"}
    for row in rows:
        assert re.fullmatch(r"(\d\.\de-\d\d / ){2}\d\.\de-\d\d", row[4]) or row[0] == "Jina v2", row
    for case in encoders.CASES:
        assert f"\n| {case} | " in encoders.PAGE.read_text()


@pytest.mark.parametrize(
    ("kind", "remat"),
    [
        *((kind, kind == "modernbert") for kind in KINDS),
        *slow_cases(*((kind, kind != "modernbert") for kind in KINDS)),
    ],
)
def test_padded_and_packed_gradients(kind, remat):
    """Padding takes no part. With `remat`, the packed call recomputes layers with their windows, biases and angles."""
    config = BertConfig.from_dict(KINDS[kind] | TWO_LAYERS)
    ids, mask = encoders.batch(config.pad_token_id)
    ids, mask = ids[:, :40] % config.vocab_size, mask[:, :40]
    starts, weight = np.concatenate([[0], np.cumsum(mask.sum(axis=1))]), jnp.linspace(-1, 1, config.hidden_size)

    def gradients(is_packed, **options):
        graph, params = nnx.split(BertModel(config, rngs=nnx.Rngs(0), **options))

        @jax.jit
        @jax.grad
        def run(params):
            model = nnx.merge(graph, params)
            if is_packed:
                packed = model(ids[mask], cu_seqlens=starts, max_seqlen=40).last_hidden_state
                return jnp.sum(jnp.tanh(packed @ weight))
            return jnp.sum(jnp.tanh(model(ids, mask).last_hidden_state @ weight), where=mask)

        return run(params)

    padded, packed = gradients(False), gradients(True, remat=remat)
    for a, b in zip(jax.tree.leaves(padded), jax.tree.leaves(packed), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1e-3, float(jnp.abs(a).max())))


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_packing_gives_nan(kind):
    config = BertConfig.from_dict(KINDS[kind])
    model = BertModel(config, rngs=nnx.Rngs(0))
    starts = jnp.asarray([0, 3, 99])
    call = jax.jit(lambda starts: model(jnp.full(8, 5), cu_seqlens=starts, max_seqlen=8).last_hidden_state)
    assert np.isnan(call(starts)).all()


@pytest.mark.parametrize(
    "kind", [*(quick := ("modernbert", "deberta-v2", "mpnet", "albert")), *slow(*(k for k in KINDS if k not in quick))]
)
def test_training_in_16_bits(kind):
    config = BertConfig.from_dict(KINDS[kind] | TWO_LAYERS)
    model = BertForMaskedLM(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    model.train()
    ids = jnp.arange(12).reshape(1, 12) % config.vocab_size
    run = nnx.jit(nnx.value_and_grad(lambda m: m.loss(ids, ids, rngs=jax.random.key(0)).mean))
    loss, gradients = run(model)
    assert jnp.isfinite(loss) and all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_hidden_states():
    """Where norms come first, the states between layers are the sums before the norms, as in transformers."""
    config = BertConfig.from_dict(MODERN)
    model = BertModel(config, rngs=nnx.Rngs(0))
    states = model(jnp.arange(6)[None], output_hidden_states=True).hidden_states
    assert len(states) == config.num_hidden_layers + 1
    for state in states[1:-1]:
        assert float(jnp.abs(state.mean(axis=-1)).max()) > 1e-4  # not normalised
    np.testing.assert_allclose(states[-1].mean(axis=-1), 0, atol=1e-6)


def test_packing_is_undone():
    starts, rows = jnp.asarray([0, 5, 8, 8]), jnp.arange(1, 23, dtype=jnp.float32).reshape(11, 2)
    padded = sequence_rows(rows, starts, 6)
    np.testing.assert_array_equal(packed_rows_of(padded, starts, 11), rows.at[8:].set(0))
    np.testing.assert_array_equal(packed_rows_of(padded[:, :4], starts, 11), rows.at[8:].set(0).at[4].set(0))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "kind", ["deberta-v2", "jina_bert", *slow(*sorted(KINDS.keys() - {"deberta-v2", "jina_bert"}))]
)
def test_types_have_symbolic_sizes_and_promote_nothing(kind, packed):
    """Forward and gradient."""
    graph, params = nnx.split(BertModel(BertConfig.from_dict(KINDS[kind] | TWO_LAYERS), rngs=nnx.Rngs(0)))

    def gradients(ids, other, long):
        options = {"cu_seqlens": other, "max_seqlen": long.size} if packed else {"attention_mask": other}
        return jax.value_and_grad(lambda p: jnp.sum(nnx.merge(graph, p)(ids, **options).last_hidden_state))(params)

    shapes = ("m", "b + 1", "t") if packed else ("b, t", "b, t", "t")
    structs = tuple(jax.ShapeDtypeStruct((1,) * (shape.count(",") + 1), jnp.int32) for shape in shapes)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        export = jax.export.export(jax.jit(gradients), disabled_checks=dispatch.EXPORT_DISABLED_CHECKS)
        export(*jax.export.symbolic_args_specs(structs, shapes))


def plain_jina(params, ids, config):
    """Computes Jina v2 as its paper describes it: BERT with ALiBi, and a gated feed-forward network."""

    def norm(x, name):
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        gamma, beta = params[name + "_gamma"], params[name + "_beta"]
        return (x - mean) / np.sqrt(variance + config.layer_norm_eps) * gamma + beta

    heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    x = norm(params["embeddings.word"][ids] + params["embeddings.token_type"][0], "embeddings.norm")
    distance = np.abs(np.arange(len(ids))[:, None] - np.arange(len(ids))[None])
    slopes = [2.0 ** (-8 * (i + 1) / heads) for i in range(heads)]
    for i in range(config.num_hidden_layers):
        start = f"layers.{i}."
        qkv = (x @ params[start + "qkv_kernel"] + params[start + "qkv_bias"]).reshape(len(ids), 3, heads, size)
        parts = []
        for head in range(heads):
            q, k, v = (qkv[:, part, head] for part in range(3))
            scores = np.exp(q @ k.T / np.sqrt(size) - slopes[head] * distance)
            parts.append(scores / scores.sum(-1, keepdims=True) @ v)
        y = np.concatenate(parts, -1) @ params[start + "out_kernel"] + params[start + "out_bias"]
        x = norm(x + y, start + "attention_norm")
        first, second = np.split(x @ params[start + "ffn_in_kernel"], 2, axis=-1)
        y = np.asarray(jax.nn.gelu(first, approximate=False)) * second
        x = norm(x + y @ params[start + "ffn_out_kernel"] + params[start + "ffn_out_bias"], start + "ffn_norm")
    return x


def test_jina_v2():
    config = BertConfig.from_dict(JINA)
    model = BertModel(config, rngs=nnx.Rngs(0))
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    params = {".".join(map(str, path)): np.asarray(value.get_value(), np.float64) for path, value in state}
    ids = np.arange(20) % 31
    found = model(ids[None]).last_hidden_state[0]
    np.testing.assert_allclose(found, plain_jina(params, ids, config), atol=2e-6)


def test_jina_v2_survives_json():
    for activation in ("geglu", "reglu"):
        config = BertConfig.from_dict(JINA | {"feed_forward_type": activation})
        assert config.hidden_act == {"geglu": "gelu", "reglu": "relu"}[activation]
        saved = config.to_dict()
        assert saved["model_type"] == "bert" and BertConfig.from_dict(json.loads(json.dumps(saved))) == config


@pytest.mark.parametrize("heads", [1, 2, 8, 12, 16, 6])
def test_alibi_slopes(heads):
    """With a number of heads that is no power of two, every other slope of twice that power follows."""
    power = 2 ** int(np.log2(heads))
    first = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    more = [2.0 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)][: heads - power]
    np.testing.assert_allclose(-np.asarray(alibi_table(heads, 2))[:, 3], first + more, rtol=1e-6)


def test_old_names_of_modernbert():
    old = {"model_type": "modernbert", "global_rope_theta": 5e4, "local_rope_theta": 2e4,
           "global_attn_every_n_layers": 2, "num_hidden_layers": 5, "local_attention": 10}  # fmt: skip
    config = BertConfig.from_dict(old)
    assert (config.rope_theta, config.local_rope_theta) == (5e4, 2e4)
    assert [config.window(i) for i in range(5)] == [None, 5, None, 5, None]
    assert BertConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    default = BertConfig.from_dict({"model_type": "modernbert"})
    assert (default.rope_theta, default.local_rope_theta) == (160_000, 10_000)
    assert [default.window(i) for i in range(5)] == [None, 64, 64, None, 64]


def test_old_names_of_nomic_bert():
    old = {"model_type": "nomic_bert", "n_embd": 32, "n_head": 4, "n_layer": 2, "n_inner": 48, "n_positions": 99,
           "layer_norm_epsilon": 1e-6, "rotary_emb_base": 500, "activation_function": "swiglu", "prenorm": False,
           "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "qkv_proj_bias": False}  # fmt: skip
    config = BertConfig.from_dict(old)
    sizes = config.hidden_size, config.num_attention_heads, config.num_hidden_layers, config.intermediate_size
    assert sizes == (32, 4, 2, 48) and config.max_sequence_length == 99
    assert (config.layer_norm_eps, config.rope_theta, config.activation) == (1e-6, 500, "silu")


def test_old_names_of_gte(monkeypatch):
    old = {"model_type": "new", "position_embedding_type": "rope", "rope_theta": 1e4, "type_vocab_size": 0,
           "rope_scaling": {"type": "ntk", "factor": 2.0}, "layer_norm_type": "layer_norm"} | SMALL  # fmt: skip
    config = BertConfig.from_dict(old)
    assert (config.model_type, config.rope_theta, config.rope_factor) == ("gte", 1e4, 2.0)
    assert BertConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    # NTK scaling: the base times the factor, and all frequencies divided by factor ** (2 / H).
    layer = BertModel(config, implementation="xla", rngs=nnx.Rngs(0)).layers[0]
    rotated, given = [], jax.random.normal(jax.random.key(0), (1, 4, 3, 2, 8))

    def keep(x, kernel, bias, *args, num_heads, **kwargs):
        rotated.append(rotary(given, *args, **kwargs))
        return rotated[0]

    monkeypatch.setattr(bert, "dense_rotary", keep)
    layer.step(*[jnp.ones((1, 4, 16))] * 2, Places(positions=jnp.arange(4), theta=2e4), [(None, None)] * 2)
    angle = 3 / (2e4 ** (np.arange(0, 8, 2) / 8)) / 2 ** (2 / 8)
    first, second = np.split(np.asarray(given[0, 3, 0, 0]), 2)
    expected = [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)]
    np.testing.assert_allclose(rotated[0][0, 3, 0, 0], np.concatenate(expected), atol=1e-6)


def test_far_positions_of_deberta_share_the_outermost_rows():
    """The table has rows for the distances -2, -1, 0 and 1 of a query from a key."""
    rng = np.random.default_rng(0)
    qkv, relative = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 5, 3, 1, 4), (4, 2, 1, 4)))
    query, key, value = (np.float64(qkv[0, :, i, 0]) for i in range(3))
    row = np.clip(np.arange(5)[:, None] - np.arange(5) + 2, 0, 3)
    of_query, of_key = (np.float64(relative[row, i, 0]) for i in (1, 0))
    scores = query @ key.T + (of_query * query[:, None]).sum(-1) + (of_key * key[None]).sum(-1)
    weights = np.exp(scores / np.sqrt(12))
    found = disentangled_attention(jnp.asarray(qkv), jnp.asarray(relative), None, 0, 2)
    np.testing.assert_allclose(found[0, :, 0], weights @ value / weights.sum(-1, keepdims=True), rtol=1e-5, atol=1e-6)


def test_log_buckets():
    """Distances below half of the buckets have their own, the farthest has the last but one."""
    found = log_buckets(np.arange(-600, 601), 256, 512)
    assert (found[600 - 127 : 600 + 128] == np.arange(-127, 128)).all()
    assert found[600 + 511] == 255 and found[600 - 511] == -255 and (np.diff(found) >= 0).all()


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (MODERN | {"mlp_dropout": 0.1}, "mlp_dropout"),
        (MODERN | {"decoder_bias": False}, "decoder_bias"),
        (MODERN | {"layer_types": ["full_attention"]}, "layer_types"),
        (MODERN | {"layer_types": ["full_attention", "x", "x"]}, "layer_types"),
        (MODERN | {"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "yarn"),
        (MODERN | {"rope_parameters": {"full_attention": {"rope_type": "linear"}}}, "linear"),
        (MODERN | {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}}, "partial_rotary_factor"),
        (MODERN | {"global_rope_theta": -1}, "rope_theta"),
        (MODERN | {"attention_bias": "yes"}, "attention_bias"),
        (MODERN | {"local_attention": 0}, "local_attention"),
        (MODERN | {"num_attention_heads": 16}, "even head size"),
        (KINDS["nomic_bert"] | {"prenorm": True}, "prenorm"),
        (KINDS["nomic_bert"] | {"rotary_emb_interleaved": True}, "rotary_emb_interleaved"),
        (KINDS["nomic_bert"] | {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction"),
        (KINDS["nomic_bert"] | {"activation_function": "gelu"}, "activation_function"),
        (KINDS["nomic_bert"] | {"num_experts": 8}, "num_experts"),
        (KINDS["gte"] | {"logn_attention_scale": True}, "logn_attention_scale"),
        (KINDS["gte"] | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        (KINDS["albert"] | {"num_hidden_groups": 2}, "num_hidden_groups"),
        (KINDS["albert"] | {"inner_group_num": 2}, "inner_group_num"),
        (DEBERTA | {"share_att_key": False}, "share_att_key"),
        (DEBERTA | {"share_att_key": None}, "share_att_key"),
        (DEBERTA | {"pos_att_type": ["p2c"]}, "pos_att_type"),
        (DEBERTA | {"conv_kernel_size": 3}, "conv_kernel_size"),
        (DEBERTA | {"position_biased_input": True}, "position_biased_input"),
        (DEBERTA | {"norm_rel_ebd": "none"}, "norm_rel_ebd"),
        (DEBERTA | {"pooler_dropout": 0.1}, "pooler_dropout"),
        (JINA | {"feed_forward_type": "original"}, "feed_forward_type"),
        ({"model_type": "ernie", "use_task_id": True} | SMALL, "use_task_id"),
        *[({"model_type": kind} | SMALL, f"{kind}.*{reason}") for kind, reason in REFUSED.items()],
        (KINDS["mpnet"] | {"relative_attention_num_buckets": 8}, "relative_attention_num_buckets"),
        (KINDS["electra"] | {"embedding_size": 0}, "embedding_size"),
    ],
)
@pytest.mark.cpu
def test_refused_fields(tmp_path, config, field):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=field):
        BertModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("kind", "model_class", "field", "default"),
    [
        ("albert", BertForSequenceClassification, "classifier_dropout_prob", 0.1),
        ("albert", BertForTokenClassification, "classifier_dropout_prob", 0.1),
        ("deberta-v2", BertForSequenceClassification, "cls_dropout", 0.4),
        ("modernbert", BertForSequenceClassification, "classifier_dropout", 0.0),
    ],
)
def test_dropout_of_heads(tmp_path, kind, model_class, field, default):
    config = BertConfig.from_dict(KINDS[kind] | {"hidden_dropout_prob": 0.4})
    assert model_class(config, rngs=None)._head_rate == default
    model_class(config, classifier_dropout=0.3, rngs=nnx.Rngs(0)).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())[field] == 0.3
    assert model_class.from_pretrained(tmp_path).classifier_dropout == 0.3


@pytest.mark.parametrize(
    ("kind", "model_class"),
    [
        ("mpnet", BertForSequenceClassification),
        ("mpnet", BertForTokenClassification),
        ("deberta-v2", BertForTokenClassification),
        ("distilbert", BertForTokenClassification),
    ],
)
def test_head_rate_without_a_field(tmp_path, kind, model_class):
    """transformers takes the rate of the encoder, whatever `classifier_dropout` says."""
    rate = "dropout" if kind == "distilbert" else "hidden_dropout_prob"
    config = BertConfig.from_dict(KINDS.get(kind, {"model_type": kind}) | {rate: 0.4})
    settings = model_class(config, classifier_dropout=0.3, rngs=None).settings
    assert "classifier_dropout" not in settings
    assert model_class._head_options({"classifier_dropout": 0.2}, config, {})["classifier_dropout"] is None
    assert model_class(config, rngs=None)._head_rate == 0.4


@pytest.mark.parametrize(("kind", "places"), [("gte", 2), ("albert", 0), ("nomic_bert", 1), ("deberta-v2", 1)])
def test_dropout_of_the_feed_forward_network(monkeypatch, kind, places):
    """GTE drops its gated activation too, and ALBERT drops nothing."""
    config = BertConfig.from_dict(KINDS[kind] | {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.0})
    layer, keys = BertModel(config, rngs=nnx.Rngs(0)).layers[0], jax.random.split(jax.random.key(1), 3)
    x, seen = jax.random.normal(jax.random.key(0), (1, 5, 16)), []
    monkeypatch.setattr(BertLayer, "_attend", lambda self, x, *_: x)
    monkeypatch.setattr(bert, "drop", lambda x, rate, key: seen.append((x.shape[-1], rate)) or x)

    def run(keys):
        return layer.step(x, x, Places(), (layer.attention_norm(), layer.ffn_norm()), keys)[0]

    found, other = run(keys), run(keys.at[2].set(keys[1]))
    assert seen == [(24, 0.5)] * 2 * (places == 2) and bool((found != other).any()) == (places > 0)


def test_deberta_drops_its_relative_embeddings(monkeypatch):
    config = BertConfig.from_dict(DEBERTA | {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.0})
    seen = []
    monkeypatch.setattr(bert, "drop", lambda x, rate, key: seen.append((x.shape, rate, key is None)) or x)
    model = BertModel(config, rngs=nnx.Rngs(0))
    model(jnp.ones((1, 4), int), deterministic=False, rngs=jax.random.key(0))
    assert seen == [((16, 16), 0.5, False)] * 3
