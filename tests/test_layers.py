"""A module of jaxft imports only from lower layers, or from its own folder a `common` file or one of the same op.

An op that is composed of others imports those."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "jaxft"
COMPOSED = {  # ops that are others where kernels of their own do not pay
    "dense_layer_norm": ("dense", "layer_norm"),
    "feed_forward": ("dense", "dense_layer_norm", "layer_norm"),
}
MODEL_ORDER = (
    "checkpoint_files",
    "checkpoint_heads",
    "checkpoint",
    "config",
    "pooling",
    "inputs",
    "dropout",
    "bert",
    "heads",
    "classification",
    "masked_lm",
    "training",
    "tokenizer",
    "batches",
    "bundled",
    "sentence_encoder",
    "cross_encoder",
    "comparison",
)  # each may import those before it
MAX_LINES = 500
MACHINE_LOOKUPS = {"default_backend", "devices", "local_devices", "device_kind", "get_backend"}


def module_names(package):
    """{dotted name: file} of every module below `package`."""
    names = {}
    for file in sorted(package.rglob("*.py")):
        parts = (package.name, *file.relative_to(package).with_suffix("").parts)
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return names


def layer(name):
    match name.split(".")[1:]:
        case []:
            return 5
        case ["reference" | "dispatch" | "tuning"]:
            return 0
        case ["tuning_dense" | "tuning_store" | "tuning_candidates" | "tuning_timing"]:
            return 0
        case ["kernels", *_] | ["tuning_search"]:
            return 1
        case ["ops", *_]:
            return 2
        case ["models", *_]:
            return 3
        case ["cli"]:
            return 4
    raise AssertionError(f"{name} is in no layer of the design")


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
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
            found.add(ast.literal_eval(node.args[0]))  # a computed name would hide from this test: it fails here
    root = name.split(".")[0]
    return {target for target in found if target.split(".")[0] == root}


def op_of(stem):
    """`attention` of `attention_backward`: what would be too long as one file."""
    if stem.startswith("tuning_"):
        return "tuning"
    return re.sub("_(common|backward|spans|implementations)$", "", stem)


def allowed(name, target):
    folder, stem = name.rpartition(".")[0], name.rpartition(".")[2]
    target_folder, target_stem = target.rpartition(".")[0], target.rpartition(".")[2]
    if target == "jaxft":
        return False  # the package itself is the highest layer
    if layer(target) < layer(name):
        return True
    if target == "jaxft.dispatch" and op_of(stem) == "tuning":
        return True  # heuristics ask how many multiprocessors there are
    if target_folder == name:
        return True  # a package exports what its modules define
    if target_folder != folder or stem == target_stem:
        return False
    if (
        target_stem.split("_")[-1] == "common"
        or op_of(stem) == op_of(target_stem)
        or target_stem in COMPOSED.get(stem, ())
    ):
        return True
    return (
        layer(name) == 3
        and stem in MODEL_ORDER
        and target_stem in MODEL_ORDER
        and MODEL_ORDER.index(target_stem) < MODEL_ORDER.index(stem)
    )


def violations(package):
    modules = module_names(package)
    return sorted(
        f"{name} imports {target}"
        for name, file in modules.items()
        if name != package.name  # its __init__ re-exports whatever it likes
        for target in imports(name, file, modules)
        if not allowed(name, target)
    )


def test_imports_point_downwards():
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("reference.py", "import jaxft.dispatch", "reference imports jaxft.dispatch"),
        ("reference.py", "from jaxft import tuning", "reference imports jaxft.tuning"),
        ("dispatch.py", "def f():\n    from jaxft.ops.dense import dense", "dispatch imports jaxft.ops.dense"),
        ("kernels/triton/dense.py", "from jaxft.ops import common", "kernels.triton.dense imports jaxft.ops.common"),
        ("kernels/triton/dense.py", "from . import other", "kernels.triton.dense imports jaxft.kernels.triton.other"),
        ("kernels/triton/dense.py", "from ..mosaic_gpu.common import launch",
         "kernels.triton.dense imports jaxft.kernels.mosaic_gpu.common"),
        ("ops/dense.py", "from jaxft.ops.attention import x", "ops.dense imports jaxft.ops.attention"),
        ("ops/dense.py", "import jaxft", "ops.dense imports jaxft"),
        ("ops/dense.py", "def f():\n    import importlib\n    importlib.import_module('jaxft.cli')",
         "ops.dense imports jaxft.cli"),
        ("models/bert.py", "from .sentence_encoder import SentenceEncoder",
         "models.bert imports jaxft.models.sentence_encoder"),
        ("models/checkpoint.py", "from jaxft import cli", "models.checkpoint imports jaxft.cli"),
    ],
)  # fmt: skip
def test_a_violation_is_found(tmp_path, file, line, found):
    package = tmp_path / "jaxft"
    lawful = {
        "reference.py": "import jax",
        "dispatch.py": "import jax",
        "tuning.py": "",
        "kernels/triton/common.py": "from jaxft import tuning",
        "kernels/triton/other.py": "from jaxft.kernels.triton.common import launch",
        "kernels/triton/dense.py": "from . import common",
        "kernels/mosaic_gpu/common.py": "",
        "ops/common.py": "from jaxft import dispatch",
        "ops/attention.py": "from .common import check",
        "ops/dense.py": "from jaxft.kernels.triton import dense\nfrom jaxft.ops import common",
        "models/checkpoint.py": "",
        "models/bert.py": "from jaxft.ops.dense import dense\nfrom jaxft.models import checkpoint",
        "models/sentence_encoder.py": "from jaxft.models.bert import BertModel",
        "cli.py": "from jaxft.models.sentence_encoder import SentenceEncoder",
        "__init__.py": "from jaxft.ops.dense import dense",
    }
    for path, text in lawful.items():
        target = package / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    assert violations(package) == []
    (package / file).write_text(line)
    assert violations(package) == [f"jaxft.{found}"]


def test_files_stay_readable():
    lengths = {file.name: len(file.read_text().splitlines()) for file in PACKAGE.rglob("*.py")}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def asks_which_machine(source):
    """Where `source` looks up the backend or a device; asking `dispatch` is what it should do."""
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
