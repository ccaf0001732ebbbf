"""Processes that tokenise: the same tokens, errors that name the text, and no process that is left."""

import contextlib
import functools
import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import tiny
from jaxft import SentenceEncoder, dispatch
from jaxft.text import batching, long_texts, processes, text_encoder
from jaxft.text.long_texts import TextError
from jaxft.text.processes import Processes

TEXTS = tiny.texts(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_sentence_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def on_gpus(monkeypatch):
    """A host with GPUs and cores for two processes, which suffice, and an encoder with small chunks."""
    monkeypatch.setattr(dispatch, "platform", lambda: "cuda")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2 * processes._CORES), raising=False)
    monkeypatch.setattr(processes, "_LEAST", 2)
    monkeypatch.setattr(Path, "read_text", without_limit(Path.read_text))
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    monkeypatch.setattr(batching, "_CHUNKS", (32, 40, 40))
    monkeypatch.setattr(text_encoder, "_MANY", 40)


def without_limit(own, limit="max 100000"):
    return lambda path, *args: limit if str(path) == "/sys/fs/cgroup/cpu.max" else own(path, *args)


def wait(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def tokens(texts_of, texts, prompt="", part=300):
    parts = [texts[first : first + part] for first in range(0, len(texts), part)]
    tokenise = functools.partial(texts_of.tokens, prompt)
    found = [chunk for _, chunk in texts_of.batcher.tokenised_parts(parts, tokenise)]
    return np.concatenate([chunk.ids for chunk in found]).tolist(), [n for chunk in found for n in chunk.lengths]


@pytest.mark.parametrize("part", [300, 100, 20])
def test_tokens_are_those_of_this_process(folder, on_gpus, monkeypatch, part):
    texts_of = SentenceEncoder.from_pretrained(folder)._texts(None)
    expected = {prompt: tokens(texts_of, TEXTS, prompt) for prompt in ("", "the old ")}
    wait(lambda: texts_of._processes.ready == 2)
    own, by_threads = texts_of.encodings, []
    monkeypatch.setattr(
        texts_of, "encodings", lambda prompt, texts: by_threads.append(len(texts)) or own(prompt, texts)
    )
    for prompt in expected:
        assert tokens(texts_of, TEXTS, prompt, part) == expected[prompt]
    assert by_threads == [min(part, 32)] * 2  # the first chunk of each call, for which the devices wait
    assert texts_of.batcher.helpers == 2


def test_options_of_the_tokenizer_are_kept(folder):
    encoder = SentenceEncoder.from_pretrained(folder)
    encoder.tokenizer.encode_special_tokens = True
    encoder.max_seq_length = 9
    of_texts = encoder._texts(None)
    of_texts.pad(8, "[MASK]", 0)
    function = functools.partial(long_texts.tokenised, of_texts.long_texts, of_texts._padding, True)
    made = Processes(function, 1)
    wait(lambda: made.ready)
    texts = ["[SEP] a", "bird " * 99, "rain"]
    there, here = made("a ", texts), function("a ", texts)
    assert there == here and [*np.diff(here[0])] == [9, 9, 8] and 3 not in here[1][1:8]


def test_error_names_the_text(folder, on_gpus, monkeypatch):
    texts_of = SentenceEncoder.from_pretrained(folder)._texts(None)
    tokens(texts_of, TEXTS)
    wait(lambda: texts_of._processes.ready == 2)
    assert texts_of._processes("", [3]) is None  # an error in a process
    own = texts_of.long_texts.encodings

    def refuse(texts):
        if "bad" in texts:
            raise TextError(texts.index("bad"), "bad", "cannot be tokenised")
        return own(texts)

    monkeypatch.setattr(texts_of.long_texts, "encodings", refuse)
    monkeypatch.setattr(Processes, "__call__", lambda *_: None)
    with pytest.raises(TextError, match=r"texts\[170\] \('bad'\) cannot be tokenised"):
        tokens(texts_of, [*TEXTS[:170], "bad", *TEXTS[171:]])


def test_threads_go_on_without_processes(folder, on_gpus, caplog):
    texts_of = SentenceEncoder.from_pretrained(folder)._texts(None)
    expected = tokens(texts_of, TEXTS)
    wait(lambda: texts_of._processes.ready == 2)
    for worker in texts_of._processes._started:
        worker.kill()
        worker.wait()
    assert tokens(texts_of, TEXTS) == expected == tokens(texts_of, TEXTS)
    assert texts_of.batcher.helpers == 0 and caplog.text.count("a process that tokenises has ended") == 2


def test_interrupted_call_leaves_no_answer_to_the_next(monkeypatch):
    made = Processes(len, 2)
    wait(lambda: made.ready == 2)

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(processes.pickle, "load", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made("four")
    assert [made("three"), made("six")] == [5, 3] and made.ready == 1


def test_threads_that_wait_for_a_process_notice_its_end():
    made = Processes(eval, 1)
    wait(lambda: made.ready)
    results = []
    calls = ["__import__('time').sleep(600)", "3", "4"]
    threads = [threading.Thread(target=lambda c=call: results.append(made(c)), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    wait(lambda: made._idle.empty())
    time.sleep(0.1)  # until the others wait
    made._started[0].kill()
    wait(lambda: not any(thread.is_alive() for thread in threads))
    assert None in results and made.ready == 0


@pytest.mark.parametrize("error", ["ValueError", "KeyboardInterrupt"])
def test_process_survives_errors_of_its_function(error):
    """A panic of the tokenizers library is no Exception."""
    made = Processes(eval, 1)
    wait(lambda: made.ready)
    assert made(f"(_ for _ in ()).throw({error})") is None and made("3") == 3 and made.ready == 1


def test_processes_get_no_signals_of_the_terminal():
    made = Processes(eval, 1)
    wait(lambda: made.ready)
    assert os.getsid(made._started[0].pid) != os.getsid(0)
    assert made("__import__('os').environ['RAYON_NUM_THREADS']") == str(processes._CORES)


def test_forked_process_ends_none_of_its_parent():
    ended = threading.Event()
    processes._end(os.getppid(), ended, [None])
    assert not ended.is_set()


def test_tokenizer_that_cannot_be_sent_stays_with_threads(caplog):
    caplog.set_level("INFO", "jaxft")
    made = Processes(lambda: 3, 2)
    assert made() is None and not made._started and "processes cannot get the tokenizer" in caplog.text


@pytest.mark.parametrize("error", [OSError("no memory"), MemoryError()])
def test_failed_start_leaves_threads(monkeypatch, caplog, error):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(processes.subprocess, "Popen", refuse)
    made = Processes(len, 1)
    wait(lambda: "could not be started" in caplog.text)
    assert made("four") is None


def test_processes_end_with_their_owner():
    """Kills the owner. Its program needs no main guard, and its processes import neither JAX nor NumPy."""
    code = """if 1:
        import os, time
        from jaxft.text.processes import Processes
        processes = Processes(eval, 1)
        while not processes.ready:
            time.sleep(0.01)
        assert not processes("__import__('jaxft.text.long_texts') and 0") and processes("print(9, flush=True)") is None
        print(processes("__import__('os').getpid()"), processes("{'jax', 'numpy'} & {*__import__('sys').modules}"))
        if child := os.fork():
            assert processes("3") == 3 and os.waitpid(child, 0)[1] == 0 and processes("4") == 4
        else:
            assert processes("5") is None
            raise SystemExit
        __import__("sys").stdout.flush()
        os.kill(os.getpid(), 9)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    number, imported = done.stdout.split()[-2:]
    assert done.returncode == -9 and imported == "set()", done.stderr
    wait(lambda: not is_alive(int(number)))


def is_alive(number):
    with contextlib.suppress(FileNotFoundError), open(f"/proc/{number}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return False


def test_processes_end_when_nothing_needs_them():
    made = Processes(len, 1)
    call = functools.partial(made, "four")
    wait(call)
    (worker,) = made._started
    del made, call
    gc.collect()
    assert worker.returncode == -9 and worker.stdout.closed


def test_nothing_is_said_if_processes_end_while_they_start(monkeypatch, caplog):
    threads = []
    monkeypatch.setattr(processes.threading.Thread, "start", lambda self: threads.append(self))
    made = Processes(len, 2)
    monkeypatch.undo()
    threads[0].start()
    started = made._started
    wait(lambda: started)  # its process is killed before it answers, or after
    del made
    gc.collect()  # ends the processes
    threads[1].start()
    for thread in threads:
        thread.join()
    wait(lambda: all(worker.poll() is not None for worker in started))
    assert not caplog.text


def test_path_of_other_types_is_ignored(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere")])
    made = Processes(len, 1)
    wait(lambda: made.ready)
    assert made("four") == 4


class Text(str):
    """A string whose class another process does not have."""


@pytest.mark.parametrize("other", [Text("rain"), np.str_("rain"), "rain " * (1 << 14)], ids=["class", "numpy", "long"])
def test_other_texts_stay_with_threads(folder, on_gpus, monkeypatch, other):
    texts_of = SentenceEncoder.from_pretrained(folder)._texts(None)
    texts = [*TEXTS[:50], other, *TEXTS[51:]]
    expected = tokens(texts_of, texts)
    wait(lambda: texts_of._processes.ready == 2)
    sent, own = [], Processes.__call__
    monkeypatch.setattr(Processes, "__call__", lambda self, *call: sent.extend(call[1]) or own(self, *call))
    assert tokens(texts_of, texts) == expected
    assert texts_of._processes.ready == 2 and sent and all(text is not other for text in sent)


def test_pairs_of_other_types_stay_with_threads():
    plain = text_encoder._are_plain
    assert plain([("a", "b")]) and not plain([("a", Text("b"))]) and not plain([("a", "b" * ((1 << 16) + 1))])


@pytest.mark.parametrize(
    "reason", ["cpu", "cores", "limit", "threads", "variable", "executable", "few texts", "one chunk", "long texts"]
)
def test_threads_suffice(folder, on_gpus, monkeypatch, reason):
    changes = {
        "cpu": lambda: monkeypatch.setattr(dispatch, "platform", lambda: "cpu"),
        "cores": lambda: monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3), raising=False),
        "limit": lambda: monkeypatch.setattr(Path, "read_text", without_limit(Path.read_text, "399999 100000")),
        "threads": lambda: monkeypatch.setenv("RAYON_NUM_THREADS", "3"),
        "variable": lambda: monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false"),
        "executable": lambda: monkeypatch.setattr(sys, "executable", "/usr/bin/uwsgi"),
        "few texts": lambda: monkeypatch.setattr(text_encoder, "_MANY", 300),
        "one chunk": lambda: monkeypatch.setattr(batching, "_CHUNKS", (300, 300, 300)),
        "long texts": lambda: monkeypatch.setattr(batching, "_LONG_MEAN", 1),
    }
    changes[reason]()
    texts_of = SentenceEncoder.from_pretrained(folder)._texts(None)
    tokens(texts_of, TEXTS)
    assert texts_of._processes is None or not texts_of._processes._started and not texts_of._processes.ready


@pytest.mark.parametrize(("cores", "expected"), [(15, 0), (16, 8), (31, 15), (32, 16), (64, 16)])
@pytest.mark.parametrize("limited", [False, True])
def test_processes_are_one_for_two_cores(monkeypatch, cores, expected, limited):
    limit = f"{cores * 50_000 + 49_999} 50000" if limited else "max 100000"
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(1000 if limited else cores), raising=False)
    monkeypatch.setattr(Path, "read_text", without_limit(Path.read_text, limit))
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    assert processes.suitable() == expected


def test_variables_of_the_tokenizers_library_count(on_gpus, monkeypatch):
    monkeypatch.setenv("RAYON_NUM_THREADS", "0")  # all
    assert processes.suitable() == 2
    for value, expected in (("true", 2), ("1", 2), ("0", 0), ("", 0), ("OFF", 0), ("no", 0), ("n", 0), ("f", 0)):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", value)
        assert processes.suitable() == expected, value
