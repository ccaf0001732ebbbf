"""Modules after an encoder: pooling with prompts, Dense, LayerNorm, Dropout and Normalize; folders and training."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import tiny
from jaxft import BertModel, EmbeddingModel, SentenceEncoder
from jaxft.checkpoint.files import CheckpointError
from jaxft.models import embedding
from jaxft.models.embedding import Dense, Dropout, LayerNorm, Normalize
from jaxft.models.pooling import pool

WIDTH = tiny.WIDTH
TEXTS = ["a bird sings in the old tree", "rain", "", "the river , the old rain ."]
TORCH = "torch.nn.modules.activation."

# PyTorch 2.14, float64.
ARGUMENTS = [-30.0, -3.5, -1.0, -0.25, 0.0, 0.5, 1.0, 2.5, 7.0, 40.0]
VALUES = {
    "Identity": [-30.0, -3.5, -1.0, -0.25, 0.0, 0.5, 1.0, 2.5, 7.0, 40.0],
    "Tanh": [-1.0, -0.9981779, -0.76159416, -0.24491866, 0.0, 0.46211716, 0.76159416, 0.9866143, 0.99999834, 1.0],
    "ReLU": [0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 1.0, 2.5, 7.0, 40.0],
    "GELU": [-0.0, -0.00081420178, -0.15865525, -0.10032342, 0.0, 0.34573123, 0.84134475, 2.4844758, 7.0, 40.0],
    "SiLU": [-2.807287e-12, -0.1025928, -0.2689414, -0.1094559, 0, 0.3112297, 0.7310586, 2.310354, 6.993623, 40],
    "Sigmoid": [9.357623e-14, 0.02931223, 0.2689414, 0.4378235, 0.5, 0.6224593, 0.7310586, 0.9241418, 0.9990889, 1],
    "LeakyReLU": [-0.3, -0.035, -0.01, -0.0025, 0.0, 0.5, 1.0, 2.5, 7.0, 40.0],
    "ELU": [-1.0, -0.96980262, -0.63212056, -0.22119922, 0.0, 0.5, 1.0, 2.5, 7.0, 40.0],
    "CELU": [-1.0, -0.96980262, -0.63212056, -0.22119922, 0.0, 0.5, 1.0, 2.5, 7.0, 40.0],
    "SELU": [-1.758099, -1.705009, -1.111331, -0.3888902, 0, 0.5253505, 1.050701, 2.626752, 7.354907, 42.02804],
    "ReLU6": [0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 1.0, 2.5, 6.0, 6.0],
    "Hardtanh": [-1.0, -1.0, -1.0, -0.25, 0.0, 0.5, 1.0, 1.0, 1.0, 1.0],
    "Hardsigmoid": [0.0, 0.0, 0.33333333, 0.45833333, 0.5, 0.58333333, 0.66666667, 0.91666667, 1.0, 1.0],
    "Hardswish": [-0.0, -0.0, -0.33333333, -0.11458333, 0.0, 0.29166667, 0.66666667, 2.2916667, 7.0, 40.0],
    "Mish": [-2.807287e-12, -0.1040958, -0.3034015, -0.129927, 0, 0.3752452, 0.8650984, 2.471392, 6.999988, 40],
    "Softplus": [9.357623e-14, 0.02975042, 0.3132617, 0.5759394, 0.6931472, 0.974077, 1.313262, 2.57889, 7.000911, 40],
    "Softsign": [-0.96774194, -0.77777778, -0.5, -0.2, 0.0, 0.33333333, 0.5, 0.71428571, 0.875, 0.97560976],
    "LogSigmoid": [
        -30.0, -3.5297504, -1.3132617, -0.82593942, -0.69314718, -0.47407698, -0.31326169, -0.078889734,
        -0.00091146645, -4.2483543e-18,
    ],
    "Hardshrink": [-30.0, -3.5, -1.0, 0.0, 0.0, 0.0, 1.0, 2.5, 7.0, 40.0],
    "Softshrink": [-29.5, -3.0, -0.5, 0.0, 0.0, 0.0, 0.5, 2.0, 6.5, 39.5],
    "Tanhshrink": [-29, -2.501822, -0.2384058, -0.005081338, 0, 0.03788284, 0.2384058, 1.513386, 6.000002, 39],
}  # fmt: skip


def close(actual, expected, atol=2e-6):
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, np.asarray(expected), rtol=0, atol=atol)


# --- Modules -----------------------------------------------------------------------------------------------------


def test_every_activation_has_stored_values():
    assert embedding.ACTIVATIONS.keys() == VALUES.keys()


@pytest.mark.parametrize("name", VALUES)
def test_activation_has_the_values_of_torch(name):
    found = embedding.ACTIVATIONS[name](jnp.array(ARGUMENTS, jnp.float32))
    np.testing.assert_allclose(found, VALUES[name], rtol=2e-6, atol=2e-7)


def test_new_modules_have_the_shapes_and_scale_of_torch():
    dense = Dense(64, 32, use_residual=True, rngs=nnx.Rngs(0))
    for parameter, shape in ((dense.kernel, (64, 32)), (dense.bias, (32,)), (dense.residual_kernel, (64, 32))):
        assert parameter.shape == shape and 0.1 < np.abs(parameter[...]).max() <= 0.125
    assert Dense(8, 8, bias=False, use_residual=True, rngs=nnx.Rngs(0)).residual_kernel is None
    x = jnp.array([[3.0, 4.0]])
    close(Normalize()(x), [[0.6, 0.8]])
    close(LayerNorm(2)(x), [[-0.5, 0.5] / np.sqrt(0.25 + 1e-5)])
    close(Dropout(0.5)(x), x)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Dense(0, 3, rngs=None), ValueError, "Dense: in_features must be a positive Python integer, got 0"),
        (lambda: Dense(3, 2.0, rngs=None), ValueError, "Dense: out_features must be a positive Python integer"),
        (lambda: Dense(3, 3, bias=1, rngs=None), TypeError, "Dense: bias must be True or False, got int"),
        (lambda: Dense(3, 3, activation="tanh", rngs=None), ValueError, "activation must be one of Identity, Tanh"),
        (lambda: Dense(3, 3, rngs=0), TypeError, "Dense: rngs must be an nnx.Rngs or None, got int"),
        (lambda: LayerNorm(0), ValueError, "LayerNorm: dimension must be a positive Python integer, got 0"),
        (lambda: Dropout(1.5), ValueError, "Dropout: dropout must be a number from 0 to 1, got 1.5"),
        (lambda: Dropout(True), ValueError, "Dropout: dropout must be a number from 0 to 1, got True"),
        (lambda: model(pooling=("median",)), ValueError, r"pooling must name some of .*, got \('median',\)"),
        (lambda: model(pooling=()), ValueError, r"pooling must name some of .*, got \(\)"),
        (lambda: model(include_prompt=None), TypeError, "include_prompt must be True or False, got NoneType"),
        (lambda: model(modules=[nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0))]), TypeError,
         r"modules\[0\] must be one of Dense, LayerNorm, Dropout, Normalize, got LayerNorm"),
        (lambda: model(token_modules=[Dropout()]), TypeError,
         r"token_modules\[0\] must be one of Dense, Normalize, got Dropout"),
        (lambda: model(pooling=("cls", "max"), modules=[Normalize(), LayerNorm(WIDTH)]), ValueError,
         r"modules\[1\], a LayerNorm module, takes vectors of 16 components, but gets 32"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


# --- EmbeddingModel ----------------------------------------------------------------------------------------------


def model(**options):
    return EmbeddingModel(BertModel(tiny.config(), rngs=nnx.Rngs(0)), **options)


def modules(rate=0.0):
    rngs = nnx.Rngs(1)
    return [Dense(WIDTH, 8, rngs=rngs), LayerNorm(8), Dropout(rate), Dense(8, 8, use_residual=True, rngs=rngs)]


IDS = np.random.default_rng(0).integers(5, len(tiny.VOCAB), (3, 6)).astype(np.int32)
LENGTHS = np.array([6, 1, 4])
MASK = (np.arange(6) < LENGTHS[:, None]).astype(np.int32)
PACKED = {"cu_seqlens": np.append(0, np.cumsum(LENGTHS)).astype(np.int32), "max_seqlen": 6}
PACKED_IDS = np.append(IDS[MASK == 1], [0, 0]).astype(np.int32)


def test_one_mode_may_be_a_string():
    assert model(pooling="lasttoken").pooling == ("lasttoken",)


def test_packed_equals_padded_and_so_do_the_gradients():
    embedder = model(
        pooling=embedding.MODES, include_prompt=False, token_modules=[Dense(WIDTH, 3, rngs=nnx.Rngs(2))],
        modules=[Dense(18, 4, rngs=nnx.Rngs(3)), Normalize()],
    )  # fmt: skip
    assert embedder.embedding_dimension == 4
    weights = jnp.asarray(np.random.default_rng(1).standard_normal((3, 4)), jnp.float32)

    def loss(embedder, **inputs):
        found = embedder(**inputs, prompt_lengths=jnp.array([2, 0, 2]))
        return jnp.sum(found * weights), found

    padded_call = functools.partial(loss, input_ids=IDS, attention_mask=MASK)
    packed_call = functools.partial(loss, input_ids=PACKED_IDS, **PACKED)
    (_, padded), gradients = nnx.jit(nnx.value_and_grad(padded_call, has_aux=True))(embedder)
    (_, packed), of_packed = nnx.jit(nnx.value_and_grad(packed_call, has_aux=True))(embedder)
    assert padded.shape == (3, 4)
    close(packed, padded)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), gradients, of_packed)
    sizes = jax.tree.map(lambda x: float(jnp.abs(x).max()), nnx.to_pure_dict(gradients))
    assert min(jax.tree.leaves((sizes["token_modules"], sizes["modules"]))) > 1e-3
    assert sizes["encoder"]["layers"][0]["qkv_kernel"] > 1e-3


def test_mask_may_leave_out_any_tokens():
    """The pooling starts at the first token of the mask and ends at the last one, as in sentence-transformers."""
    embedder = model(pooling=("cls", "weightedmean", "lasttoken"), include_prompt=False)
    mask = np.array([[0, 1, 1, 0, 1, 0]])
    tokens = np.asarray(embedder.encoder(IDS[:1], mask).last_hidden_state, np.float64)[0]
    mean = (tokens[1] + 2 * tokens[2] + 4 * tokens[4]) / 7
    close(embedder(IDS[:1], mask)[0], np.concatenate([tokens[1], mean, tokens[4]]))
    mean = (2 * tokens[2] + 4 * tokens[4]) / 6
    close(embedder(IDS[:1], mask, prompt_lengths=1)[0], np.concatenate([tokens[2], mean, tokens[4]]))


def test_dropout_follows_the_key_and_the_mode():
    embedder = model(modules=modules(0.5))
    plain = embedder(IDS, MASK)
    assert np.array_equal(embedder(IDS, MASK, rngs=jax.random.key(0)), plain)
    embedder.train()
    # The encoder has dropout, too. Without it, the modules alone change the result.
    embedder.encoder.config = tiny.config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    found = [embedder(IDS, MASK, rngs=jax.random.key(seed)) for seed in (0, 0, 1)]
    assert np.array_equal(found[0], found[1]) and not np.array_equal(found[0], found[2])
    assert np.array_equal(embedder(IDS, MASK, deterministic=True), plain)
    packed = embedder(PACKED_IDS, **PACKED, rngs=jax.random.key(0))
    close(packed, found[0])
    with pytest.raises(ValueError, match=r"rate of modules\[2\] is 0.5, so rngs must be"):
        embedder(IDS, MASK)
    embedder.eval()
    assert np.array_equal(embedder(IDS, MASK), plain)


def test_two_dropout_modules_drop_other_elements():
    def kept(*rates):
        embedder = model(modules=[Dropout(rate) for rate in rates])
        embedder.encoder.config = tiny.config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        return np.asarray(embedder(IDS, MASK, deterministic=False, rngs=jax.random.key(0))) != 0

    one, two = kept(0.5), kept(0.5, 0.5)
    assert (one | ~two).all() and 0.25 < two.sum() / one.sum() < 0.75


def test_training_moves_pairs_together():
    embedder = model(modules=[Dense(WIDTH, 8, rngs=nnx.Rngs(1)), Normalize()])

    @nnx.jit
    def step(embedder):
        def loss(embedder):
            first, second = embedder(IDS[:, :3]), embedder(IDS[:, 3:])
            return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(first @ second.T / 0.1)))

        value, gradients = nnx.value_and_grad(loss)(embedder)
        nnx.update(embedder, jax.tree.map(lambda p, g: p - 0.01 * g, nnx.state(embedder, nnx.Param), gradients))
        return value

    losses = [float(step(embedder)) for _ in range(10)]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    ("prompt_lengths", "error", "message"),
    [
        ([1, 2], ValueError, r"prompt_lengths must be an integer or have the shape \[3\], got \[2\]"),
        (1.5, TypeError, "prompt_lengths must be integers"),
    ],
)
def test_prompt_lengths_are_checked(prompt_lengths, error, message):
    embedder = model(include_prompt=False)
    for ids, packing in (((IDS, MASK), {}), ((PACKED_IDS,), PACKED)):
        with pytest.raises(error, match=message):
            embedder(*ids, **packing, prompt_lengths=prompt_lengths)


# --- Folders -----------------------------------------------------------------------------------------------------


def write_module(folder, kind, config, tensors=None):
    """Adds a module to a folder, in the layout of sentence-transformers."""
    file = folder / "modules.json"
    entries = json.loads(file.read_text())
    path = f"{len(entries)}_{kind}"
    tiny.write_json(folder / path / "config.json", config)
    if tensors is not None:
        safetensors.numpy.save_file(tensors, folder / path / "model.safetensors")
    tiny.write_json(file, [*entries, {"type": tiny.TYPES + kind, "path": path}])
    return folder / path


def linear(size_in, size_out, *, bias=True, residual=False, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"linear.weight": (size_out, size_in)}
    shapes |= {"linear.bias": (size_out,)} if bias else {}
    shapes |= {"residual.weight": (size_out, size_in)} if residual else {}
    return {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def sizes(size_in, size_out, **more):
    return {"in_features": size_in, "out_features": size_out, **more}


@pytest.mark.parametrize("packed", [True, False])
def test_folder_with_every_module(tmp_path, packed):
    """Compared with NumPy in float64. The second Dense module has no bias, the last one a projected residual."""
    tiny.write_sentence_model(tmp_path)
    plain = SentenceEncoder.from_pretrained(tmp_path).encode(TEXTS).astype(np.float64)
    one, two, three = linear(WIDTH, 8), linear(8, 8, bias=False, seed=1), linear(8, 5, residual=True, seed=2)
    norm = {"norm.weight": np.linspace(0.5, 2, 8, dtype=np.float32), "norm.bias": np.full(8, 0.5, np.float32)}
    write_module(tmp_path, "Dense", sizes(WIDTH, 8, activation_function=TORCH + "Tanh"), one)
    write_module(tmp_path, "LayerNorm", {"dimension": 8}, norm)
    identity = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity", "use_residual": True}
    write_module(tmp_path, "Dense", sizes(8, 8, **identity), two)
    write_module(tmp_path, "Dropout", {"dropout": 0.5})
    write_module(tmp_path, "Dense", sizes(8, 5, use_residual=True, new_option=3), three)  # Tanh
    write_module(tmp_path, "Normalize", {"module_input_name": "sentence_embedding"})

    x = np.tanh(plain @ one["linear.weight"].T + one["linear.bias"])
    x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    x = x * norm["norm.weight"] + norm["norm.bias"]
    x = x + x @ two["linear.weight"].T
    x = np.tanh(x @ three["linear.weight"].T + three["linear.bias"]) + x @ three["residual.weight"].T
    encoder = SentenceEncoder.from_pretrained(tmp_path, packed=packed)
    assert encoder.embedding_dimension == encoder.get_embedding_dimension() == 5
    close(encoder.encode(TEXTS), x / np.linalg.norm(x, axis=1, keepdims=True))
    encoder.embedder.train()  # encode never drops
    close(encoder.encode(TEXTS), x / np.linalg.norm(x, axis=1, keepdims=True))


@pytest.mark.parametrize("packed", [True, False])
def test_modules_before_the_pooling_see_tokens(tmp_path, packed):
    tiny.write_sentence_model(tmp_path, {"pooling_mode": ["mean", "lasttoken"], "embedding_dimension": 6})
    (_, pooling), tokens = (
        json.loads((tmp_path / "modules.json").read_text()),
        {"module_input_name": "token_embeddings"},
    )
    dense = linear(WIDTH, 6)
    write_module(tmp_path, "Normalize", {})  # without effect: there is no sentence embedding yet
    write_module(tmp_path, "Dense", sizes(WIDTH, 6, **tokens), dense)
    write_module(tmp_path, "Normalize", tokens | {"module_output_name": "token_embeddings"})
    entries = json.loads((tmp_path / "modules.json").read_text())
    tiny.write_json(tmp_path / "modules.json", [entries[0], *entries[2:], pooling])
    encoder = SentenceEncoder.from_pretrained(tmp_path, packed=packed)
    found = encoder.encode(TEXTS, output_value="token_embeddings")
    for text, vectors, pooled in zip(TEXTS, found, encoder.encode(TEXTS), strict=True):
        hidden = encoder.model(np.array(encoder.tokenize(text))).last_hidden_state[0]
        expected = np.tanh(np.asarray(hidden, np.float64) @ dense["linear.weight"].T + dense["linear.bias"])
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        close(vectors, expected)
        close(pooled, np.concatenate([expected.mean(0), expected[-1]]))


def test_modules_compute_in_float32(tmp_path):
    halves = {name: x.astype(np.float16) for name, x in linear(WIDTH, 4).items()}
    write_module(tiny.write_sentence_model(tmp_path), "Dense", sizes(WIDTH, 4), halves)
    (dense,) = SentenceEncoder.from_pretrained(tmp_path).embedder.modules
    assert {x.dtype for x in jax.tree.leaves(nnx.state(dense))} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("kind", "config", "tensors", "message"),
    [
        ("Router", {}, None, r"modules.json: module 'sentence_transformers.models.Router' is not supported"),
        ("StaticEmbedding", {}, None, "'sentence_transformers.models.StaticEmbedding' is not supported"),
        ("WeightedLayerPooling", {}, None, "'sentence_transformers.models.WeightedLayerPooling' is not supported"),
        ("Dense", sizes(WIDTH, 4), None, "2_Dense has no model.safetensors. To convert the whole checkpoint, load it"),
        ("Dense", sizes(WIDTH, 4), {}, r"model.safetensors: 'linear.bias' is missing\n.*'linear.weight' is missing"),
        ("Dense", sizes(WIDTH, 4, bias=False), linear(WIDTH, 4), "'linear.bias': is unexpected"),
        ("Dense", sizes(WIDTH, 4), linear(WIDTH, 5), r"'linear.weight': has shape \[5, 16\], expected \[4, 16\]"),
        ("Dense", sizes(WIDTH, 4, use_residual=True), linear(WIDTH, 4), "'residual.weight' is missing"),
        ("Dense", sizes(7, 4), linear(7, 4), r"modules\[0\], a Dense module, takes vectors of 7 compo"),
        ("Dense", sizes(WIDTH, 4), {n: x * np.nan for n, x in linear(WIDTH, 4).items()}, "values that are not finite"),
        ("Dense", sizes(WIDTH, 4), {n: x.astype(int) for n, x in linear(WIDTH, 4).items()}, "has dtype I64, expected"),
        ("Dense", sizes(WIDTH, 4, activation_function="own.Tanh"), linear(WIDTH, 4), "'own.Tanh' is not supported"),
        ("Dense", sizes(WIDTH, 4, activation_function=TORCH + "GLU"), linear(WIDTH, 4), "GLU' is not supported; supp"),
        ("Dense", sizes(WIDTH, 4, activation_function=None), linear(WIDTH, 4), "'None' is not supported"),
        ("Dense", sizes(10**12, 4), linear(WIDTH, 4), r"in_features must be below 2\^31"),
        ("Dense", sizes(WIDTH, None), linear(WIDTH, 4), "config.json: Dense: out_features must be a positive Python"),
        ("Dense", sizes(WIDTH, 4, bias=1), linear(WIDTH, 4), "config.json: Dense: bias must be True or False, got int"),
        ("Dense", sizes(WIDTH, 4, module_input_name="token_embeddings"), linear(WIDTH, 4),
         "of module Dense, 'token_embeddings' and 'token_embeddings', are not supported after the Pooling"),
        ("Dense", sizes(WIDTH, 4, module_output_name="scores"), linear(WIDTH, 4),
         "'sentence_embedding' and 'scores', are not"),
        ("LayerNorm", {"dimension": 9}, {"norm.weight": np.ones(9), "norm.bias": np.ones(9)}, "a LayerNorm module"),
        ("LayerNorm", {"dimension": 2**31 - 1}, {"norm.weight": np.ones(9), "norm.bias": np.ones(9)}, "has shape .9.,"),
        ("LayerNorm", {}, None, "config.json: LayerNorm: dimension must be a positive Python integer, got None"),
        ("LayerNorm", {"dimension": WIDTH}, {"norm.weight": np.ones(WIDTH)}, "'norm.bias' is missing"),
        ("LayerNorm", {"dimension": WIDTH, "eps": 1}, None, "unknown field 'eps'; known are dimension"),
        ("Dropout", {"dropout": "x"}, None, "config.json: Dropout: dropout must be a number from 0 to 1, got 'x'"),
        ("Dropout", {"rate": 0.1}, None, "unknown field 'rate'; known are dropout"),
        ("Normalize", {"module_input_name": "token_embeddings"}, None, "not supported after the Pooling module"),
    ],
)  # fmt: skip
def test_bad_module_is_refused_by_name(tmp_path, kind, config, tensors, message):
    write_module(tiny.write_sentence_model(tmp_path), kind, config, tensors)
    with pytest.raises(CheckpointError, match=message):
        SentenceEncoder.from_pretrained(tmp_path)


def test_pickles_of_modules_are_never_opened(tmp_path):
    path = write_module(tiny.write_sentence_model(tmp_path), "Dense", sizes(WIDTH, 4))
    (path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(
        CheckpointError, match=r"only pytorch_model.bin, a pickle, .* SentenceTransformer\(folder\).save"
    ):
        SentenceEncoder.from_pretrained(tmp_path)


def test_sentence_module_before_the_pooling_is_refused(tmp_path):
    write_module(tiny.write_sentence_model(tmp_path), "Dense", sizes(WIDTH, 4), linear(WIDTH, 4))
    entries = json.loads((tmp_path / "modules.json").read_text())
    tiny.write_json(tmp_path / "modules.json", [entries[0], entries[2], entries[1]])
    with pytest.raises(CheckpointError, match="'sentence_embedding', are not supported before the Pooling module"):
        SentenceEncoder.from_pretrained(tmp_path)


def test_bad_parameter_of_a_module_is_named(tmp_path):
    write_module(tiny.write_sentence_model(tmp_path), "Dense", sizes(WIDTH, 4), linear(WIDTH, 4))
    encoder = SentenceEncoder.from_pretrained(tmp_path)
    encoder.embedder.modules[0].bias.set_value(jnp.full(4, jnp.nan))
    with pytest.raises(ValueError, match="parameter modules.0.bias has NaN or infinite values"):
        encoder.encode(TEXTS)


def test_prompt_beside_left_padding_keeps_its_first_token():
    hidden = jnp.arange(8.0).reshape(1, 4, 2)
    mask, lengths = jnp.array([[False, True, True, True]]), jnp.array([3])
    np.testing.assert_array_equal(pool(hidden, mask, ("cls",), lengths), hidden[:, 1])
    np.testing.assert_array_equal(pool(hidden, mask, ("cls",), lengths - 1), hidden[:, 3])
