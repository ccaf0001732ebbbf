"""Text that is on every machine: the docstrings of Python's standard library."""

import ast
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Docstring(NamedTuple):
    """A docstring of Python's standard library."""

    owner: str  # name of the top-level module or package
    name: str | None  # of the class or function, or None for a module
    paragraphs: list[str]


def docstrings() -> Iterator[Docstring]:
    """Finds the docstrings of Python's standard library, in a fixed order. Tests of the library are left out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library.rglob("*.py"))
    if not files:
        raise SystemExit(f"{library} has no sources of Python's standard library, whose docstrings are the text")
    for file in files:
        parts = file.relative_to(library).with_suffix("").parts
        if {"site-packages", "test", "tests"} & {*parts}:
            continue
        with warnings.catch_warnings(action="ignore"):  # about invalid escapes in the library's strings
            tree = ast.parse(file.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = re.split(r"\n\s*\n", ast.get_docstring(node) or "")
                yield Docstring(parts[0], getattr(node, "name", None), [" ".join(part.split()) for part in text])
