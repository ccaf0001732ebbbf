"""`jaxft bench --latency` times single queries beside plain JAX and sentence-transformers."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import tiny
from jaxft import cli, latency
from jaxft.models import bert
from jaxft.text.sentence_encoder import SentenceEncoder

ROOT = Path(__file__).resolve().parents[1]
PEER = """
import os
class SentenceTransformer:
    def __init__(self, folder, model_kwargs):
        assert os.path.isdir(folder) and model_kwargs == {"dtype": "of torch", "attn_implementation": "sdpa"}
    def encode(self, query, show_progress_bar):
        assert show_progress_bar is False
        if os.environ.get("FAIL"):
            raise MemoryError("out of memory")
        print("a line of the library")
        return query
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny.write_sentence_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def peer(tmp_path, monkeypatch):
    """A library of the name sentence_transformers."""
    (tmp_path / "sentence_transformers.py").write_text(PEER)
    (tmp_path / "torch.py").write_text("float32 = bfloat16 = 'of torch'")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


def test_times_are_those_of_all_calls():
    calls = [0]

    def encode(query):
        calls[0] += 1
        time.sleep(0.05 if calls[0] == 10 else 0.001)

    found = latency.measure({"of one": encode}, 1, 20)["of one"]
    assert calls[0] == 20
    assert 1 <= found.p50_ms <= found.p95_ms and 50 <= found.p99_ms
    assert found.per_second < 20 / 0.069


def test_percentile_is_not_exceeded_by_enough_calls():
    assert latency._latency([n / 1e3 for n in range(100, 0, -1)], 4.0) == (50.0, 95.0, 99.0, 25.0)
    assert latency._latency([0.003, 0.001, 0.002], 1.0) == (2.0, 3.0, 3.0, 3.0)


def test_callers_call_at_the_same_time():
    inside, together = threading.Semaphore(0), threading.Barrier(3, timeout=20)

    def encode(query):
        if threading.current_thread() is not threading.main_thread():
            together.wait()
            inside.release()

    latency.measure({"of one": encode}, 3, 4)
    assert inside._value == 12


def test_encoders_take_turns():
    order = []
    encoders = {name: lambda query, name=name: order.append(name) for name in "ab"}
    found = latency.measure(encoders, 1, 20)
    assert order == (["a"] * 4 + ["b"] * 4) * 5
    assert [*found] == ["a", "b"]


@pytest.mark.parametrize(("callers", "calls"), [(1, 8), (3, 8), (1, 11), (8, 1)])
def test_few_calls_time_all_kinds_of_queries(callers, calls):
    seen = []
    latency.measure({"of one": seen.append}, callers, calls)
    assert {*seen} == {*latency.QUERIES} and len(seen) == callers * calls


@pytest.mark.parametrize("callers", [1, 3, 8])
def test_default_number_of_calls_is_that_of_all_callers(callers):
    calls = []
    latency.measure({"of one": calls.append}, callers, None)
    assert latency.CALLS <= len(calls) < latency.CALLS + callers


def test_error_of_a_caller_is_raised():
    def encode(query):
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        latency.measure({"of one": encode}, 2, 3)


def test_table_and_json(model, peer, tmp_path, capsys):
    out = tmp_path / "out.json"
    arguments = ["--callers", "1", "2", "1", "--calls", "2", "--dtype", "float32", "-o", str(out)]
    assert cli.main(["bench", "--latency", "--model", model, *arguments]) == 0
    head, _, columns, *lines = capsys.readouterr().out.splitlines()
    assert model in head and "float32" in head
    assert columns.split() == ["callers", "variant", "p50", "ms", "p95", "ms", "p99", "ms", "queries/s"]
    variants = [(count, name) for count in (1, 2) for name in ("jaxft", "xla")]
    variants += [(count, "sentence-transformers") for count in (1, 2)]
    assert [(int(line.split()[0]), line.split()[1]) for line in lines] == variants
    assert all(re.fullmatch(r"\d+\.\d\d", cell) for line in lines for cell in line.split()[2:])
    results = json.loads(out.read_text())["results"]
    assert [(r["callers"], r["variant"]) for r in results] == variants
    assert all(0 < r["p50_ms"] <= r["p95_ms"] <= r["p99_ms"] and r["per_second"] > 0 for r in results)


def fails(capsys, *arguments):
    assert cli.main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()[-1].removeprefix("jaxft: error: ")


def test_failure_of_the_peer_is_named_after_the_other_times(model, peer, monkeypatch, capsys):
    monkeypatch.setenv("FAIL", "1")
    assert cli.main(["bench", "--model", model, "--latency", "--calls", "1", "--callers", "1"]) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].endswith(": sentence-transformers failed: MemoryError: out of memory")
    assert [line.split()[1] for line in captured.out.splitlines()[3:]] == ["jaxft", "xla"]


def test_times_are_printed_as_soon_as_they_are_measured(model, monkeypatch, capsys):
    printed = []
    measure = latency.measure

    def watched(*args):
        printed.append(len(capsys.readouterr().out.splitlines()))
        return measure(*args)

    monkeypatch.setattr(latency, "measure", watched)
    monkeypatch.setattr(latency.importlib.util, "find_spec", lambda name: None)  # no other library
    assert cli.main(["bench", "--model", model, "--latency", "--calls", "1", "--callers", "1", "2"]) == 0
    assert printed == [0, 5]  # the head, and two variants


def test_more_callers_than_threads_are_an_error(model, monkeypatch, capsys):
    class Thread(threading.Thread):
        def start(self):
            if self._target.__qualname__ == "_turn.<locals>.work" and self._args == (3,):
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(latency.threading, "Thread", Thread)
    message = fails(capsys, "--model", model, "--latency", "--calls", "1", "--callers", "5")
    assert message == "5 callers: can't start new thread"


def test_peer_ends_with_its_caller(peer, tmp_path):
    (tmp_path / "torch.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)")
    command = [sys.executable, "-m", "jaxft.latency", str(tmp_path), "float32", "1", "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.stdin.close()
        assert process.wait(20) == 1


def test_peer_encodes_all_queries_before_it_is_timed(peer, tmp_path, capsys):
    latency._main(str(tmp_path), "bfloat16", "2", "1", "3")
    *lines, found = capsys.readouterr().out.splitlines()
    assert lines == ["a line of the library"] * (len(latency.QUERIES) + 2 + 3 * 2)
    assert [len(times) for times in json.loads(found)] == [4, 4]


def test_variants_are_loaded_as_told(model, monkeypatch):
    seen, load = [], SentenceEncoder.from_pretrained

    def watched(folder, **options):
        seen.append(options)
        return load(folder, dtype="float32")

    monkeypatch.setattr(SentenceEncoder, "from_pretrained", watched)
    next(latency.compare(Path(model), "bfloat16", [1], 1, "fp8"))
    assert seen == [{"dtype": "bfloat16", "quantization": "fp8"},
                    {"dtype": "bfloat16", "implementation": "xla", "packed": False}]  # fmt: skip


def test_other_embeddings_are_not_timed(model, monkeypatch, capsys):
    encode = SentenceEncoder.encode

    def wrong(self, inputs, **options):
        """Changes one embedding such that its cosine with the right one is 0.97."""
        found = encode(self, inputs, **options)
        if self.model.embeddings.options.implementation == "xla" or inputs != latency.QUERIES[3]:
            return found
        length = np.linalg.norm(found)
        other = np.roll(found, 1) - found * (np.roll(found, 1) @ found) / length**2
        return 0.97 * found + (1 - 0.97**2) ** 0.5 * other * length / np.linalg.norm(other)

    monkeypatch.setattr(SentenceEncoder, "encode", wrong)
    message = fails(capsys, "--model", model, "--latency", "--calls", "1")
    assert message.startswith("jaxft's embeddings have a cosine of 0.9700 with") and "nothing was timed" in message


@pytest.mark.parametrize(("options", "message"), [
    (["--latency", "--batch", "1"], "--batch has no meaning with --latency"),
    (["--latency", "--chart", "out.png"], "--chart has no meaning with --latency"),
    (["--latency", "--length", "8"], "--length has no meaning with --latency"),
    (["--callers", "2"], "--callers has no meaning without --latency"),
    (["--calls", "2"], "--calls has no meaning without --latency"),
    (["--latency", "-o", "out.txt"], "output 'out.txt' must end in .json"),
])  # fmt: skip
def test_options_of_the_other_kind_are_errors(model, capsys, options, message):
    assert fails(capsys, "--model", model, *options) == message


def test_options_reach_the_comparison(model, monkeypatch, capsys, tmp_path):
    seen = []
    one = [(1, "jaxft", latency.Latency(1.0, 1.0, 1.0, 1000.0))]
    monkeypatch.setattr(latency, "compare", lambda *arguments: seen.append(arguments) or one)
    for given in ([], ["--callers", "2", "1", "2", "--calls", "7", "--quantization", "fp8", "--dtype", "float16"]):
        assert cli.main(["bench", "--latency", "--model", model, *given, "-o", str(tmp_path / "out.json")]) == 0
        quantization = "fp8" if given else None
        assert json.loads((tmp_path / "out.json").read_text())["quantization"] == quantization
        assert ("float16, jaxft in fp8, " if given else "float32, ") in capsys.readouterr().out
    assert [options for _, *options in seen] == [["float32", [1, 8], None, None], ["float16", [2, 1], 7, "fp8"]]


@pytest.mark.parametrize("options", [[], ["--quantization", "fp8"], ["--dtype", "float32"]])
def test_model_saved_in_float8_is_refused(options, tmp_path, capsys):
    """The model is in a folder of its own, which modules.json names."""
    tiny.write_sentence_model(tmp_path)
    inner = tmp_path / "0_Transformer"
    tiny.write_model(inner, hidden_size=128, intermediate_size=128)
    bert.BertModel.from_pretrained(inner, quantization="fp8").save_pretrained(inner)
    tiny.write_modules(
        tmp_path, (tiny.TYPES + "Transformer", "0_Transformer"), (tiny.TYPES + "Pooling", "1_Pooling")
    )  # fmt: skip
    message = fails(capsys, "--model", str(tmp_path), "--latency", "--calls", "1", *options)
    assert message == f"{tmp_path}: is in float8; bench needs the 16-bit model, with --quantization fp8"
