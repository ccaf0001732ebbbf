"""Ctrl-C, SIGTERM and SIGHUP end the command line at once, whenever they come, and leave nothing behind.

`make test-signals` tries 100 random moments (JAXFT_TEST_MOMENTS); the ordinary tests try a few.
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import tiny
from cases import slow_cases
from jaxft import atomic, cli
from test_atomic import names

ROOT = Path(__file__).resolve().parents[1]
MOMENTS = int(os.environ.get("JAXFT_TEST_MOMENTS", 3))
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SECONDS = 2.0

HEAD = """
import os, signal, sys, time
from pathlib import Path
from jaxft import atomic
atomic.end_at_signals(lambda number: "ended")
number = int(sys.argv[1])
"""
# 12 s in which no bytecode runs in the main thread.
COMPILING = (
    HEAD
    + """
import jax, jax.numpy as jnp
def f(x):
    for i in range(400):
        x = jnp.sin(x @ x) + jnp.cos(x) * i
    return x
lowered = jax.jit(f).lower(jnp.ones((64, 64)))
with atomic.replacing(Path("out")) as (new,):
    new.write_text("half")
    print("ready", flush=True)
    lowered.compile()
    time.sleep(30)
"""
)
# An exception that a handler raises would be dropped here.
COLLECTING = (
    HEAD
    + """
import gc
gc.callbacks.append(lambda phase, info: os.kill(os.getpid(), number))
with atomic.replacing(Path("out")) as (new,):
    new.write_text("half")
    print("ready", flush=True)
    gc.collect()
    time.sleep(30)
"""
)
# Another thread, as of C++ code, writes into the temporary folder until the end.
WRITING = (
    HEAD
    + """
import contextlib, threading
with atomic.replacing(Path("out")) as (new,):
    def write():
        with contextlib.suppress(FileNotFoundError):  # once the folder is removed
            for i in range(100_000):
                with open(new.parent / str(i), "w") as file:
                    file.write("x")
    threading.Thread(target=write, daemon=True).start()
    print("ready", flush=True)
    time.sleep(30)
"""
)
# Nobody reads what the process prints.
BLOCKED = (
    HEAD
    + """
with atomic.replacing(Path("out")) as (new,):
    print("ready", flush=True)
    sys.stderr.write("x" * 1_000_000)
"""
)
# A progress bar has no end of line.
PROGRESS = (
    HEAD
    + """
from tqdm import tqdm
with atomic.replacing(Path("out")), tqdm(total=10):
    print("ready", flush=True)
    time.sleep(30)
"""
)
# The main thread gives two files their names, slowly, when the signal comes: both have them, or neither.
RENAMING = (
    HEAD
    + """
replace = os.replace
def slow(source, target):
    replace(source, target)
    print("ready", flush=True)
    time.sleep(0.1)
os.replace = slow
with atomic.replacing(Path("a"), Path("b")) as pair:
    for new in pair:
        new.write_text("whole")
time.sleep(30)
"""
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny.write_sentence_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def ranker(tmp_path_factory):
    return str(tiny.write_classifier(tmp_path_factory.mktemp("ranker")))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """More texts than a process encodes before the signal."""
    file = tmp_path_factory.mktemp("texts") / "texts.txt"
    file.write_text("a bird sings in the old tree\n" * 300_000)
    return str(file)


def start(folder, code, *arguments, ignored=()):
    # If the tests run in the background of a shell, or by nohup, their children ignore interrupts or hang-ups.
    lines = ["import signal", "signal.signal(signal.SIGINT, signal.default_int_handler)"]
    lines += ["signal.signal(signal.SIGHUP, signal.SIG_DFL)"]
    lines += [f"signal.signal({int(number)}, signal.SIG_IGN)" for number in ignored]
    return subprocess.Popen(
        [sys.executable, "-c", "\n".join([*lines, code]), *map(str, arguments)], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONWARNINGS": ""},
    )  # fmt: skip


def wait_until_handled(process, number=signal.SIGTERM):
    """Waits until the process has a handler for the signal. Without /proc, for a tenth of a second."""
    try:
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            if int(re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)[1], 16) >> (number - 1) & 1:
                return
            time.sleep(0.005)
    except FileNotFoundError:
        time.sleep(0.1)


def end(process, number=None):
    """Sends the signal and returns what the process prints to stderr. It must end in time."""
    begin = time.monotonic()
    if number is not None:
        process.send_signal(number)
    try:
        process.wait(20)
    finally:
        process.kill()
    assert time.monotonic() - begin < SECONDS
    return process.communicate()[1]


@pytest.mark.parametrize(
    ("code", "number"),
    [
        pytest.param(COMPILING, signal.SIGTERM, id="compiling"),
        pytest.param(WRITING, signal.SIGHUP, id="writing"),
        pytest.param(BLOCKED, signal.SIGINT, id="blocked"),
        pytest.param(PROGRESS, signal.SIGINT, id="progress"),
        *slow_cases((COMPILING, signal.SIGINT), (COMPILING, signal.SIGHUP)),
    ],
)
def test_signal_ends_a_busy_process(code, number, tmp_path):
    process = start(tmp_path, code, int(number))
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    *_, last = end(process, number).splitlines()
    assert last == "ended" or code is BLOCKED and not last.strip("x")
    assert process.returncode == 128 + number and [*tmp_path.iterdir()] == []


def test_signal_in_a_callback_of_the_garbage_collector_is_not_lost(tmp_path):
    process = start(tmp_path, COLLECTING, int(signal.SIGTERM))
    process.stdout.readline()
    assert end(process) == "ended\n"
    assert process.returncode == 143 and [*tmp_path.iterdir()] == []


def test_signal_decides_the_exit_code(tmp_path):
    """The main thread does not come to its own end meanwhile."""
    process = start(tmp_path, HEAD + "os.kill(os.getpid(), number); os._exit(3)", int(signal.SIGTERM))
    assert end(process) == "ended\n" and process.returncode == 143


def test_signal_does_not_separate_files_that_belong_together(tmp_path):
    process = start(tmp_path, RENAMING, int(signal.SIGTERM))
    assert process.stdout.readline() == "ready\n"  # the first of two files has its name
    assert end(process, signal.SIGTERM) == "ended\n"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "whole", "b": "whole"}


def test_ignored_signals_stay_ignored(tmp_path):
    """As under nohup, or for Ctrl-C in the background of a script."""
    process = start(tmp_path, WRITING, int(signal.SIGTERM), ignored=(signal.SIGHUP, signal.SIGINT))
    assert process.stdout.readline() == "ready\n"
    for number in (signal.SIGHUP, signal.SIGINT):
        process.send_signal(number)
    time.sleep(0.3)
    assert process.poll() is None
    end(process, signal.SIGTERM)
    assert process.returncode == 143


def test_library_leaves_signals_alone(tmp_path):
    def handlers():
        wakeup = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(wakeup)
        return wakeup, [signal.getsignal(number) for number in SIGNALS]

    before = handlers()
    with atomic.replacing(tmp_path / "a") as (new,):
        new.touch()
        assert handlers() == before
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert handlers() == before
    restore = atomic.end_at_signals(lambda number: "")
    assert handlers() != before
    restore()
    assert handlers() == before


def check_moment(command, number, seconds, folder):
    """Sends a signal so many seconds after the command has begun. The command may have succeeded by then."""
    code = "import sys\nfrom jaxft import cli\ncode = cli.main()\nprint('end of main', file=sys.stderr)\nsys.exit(code)"
    process = start(folder, code, *command)
    wait_until_handled(process)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    if process.poll() is None:
        printed = end(process, number)
        # Python takes its handlers away when it ends: the signal ends the process itself then.
        succeeded = process.returncode == 0 or (process.returncode == -number and "end of main" in printed)
        assert succeeded or process.returncode == 128 + number, printed
        progress = re.compile(r"(text|pair|case)/s\]|^end of main$|^\s*$")
        lines = [line for line in printed.splitlines() if not progress.search(line)]
        expected = ["jaxft: interrupted"] if number == signal.SIGINT else []
        assert succeeded or lines == expected
    else:
        succeeded = process.returncode == 0
        assert succeeded, process.communicate()
    process.communicate()
    left = {*names(folder)} - {"arguments.py", "__pycache__"}
    if "out/" in command:  # whole parts stay, and the command goes on with them
        kept = names(folder / "out") if left else []
        assert left <= {"out"} and all(re.fullmatch(r"manifest\.json|part-\d{6}\.(json|parquet)", x) for x in kept)
        return
    assert left == ({"out.npy"} if succeeded and "out.npy" in command else set())
    if "out.npy" in command and succeeded:
        assert np.load(folder / "out.npy").shape == (300_000, tiny.WIDTH)


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_early_ctrl_c_gives_one_line(seconds, tmp_path):
    check_moment(["info"], signal.SIGINT, seconds, tmp_path)


def signalled_in_an_import(number, module, run, folder):
    """Sends a signal to a program while it imports a module. Returns stdout, stderr and the exit code."""
    slow = f"""
import importlib.abc, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # as in `start`
signal.signal(signal.SIGHUP, signal.SIG_DFL)
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            print("ready", flush=True)
            time.sleep(30)
sys.meta_path.insert(0, Slow())
for name in ("argparse", "shutil"):
    sys.modules.pop(name, None)
import runpy
{run}
"""
    with subprocess.Popen(
        [sys.executable, "-c", slow, module], cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        return *process.communicate(timeout=20), process.returncode


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("module", ["argparse", "shutil", "jaxft.text.records"])
def test_signal_during_import_of_commands_gives_one_line(module, number, tmp_path):
    run = "runpy.run_module('jaxft.cli', run_name='__main__', alter_sys=True)"
    line = "jaxft: interrupted\n" if number == signal.SIGINT else ""
    assert signalled_in_an_import(number, module, run, tmp_path) == ("", line, 128 + number)


@pytest.mark.parametrize("module", ["argparse", "jax"])
@pytest.mark.parametrize("example", ["demo", "finetune", "pretrain", "train_embedder"])
def test_signal_during_import_of_examples_gives_one_line(example, module, tmp_path):
    folder = str(ROOT / "examples")
    run = f"sys.path.insert(0, {folder!r}); runpy.run_path({folder!r} + '/{example}.py', run_name='__main__')"
    number = signal.SIGINT if module == "jax" else signal.SIGTERM
    assert signalled_in_an_import(number, module, run, tmp_path) == ("", "interrupted\n", 128 + number)


def test_importing_the_command_line_leaves_ctrl_c_alone(tmp_path):
    code = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # as in `start`
import jaxft.cli
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize("seed", range(MOMENTS))
def test_signal_at_a_random_moment(seed, model, ranker, texts, tmp_path):
    rng = random.Random(seed)
    commands = [["encode", "--model", model, texts, "-o", "out.npy"], ["similar", "--model", model, texts, "a tree"],
                ["bench", "--model", model, "--length", "16", "-o", "out.json"], ["info"],
                ["rerank", "--model", ranker, "a tree", texts], ["encode", "--model", model, texts, "-o", "out/"],
                ["fuse", "jax.nn:softmax", "--args", "arguments:given"]]  # fmt: skip
    command, number, seconds = rng.choices(commands, (6, 1, 2, 1, 1, 2, 1))[0], rng.choice(SIGNALS), rng.uniform(0, 6)
    (tmp_path / "arguments.py").write_text("import jax.numpy as jnp\ngiven = (jnp.ones((4, 8)),)\n")
    print(f"{command[0]}, {number.name} after {seconds:.3f} s")
    check_moment(command, number, seconds, tmp_path)
