"""BertForQuestionAnswering beside transformers: results, losses and files.

`python tests/test_question_answering.py` writes the file of transformers' weights and results, with transformers 5.
"""

import io
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data" / "question_answering.npz"
SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 24, "max_position_embeddings": 40}  # fmt: skip
ANSWERS = [[3, 5], [0, 19]]
CASES = {
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    "distilbert": ("DistilBert", {"hidden_dim": 24}),
    "electra": ("Electra", {"embedding_size": 8}),
    "modernbert": ("ModernBert", {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
                                  "sep_token_id": 2, "local_attention": 8}),
}  # fmt: skip


def batch():
    return np.random.default_rng(0).integers(5, 40, (2, 20))


def main():
    import torch
    import transformers

    stored = {}
    for case, (start, options) in CASES.items():
        torch.manual_seed(0)
        config = getattr(transformers, start + "Config")(**SIZES | options, initializer_range=0.3)
        model = getattr(transformers, start + "ForQuestionAnswering")(config).eval()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            for file in ("config.json", "model.safetensors"):
                stored[f"{case} {file}"] = np.frombuffer((Path(folder) / file).read_bytes(), np.uint8)
        with torch.no_grad():
            starts, ends = torch.tensor(ANSWERS).T
            found = model.double()(torch.tensor(batch()), start_positions=starts, end_positions=ends)
        stored[f"{case} logits"] = np.stack([found.start_logits, found.end_logits], -1)
        stored[f"{case} loss"] = np.asarray(found.loss)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **stored)
    DATA.write_bytes(buffer.getvalue())


if __name__ == "__main__":
    sys.exit(main())

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import pytest  # noqa: E402
import safetensors.numpy  # noqa: E402
from flax import nnx  # noqa: E402

from jaxft import BertConfig, BertForQuestionAnswering, BertModel  # noqa: E402
from jaxft.checkpoint.files import CheckpointError  # noqa: E402

STORED = np.load(DATA)


@pytest.fixture(params=CASES)
def folder(request, tmp_path):
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes(STORED[f"{request.param} {file}"].tobytes())
    return tmp_path, request.param


def test_transformers_results(folder):
    folder, case = folder
    model = BertForQuestionAnswering.from_pretrained(folder)
    found, expected = jax.jit(lambda: model(batch()))(), STORED[f"{case} logits"]
    np.testing.assert_allclose(np.stack(found, -1), expected, rtol=0, atol=4e-6 * np.abs(expected).max())
    np.testing.assert_allclose(model.loss(batch(), np.array(ANSWERS)).mean, STORED[f"{case} loss"], rtol=1e-5)


def test_saved_files(folder):
    folder, case = folder
    BertForQuestionAnswering.from_pretrained(folder).save_pretrained(folder / "saved")
    before, after = (safetensors.numpy.load_file(where / "model.safetensors") for where in (folder, folder / "saved"))
    assert {*before} == {*after} and all(np.array_equal(before[name], after[name]) for name in before)
    settings = json.loads((folder / "saved" / "config.json").read_text())
    assert settings["architectures"] == [CASES[case][0] + "ForQuestionAnswering"]


def small(**options):
    config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
    return BertForQuestionAnswering(config, **options, rngs=nnx.Rngs(0))


def test_packed_and_padded_sequences_agree():
    model = small()
    mask = np.arange(20) < np.array([20, 11])[:, None]
    packed, labels = {"cu_seqlens": jnp.array([0, 20, 31]), "max_seqlen": 20}, np.array([[3, 5], [10, 11]])
    for one, other in zip(model(batch(), mask), model(batch()[mask], **packed), strict=True):
        np.testing.assert_allclose(np.asarray(one)[mask], other, atol=1e-5)
    one, other = model.loss(batch(), labels, mask), model.loss(batch()[mask], labels, **packed)
    assert one.labelled == other.labelled == 3  # position 11 of the second text is padding
    np.testing.assert_allclose(one.total, other.total, rtol=1e-5)
    one, other = (model.loss(batch(), labels, m).total for m in (mask, mask.astype(int)))
    assert one == other


@pytest.mark.parametrize("packed", [False, True])
def test_text_without_tokens_makes_no_nan(packed):
    graph, params = nnx.split(
        BertForQuestionAnswering(BertConfig(**SIZES | {"num_hidden_layers": 1}), rngs=nnx.Rngs(0))
    )
    ids, given = np.arange(6), {"cu_seqlens": np.array([0, 3, 3, 6]), "max_seqlen": 4}
    if not packed:
        ids, given = np.arange(12).reshape(3, 4), {"attention_mask": np.array([[1, 1, 1, 0], [0] * 4, [1, 1, 1, 0]])}

    def loss(params, labels):
        return nnx.merge(graph, params).loss(ids, labels, **given).mean

    with jax.debug_nans(True):
        jax.value_and_grad(loss)(params, np.array([[0, 1], [0, 0], [2, 1]]))


def test_loss_can_be_trained():
    model = small()
    loss, gradient = nnx.value_and_grad(lambda m: m.loss(batch(), np.array(ANSWERS)).mean)(model)
    assert np.isfinite(loss) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    model.train()
    assert model.loss(batch(), np.array(ANSWERS), rngs=jax.random.key(0)).mean != loss


def test_wrong_arguments(tmp_path):
    with pytest.raises(ValueError, match="num_labels must be 2, of start and end, got 3"):
        small(num_labels=3)
    with pytest.raises(ValueError, match=r"labels must have shape \(2, 2\), got \(2,\)"):
        small().loss(batch(), np.array([1, 2]))
    BertModel(small().config, rngs=nnx.Rngs(0)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="'qa_outputs.weight' is missing"):
        BertForQuestionAnswering.from_pretrained(tmp_path)
    assert BertForQuestionAnswering.from_pretrained(tmp_path, rngs=nnx.Rngs(1)).num_labels == 2
