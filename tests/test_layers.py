"""Folders are layers (DESIGN.md, section 1): a module imports from lower layers and its own folder, without cycles."""

import ast
import graphlib
import importlib
import inspect
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "jaxft"
# From the lowest to the highest. The names in one entry lie side by side: neither imports the other.
LAYERS = (
    ("_version",),
    ("dropout",),
    ("atomic", "compilation_cache", "dispatch"),
    ("reference",),
    ("tuning",),
    ("kernels",),
    ("ops",),
    ("fusion",),
    ("checkpoint",),
    ("models",),
    ("contrastive",),
    ("training",),
    ("text",),
    ("comparison", "latency"),
    ("cli",),
)
HEIGHTS = {name: height for height, names in enumerate(LAYERS) for name in names}
MACHINE_LOOKUPS = {"default_backend", "devices", "local_devices", "device_kind", "get_backend"}


def module_names(package):
    """{dotted name: file} of every module below `package`."""
    names = {}
    for file in sorted(package.rglob("*.py")):
        parts = (package.name, *file.relative_to(package).with_suffix("").parts)
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return names


def height(name):
    """Height of a module's layer. The package itself is the highest."""
    _, *below = name.split(".")
    if below and below[0] not in HEIGHTS:
        raise AssertionError(f"{name} is in no layer of the design")
    return HEIGHTS[below[0]] if below else len(LAYERS)


def imports(name, file, modules):
    """Modules of the package that `file` imports anywhere in it, functions included."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
                above = package[: len(package) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in modules else base)
        # A computed name would hide from this test: literal_eval fails here.
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
            found.add(ast.literal_eval(node.args[0]))
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "sys.modules":
            found.add(ast.literal_eval(node.slice))
    root = name.split(".")[0]
    return {target for target in found if target.split(".")[0] == root}


def import_graph(package):
    """{module: modules that it imports}. The package itself is left out: it exports whatever it likes."""
    modules = module_names(package)
    return {name: imports(name, file, modules) for name, file in modules.items() if name != package.name}


def violations(package):
    """Imports that point upwards, or sideways into another folder of the same layer (one backend into another)."""
    modules, found = module_names(package), []
    for name, targets in import_graph(package).items():
        for target in targets:
            beside = target in modules and modules[target].parent == modules[name].parent != package
            if height(target) >= height(name) and not beside:
                found.append(f"{name} imports {target}")
    return sorted(found)


def cycle(package):
    """Modules of a cycle of imports, with the first one again at the end, or None."""
    try:
        graphlib.TopologicalSorter(import_graph(package)).prepare()
    except graphlib.CycleError as error:
        return error.args[1]


def hidden_names(package):
    """Public names of a package that are names of its modules too: their second use may find the module."""
    modules, found = module_names(package), []
    for name, file in modules.items():
        if file.name != "__init__.py":
            continue
        public = set()
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                public.add(node.name)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                public |= {alias.asname or alias.name for alias in node.names
                           if f"{node.module}.{alias.name}" not in modules}  # fmt: skip
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                public |= set(ast.literal_eval(node.value))
        found += [f"{name}.{public_name}" for public_name in public if f"{name}.{public_name}" in modules]
    return sorted(found)


def test_imports_point_to_lower_layers():
    assert violations(PACKAGE) == []


def test_imports_close_no_cycle():
    assert cycle(PACKAGE) is None


def test_no_module_has_a_public_name():
    assert hidden_names(PACKAGE) == []


@pytest.mark.parametrize("package", ["jaxft", "jaxft.tuning"])
def test_public_names_stay_the_same_object(package):
    module = importlib.import_module(package)
    first = {name: getattr(module, name) for name in module.__all__}
    for other in module_names(PACKAGE):
        importlib.import_module(other)  # which makes it an attribute of its package
    assert {name: getattr(module, name) for name in first} == first
    assert not [name for name, value in first.items() if inspect.ismodule(value)]


LAWFUL = {
    "_version.py": "",
    "dropout.py": "",
    "reference.py": "from jaxft import dropout",
    "dispatch.py": "import jax",
    "tuning/__init__.py": "from jaxft.tuning.search import autotune",
    "tuning/table.py": "from jaxft.dispatch import Device",
    "tuning/search.py": "def autotune():\n    from jaxft.tuning import table",
    "kernels/triton/common.py": "from jaxft.tuning.table import Config",
    "kernels/triton/dense.py": "from . import common",
    "kernels/mosaic_gpu/common.py": "",
    "ops/__init__.py": "",
    "ops/checks.py": "from jaxft import dispatch",
    "ops/attention.py": "from .checks import check",
    "ops/dense.py": "from jaxft.kernels.triton import dense\nfrom jaxft.ops import checks",
    "checkpoint/files.py": "",
    "models/config.py": "from jaxft.checkpoint import files",
    "models/bert.py": "from jaxft.ops.dense import dense\nfrom jaxft.models import config",
    "text/sentence_encoder.py": "from jaxft.models.bert import BertModel",
    "cli.py": "from jaxft._version import __version__\nfrom jaxft.text.sentence_encoder import SentenceEncoder",
    "__init__.py": "from jaxft.ops.dense import dense\n__all__ = ['dense', 'encoder']",
}


@pytest.fixture
def planted(tmp_path):
    """A lawful package with one file replaced."""

    def write(changed):
        for path, text in (LAWFUL | changed).items():
            target = tmp_path / "jaxft" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        return tmp_path / "jaxft"

    return write


def test_lawful_package_passes(planted):
    package = planted({})
    assert (violations(package), cycle(package), hidden_names(package)) == ([], None, [])


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("dispatch.py", "import jaxft.reference", "dispatch imports jaxft.reference"),
        ("reference.py", "from jaxft import tuning", "reference imports jaxft.tuning"),
        ("dropout.py", "from . import reference", "dropout imports jaxft.reference"),
        ("dispatch.py", "def f():\n    from jaxft.ops.dense import dense", "dispatch imports jaxft.ops.dense"),
        ("tuning/table.py", "from jaxft.kernels.triton.dense import unsupported",
         "tuning.table imports jaxft.kernels.triton.dense"),
        ("kernels/triton/dense.py", "from jaxft.ops import checks", "kernels.triton.dense imports jaxft.ops.checks"),
        ("kernels/triton/dense.py", "from ..mosaic_gpu.common import launch",
         "kernels.triton.dense imports jaxft.kernels.mosaic_gpu.common"),
        ("ops/dense.py", "import jaxft", "ops.dense imports jaxft"),
        ("ops/dense.py", "import sys\nversion = sys.modules['jaxft'].__version__", "ops.dense imports jaxft"),
        ("ops/dense.py", "def f():\n    import importlib\n    importlib.import_module('jaxft.cli')",
         "ops.dense imports jaxft.cli"),
        ("models/bert.py", "from jaxft.text.sentence_encoder import SentenceEncoder",
         "models.bert imports jaxft.text.sentence_encoder"),
        ("checkpoint/files.py", "from jaxft.models import config", "checkpoint.files imports jaxft.models.config"),
        ("text/sentence_encoder.py", "from jaxft import cli", "text.sentence_encoder imports jaxft.cli"),
    ],
)  # fmt: skip
def test_forbidden_import_is_found(file, line, found, planted):
    assert violations(planted({file: line})) == [f"jaxft.{found}"]


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("ops/checks.py", "from jaxft.ops.attention import attention", {"jaxft.ops.checks", "jaxft.ops.attention"}),
        ("ops/checks.py", "def f():\n    from . import dense", {"jaxft.ops.checks", "jaxft.ops.dense"}),
        ("models/config.py", "from jaxft.models import bert", {"jaxft.models.config", "jaxft.models.bert"}),
        ("tuning/table.py", "from jaxft.tuning import autotune", {"jaxft.tuning", "jaxft.tuning.search",
                                                                  "jaxft.tuning.table"}),
    ],
)  # fmt: skip
def test_cycle_is_found(file, line, found, planted):
    assert set(cycle(planted({file: line}))) == found


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("tuning/autotune.py", "", "jaxft.tuning.autotune"),
        ("encoder.py", "", "jaxft.encoder"),
        ("ops/__init__.py", "def dense(x): ...", "jaxft.ops.dense"),
        ("ops/__init__.py", "from jaxft.ops import dense", None),
    ],
)
def test_module_with_a_public_name_is_found(file, line, found, planted):
    assert hidden_names(planted({file: line})) == ([found] if found else [])


def asks_which_machine(source):
    """Expressions in `source` that look up the backend or a device without asking `dispatch`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in MACHINE_LOOKUPS and ast.unparse(node.value) != "dispatch":
            yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jax":
            yield from (alias.name for alias in node.names if alias.name in MACHINE_LOOKUPS)


def test_only_dispatch_asks_which_machine():
    asking = {file.relative_to(PACKAGE).as_posix(): [*asks_which_machine(file.read_text())]
              for file in PACKAGE.rglob("*.py")}  # fmt: skip
    assert asking.pop("dispatch.py"), "dispatch.py asks nothing: the names looked for must be out of date"
    assert {file: places for file, places in asking.items() if places} == {}


def test_asking_elsewhere_is_found():
    source = "from jax import devices\nkind = jax.devices()[0].device_kind\nfine = dispatch.device_kind(device_kind)"
    assert sorted(asks_which_machine(source)) == ["devices", "jax.devices", "jax.devices()[0].device_kind"]
