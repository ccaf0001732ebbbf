"""The examples of distributed engines compute what `encode` computes, on one machine."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
from jaxft.text.sentence_encoder import SentenceEncoder

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ["a bird sings in the old tree", "rain", "the old tree falls on the river ."] * 20


@pytest.mark.parametrize(("script", "package"), [("ray_data", "ray"), ("datasets_map", "datasets")])
def test_example_computes_what_encode_computes(script, package, tmp_path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    (tmp_path / "model").mkdir()
    model = str(tiny.write_sentence_model(tmp_path / "model"))
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "data.parquet")
    out = tmp_path / ("out" if script == "ray_data" else "out.parquet")
    done = subprocess.run(
        [sys.executable, ROOT / f"examples/distributed/{script}.py", "--model", model, "--data",
         str(tmp_path / "data.parquet"), "--out", str(out), "--rows", "25"],
        env=os.environ | {"PYTHONWARNINGS": "", "HF_HOME": str(tmp_path / "cache"),
                          "RAY_USAGE_STATS_ENABLED": "0", "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = pq.read_table(out).to_pylist()
    assert sorted(row["text"] for row in rows) == sorted(TEXTS)
    expected = dict(zip(TEXTS, SentenceEncoder.from_pretrained(model).encode(TEXTS), strict=True))
    for row in rows:
        np.testing.assert_allclose(row["embedding"], expected[row["text"]], atol=1e-5)
