"""The examples run, and a run that is interrupted and resumed is bitwise the one that was not."""

import csv
import dataclasses
import json
import os
import random
import re
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
import custom_modules
import finetune
import pretrain
import tiny
import train_parity
from cases import INTERPRET
from jaxft import BertConfig, BertForMaskedLM, BertForSequenceClassification
from jaxft.models import tokenizer as tokenizer_files
from jaxft.models.training import LossScale

STEPS = 40
CONFIG = dataclasses.replace(tiny.config(initializer_range=0.02), vocab_size=30522)
SUBJECTS = {"birds": "bird sings tree", "weather": "rain falls on", "waters": "river old ."}


def some_texts(count=240):
    """Made of the words of a subject and some that all of them have -> the subject."""
    rng = random.Random(0)
    subjects = list(SUBJECTS) * (count // len(SUBJECTS))
    return {" ".join(rng.choices(SUBJECTS[s].split() * 2 + ["a", "in", "the"], k=12)) + " " * 20: s for s in subjects}


@pytest.fixture(autouse=True)
def standard_promotion():
    """optax and Flax do not run under strict dtype promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(autouse=True)
def quick_compiler():
    """On a CPU: compiling takes longer than anything else here, and half of that is optimisation."""
    jax.config.update("jax_disable_most_optimizations", INTERPRET)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.write_model(tmp_path_factory.mktemp("checkpoint"), hidden_dropout_prob=0.1)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Texts and sizes for seconds."""
    monkeypatch.setattr(common, "paragraphs", some_texts)
    preset = pretrain.Preset(CONFIG, length=16, rows=128, steps=STEPS, learning_rate=1e-2)
    monkeypatch.setattr(pretrain, "PRESETS", {"small": preset, "base": preset})
    monkeypatch.setattr(pretrain, "EVALUATED", 1)
    labelled = finetune.Preset(length=16, batch=8, steps=STEPS, learning_rate=1e-2, labels=3)
    monkeypatch.setattr(finetune, "PRESETS", {"small": labelled, "base": labelled})


def losses(out):
    """As they are written: of the same digits only if they are bitwise the same."""
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


def test_interrupted_before_the_first_step():
    """Or after the last, where there is nothing to save: an exit code and no traceback."""

    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stopped:
        common.run(main)
    assert stopped.value.code == common.INTERRUPTED


@pytest.mark.parametrize(
    ("example", "options", "number"),
    [
        (pretrain, ["--dtype=float16", "--accumulate=2", "--remat", "--peak-tflops=0.5"], signal.SIGINT),
        (finetune, ["--dtype=float32"], signal.SIGTERM),
    ],
    ids=["pretrain", "finetune"],
)
def test_interrupted_and_resumed_is_bitwise_the_same(
    example, options, number, checkpoint, tmp_path, monkeypatch, capsys
):
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
    # The step that it came in is done.
    assert f"interrupted after step 25 of {STEPS}" in printed and len(losses(tmp_path / "resumed")) == 25
    assert not (tmp_path / "resumed" / "model").exists()
    code, printed = run("resumed")
    assert code == 0 and "resumed after step 25\n" in printed

    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")
    whole, resumed = (evaluations(tmp_path / name) for name in ("whole", "resumed"))
    assert {**resumed, **whole} == resumed and resumed.keys() - whole.keys() == {"25"}
    files = [tmp_path / name / "model" / "model.safetensors" for name in ("whole", "resumed")]
    assert files[0].read_bytes() == files[1].read_bytes()

    with pytest.raises(SystemExit, match="has the checkpoints of another run: seed is 1 and was 0. To go on"):
        run("whole", "--seed=1")


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
    assert [*evaluations(out)] == ["0", "10", "20", "30", "40"]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    tokenizer_files.load(out / "model", do_lower_case=False)
    if example is finetune:
        model = BertForSequenceClassification.from_pretrained(out / "model")
        assert set(model.id2label.values()) == set(SUBJECTS)
    else:
        assert BertForMaskedLM.from_pretrained(out / "model").config.vocab_size == len(tiny.VOCAB)


@pytest.mark.parametrize(
    ("dtype", "bad", "stopped", "message", "advice"),
    [
        ("float32", "loss", 30, "the loss is nan", "a lower learning rate in the preset may help"),
        ("float32", "update", 30, "the parameters are not finite", "a lower learning rate in the preset may help"),
        ("bfloat16", "update", 30, "the parameters are not finite", "another --dtype or a lower learning rate"),
        # The first 24 may be the scale's fault.
        ("float16", "loss", 50, "of 30 steps in a row were not finite", "another --dtype or a lower learning rate"),
    ],
)
def test_a_run_that_is_lost_stops_before_it_replaces_a_good_checkpoint(dtype, bad, stopped, message, advice, tmp_path):
    """From step 20 on, no loss is finite; or no update is from step 29 on, the last before a checkpoint."""

    def step(state, batch, key):
        finite = jnp.isfinite(batch["loss"])
        scale = None if state.loss_scale is None else state.loss_scale.update(finite)
        params = jax.tree.map(lambda w: w + batch["update"], state.params)
        return state._replace(params=params, loss_scale=scale), jnp.where(finite, 1.0, batch["loss"])

    def batch_at(step):
        lost = step >= {"loss": 20, "update": 29}[bad]
        return {"loss": jnp.float32(0.0), "update": jnp.float32(0.0)} | ({bad: jnp.float32(jnp.nan)} if lost else {})

    def begin():  # with arrays of its own, which the loop donates
        scale = LossScale.create(2.0**24) if dtype == "float16" else None
        state = common.State({"w": jnp.ones(2)}, (), scale)
        return common.Run(tmp_path, {"steps": 90, "seed": 0, "dtype": dtype}, state)

    with pytest.raises(SystemExit, match=f"stopped at step {stopped}, which is not saved: .*{message}.*; {advice}"):
        begin().train(step, batch_at, save_every=10)
    again = begin()
    assert again.step == stopped - 10 and len(losses(tmp_path)) == again.step
    assert dtype != "float16" or again.state.loss_scale.skipped == 20


@pytest.mark.skipif(INTERPRET, reason="takes a minute; on a CPU, programs are the same in every process")
def test_processes_that_share_their_programs_are_bitwise_the_same(minilm, tmp_path):
    root = Path(__file__).resolve().parents[1]
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs")}

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


@pytest.fixture
def programs_of_its_own():
    """What a run sets in JAX is as it was after the test."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("programs_of_its_own")
@pytest.mark.parametrize("named", [None, "", "elsewhere"])
def test_a_run_on_a_gpu_keeps_its_programs(named, tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    if named is not None:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", named)
    jax.config.update("jax_compilation_cache_dir", None)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        common.Run(tmp_path, {"steps": 1, "seed": 0}, common.State({"w": jnp.ones(2)}, (), None))
    jax.jit(lambda x: x + 1)(jnp.ones(3)).block_until_ready()
    assert (tmp_path / "programs").is_dir() == (named != "elsewhere")
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0


@pytest.mark.parametrize("steps", [1, 2, 20])
def test_few_steps_learn_too(steps):
    optimizer, params = common.adamw(0.1, steps), {"w": jnp.ones(2)}
    state = optimizer.init(params)
    for _ in range(steps):
        updates, state = optimizer.update({"w": jnp.ones(2)}, state, params)
        params = optax.apply_updates(params, updates)
    assert (params["w"] < 0.95).all()


def test_settings_are_those_that_change_the_bits():
    args = common.arguments(None, "x", {"small": 0, "base": 1}).parse_args(["--model=a", "--out=b"])
    found = common.settings(args, data="c")
    versions = {"jax": jax.__version__, "numpy": np.__version__, "optax": optax.__version__}
    assert versions.items() <= found.items() and {"jaxlib", "flax", "jaxft", "device", "dtype", "data"} <= found.keys()
    assert not {"model", "out", "save_every"} & found.keys()


def test_a_tokenizer_without_a_mask(tmp_path):
    with pytest.raises(SystemExit, match=r"pretrain: the tokenizer has no \[MASK\], which masking needs"):
        tokenizer = tiny.bert_tokenizer()
        vocab = json.loads(tokenizer.to_str())
        del vocab["model"]["vocab"]["[MASK]"]
        vocab["added_tokens"] = [token for token in vocab["added_tokens"] if token["content"] != "[MASK]"]
        pretrain.Documents(["a"], type(tokenizer).from_str(json.dumps(vocab)), pretrain.PRESETS["small"])


def test_masked_batches():
    tokenizer = tiny.bert_tokenizer()
    documents = pretrain.Documents(list(some_texts()), tokenizer, pretrain.PRESETS["small"])
    assert documents.lengths.max() <= 16 and all(s[0] == 2 and s[-1] == 3 for s in documents.sequences)
    known = {tuple(sequence) for sequence in documents.sequences}
    counts = np.zeros(4)
    for step in range(100):
        batch = documents.batch(np.random.default_rng(step))
        ids, labels, ends = batch["input_ids"], batch["labels"], batch["cu_seqlens"]
        original = np.where(labels >= 0, labels, ids)
        sequences = [tuple(original[a:b]) for a, b in zip(ends, ends[1:], strict=False) if b > a]
        assert set(sequences) <= known and ends[0] == 0 and 128 - 16 <= ends[-1] <= 128 and len(ends) == 128 // 16 + 1
        assert (ids[ends[-1] :] == 0).all() and (labels[ends[-1] :] == -100).all()
        assert not np.isin(original[labels >= 0], [0, 2, 3]).any()
        inner = ends[-1] - 2 * len(sequences)
        masked, same = (labels >= 0) & (ids == documents.mask), (labels >= 0) & (ids == labels)
        counts += inner, (labels >= 0).sum(), masked.sum(), same.sum()
    np.testing.assert_allclose(counts[1] / counts[0], 0.15, atol=0.01)
    np.testing.assert_allclose(counts[2:] / counts[1], [0.8, 0.1], atol=0.03)
    for name, array in pretrain.batches(documents, [0, 3], 2).items():
        np.testing.assert_array_equal(array, pretrain.batches(documents, [0, 3], 2)[name])
        assert array.shape[0] == 2


def test_flops_are_six_a_parameter_and_token():
    """Those of the matrices of layers and head; of the embeddings only as the last one, for tokens to be predicted."""
    model = nnx.eval_shape(lambda: BertForMaskedLM(BertConfig(), rngs=nnx.Rngs(0)))
    sizes = {name: np.prod(parameter.shape) for name, parameter in model._parameters().items()}
    kernels = sum(size for name, size in sizes.items() if name.endswith("kernel"))
    labels = np.full((2, 256), -100)
    labels[0, :30] = 5
    batch = {"labels": labels, "cu_seqlens": np.array([[0, 100, 200, 200], [0, 50, 50, 50]])}
    attention = 12 * 12 * 768 * (100**2 + 100**2 + 50**2)
    expected = 6 * kernels * 250 + 6 * sizes["embeddings.word"] * 30 + attention
    assert pretrain.flops(BertConfig(), batch) == expected


def test_peak(monkeypatch):
    assert pretrain.peak_flops("bfloat16", 100.0) == 1e14
    for kind, dtype, tflops in (("NVIDIA H200", "bfloat16", 989.5), ("NVIDIA A100-SXM4-80GB", "float32", 156.0)):
        monkeypatch.setattr(pretrain.dispatch, "device_kind", lambda kind=kind: kind)
        assert pretrain.peak_flops(dtype, None) == tflops * 1e12
    monkeypatch.setattr(pretrain.dispatch, "device_kind", lambda: "cpu")
    assert pretrain.peak_flops("float32", None) is None


def test_paragraphs(tmp_path, monkeypatch):
    monkeypatch.undo()
    (tmp_path / "package" / "test").mkdir(parents=True)
    code = '"""First\n  line.\n\n\nIn both."""\nclass A:\n    """Class."""\n    def f(self):\n        """Method."""\n'
    (tmp_path / "package" / "a.py").write_text(code)
    (tmp_path / "package" / "test" / "b.py").write_text('"""A test."""')
    (tmp_path / "module.py").write_text('"""In both.\n\nAlone."""')
    monkeypatch.setattr(common.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    expected = {"Alone.": "module", "First line.": "package", "Class.": "package", "Method.": "package"}
    assert common.paragraphs() == expected
    held_out = [common.held_out(str(number)) for number in range(2000)]
    assert 0.08 < np.mean(held_out) < 0.12


@pytest.mark.parametrize("value", ["0", "-1", "x"])
def test_counts_are_positive(value, capsys):
    with pytest.raises(SystemExit):
        finetune.main(["--model", "x", "--steps", value])
    assert "argument --steps: invalid positive value" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "x"])
def test_a_peak_is_positive(value, capsys):
    with pytest.raises(SystemExit):
        pretrain.main(["--model", "x", "--peak-tflops", value])
    assert "argument --peak-tflops: invalid positive_float value" in capsys.readouterr().err


def test_custom_modules(monkeypatch, capsys):
    custom_modules.main()
    assert re.search(r"NNX: the loss falls from .*\nLinen: the loss falls from", capsys.readouterr().out)
    monkeypatch.setattr(custom_modules, "STEPS", 1)
    with pytest.raises(AssertionError):
        custom_modules.train("flat", lambda params, digits: params[digits], np.zeros((10, 10), np.float32))


# --- Training with kernels and without -------------------------------------------------------------------------


@pytest.fixture
def small_parity(monkeypatch):
    sizes = {"CONFIG": dataclasses.replace(CONFIG, vocab_size=50, num_hidden_layers=1, max_position_embeddings=16)}
    sizes |= {"BATCH": 4, "LENGTH": 12, "STEPS": 60, "LEARNING_RATE": 5e-3, "docstrings": lambda: list(some_texts())}
    sizes |= {"IMPLEMENTATIONS": {"jaxft": "triton", "xla": "xla"}}
    for name, value in sizes.items():
        monkeypatch.setattr(train_parity, name, value)


def test_parity(small_parity, tmp_path, capsys):
    """The kernels, in interpret mode where there is no GPU, train as plain XLA does."""
    assert train_parity.main(["--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("PASS") == 2
    (path,) = tmp_path.glob("*.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 60 and path.with_suffix(".png").exists()
    for name in ("bfloat16 jaxft", "bfloat16 xla", "float32 jaxft", "float32 xla"):
        values = [float(row[name]) for row in rows]
        assert np.mean(values[-20:]) < 0.8 * np.mean(values[:20])
    assert rows[0]["jax"] == jax.__version__ and rows[0]["commit"] and rows[0]["date"]
    assert rows[5]["bfloat16 jaxft"] != rows[5]["float32 jaxft"]


@pytest.mark.parametrize(("dtype", "wrong"), [("bfloat16", 1.011), ("float32", 1.0002), ("float32", np.nan)])
def test_parity_fails_beyond_its_bounds(dtype, wrong, small_parity, tmp_path, monkeypatch, capsys):
    def losses(case, implementation, data):
        factor = wrong if case.dtype == dtype and implementation == "xla" else 1.0
        return np.where(np.arange(60) < 40, 1.0, factor)

    monkeypatch.setattr(train_parity, "losses", losses)
    assert train_parity.main(["--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert printed.count("PASS") == 1 and re.search(rf"{dtype}: .*: FAIL", printed)


def test_losses_that_do_not_fit_their_checkpoint_are_refused(tmp_path):
    def begin():
        return common.Run(tmp_path, {"steps": 3, "seed": 0}, common.State({"w": jnp.ones(2)}, (), None))

    run = begin()
    assert all(leaf.committed for leaf in jax.tree.leaves(run.state))  # as restored ones: the same compiled program
    assert run.train(lambda state, batch, key: (state, jnp.sum(batch)), lambda step: jnp.ones(2), save_every=3)
    path = tmp_path / "losses.csv"
    lines = path.read_text().splitlines()
    assert len(lines) == 4 and [*tmp_path.glob("*.part")] == []
    for text, message in (
        ("\n".join(lines[:3]), "losses of 3 steps, .* got 2"),
        ("step,loss\n0,x\n", "cannot be read"),
    ):
        path.write_text(text)
        with pytest.raises(SystemExit, match=message):
            begin()
    path.unlink()
    with pytest.raises(SystemExit, match="cannot be read"):
        begin()
