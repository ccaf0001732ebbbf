"""The README's Python examples run as they stand, and its table of versions is that of pyproject.toml."""

import re
import tomllib
from pathlib import Path

import jax
import pytest

import tiny

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_there_are_examples():
    assert len(SNIPPETS) >= 4


@pytest.fixture
def reranker(tmp_path):
    """In the place of the one that the README names: a tiny one, with random parameters."""
    return tiny.write_classifier(tmp_path)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
@pytest.mark.filterwarnings("default")  # the example that sets a filter must not change those of other tests
def test_example_runs(number, minilm, reranker, capsys):
    code = SNIPPETS[number].replace('"sentence-transformers/all-MiniLM-L6-v2"', repr(str(minilm)))
    code = code.replace('"cross-encoder/ms-marco-MiniLM-L6-v2"', repr(str(reranker)))
    with jax.numpy_dtype_promotion("standard"):  # JAX's default, without which optax does not run
        exec(compile(code, f"README.md, Python example {number}", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert bool(printed) == ("print(" in code)
    for comment in re.findall(r"print\(.*\)  # (.+)", code):
        assert comment in printed


def test_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = dict(re.match(r"([\w.-]+)(.*)", line).groups() for line in project["dependencies"])
    assert requirements["jax"] == ">=0.10.2,<0.13" and "| JAX | 0.10.2 to 0.12, with flax 0.12.8 or later |" in README
    assert requirements["flax"] == ">=0.12.8"
    assert project["requires-python"] == ">=3.11,<3.13" and "| Python | 3.11 (JAX 0.10 only) and 3.12 |" in README
