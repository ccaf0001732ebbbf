"""sentence-transformers' evaluators on a jaxft encoder, beside the same evaluators on sentence-transformers' own model.

    pip install "sentence-transformers>=6.2,<6.3" datasets
    python examples/evaluate.py --model FOLDER [--texts 400]

`Evaluated` is the adapter. The data is on every machine: the docstrings of Python's standard library. A query is the
first paragraph of a docstring, its document is the start of the rest. Exit code 0: both libraries have the same scores
to four digits.
"""

import argparse
from typing import Any

import jax
import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import evaluation

from docstrings import docstrings
from jaxft import SentenceEncoder

SAME = 5e-5  # two scores that differ by less agree to four digits


class Evaluated:
    """A jaxft encoder as the evaluators call it: with PyTorch tensors, and a model card that takes the scores.

    Args:
      encoder: a `SentenceEncoder`, or a `CrossEncoder` for the evaluators of cross-encoders.
    """

    def __init__(self, encoder: Any) -> None:
        self.encoder = encoder
        self.model_card_data = self
        self.metrics: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        """Returns what only passes through, for example `similarity_fn_name` and `predict`."""
        return getattr(self.encoder, name)

    def set_evaluation_metrics(self, evaluator: Any, metrics: dict[str, float], *_: Any) -> None:
        """Keeps the scores. The evaluators call this method of a model card."""
        self.metrics |= metrics

    def eval(self) -> "Evaluated":
        """Changes nothing: an encoder always computes without dropout."""
        return self

    def encode(self, inputs: Any, **options: Any) -> Any:
        """Computes embeddings by `SentenceEncoder.encode`.

        With `convert_to_tensor=True` they are a tensor, with `convert_to_numpy=False` a list of tensors.
        """
        return self._encode(self.encoder.encode, inputs, **options)

    def encode_query(self, inputs: Any, **options: Any) -> Any:
        """Computes embeddings by `SentenceEncoder.encode_query`."""
        return self._encode(self.encoder.encode_query, inputs, **options)

    def encode_document(self, inputs: Any, **options: Any) -> Any:
        """Computes embeddings by `SentenceEncoder.encode_document`."""
        return self._encode(self.encoder.encode_document, inputs, **options)

    def similarity(self, a: Any, b: Any) -> torch.Tensor:
        """Computes the similarity of each row of `a` with each row of `b`."""
        return torch.tensor(np.asarray(self.encoder.similarity(np.asarray(a), np.asarray(b))))

    def similarity_pairwise(self, a: Any, b: Any) -> torch.Tensor:
        """Computes the similarity of each row of `a` with the same row of `b`."""
        return torch.tensor(np.asarray(self.encoder.similarity_pairwise(np.asarray(a), np.asarray(b))))

    def _encode(
        self, encode: Any, inputs: Any, *, convert_to_tensor: bool = False, convert_to_numpy: bool = True,
        precision: str | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        found = encode(inputs, precision=precision or "float32", **options)
        if convert_to_tensor:
            return torch.tensor(found)
        return found if convert_to_numpy else [*torch.tensor(found)]


def evaluators(count: int) -> dict[str, Any]:
    """Returns evaluators on `count` docstrings that are spread over the standard library."""
    texts = {
        text.paragraphs[0]: (text.owner, text.paragraphs[0], " ".join(text.paragraphs[1:])[:200])
        for text in docstrings()
        if text.name is not None
    }
    found = [(module, first, rest) for module, first, rest in texts.values() if len(first) > 20 and len(rest) > 40]
    found = found[:: max(1, len(found) // count)][:count]
    modules, queries, documents = (list(column) for column in zip(*found, strict=True))
    ids = [str(i) for i in range(len(found))]
    others = documents[1:] + documents[:1]
    near = [0.5 * (a == b) for a, b in zip(modules, modules[1:] + modules[:1], strict=True)]
    samples = [
        {"query": query, "positive": [documents[i]], "negative": [documents[i - k] for k in range(1, 6)]}
        for i, query in enumerate(queries)
    ]
    every = ["cosine", "dot", "euclidean", "manhattan"]
    return {
        "information retrieval": evaluation.InformationRetrievalEvaluator(
            dict(zip(ids, queries, strict=True)), dict(zip(ids, documents, strict=True)), {i: {i} for i in ids},
            write_csv=False,
        ),
        "similarity": evaluation.EmbeddingSimilarityEvaluator(
            queries * 2, documents + others, [1.0] * len(ids) + near, similarity_fn_names=every, write_csv=False
        ),
        "similarity, int8": evaluation.EmbeddingSimilarityEvaluator(
            queries * 2, documents + others, [1.0] * len(ids) + near, precision="int8", write_csv=False
        ),
        "triplets": evaluation.TripletEvaluator(
            queries, documents, others, similarity_fn_names=every, write_csv=False
        ),
        "pairs": evaluation.BinaryClassificationEvaluator(
            queries * 2, documents + others, [1] * len(ids) + [0] * len(ids), write_csv=False
        ),
        "reranking": evaluation.RerankingEvaluator(samples, write_csv=False),
    }  # fmt: skip


def main() -> int:
    """Evaluates both libraries and prints their scores side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="FOLDER", required=True, help="a folder in sentence-transformers' layout")
    parser.add_argument("--texts", type=int, default=400, help="number of docstrings (%(default)s)")
    args = parser.parse_args()
    if args.texts < 2:
        parser.error(f"argument --texts: expected at least 2, got {args.texts}")
    # TF32, the default for float32 matmuls on NVIDIA GPUs, has three digits.
    with jax.default_matmul_precision("highest"):
        ours = Evaluated(SentenceEncoder.from_pretrained(args.model))
        mine = {name: evaluator(ours) for name, evaluator in evaluators(args.texts).items()}
    theirs = SentenceTransformer(args.model)
    different = 0
    print(f"{'':52} {'jaxft':>9}  sentence-transformers")
    for name, evaluator in evaluators(args.texts).items():
        for metric, expected in evaluator(theirs).items():
            got = mine[name][metric]
            different += (wrong := not abs(got - expected) < SAME)
            print(f"{f'{name}: {metric}':52} {got:9.4f} {expected:9.4f}{'  DIFFERENT' * wrong}")
    print(f"{different} scores differ" if different else "All scores agree to four digits.")
    return int(different > 0)


if __name__ == "__main__":
    raise SystemExit(main())
