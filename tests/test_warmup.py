"""`warmup` compiles exactly the programs that later calls need, and calls compile several programs at a time."""

import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

import peer_models
import tiny
from cases import slow, slow_cases
from jaxft import cli, dispatch
from jaxft.text import batching, devices, text_encoder
from jaxft.text.cross_encoder import CrossEncoder
from jaxft.text.multi_vector_encoder import MultiVectorEncoder
from jaxft.text.sentence_encoder import SentenceEncoder
from jaxft.text.sparse_encoder import SparseEncoder

ROOT = Path(__file__).resolve().parents[1]
TEXTS = [" ".join(random.Random(i).choices(tiny.WORDS, k=1 + i * 7 % 70)) for i in range(150)]
COUNTS = (1, 2, 3, 4, 5, 9, 150)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_sentence_model(tmp_path_factory.mktemp("model"))


def load(kind, folder, tmp_path, packed):
    """Returns an encoder, and functions that compute all texts and a single one."""
    if kind == "sentence":
        encoder = SentenceEncoder.from_pretrained(folder, packed=packed)
        return encoder, encoder.encode, {"batch_size": 4}
    if kind == "cross":
        encoder = CrossEncoder.from_pretrained(tiny.write_classifier(tmp_path), packed=packed)
        return encoder, lambda texts, **o: encoder.predict([("rain", text) for text in texts], **o), {"batch_size": 4}
    if kind == "sparse":
        peer_models.write(tmp_path / "splade", "splade")
        encoder = SparseEncoder.from_pretrained(tmp_path / "splade", packed=packed)
        return encoder, encoder.encode, {"batch_size": 4}
    peer_models.write_stanford(tmp_path / "colbert", None)
    encoder = MultiVectorEncoder.from_pretrained(tmp_path / "colbert", packed=packed)
    return encoder, encoder.encode, {"batch_size": 4}


@pytest.mark.parametrize(("kind", "packed"), [
    ("sentence", True), ("cross", False),
    *slow_cases(("sentence", False), ("cross", True)),
    *slow_cases(*((kind, packed) for kind in ("sparse", "multi-vector") for packed in (False, True))),
])  # fmt: skip
def test_nothing_compiles_after_warmup(kind, folder, tmp_path, packed, compiled):
    encoder, compute, options = load(kind, folder, tmp_path, packed)
    encoder.max_seq_length = 24
    assert encoder.warmup(**options) is None
    shapes = len(encoder._dealer._programs)
    assert shapes == (len(encoder.buckets(4)) if packed else 2 * 3)  # two lengths, and 1, 2 or 4 rows
    assert len(compiled) >= shapes
    compiled.clear()
    for count in COUNTS:
        compute(TEXTS[:count], **options)
    assert compiled == [] and len(encoder._dealer._programs) == shapes
    encoder.warmup(**options)
    assert compiled == []


def test_sentence_encoder_compiles_nothing_but_the_shapes(folder, compiled):
    encoder = SentenceEncoder.from_pretrained(folder, packed=True)
    encoder.encode("rain", batch_size=4)  # programs of no shape, if there are any
    compiled.clear()
    encoder.warmup(batch_size=4)
    assert len(compiled) == len(encoder.buckets(4)) - 1


@pytest.mark.parametrize("options", [
    {"output_value": None}, {"precision": "int8"},
    *slow({"normalize_embeddings": True}, {"truncate_dim": 8}, {"prompt": "the bird "}),
])  # fmt: skip
def test_warmup_takes_the_options_of_calls(folder, options, compiled):
    encoder = SentenceEncoder.from_pretrained(folder, packed=True, max_seq_length=16)
    encoder.warmup(batch_size=1, **options)
    compiled.clear()
    encoder.encode(TEXTS[:9], batch_size=1, **options)
    assert compiled == []


def test_warmup_of_a_task_compiles_for_its_calls(tmp_path, compiled):
    peer_models.write_stanford(tmp_path / "colbert", None)
    encoder = MultiVectorEncoder.from_pretrained(tmp_path / "colbert", packed=True)
    for task, method in (("query", encoder.encode_query), ("document", encoder.encode_document)):
        encoder.warmup(batch_size=2, task=task)
        compiled.clear()
        method(TEXTS[:40], batch_size=2)
        assert compiled == []


def test_many_scores_need_no_further_program(tmp_path, compiled):
    encoder = CrossEncoder.from_pretrained(tiny.write_classifier(tmp_path, num_labels=3), packed=True, max_length=8)
    encoder.warmup(batch_size=8, apply_softmax=True)
    compiled.clear()
    pairs = [("rain", "bird")] * 2500
    scores = encoder.predict(pairs, batch_size=8, apply_softmax=True)
    assert compiled == [] and scores.shape == (2500, 3)
    np.testing.assert_allclose(scores, np.tile(scores[:1], (2500, 1)), atol=1e-5)


@pytest.mark.parametrize(("options", "error"), [
    ({"batch_size": 0}, ValueError), ({"prompt_name": "none"}, ValueError), ({"task": "x"}, ValueError),
    ({"show_progress_bar": 3}, TypeError), ({"device": "cpu"}, TypeError), ({"devices": [99]}, ValueError),
])  # fmt: skip
def test_wrong_options_are_errors(folder, options, error):
    with pytest.raises(error):
        SentenceEncoder.from_pretrained(folder).warmup(**options)


def test_progress_counts_programs(folder, capsys):
    encoder = SentenceEncoder.from_pretrained(folder, packed=True)
    encoder.warmup(batch_size=1, show_progress_bar=True)
    count = len(encoder.buckets(1))
    assert f"{count}/{count}" in capsys.readouterr().err
    encoder.warmup(batch_size=1)
    assert capsys.readouterr().err == ""


# --- Programs of later batches ----------------------------------------------------------------------------------


class Held:
    """An executor that holds its tasks until `release`."""

    def __init__(self):
        self.tasks = []

    def submit(self, function):
        self.tasks.append((future := devices.Future(), function))
        return future

    def release(self):
        for future, function in self.tasks:
            future.set_result(function())


class Watched:
    """A jitted function that counts its calls."""

    def __init__(self, function):
        self.function, self.lower, self.calls = function, function.lower, 0

    def __call__(self, *args):
        self.calls += 1
        return self.function(*args)


def test_later_programs_compile_before_the_first_is_there(folder, monkeypatch):
    encoder = SentenceEncoder.from_pretrained(folder, packed=True)
    expected = encoder.encode(TEXTS, batch_size=4)
    shapes = len(encoder._dealer._programs)
    assert shapes > 1
    again, held = SentenceEncoder.from_pretrained(folder, packed=True), Held()
    monkeypatch.setattr(devices, "_compilers", lambda is_first: held)
    again._embed = watched = Watched(again._embed)
    found = []
    thread = threading.Thread(target=lambda: found.append(again.encode(TEXTS, batch_size=4)), daemon=True)
    thread.start()
    latest = time.monotonic() + 20
    while len(held.tasks) < shapes:
        assert thread.is_alive() and time.monotonic() < latest
        thread.join(0.01)
    thread.join(0.2)
    assert watched.calls == 0  # a call would compile once more
    held.release()
    thread.join()
    np.testing.assert_array_equal(found[0], again.encode(TEXTS, batch_size=4))
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-5)  # other programs, in which bits may differ


def test_program_that_cannot_be_compiled_is_an_error(folder, monkeypatch):
    encoder, held = SentenceEncoder.from_pretrained(folder, packed=True), Held()
    monkeypatch.setattr(devices, "_compilers", lambda is_first: held)

    def fail(function):
        future = devices.Future()
        future.set_exception(jax.errors.JaxRuntimeError("INTERNAL: no"))
        return future

    monkeypatch.setattr(held, "submit", fail)
    assert encoder.encode("rain").shape == (tiny.WIDTH,)  # the call compiles by itself, and may succeed


def test_threads_compile_a_program_once(folder, compiled):
    encoder = SentenceEncoder.from_pretrained(folder, packed=True)
    expected = SentenceEncoder.from_pretrained(folder, packed=True).encode("rain")
    compiled.clear()
    found = [None] * 6

    def call(i):
        found[i] = encoder.encode("rain")

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1
    later = encoder.encode("rain")
    for one in found:
        np.testing.assert_array_equal(one, later)
    np.testing.assert_allclose(later, expected, rtol=0, atol=1e-5)  # of another program, in which bits may differ


@pytest.mark.parametrize(("kind", "packed"), [
    ("cross", True), ("sentence", True),
    *slow_cases(("cross", False), ("sparse", True), ("sparse", False), ("multi-vector", True), ("multi-vector", False)),
])  # fmt: skip
def test_threads_get_the_bits_of_one(kind, folder, tmp_path, packed):
    """Eight threads call an encoder that has computed nothing yet. Single texts have a way of their own."""
    _, alone, options = load(kind, folder, tmp_path, packed)
    calls = [TEXTS[i : i + 1 + 3 * (i % 2)] for i in range(16)]
    expected = [alone(texts, **options) for texts in calls]
    _, shared, options = load(kind, folder, tmp_path, packed)
    with ThreadPoolExecutor(8) as threads:
        found = [*threads.map(lambda texts: shared(texts, **options), calls * 4)]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected * 4), strict=True):
        a, b = (x.toarray() if hasattr(x, "toarray") else x for x in (a, b))  # SciPy's sparse arrays
        np.testing.assert_array_equal(a, b)


def test_at_most_twenty_programs_at_512_tokens():
    assert len(batching.buckets(32, 512)) <= 20


# --- The command line --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "options"), [
    ("encode", ["--normalize"]), ("similar", []), ("rerank", []),
])  # fmt: skip
def test_command_compiles_for_a_command(folder, tmp_path, capsys, monkeypatch, command, options):
    monkeypatch.delenv("JAXFT_COMPILATION_CACHE")
    model = tiny.write_classifier(tmp_path) if command == "rerank" else folder
    arguments = ["--model", str(model), "--batch-size", "1", "--max-seq-length", "16", "--for", command, *options]
    assert cli.main(["warmup", *arguments]) == 0
    output = capsys.readouterr()
    assert output.out == "" and "program/s" in output.err and "jaxft: ready after " in output.err


def test_command_finds_the_programs_of_warmup(folder, tmp_path):
    environment = os.environ | {"JAXFT_COMPILATION_CACHE": str(tmp_path)}
    common = ["--model", str(folder), "--batch-size", "1", "--max-seq-length", "24"]
    sizes = []
    for command in (["warmup", *common], ["encode", *common, "-o", "-"]):
        subprocess.run(
            [sys.executable, "-m", "jaxft.cli", *command], input="\n".join(TEXTS[:30]) + "\n", env=environment,
            capture_output=True, check=True, text=True,
        )  # fmt: skip
        sizes.append(len([*tmp_path.glob("jit_embed-*-cache")]))
    shapes = 1 if batching.packs(None) else 2  # packed: 24 tokens, otherwise one row of 16 or 24 tokens
    assert sizes == [shapes] * 2


@pytest.mark.parametrize("output", ["folder/", "file.npy"])
def test_quantized_output_needs_no_program_after_warmup(folder, tmp_path, output, compiled, monkeypatch):
    """A folder gets int8 ranges from its first texts, a file from all texts."""
    monkeypatch.delenv("JAXFT_COMPILATION_CACHE")
    (file := tmp_path / "texts.txt").write_text("\n".join(TEXTS[:30]) + "\n")
    common = ["--model", str(folder), "--batch-size", "1", "--max-seq-length", "16", "--precision", "int8"]
    loaded = SentenceEncoder.from_pretrained(folder, max_seq_length=16, dtype="float32")
    monkeypatch.setattr(SentenceEncoder, "from_pretrained", lambda *_, **__: loaded)  # keeps the programs
    assert cli.main(["warmup", *common]) == 0
    compiled.clear()
    assert cli.main(["encode", *common, str(file), "-o", f"{tmp_path}/{output}"]) == 0
    assert compiled == []


def test_command_needs_the_cache(folder, capsys):
    assert cli.main(["warmup", "--model", str(folder), "--no-compilation-cache"]) == 2
    assert "warmup needs the compilation cache" in capsys.readouterr().err


def _without_memory(*arguments):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")


def test_warmup_raises_the_error_of_a_compilation(folder, monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", _without_memory)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        SentenceEncoder.from_pretrained(folder).warmup(batch_size=1)


AFTER_THE_MAIN_THREAD = """
import sys, threading, time
from jaxft import SentenceEncoder
encoder = SentenceEncoder.from_pretrained(sys.argv[1])
def run():
    threading.main_thread().join()
    time.sleep(0.5)
    print(encoder.encode("rain falls").shape)
threading.Thread(target=run).start()
"""


def test_thread_may_outlive_the_main_thread(folder):
    """No thread can be started then, so the program is compiled by the thread that needs it."""
    code = [sys.executable, "-c", AFTER_THE_MAIN_THREAD, str(folder)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip().endswith(",)"), done.stderr


FORKED = """
import os, sys
from jaxft import SentenceEncoder
encoder = SentenceEncoder.from_pretrained(sys.argv[1])
encoder.encode(["rain falls"] * 9)
if os.fork() == 0:
    try:
        encoder.encode("rain falls")
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_forked_process_gets_an_error(folder):
    """JAX's threads are gone, and a computation would wait for ever."""
    code = [sys.executable, "-W", "ignore", "-c", FORKED, str(folder)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=60)
    assert "encode: this process was forked after the encoder was made" in done.stdout, done.stderr


QUEUED = """
import time
from jaxft.text import devices
for _ in range(50):
    devices._compilers(is_first=False).submit(lambda: (time.sleep(0.2), print("compiled", flush=True)))
"""


LOWERED = """
import time
from jaxft.text import devices, programs
def lower():
    time.sleep(0.5)
    print("lowered", flush=True)
    raise ValueError
state = None, programs.settings()
for _ in range(8):
    devices._compilers(is_first=False).submit(lambda: devices._lower_and_compile(lower, None, None, state, "cpu", 8))
time.sleep(0.1)
"""


@pytest.mark.parametrize(("code", "most"), [(QUEUED, 8), (LOWERED, 1)])
def test_queued_compilations_do_not_delay_the_exit(code, most):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr and 0 < len(done.stdout.splitlines()) <= most


def test_compilation_without_memory_is_tried_again(folder, monkeypatch, compiled):
    encoder = SentenceEncoder.from_pretrained(folder)
    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", _without_memory)
        with pytest.raises(jax.errors.JaxRuntimeError):
            encoder.warmup(batch_size=1)
    compiled.clear()
    encoder.warmup(batch_size=1)
    assert compiled


@pytest.fixture
def imported(monkeypatch):
    """The modules that threads import ahead."""
    found = []
    devices.import_mosaic_gpu.cache_clear()
    monkeypatch.setattr(devices.importlib, "import_module", found.append)
    yield found
    devices.import_mosaic_gpu.cache_clear()


def test_only_cards_that_run_mosaic_import_it_ahead(imported):
    before = threading.enumerate()
    for card in (("NVIDIA H200",), ("NVIDIA L4", (8, 9))):
        with dispatch.target(*card):
            devices.import_mosaic_gpu(dispatch.device())
    if not dispatch.device().is_hopper:
        devices.import_mosaic_gpu(dispatch.device())
    for thread in threading.enumerate():
        if thread not in before:
            thread.join()
    assert imported == ["jaxft.kernels.mosaic_gpu.dense"]


def asked_for_mosaic(monkeypatch):
    """Returns a list that gets an element whenever an encoder starts the import."""
    asked = []
    for module in (devices, text_encoder):
        monkeypatch.setattr(module, "import_mosaic_gpu", asked.append)
    return asked


def test_mosaic_is_imported_before_the_first_program_is_traced(folder, monkeypatch):
    """While the weights are read, unless there are programs of earlier processes; then while XLA compiles."""
    asked = asked_for_mosaic(monkeypatch)
    encoder = SentenceEncoder.from_pretrained(folder)
    assert asked == [dispatch.device()]
    encoder.encode("rain")
    assert asked == [dispatch.device()] * 2
    monkeypatch.setattr(text_encoder.compilation_cache, "is_empty", lambda: False)
    SentenceEncoder.from_pretrained(folder)
    assert len(asked) == 2


def test_programs_without_kernels_import_no_mosaic(folder, tmp_path, monkeypatch):
    asked = asked_for_mosaic(monkeypatch)
    encoder = SentenceEncoder.from_pretrained(folder, implementation="xla", packed=False)
    encoder.encode("rain")
    assert not asked
    encoder = SentenceEncoder.from_pretrained(folder, max_seq_length=8, packed=False)
    encoder.export(tmp_path / "exported", batch_size=1)
    asked.clear()
    SentenceEncoder.from_exported(tmp_path / "exported").encode("rain", batch_size=1)
    assert not asked
