"""Embeddings and scores of tiny models equal those that sentence-transformers 6.2 computed; peer_models.py has both."""

import numpy as np
import pytest

import cases
import jaxft
import peer_models

MODELS, NAMES = peer_models.ALL, peer_models.STORED_ALL
CLASSES = {
    "SentenceTransformer": jaxft.SentenceEncoder, "CrossEncoder": jaxft.CrossEncoder,
    "SparseEncoder": jaxft.SparseEncoder, "MultiVectorEncoder": jaxft.MultiVectorEncoder,
}  # fmt: skip
PACKED = (
    "all poolings without the prompt",
    "one label",
    "splade",
    "colbert of pylate",
)  # the others are slow: packed batches differ in the pooling
CASES = [
    *(pytest.param(name, False, id=name) for name in NAMES),
    *(pytest.param(name, True, id=f"{name}, packed") for name in PACKED),
    *cases.slow(*(pytest.param(name, True, id=f"{name}, packed") for name in NAMES if name not in PACKED)),
]


@pytest.fixture(scope="module")
def stored():
    with np.load(peer_models.DATA) as file:
        return dict(file)


def test_every_stored_result_is_compared(stored):
    assert stored.keys() == {f"{name}: {call}" for name in NAMES for call in MODELS[name]["calls"]}


@pytest.mark.parametrize(("name", "packed"), CASES)
def test_results_equal_those_of_sentence_transformers(name, packed, stored, tmp_path):
    family = CLASSES[peer_models.class_of(MODELS[name])]
    encoder = family.from_pretrained(peer_models.write(tmp_path / "model", name), packed=packed)
    for call, got in peer_models.results(encoder, MODELS[name]):
        peer_models.assert_close(got, stored[f"{name}: {call}"], stored.get(f"{name}: encode"), call)
