"""all-MiniLM-L6-v2 against reference outputs that were computed in float64."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cases import slow
from jaxft.checkpoint import files as checkpoint_files
from jaxft.models.bert import BertModel

GOLDEN = Path(__file__).parent / "data" / "minilm_golden.npz"

# Largest absolute error of the normalised embeddings, and of each hidden state relative to its largest value.
FLOAT32, HIDDEN_FLOAT32 = 2e-6, 1e-5
FLOAT16, BFLOAT16 = 5e-4, 4e-3


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as file:
        return {name: file[name] for name in file.files}


def errors(model, golden):
    """Returns the errors of embeddings and pooler output, and the largest relative error of the hidden states."""
    graph, params = nnx.split(model)
    mask = golden["attention_mask"]

    @jax.jit
    def forward(params, ids, mask):
        return nnx.merge(graph, params)(ids, mask, output_hidden_states=True)

    with jax.default_matmul_precision("highest"):
        out = forward(params, golden["input_ids"], mask)
    last = np.asarray(out.last_hidden_state, np.float64)
    embeddings = (last * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    hidden = []
    for i, state in enumerate(out.hidden_states):
        expected = golden[f"hidden_{i}"]  # the file has the first tokens of the first sentences
        rows, tokens = expected.shape[:2]
        kept = mask[:rows, :tokens] == 1
        difference = np.asarray(state, np.float64)[:rows, :tokens] - expected
        hidden.append(np.abs(difference[kept]).max() / np.abs(expected[kept]).max())
    pooled = np.asarray(out.pooler_output, np.float64) - golden["pooler_output"]
    return np.abs(embeddings - golden["embeddings"]).max(), np.abs(pooled).max(), max(hidden)


def test_float32(minilm, golden):
    embeddings, pooled, hidden = errors(BertModel.from_pretrained(minilm), golden)
    assert embeddings <= FLOAT32
    assert pooled <= FLOAT32
    assert hidden <= HIDDEN_FLOAT32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "allowed", "param_dtype"),
    [(jnp.bfloat16, BFLOAT16, jnp.float32), (jnp.float16, FLOAT16, None), (jnp.float16, FLOAT16, jnp.float32),
     (jnp.bfloat16, BFLOAT16, None)],
)  # fmt: skip
def test_16_bit_dtypes(minilm, golden, dtype, allowed, param_dtype):
    embeddings, pooled, _ = errors(BertModel.from_pretrained(minilm, dtype=dtype, param_dtype=param_dtype), golden)
    assert embeddings <= allowed
    assert pooled <= allowed


@pytest.mark.parametrize("mistake", [{"layer_norm_eps": 1e-6}, *slow({"hidden_act": "gelu_new"})], ids=str)
def test_classic_mistakes_are_noticed(minilm, golden, mistake, monkeypatch):
    """Both mistakes pass a test that only asks for a cosine near 1."""
    settings = checkpoint_files.read_json_object(minilm / "config.json")
    monkeypatch.setattr(checkpoint_files, "read_json_object", lambda file: settings | mistake)
    embeddings, _, hidden = errors(BertModel.from_pretrained(minilm), golden)
    assert embeddings > 4 * FLOAT32
    assert hidden > 4 * HIDDEN_FLOAT32
