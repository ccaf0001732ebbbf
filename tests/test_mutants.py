"""The lists of planted faults in tests/mutants: every entry applies, and no module is without one."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from mutants import run

PACKAGE = Path(__file__).resolve().parents[1] / "jaxft"
MUTANTS = run.read()


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_every_fault_can_be_planted(file):
    """The old text occurs once, the new code is Python, and the tests that notice it exist."""
    text = (PACKAGE / file).read_text()
    for mutant in MUTANTS:
        if mutant.file == file:
            assert mutant.problem() is None, mutant.name
            assert ast.dump(ast.parse(text.replace(mutant.old, mutant.new))) != ast.dump(ast.parse(text)), mutant.name


def test_every_module_has_faults():
    counts = Counter(mutant.file for mutant in MUTANTS)
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        has_code = any(isinstance(node, ast.FunctionDef) for node in ast.walk(ast.parse(path.read_text())))
        least = 5 if name.startswith("kernels/") else 2
        assert not has_code or counts[name] >= least, f"{name} has {counts[name]} faults, at least {least} are wanted"


def test_versions_of_jax_are_compared():
    ran = [(wanted, version) for wanted in ("", "0.11", "<0.11") for version in ((0, 10, 2), (0, 11, 0), (1, 0, 0))
           if run.Mutant("a.py", "", "", jax=wanted).runs_on(version)]  # fmt: skip
    assert ran == [("", (0, 10, 2)), ("", (0, 11, 0)), ("", (1, 0, 0)), ("0.11", (0, 11, 0)), ("0.11", (1, 0, 0)),
                   ("<0.11", (0, 10, 2))]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"old": "no such text"}, "the old text occurs 0 times"),
        ({"old": "import"}, "the old text occurs"),
        ({"file": "nowhere.py"}, "no such file"),
        ({"tests": ()}, "no tests"),
        ({"tests": ("test_nowhere.py::test_it",)}, "no test test_nowhere.py::test_it"),
        ({"tests": ("test_mutants.py::test_nothing",)}, "no test test_mutants.py::test_nothing"),
    ],
    ids=str,
)
def test_wrong_entries_are_found(change, problem):
    good = vars(MUTANTS[0])
    assert run.Mutant(**good).problem() is None
    assert run.Mutant(**good | change).problem().startswith(problem)
