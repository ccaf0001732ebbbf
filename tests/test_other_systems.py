"""The package imports and runs on a CPU where Unix-only modules, signals and functions are missing, as on Windows."""

import subprocess
import sys

import pytest

import tiny
from cases import slow

# Removes what Windows lacks, after the imports of Python's library and of packages, which know Windows.
WINDOWS = """
import os, signal, sys
sys.modules["jaxlib.mlir._mlir_libs._triton_ext"] = None  # JAX for Windows has no Triton
import huggingface_hub, jax, jax.experimental.pallas.mosaic_gpu, numpy, safetensors.numpy, tokenizers, tqdm
from flax import nnx
for name in ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"):
    sys.modules[name] = None
known = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM"}
for name in [name for name in dir(signal) if name.startswith("SIG") and name[3:].isalpha() and name not in known]:
    delattr(signal, name)
for name in ("chown", "fchmod", "fork", "getuid", "killpg", "mkfifo", "sched_getaffinity", "setsid", "uname"):
    delattr(os, name)
sys.platform = "win32"
"""


def run(code, *arguments):
    command = [sys.executable, "-W", "ignore", "-c", WINDOWS + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_every_module_imports_and_ops_run():
    done = run("""
import importlib, pkgutil, jaxft
for module in pkgutil.walk_packages(jaxft.__path__, "jaxft."):
    importlib.import_module(module.name)
import jax.numpy as jnp
x = jnp.ones((2, 8))
print(jax.grad(lambda x: jaxft.dense(x, jnp.eye(8), activation="gelu").sum())(x).shape)
try:
    jaxft.softmax(x, implementation="triton")
except NotImplementedError as error:
    print(error)
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "(2, 8)", "softmax: implementation 'triton' cannot be used: it needs an NVIDIA GPU, this is cpu"
    ]  # fmt: skip


@pytest.mark.parametrize("command", ["encode", *slow("info")])
def test_command_line_runs(command, tmp_path):
    arguments = [command]
    if command == "encode":
        (tmp_path / "texts.txt").write_text("rain falls\nbirds sing\n")
        model = tiny.write_model(tmp_path / "model")
        arguments += ["--model", model, tmp_path / "texts.txt", "-o", tmp_path / "out.npy"]
    done = run("from jaxft import cli\nsys.exit(cli.main(sys.argv[1:]))", *arguments)
    assert done.returncode == 0, done.stderr
    assert command == "info" or (tmp_path / "out.npy").stat().st_size > 128
