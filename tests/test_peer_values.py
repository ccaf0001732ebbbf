"""Embeddings and scores of tiny models equal those that sentence-transformers 6.2 computed; peer_models.py has both."""

import numpy as np
import pytest

import jaxft
import peer_models

MODELS = peer_models.MODELS | peer_models.RERANKERS
CASES = [
    pytest.param(name, packed, id=f"{name}{', packed' * packed}")
    for name in peer_models.STORED + peer_models.STORED_RERANKERS
    for packed in (False, True)
]


@pytest.fixture(scope="module")
def stored():
    with np.load(peer_models.DATA) as file:
        return dict(file)


def test_every_stored_result_is_compared(stored):
    names = peer_models.STORED + peer_models.STORED_RERANKERS
    assert stored.keys() == {f"{name}: {call}" for name in names for call in MODELS[name]["calls"]}


@pytest.mark.parametrize(("name", "packed"), CASES)
def test_results_equal_those_of_sentence_transformers(name, packed, stored, tmp_path):
    family = {"SentenceTransformer": jaxft.SentenceEncoder, "CrossEncoder": jaxft.CrossEncoder}[MODELS[name]["family"]]
    encoder = family.from_pretrained(peer_models.write(tmp_path / "model", name), packed=packed)
    for call, got in peer_models.results(encoder, MODELS[name]):
        peer_models.assert_close(got, stored[f"{name}: {call}"], stored.get(f"{name}: encode"), call)
