"""The examples run, and a run that is interrupted and resumed is bitwise equal to an uninterrupted one."""

import csv
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

import common
import finetune
import fuse_linen
import pretrain
import tiny
import train_embedder
from cases import INTERPRET, slow_cases
from docstrings import Docstring
from jaxft import BertForMaskedLM, BertForSequenceClassification, BertModel, SentenceEncoder, training
from jaxft.text import tokenizer as tokenizer_files
from jaxft.training import LossScale

STEPS = 40
CONFIG = dataclasses.replace(tiny.config(initializer_range=0.02), vocab_size=30522)
SUBJECTS = {"birds": "bird sings tree", "weather": "rain falls on", "waters": "river old ."}


def some_texts(count=240):
    """Returns {text: subject}. A text has words of its subject and words that all texts have."""
    rng = random.Random(0)
    subjects = list(SUBJECTS) * (count // len(SUBJECTS))
    return {" ".join(rng.choices(SUBJECTS[s].split() * 2 + ["a", "in", "the"], k=12)) + " " * 20: s for s in subjects}


def some_docstrings(count=240):
    """Returns docstrings of 40 modules. A summary and the rest have some letters in common, and other words."""
    rng = random.Random(0)
    for place in range(count):
        letters = rng.sample("bcdefghijklmno", 5)
        parts = (letters + rng.choices(tiny.WORDS, k=4) for _ in range(2))
        yield Docstring(f"module{place % 40}", "f", [" ".join(rng.sample(part, 9)) for part in parts])


@pytest.fixture(autouse=True)
def standard_promotion():
    """Turns strict dtype promotion off: optax and Flax do not run under it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(autouse=True)
def quick_compiler():
    """Turns XLA's optimisations off on a CPU, where they are half of the compile time."""
    jax.config.update("jax_disable_most_optimizations", INTERPRET)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def programs_of_its_own():
    """Restores JAX's settings of the compilation cache after the test."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def kept_programs(programs_of_its_own, tmp_path):
    """Keeps programs in a folder, so that the runs of a test compile each of them once."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "kept"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.write_model(tmp_path_factory.mktemp("checkpoint"), hidden_dropout_prob=0.1)


@pytest.fixture(scope="module")
def embedder_checkpoint(tmp_path_factory):
    folder = tiny.write_sentence_model(tmp_path_factory.mktemp("embedder"), normalize=True)
    BertModel(tiny.config(initializer_range=0.02), rngs=nnx.Rngs(0)).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Replaces texts and sizes by small ones."""
    monkeypatch.setattr(common, "paragraphs", some_texts)
    preset = pretrain.Preset(CONFIG, length=16, rows=128, steps=STEPS, learning_rate=1e-2)
    monkeypatch.setattr(pretrain, "PRESETS", {"small": preset, "base": preset})
    monkeypatch.setattr(pretrain, "EVALUATED", 1)
    labelled = finetune.Preset(length=16, batch=8, steps=STEPS, learning_rate=1e-2, labels=3)
    monkeypatch.setattr(finetune, "PRESETS", {"small": labelled, "base": labelled})
    paired = train_embedder.Preset(length=16, pairs=24, steps=STEPS, learning_rate=1e-2)
    monkeypatch.setattr(train_embedder, "PRESETS", {"small": paired, "base": paired})
    monkeypatch.setattr(train_embedder, "LEAST_CHARACTERS", 1)
    monkeypatch.setattr(common, "docstrings", some_docstrings)


def losses(out):
    """Returns the losses as text: equal digits mean bitwise equal losses."""
    with (out / "losses.csv").open(newline="") as file:
        return [row["loss"] for row in csv.DictReader(file)]


def evaluations(out):
    with (out / "held_out.csv").open(newline="") as file:
        return {row["step"]: row["value"] for row in csv.DictReader(file)}


def at_step(monkeypatch, number, action):
    """Makes the loop do `action` before it does that step."""
    train = common.Run.train

    def with_action(run, step, batch_at, **options):
        def batch_of(now):
            if now == number and run.step == now and run.out.joinpath("began").exists():
                action()
            run.out.joinpath("began").touch()  # the first call is for compiling
            return batch_at(now)

        return train(run, step, batch_of, **options)

    monkeypatch.setattr(common.Run, "train", with_action)


def fail():
    raise RuntimeError("power cut")


NOTHING = common.Evaluation("nothing", lambda params: 0.0, ".1f")


def begin(out, **settings):
    """Begins a run of three steps, or resumes it."""
    return common.Run(out, {"steps": 3, "seed": 0} | settings, common.State({"w": jnp.ones(2)}, (), None))


def finish(run, batch_at=lambda step: jnp.ones(2)):
    step = lambda state, batch, key: (state, jnp.sum(batch))  # noqa: E731
    return run.train(step, batch_at, save_every=1, evaluation=NOTHING)


SIGNALLED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup
from pathlib import Path
import jax.numpy as jnp
import common
from jaxft import atomic

at, number = map(int, sys.argv[1:3])
atomic._ONE_SIGNAL = 0.0

def batch_at(step):
    for _ in range(2 if step == at else 0):
        os.kill(os.getpid(), number)
    return jnp.ones(2)

def main():
    if at < 0:
        os.kill(os.getpid(), number)
    run = common.Run(Path(sys.argv[3]), {"steps": 3, "seed": 0}, common.State({"w": jnp.ones(2)}, (), None))
    step = lambda state, batch, key: (state, jnp.sum(batch))
    run.train(step, batch_at, save_every=1, evaluation=common.Evaluation("nothing", lambda params: 0.0, ".1f"))
    return 0

common.run(main)
"""


def run_in_process(code, *arguments, **options):
    root = Path(__file__).resolve().parents[1]
    environment = os.environ | {"PYTHONPATH": f"{root / 'examples'}{os.pathsep}{os.environ['PYTHONPATH']}"}
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment,
                          timeout=300, **options)  # fmt: skip


@pytest.mark.parametrize(
    ("at", "number"), [(-1, signal.SIGTERM), (2, signal.SIGINT), *slow_cases((2, signal.SIGHUP), (-1, signal.SIGINT))]
)
def test_early_or_second_signal_stops_at_once(at, number, tmp_path):
    done = run_in_process(SIGNALLED, str(at), str(int(number)), str(tmp_path))
    assert done.returncode == 128 + number
    lines = [line for line in done.stderr.splitlines() if not re.search("step/s|s/step", line) and line.strip()]
    assert lines == ["interrupted: what no checkpoint has is lost; the same command goes on from the last one, if any"]
    run = begin(tmp_path)
    assert run.step in ((0,) if at < 0 else (1, 2))  # the checkpoint of step 2 may not be complete
    assert all(name.name.isdecimal() for name in (tmp_path / "checkpoints").iterdir())


def test_simultaneous_signals_count_as_one(tmp_path):
    """`make` and the program that ends its children may both send a signal. The step is saved."""

    def terminate(step):
        for number in (signal.SIGTERM, signal.SIGINT) if step == 1 else ():
            signal.raise_signal(number)
        return jnp.ones(2)

    assert not finish(begin(tmp_path), terminate)
    assert begin(tmp_path).step == 2


@pytest.mark.parametrize("killed_at", [1, 2])
def test_run_killed_before_its_checkpoint_repeats_no_step(killed_at, tmp_path, monkeypatch):
    """The losses and evaluations on the disk may be newer than the latest checkpoint."""
    batch_at = lambda step: jnp.full(2, 1.0 + step)  # noqa: E731
    assert finish(begin(tmp_path / "whole"), batch_at)
    save = common.ocp.CheckpointManager.save

    def killed(self, step, **options):
        if step > killed_at:
            raise KeyboardInterrupt
        save(self, step, **options)

    with monkeypatch.context() as patch:
        patch.setattr(common.ocp.CheckpointManager, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            finish(begin(tmp_path / "killed"), batch_at)
    assert len(losses(tmp_path / "killed")) == killed_at + 1
    with (tmp_path / "killed" / "held_out.csv").open("a") as file:
        file.write(f"{killed_at + 1},7.0\n")
    run = begin(tmp_path / "killed")
    assert run.step == killed_at
    assert finish(run, batch_at)
    for name in ("losses.csv", "held_out.csv"):
        assert (tmp_path / "killed" / name).read_text() == (tmp_path / "whole" / name).read_text()


def test_checkpoints_of_killed_processes_are_removed(tmp_path):
    (tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp" / "state" / "half").write_text("x")
    run = begin(tmp_path)
    assert [*(tmp_path / "checkpoints").iterdir()] == []
    assert finish(run)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"2", "3"}


FULL_DISK = """
import resource, sys
from pathlib import Path
import jax, jax.numpy as jnp
import common

def main():
    params = {f"w{i}": jax.random.normal(jax.random.key(i), 20_000) for i in range(50)}
    run = common.Run(Path(sys.argv[1]), {"steps": 3, "seed": 0}, common.State(params, (), None))
    step = lambda state, batch, key: (state, jnp.sum(batch))
    def batch_at(step):
        if step == run.step == 2:
            run._manager.wait_until_finished()
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), -1))
        return jnp.ones(2)
    run.train(step, batch_at, save_every=1, evaluation=common.Evaluation("nothing", lambda params: 0.0, ".1f"))
    return 0

common.run(main)
"""


@pytest.mark.parametrize(
    ("limit", "what"), [("30000", r".*checkpoints/3.*"), *slow_cases(("10", r"cannot write .*losses\.csv: "))]
)
def test_full_disk_ends_a_run_with_one_line(limit, what, tmp_path):
    """A limit on the size of files stands for the full disk."""
    done = run_in_process(FULL_DISK, str(tmp_path), limit)
    assert done.returncode == common.UNWRITTEN and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if not re.search("step/s|s/step", line) and line.strip()]
    then = "; step 2 is saved; the same command goes on from there"
    assert re.fullmatch(rf"stopped after step 3: {what}File too large.*{then}", line)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"1", "2"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "held_out.csv", "losses.csv"]
    params = {f"w{i}": jnp.ones(20_000) for i in range(50)}
    run = common.Run(tmp_path, {"steps": 3, "seed": 0}, common.State(params, (), None))
    assert run.step == 2 and finish(run)


@pytest.mark.usefixtures("kept_programs")
@pytest.mark.parametrize(
    ("example", "options", "number"),
    [
        *slow_cases((pretrain, ["--dtype=float16", "--accumulate=2", "--remat", "--peak-tflops=0.5"], signal.SIGINT)),
        (finetune, ["--dtype=float32"], signal.SIGTERM),
    ],
    ids=["pretrain", "finetune"],
)
def test_resumed_run_is_bitwise_equal(example, options, number, checkpoint, tmp_path, monkeypatch, capsys):
    def run(name, *more):
        code = example.main(
            ["--model", str(checkpoint), "--out", str(tmp_path / name), "--save-every=10", *options, *more]
        )
        return code, capsys.readouterr().out

    code, printed = run("whole")
    assert code == 0
    check_printed(example, printed)
    check_written(example, tmp_path / "whole")

    with monkeypatch.context() as patch:
        at_step(patch, 15, fail)
        with pytest.raises(RuntimeError, match="power cut"):
            run("resumed")
    with monkeypatch.context() as patch:
        at_step(patch, 24, lambda: os.kill(os.getpid(), number))
        handler = signal.getsignal(number)
        code, printed = run("resumed")
    assert code == common.INTERRUPTED and signal.getsignal(number) is handler
    assert "resumed after step 10\n" in printed
    # The interrupted step is completed.
    assert f"interrupted after step 25 of {STEPS}" in printed and len(losses(tmp_path / "resumed")) == 25
    assert not (tmp_path / "resumed" / "model").exists()
    code, printed = run("resumed")
    assert code == 0 and "resumed after step 25\n" in printed

    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")
    whole, resumed = (evaluations(tmp_path / name) for name in ("whole", "resumed"))
    assert {**resumed, **whole} == resumed and resumed.keys() - whole.keys() == {"25"}
    files = [tmp_path / name / "model" / "model.safetensors" for name in ("whole", "resumed")]
    assert files[0].read_bytes() == files[1].read_bytes()

    run("whole")  # the run is complete: it times no step and keeps no speed of another call
    assert not (tmp_path / "whole" / "speed.json").exists()
    with pytest.raises(SystemExit, match="has the checkpoints of another run: seed is 1 and was 0. To go on"):
        run("whole", "--seed=1")
    if example is finetune:
        other = shutil.copytree(checkpoint, tmp_path / "other")
        BertModel(tiny.config(hidden_dropout_prob=0.1), rngs=nnx.Rngs(1)).save_pretrained(other)
        with pytest.raises(SystemExit, match="has the checkpoints of another run: weights is .* and was .*. To go on"):
            run("whole", f"--model={other}")


def check_printed(example, printed):
    assert re.search(r"temporary memory of a step: [\d,]+ MiB", printed)
    if example is finetune:
        majority = float(re.search(r"accuracy of always saying \w+: ([\d.]+)%", printed)[1])
        before, *_, after = map(float, re.findall(r"step \d+: accuracy ([\d.]+)%", printed))
        assert after > 80 > 60 > max(majority, before)
        return
    before, *_, after = map(float, re.findall(r"step \d+: loss of held-out text ([\d.]+)", printed))
    assert before > 4 > 3 > after
    tokens, tflops, share = re.search(r"([\d,]+) tokens/s, (\S+) TFLOP/s: (\S+)% of .* \(MFU\)", printed).groups()
    assert float(tokens.replace(",", "")) > 0
    assert float(share) == pytest.approx(float(tflops) / 0.5 * 100, abs=0.06)


def check_written(example, out):
    values = losses(out)
    assert len(values) == len(set(values)) == STEPS
    assert {step.name for step in (out / "checkpoints").iterdir()} == {"30", "40"}  # the last one may be damaged
    assert [*evaluations(out)] == ["0", "10", "20", "30", "40"]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    tokenizer_files.load(tokenizer_files.Settings(out / "model"))
    if example is finetune:
        model = BertForSequenceClassification.from_pretrained(out / "model")
        assert set(model.id2label.values()) == set(SUBJECTS)
    else:
        assert BertForMaskedLM.from_pretrained(out / "model").config.vocab_size == len(tiny.VOCAB)
        speed = json.loads((out / "speed.json").read_text())
        assert speed["mfu"] == speed["flops_per_s"] / 0.5e12 and speed["tokens_per_s"] * speed["step_seconds"] <= 256


@pytest.mark.parametrize(
    ("dtype", "bad", "stopped", "message", "advice"),
    [
        ("float32", "loss", 30, "the loss is nan", "a lower learning rate in the preset may help"),
        ("float32", "update", 30, "the parameters are not finite", "a lower learning rate in the preset may help"),
        ("bfloat16", "update", 30, "the parameters are not finite", "another --dtype or a lower learning rate"),
        # The loss scale may cause the first 24.
        ("float16", "loss", 50, "of 30 steps in a row were not finite", "another --dtype or a lower learning rate"),
    ],
)
def test_diverged_run_keeps_the_good_checkpoint(dtype, bad, stopped, message, advice, tmp_path):
    """Losses are NaN from step 20 on, or updates from step 29 on, the last one before a checkpoint."""

    def step(state, batch, key):
        finite = jnp.isfinite(batch["loss"])
        scale = None if state.loss_scale is None else state.loss_scale.update(finite)
        params = jax.tree.map(lambda w: w + batch["update"], state.params)
        return state._replace(params=params, loss_scale=scale), jnp.where(finite, 1.0, batch["loss"])

    def batch_at(step):
        lost = step >= {"loss": 20, "update": 29}[bad]
        return {"loss": jnp.float32(0.0), "update": jnp.float32(0.0)} | ({bad: jnp.float32(jnp.nan)} if lost else {})

    def begin():  # a new run needs new arrays, since the loop donates them
        scale = LossScale.create(2.0**24) if dtype == "float16" else None
        state = common.State({"w": jnp.ones(2)}, (), scale)
        return common.Run(tmp_path, {"steps": 90, "seed": 0, "dtype": dtype}, state)

    with pytest.raises(SystemExit, match=f"stopped at step {stopped}, which is not saved: .*{message}.*; {advice}"):
        begin().train(step, batch_at, save_every=10, evaluation=NOTHING)
    again = begin()
    assert again.step == stopped - 10 and len(losses(tmp_path)) == again.step
    assert dtype != "float16" or again.state.loss_scale.skipped == 20


def test_too_many_skipped_steps_stop_a_run(tmp_path):
    params, scale = {"w": jnp.ones(2)}, LossScale.create(1.0)

    def skipping(steps):
        state = common.State(params, (), scale._replace(skipped=jnp.int32(steps)))
        run = common.Run(tmp_path / str(steps), {"steps": 90, "seed": 0, "dtype": "float16"}, state)
        run._losses.append(float("nan"))
        return run

    skipping(24)._check()
    with pytest.raises(SystemExit, match="the gradients of 25 steps in a row were not finite"):
        skipping(25)._check()


@pytest.mark.skipif(INTERPRET, reason="takes a minute; on a CPU, programs are the same in every process")
def test_shared_compilation_cache_keeps_runs_equal(minilm, tmp_path):
    root = Path(__file__).resolve().parents[1]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs")}

    def start(name):
        options = ["--preset=small", "--steps=600", "--save-every=200", "--dtype=bfloat16", "--accumulate=2"]
        paths = [f"--model={minilm}", f"--out={tmp_path / name}"]
        return subprocess.Popen([sys.executable, root / "examples" / "pretrain.py", *paths, *options], env=environment)

    assert start("whole").wait() == 0
    process = start("resumed")
    while not (tmp_path / "resumed" / "checkpoints" / "200").is_dir():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait() == common.INTERRUPTED
    assert 200 <= len(losses(tmp_path / "resumed")) < 600
    assert start("resumed").wait() == 0
    for file in ("losses.csv", "model/model.safetensors"):
        assert (tmp_path / "resumed" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file


@pytest.mark.usefixtures("programs_of_its_own")
@pytest.mark.parametrize("named", [None, "", "elsewhere"])
def test_gpu_run_caches_its_programs(named, tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    if named is not None:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", named)
    jax.config.update("jax_compilation_cache_dir", None)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        begin(tmp_path)
    jax.jit(lambda x: x + 1)(jnp.ones(3)).block_until_ready()
    assert (tmp_path / "programs").is_dir() == (named != "elsewhere")
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0


def test_losses_must_match_the_checkpoint(tmp_path):
    run = begin(tmp_path)
    assert all(
        leaf.committed for leaf in jax.tree.leaves(run.state)
    )  # restored arrays are committed, too, and so take the same compiled program
    assert finish(run)
    path = tmp_path / "losses.csv"
    lines = path.read_text().splitlines()
    assert len(lines) == 4 and [*tmp_path.glob("*.part")] == []
    for text, message in (
        ("\n".join(lines[:3]), "losses of 3 steps, .* got 2"),
        ("step,loss\n0,x\n", "cannot be read"),
    ):
        path.write_text(text)
        with pytest.raises(SystemExit, match=message):
            begin(tmp_path)
    path.unlink()
    with pytest.raises(SystemExit, match="cannot be read"):
        begin(tmp_path)


@pytest.mark.parametrize("file", ["state/manifest.ocdbt", "settings/metadata"])
def test_damaged_checkpoint_is_named(file, tmp_path):
    finish(begin(tmp_path))
    for step, then in ((3, "goes on from step 2"), (2, "starts anew")):
        folder = tmp_path / "checkpoints" / str(step)
        (folder / file).write_bytes((folder / file).read_bytes()[:20])
        reason = rf"{folder}, the checkpoint of step {step}, cannot be read: \w+Error: .*"
        with pytest.raises(SystemExit, match=rf"{reason} remove that folder; the same command then {then}$"):
            begin(tmp_path)
        shutil.rmtree(folder)
    assert begin(tmp_path).step == 0


def test_other_settings_are_refused(tmp_path):
    settings = {"steps": 3, "seed": 0, "cores": 2, "jax_enable_x64": False}
    finish(begin(tmp_path, **settings))
    for name, value in settings.items():
        with pytest.raises(SystemExit, match=f"another run: {name} is 'x' and was {value}. To go on"):
            begin(tmp_path, **settings | {name: "x"})
    with pytest.raises(SystemExit, match="another version of this one: only one .* has the settings cores, new. To"):
        begin(tmp_path, **{name: settings[name] for name in settings if name != "cores"}, new=1)
    assert begin(tmp_path, **settings).step == 3


def test_impossible_output_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="--out must name a folder, or where one can be made: .*file"):
        begin(tmp_path / "file")


def test_steps_are_compiled_with_the_options(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "COMPILER_OPTIONS", {"xla_of_this_test": True})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_of_this_test"):
        finish(begin(tmp_path))


@pytest.mark.parametrize("steps", [1, 2, 20])
def test_few_steps_learn_too(steps):
    optimizer, params = common.adamw(0.1, steps), {"w": jnp.ones(2)}
    state = optimizer.init(params)
    for _ in range(steps):
        updates, state = optimizer.update({"w": jnp.ones(2)}, state, params)
        params = optax.apply_updates(params, updates)
    assert (params["w"] < 0.95).all()


def test_gradients_are_clipped():
    optimizer = common.adamw(0.1, 20)

    def momentum(gradient):
        return optax.tree.get(optimizer.update({"w": gradient}, state, params)[1], "mu")["w"]

    params, direction = {"w": jnp.ones(2)}, jnp.array([0.6, 0.8])
    state = optimizer.init(params)
    np.testing.assert_allclose(momentum(50 * direction), 0.1 * direction, rtol=1e-6)
    np.testing.assert_allclose(momentum(direction / 2), 0.05 * direction, rtol=1e-6)


def test_biases_do_not_decay():
    optimizer, params = common.adamw(0.1, 1), {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    np.testing.assert_allclose(updates["kernel"], -0.1 * 0.01, rtol=1e-6)
    assert (updates["bias"] == 0).all()


@pytest.fixture
def given(checkpoint, tmp_path, monkeypatch):
    """Returns what an example passes to the training loop (run, loss and batches) without a step."""

    def given(example, *options):
        found = []
        with monkeypatch.context() as patch:
            patch.setattr(common, "make_step", lambda loss_fn, optimizer, **_: loss_fn)
            patch.setattr(common.Run, "train", lambda *args, **_: found.extend(args))
            out = tmp_path / "-".join(("run", *options))
            assert example.main([f"--model={checkpoint}", f"--out={out}", *options]) == common.INTERRUPTED
        return found

    return given


@pytest.mark.parametrize("example", [pretrain, finetune])
def test_options_select_what_is_trained(example, given):
    for options in ([], ["--dtype=bfloat16", "--remat", "--accumulate=2"]):
        run, loss_fn, batch_at = given(example, "--dtype=float32", *options)
        batch, again, other = batch_at(0), batch_at(0), batch_at(1)
        for name, array in batch.items():
            assert array.shape[0] == (2 if options else 1)
            np.testing.assert_array_equal(array, again[name])
        assert not np.array_equal(batch["input_ids"], other["input_ids"])
        one = {name: array[0] for name, array in batch.items()}
        program = str(jax.make_jaxpr(loss_fn)(run.state.params, one, jax.random.key(0)))
        assert ("bf16[" in program, "prevent_cse" in program) == (bool(options), bool(options))
        assert {leaf.dtype.name for leaf in jax.tree.leaves(run.state.params)} == {"float32"}
    loss = jax.jit(lambda key: loss_fn(run.state.params, one, key)[0])
    assert loss(jax.random.key(0)) != loss(jax.random.key(1))  # they differ by dropout


@pytest.mark.usefixtures("kept_programs")
@pytest.mark.parametrize(
    ("packed", "options"),
    [(True, ["--accumulate=2", "--dims", "8", "4"]), *slow_cases((False, []), (True, ["--dtype=float16", "--remat"]))],
)
def test_embedder_learns_and_resumes(packed, options, embedder_checkpoint, tmp_path, monkeypatch, capsys):
    """The pairs of two micro-batches are compared with each other: the loss begins near log(48), not near log(24)."""
    monkeypatch.setattr(train_embedder.batching, "packs", lambda implementation: packed)

    def run(name):
        paths = [f"--model={embedder_checkpoint}", f"--out={tmp_path / name}"]
        return train_embedder.main([*paths, "--save-every=10", *options]), capsys.readouterr().out

    with monkeypatch.context() as patch:
        at_step(patch, 14, lambda: os.kill(os.getpid(), signal.SIGTERM))
        code, printed = run("resumed")
    assert code == common.INTERRUPTED and "interrupted after step 15" in printed
    code, printed = run("resumed")
    assert code == 0 and "resumed after step 15" in printed
    found = dict(re.findall(r"(.*): from 0\.\d+ to (\d\.\d+)", printed))
    metrics = [f"{name}{cut}" for cut in ("", ", 8 dimensions", ", 4 dimensions")
               for name in ("recall@1", "recall@10", "nDCG@10")]  # fmt: skip
    assert [*found] == metrics[: 9 if "--dims" in options else 3]
    results = json.loads((tmp_path / "resumed" / "retrieval.json").read_text())
    assert {name: f"{value:.3f}" for name, value in results[str(STEPS)].items()} == found
    assert results["0"]["nDCG@10"] < 0.5 < 0.7 < results[str(STEPS)]["nDCG@10"]
    (tmp_path / "whole").mkdir()
    assert run("whole")[0] == 0
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")
    encoder = SentenceEncoder.from_pretrained(tmp_path / "resumed" / "model")
    _, held_out = train_embedder.docstring_pairs()
    sides = [encoder.encode(texts) for texts in zip(*held_out, strict=True)]
    again = train_embedder.retrieval(*sides, [tiny.WIDTH])
    np.testing.assert_allclose(again["nDCG@10"], results[str(STEPS)]["nDCG@10"], atol=0.02)
    assert encoder.max_seq_length == SentenceEncoder.from_pretrained(embedder_checkpoint).max_seq_length


def test_classifier_starts_from_the_checkpoint(checkpoint, given):
    run, _, _ = given(finetune, "--seed=1")  # the seed of the checkpoint is 0
    encoder = BertModel.from_pretrained(checkpoint, param_dtype=jnp.float32)
    encoder.pooler = None  # the classifier's pooler is new
    jax.tree.map(np.testing.assert_array_equal, run.state.params["bert"], nnx.state(encoder))


@pytest.mark.parametrize(("example", "missing"), [(pretrain, "tokenizer.json"), (finetune, "model.safetensors")])
def test_folder_without_a_checkpoint_is_named(example, missing, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "model")
    for file in (missing, "vocab.txt"):
        (tmp_path / "model" / file).unlink()
    with pytest.raises(SystemExit, match=f"--model: .*model.* n.*{missing}"):
        common.run(lambda: example.main([f"--model={tmp_path / 'model'}", f"--out={tmp_path / 'out'}"]))


@pytest.mark.slow
def test_fused_training_takes_the_same_steps(capsys):
    fuse_linen.main("--layers 1 --width 32 --heads 2 --batch 2 --length 16 --steps 3 --dtype float32 --force".split())
    text = capsys.readouterr().out
    original, fused = (np.array(pair, float) for pair in re.findall(r"loss ([\d.]+) -> ([\d.]+)", text))
    np.testing.assert_allclose(fused, original, atol=2e-4)
    assert "feed_forward_residual_layer_norm" in text and original[1] < original[0]
