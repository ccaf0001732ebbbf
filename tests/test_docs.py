"""The documents: their Python examples run as they stand, and what they point at exists."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest
import safetensors.numpy

import peer_models
import tiny
from cases import INTERPRET
from jaxft import cli

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")] + DOCS
FENCE = re.compile(r"^```(\S*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
EXECUTED = [page for page in PAGES if page.parent in (ROOT, ROOT / "docs") and "```python\n" in page.read_text()]
OUTPUTS = ("-o", "--output", "--chart")
FOLDERS = "benchmarks|docs|examples|jaxft|tests"


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page, language):
    return [code for found, code in FENCE.findall(page.read_text()) if found == language]


def prose(page):
    return FENCE.sub("", page.read_text())


def anchors(page):
    """The anchors that GitHub and mkdocs give to the headings of a page."""
    titles = re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def test_examples_are_found():
    assert len(blocks(ROOT / "README.md", "python")) >= 4
    assert {"README.md", "docs/usage.md", "docs/training.md"} <= {*map(name_of, EXECUTED)}


@pytest.fixture
def quick_compiler():
    """Turns XLA's optimisations off on a CPU, where they are half of the compile time."""
    jax.config.update("jax_disable_most_optimizations", INTERPRET)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def shallow(minilm, tmp_path_factory):
    """The checkpoint with one of its six layers, which compiles in a quarter of the time."""
    folder = tmp_path_factory.mktemp("shallow") / "model"
    shutil.copytree(minilm, folder, ignore=shutil.ignore_patterns("model.safetensors"))
    tensors = safetensors.numpy.load_file(minilm / "model.safetensors")
    kept = {name: x for name, x in tensors.items() if not re.search(r"\.layer\.[1-9]", name)}
    safetensors.numpy.save_file(kept, folder / "model.safetensors")
    config = json.loads((minilm / "config.json").read_text())
    tiny.write_json(folder / "config.json", config | {"num_hidden_layers": 1})
    return folder


@pytest.fixture
def reranker(tmp_path):
    """A tiny reranker with random parameters, in the place of the one that the documents name."""
    return tiny.write_classifier(tmp_path)


@pytest.fixture
def late(tmp_path):
    """Tiny SPLADE and ColBERT models, in the places of the ones that the documents name."""
    peer_models.write(tmp_path / "splade", "splade")
    peer_models.write_stanford(tmp_path / "colbert", None)
    return tmp_path


@pytest.mark.parametrize("page", EXECUTED, ids=name_of)
@pytest.mark.filterwarnings("default")  # An example that sets a filter must not change the filters of other tests.
def test_examples_run(page, quick_compiler, shallow, reranker, late, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where examples write files
    namespace = {"__name__": "__main__"}
    for number, code in enumerate(blocks(page, "python")):
        code = code.replace('"sentence-transformers/all-MiniLM-L6-v2"', repr(str(shallow)))
        code = code.replace('"cross-encoder/ms-marco-MiniLM-L6-v2"', repr(str(reranker)))
        code = code.replace("num_hidden_layers=2", "num_hidden_layers=1")  # compiles in half of the time
        code = code.replace('"naver/splade-cocondenser-ensembledistil"', repr(str(late / "splade")))
        code = code.replace('"colbert-ir/colbertv2.0"', repr(str(late / "colbert")))
        with jax.numpy_dtype_promotion("standard"):  # JAX's default, without which optax does not run
            exec(compile(code, f"{name_of(page)}, Python example {number}", "exec"), namespace)
        printed = capsys.readouterr().out
        assert bool(printed) == ("print(" in code)
        for comment in re.findall(r"print\(.*\)  # (.+)", code):
            assert comment in printed


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page):
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
        elif page in DOCS and ROOT / "docs" not in target.parents:
            wrong.append(f"{link} (mkdocs has the files in docs/ only)")
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_files_exist(page):
    code = re.findall(r"`([^`\n]+)`", prose(page))
    paths = [path for text in code for path in re.findall(rf"(?:^|(?<= ))(?:{FOLDERS})/[\w./-]*(?=$| )", text)]
    assert not [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_functions_exist(page):
    """`path/of/file.py` (`name`, `name`), and `name` in `path/of/file.py`: the file has these names."""
    wrong, text = [], prose(page)
    pointers = re.findall(r"`([\w./]+\.py)`\s+\(((?:`\w+`,?\s*)+)\)", text)
    pointers += [(path, name) for name, path in re.findall(r"`(\w+)`\s+in\s+`([\w./]+\.py)`", text)]
    for path, names in pointers:
        text = (ROOT / path).read_text()
        wrong += [f"{path}: {name}" for name in re.findall(r"\w+", names) if not re.search(rf"\b{name}\b", text)]
    assert not wrong


def test_architecture_page_names_every_module():
    """Files of ops and kernels have the names of ops, which the page does not list."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    files = [file for folder in (".", "checkpoint", "fusion", "models", "text", "tuning")
             for file in (ROOT / "jaxft" / folder).glob("*.py") if not file.name.startswith("_")]  # fmt: skip
    assert [file.name for file in files if not re.search(rf"[`/]{file.name}`", text)] == []


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="cuDNN is in the plans where there is one")
def test_kernels_page_is_current():
    script = [sys.executable, ROOT / "docs" / "generate_kernels.py", "--check"]
    subprocess.run(script, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})


def test_code_refers_to_sections_that_exist():
    """docs/page.md, "Title": in comments and docstrings of the library."""
    wrong, titles = [], r'"[^"]+"(?:(?:,| and|, and) "[^"]+")*'
    for file in (ROOT / "jaxft").rglob("*.py"):
        text = re.sub(r"\s*\n\s*#?\s*", " ", file.read_text())
        for page, found in re.findall(rf"docs/([\w/-]+\.md),? ({titles})", text):
            headings = re.findall(r"^#+ +(.+?) *$", prose(ROOT / "docs" / page), re.MULTILINE)
            wrong += [f"{file.name}: {title}" for title in re.findall(r'"([^"]+)"', found) if title not in headings]
    assert not wrong


def commands(page):
    """The commands of shell examples and of inline code."""
    lines = [line for code in blocks(page, "sh") for line in code.splitlines()]
    for line in lines + re.findall(r"`((?:make|python|jaxft) [^`\n]+)`", prose(page)):
        if words := shlex.split(line, comments=True):
            yield line, words


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_are_right(page, capsys):
    targets = re.findall(r"^([\w -]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {target for line in targets for target in line.split()}
    wrong = []
    for line, words in commands(page):
        match words:
            case ["make", *rest]:
                fits = all(word in targets or "=" in word for word in rest)
            case ["python", script, *_]:
                fits = (ROOT / script).is_file()
            case ["jaxft", *rest] if "--model" in rest or rest == ["info"]:
                try:
                    cli._parser().parse_args(rest)
                    fits = True
                except SystemExit:
                    fits = False
            case _:
                fits = True
        inputs = [word for before, word in zip(words, words[1:], strict=False) if before not in OUTPUTS]
        fits &= all((ROOT / word).exists() for word in inputs if re.fullmatch(r"[\w./-]+\.(py|txt|jsonl|npy)", word))
        if not fits:
            wrong.append(line)
    capsys.readouterr()
    assert not wrong


def test_supported_versions_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = dict(re.match(r"([\w.-]+)(.*)", line).groups() for line in project["dependencies"])
    readme = (ROOT / "README.md").read_text()

    def span(requirement):
        first, major, after = re.fullmatch(r">=([\d.]+),<(\d+)\.(\d+)", requirement).groups()
        return f"{first} to {major}.{int(after) - 1}"

    assert f"| Python | {span(project['requires-python'])} |" in readme
    flax = requirements["flax"].removeprefix(">=")
    assert f"| JAX | {span(requirements['jax'])}, with flax {flax} or later |" in readme
