"""Processes that tokenise: the same tokens, errors that name the text, and no process that is left."""

import functools
import os
import subprocess
import sys
import time

import numpy as np
import pytest

import tiny
from jaxft import SentenceEncoder, dispatch
from jaxft.text import batching, long_texts
from jaxft.text.batching import TextError
from jaxft.text.processes import Processes

TEXTS = tiny.texts(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_sentence_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def texts_of(folder):
    """Returns what tokenises for an encoder, with two processes, as on a host with GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "platform", lambda: "cuda")
        patch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
        patch.delenv("TOKENIZERS_PARALLELISM", raising=False)
        encoder = SentenceEncoder.from_pretrained(folder, prompts={"query": "the old "})
        texts_of = encoder._texts(None)
        texts_of.batcher.for_many()
    wait(texts_of.processes, 2)
    return texts_of


def wait(processes, count):
    end = time.monotonic() + 60
    while processes.ready < count:
        assert time.monotonic() < end
        time.sleep(0.01)


def tokens(texts_of, texts, prompt=""):
    found = [chunk for _, chunk in texts_of.batcher.tokenised(texts, lambda some: texts_of.tokenise(prompt, some))]
    return np.concatenate([chunk.ids for chunk in found]).tolist(), [n for chunk in found for n in chunk.lengths]


@pytest.mark.parametrize("prompt", ["", "the old "])
def test_tokens_are_those_of_this_process(texts_of, prompt, monkeypatch):
    monkeypatch.setattr(batching, "_CHUNKS", (64, 70, 70))
    calls = []
    own = Processes.__call__
    monkeypatch.setattr(Processes, "__call__", lambda *a: calls.append(a) or own(*a))
    found = tokens(texts_of, TEXTS, prompt)
    assert len(calls) == 4  # of the last chunk, there are too few
    monkeypatch.setattr(texts_of, "processes", None)
    assert found == tokens(texts_of, TEXTS, prompt)


def test_options_of_the_tokenizer_are_kept(folder):
    encoder = SentenceEncoder.from_pretrained(folder)
    encoder.tokenizer.encode_special_tokens = True
    encoder.max_seq_length = 9
    of_texts = encoder._texts(None)
    of_texts.pad(8, "[MASK]", 0)
    function = functools.partial(long_texts.tokens, of_texts.long_texts, of_texts._padding, True)
    processes = Processes(function, 1)
    wait(processes, 1)
    texts = ["[SEP] a", "bird " * 99, "rain"]
    there, here = processes("a ", texts), function("a ", texts)
    for name in ("begins", "ids", "type_ids"):
        np.testing.assert_array_equal(getattr(there, name), getattr(here, name))
    assert there.lengths.tolist() == [9, 9, 8] and 3 not in here.ids[1:8]


def test_error_names_the_text(texts_of, monkeypatch):
    own = texts_of.long_texts.encodings

    def refuse(texts):
        if "bad" in texts:
            raise TextError(texts.index("bad"), "bad", "cannot be tokenised")
        return own(texts)

    assert texts_of.processes("", [3]) is None  # an error in a process
    monkeypatch.setattr(texts_of.long_texts, "encodings", refuse)
    monkeypatch.setattr(texts_of.processes, "__class__", type("Failing", (Processes,), {"__call__": lambda *_: None}))
    with pytest.raises(TextError, match=r"texts\[170\] \('bad'\) cannot be tokenised"):
        tokens(texts_of, [*TEXTS[:170], "bad", *TEXTS[171:]])


def test_processes_that_end_are_not_missed(folder, texts_of, caplog):
    processes = Processes(len, 2)
    wait(processes, 2)
    assert processes("four") == 4
    for worker in processes._workers:
        worker.kill()
        worker.wait()
    assert [processes("four") for _ in range(3)] == [None] * 3 and processes.ready == 0
    assert caplog.text.count("has ended") == 2


def test_processes_end_with_their_owner():
    """The owner is killed while a worker waits for it, and a worker has not imported JAX."""
    code = """if 1:
        import os, time
        from jaxft.text.processes import Processes
        processes = Processes(eval, 1)
        while not processes.ready:
            time.sleep(0.01)
        modules = processes("[m for m in __import__('sys').modules if m in ('jax', 'jaxft.text.batching')]")
        assert not processes("__import__('jaxft.text.long_texts') and 0") and modules == [], modules
        print(processes("__import__('os').getpid()"), processes("'jax' in __import__('sys').modules"), flush=True)
        os.kill(os.getpid(), 9)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    number, has_jax = done.stdout.split()
    assert done.returncode == -9 and has_jax == "False", done.stderr
    end = time.monotonic() + 30
    while is_alive(int(number)):
        assert time.monotonic() < end
        time.sleep(0.01)


def is_alive(number):
    try:
        with open(f"/proc/{number}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_processes_end_when_nothing_needs_them():
    processes = Processes(len, 1)
    wait(processes, 1)
    workers = processes._workers
    del processes
    assert [worker.returncode for worker in workers] == [-9]


@pytest.mark.parametrize("reason", ["cpu", "cores", "variable", "few texts"])
def test_threads_suffice(folder, monkeypatch, reason):
    monkeypatch.setattr(dispatch, "platform", lambda: "cpu" if reason == "cpu" else "cuda")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(7 if reason == "cores" else 8), raising=False)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false" if reason == "variable" else "true")
    monkeypatch.setattr(batching, "_MANY", 301 if reason == "few texts" else 300)
    texts_of = SentenceEncoder.from_pretrained(folder)._texts(None)
    tokens(texts_of, TEXTS)
    assert texts_of.processes is None
