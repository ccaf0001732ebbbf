"""The command line: a few cases end to end in a separate process, the rest through `main`."""

import dataclasses
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import tiny
from cases import slow, slow_cases
from jaxft import cli, dispatch
from jaxft.checkpoint.files import CheckpointError
from jaxft.models.bert import BertModel
from jaxft.text import batching
from jaxft.text.cross_encoder import CrossEncoder
from jaxft.text.quantization import PRECISIONS
from jaxft.text.sentence_encoder import SentenceEncoder
from jaxft.tuning import cache as tuning_cache
from jaxft.tuning import table as tuning_table

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {
    "PYTHONWARNINGS": "",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
}
LINES = ["a bird sings in the old tree", "", "rain falls on the river .", "the old tree falls"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny.write_sentence_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def prompted(tmp_path_factory):
    """A model with prompts for queries and documents, and one that is the default."""
    folder = tiny.write_sentence_model(tmp_path_factory.mktemp("prompted"))
    prompts = {"query": "the bird ", "document": "rain ", "other": "the old tree "}
    settings = {"prompts": prompts, "default_prompt_name": "other"}
    tiny.write_json(folder / "config_sentence_transformers.json", settings)
    return str(folder)


@pytest.fixture(scope="module")
def ranker(tmp_path_factory):
    return str(tiny.write_classifier(tmp_path_factory.mktemp("ranker")))


@pytest.fixture(scope="module")
def embeddings(model):
    return SentenceEncoder.from_pretrained(model).encode(LINES)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Working folder with texts.txt. At the end it holds no other files than those that a test names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("\n".join(LINES) + "\n")
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def start(*arguments):
    # If the tests run in the background of a shell, their children ignore interrupts.
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"import sys; {listen}; from jaxft import cli; sys.exit(cli.main())"
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=pipe, stdout=pipe, stderr=pipe, env=ENVIRONMENT
    )


def fails(capsys, *arguments):
    """Runs a command that must end with one line of error, and returns that line."""
    try:
        code = cli.main(list(arguments))
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    line = captured.err
    assert line.startswith("jaxft: error: ") and line.count("\n") == 1 and line.endswith("\n")
    return line.removeprefix("jaxft: error: ").rstrip()


@pytest.mark.parametrize("output", ["in.jsonl", "./in.jsonl", "link.jsonl", "hard.jsonl"])
def test_input_is_not_replaced(folder, capsys, output):
    Path("in.jsonl").write_text('"a bird"\n')
    os.symlink("in.jsonl", "link.jsonl")
    os.link("in.jsonl", "hard.jsonl")
    message = fails(capsys, "encode", "--model", "m", "in.jsonl", "-o", output)
    assert message == f"cannot write {output}: it is the file with the texts"
    assert Path("in.jsonl").read_text() == '"a bird"\n'


def test_special_files_are_not_replaced(folder, model, capsys, monkeypatch):
    os.mkfifo("pipe.npy")
    message = fails(capsys, "encode", "--model", model, "texts.txt", "-o", "pipe.npy")
    assert message == "cannot write pipe.npy: it is no regular file"
    Path("old.npy").write_bytes(b"old")
    os.chmod("old.npy", 0o640)
    assert cli.main(["encode", "--model", model, "texts.txt", "-o", "old.npy"]) == 0
    assert os.stat("old.npy").st_mode & 0o777 == 0o640 and np.load("old.npy").ndim == 2
    capsys.readouterr()
    monkeypatch.setattr(os, "access", lambda file, mode: False)  # tests may run as root, who may write all
    message = fails(capsys, "encode", "--model", model, "texts.txt", "-o", "old.npy")
    assert message == "cannot write old.npy: it may not be written"


# --- Processes ---------------------------------------------------------------------------------------------------


def test_encode_stdin(folder, model, embeddings):
    process = start("encode", "--model", model, "-", "-o", "out.npy")
    out, err = process.communicate("\r\n".join(LINES).encode())
    assert process.returncode == 0, err.decode()
    assert out == b""
    assert b"4/4" in err  # progress
    assert re.search(rb"4 texts in [\d.]+ s: [\d,]+ texts/s", err)
    assert names(folder) == ["out.npy", "texts.txt"]
    np.testing.assert_allclose(np.load("out.npy"), embeddings, rtol=0, atol=1e-6)


def test_interrupt_exits_with_130(folder, model):
    process = start("encode", "--model", model, "-o", "out.npy")
    while not any(name.startswith(".jaxft-") for name in names(folder)):  # it now waits for stdin
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (130, b"", b"jaxft: interrupted\n")
    assert names(folder) == ["texts.txt"]


def test_sigterm_exits_with_143(folder, model):
    process = start("encode", "--model", model, "-o", "out.npy")
    while not any(name.startswith(".jaxft-") for name in names(folder)):  # it now waits for stdin
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.communicate() == (b"", b"")
    assert process.returncode == 143
    assert names(folder) == ["texts.txt"]


@pytest.mark.parametrize(
    ("streams", "arguments", "code", "message"),
    [
        ("<&-", "encode --model MODEL -o out.npy", 2, b"jaxft: error: stdin is empty\n"),
        *slow_cases(
            (">&-", "info", 0, b""),
            ("2>&-", "encode --model MODEL texts.txt -o out.npy", 0, b""),
            (">&- 2>&-", "encode --model MODEL no.txt -o out.npy", 2, b""),
        ),
    ],
)
def test_closed_streams_are_survived(folder, model, streams, arguments, code, message):
    script = f'exec "$0" -m jaxft.cli {arguments.replace("MODEL", model)} {streams}'
    done = subprocess.run(["sh", "-c", script, sys.executable], capture_output=True, env=ENVIRONMENT)
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", message)
    assert names(folder) == (["out.npy", "texts.txt"] if "texts.txt" in arguments else ["texts.txt"])


def test_broken_pipe_exits_with_141():
    process = start("info", "--json")
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141
    process.stdin.close()
    process.stderr.close()


def test_closed_stdout_of_encode_exits_with_141(folder, model):
    process = start("encode", "--model", model, "texts.txt", "-o", "-")
    process.stdout.close()
    assert process.stderr.read().splitlines()[-1].startswith(b"4 texts in")
    assert process.wait() == 141
    process.stdin.close()
    process.stderr.close()


# --- encode ------------------------------------------------------------------------------------------------------


def test_encode_npy(folder, model, embeddings, capsys):
    Path("out.npy").write_text("an older result")
    assert cli.main(["encode", "--model", model, "texts.txt", "-o", "out.npy", "--batch-size", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and "4 texts in" in captured.err
    result = np.load("out.npy")
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, embeddings, rtol=0, atol=1e-6)
    assert names(folder) == ["out.npy", "texts.txt"]


def test_encode_normalized_half_precision(folder, model, embeddings):
    arguments = ["--dtype", "bfloat16", "--normalize", "--implementation", "xla"]
    assert cli.main(["encode", "--model", model, "texts.txt", "-o", "out.npy", *arguments]) == 0
    expected = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    result = np.load("out.npy")
    np.testing.assert_allclose(np.linalg.norm(result, axis=1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(result, expected, rtol=0, atol=0.02)
    assert np.abs(result - expected).max() > 1e-4  # it was bfloat16


def test_encode_jsonl(folder, model, embeddings):
    first = '{"text": "a bird sings in the old tree", "id": 7, "embedding": null, "note": "Ä\\ud800"}'
    lines = [first, '""', '"rain falls on the river ."', '{"text": "the old tree falls"}']
    Path("in.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert cli.main(["encode", "--model", model, "in.jsonl", "-o", "out.jsonl"]) == 0
    written = Path("out.jsonl").read_text(encoding="utf-8")
    assert written.endswith("}\n")
    rows = [json.loads(line) for line in written.splitlines()]
    np.testing.assert_allclose([row.pop("embedding") for row in rows], embeddings, rtol=0, atol=1e-6)
    assert rows[0] == {"text": LINES[0], "id": 7, "note": "Ä\ud800"}
    assert rows[1:] == [{"text": line} for line in LINES[1:]]


def test_stdout_gets_the_lines_of_a_jsonl_file(folder, model, capfdbinary):
    Path("in.jsonl").write_text('{"text": "rain", "note": "Ä\\ud800"}\n""\n', encoding="utf-8")
    assert cli.main(["encode", "--model", model, "in.jsonl", "-o", "out.jsonl"]) == 0
    assert capfdbinary.readouterr().out == b""
    assert cli.main(["encode", "--model", model, "in.jsonl", "-o", "-"]) == 0
    captured = capfdbinary.readouterr()
    assert captured.out == Path("out.jsonl").read_bytes() and "Ä\\ud800".encode() in captured.out
    assert b"2 texts in" in captured.err
    assert names(folder) == ["in.jsonl", "out.jsonl", "texts.txt"]


@pytest.mark.parametrize(
    "precision", [pytest.param(p, marks=[pytest.mark.slow] * (p in ("uint8", "binary"))) for p in PRECISIONS]
)
def test_encode_precisions(folder, model, monkeypatch, precision):
    """The .npy file has the dtype of the precision and is allocated in its final size."""
    assert tuple(PRECISIONS) == cli._PRECISIONS
    sizes = []
    monkeypatch.setattr(cli, "_allocate", lambda file, size: sizes.append(size))
    expected = SentenceEncoder.from_pretrained(model).encode(LINES, precision=precision, truncate_dim=9)
    options = ["--precision", precision, "--truncate-dim", "9"]
    for output in ("out.npy", "out.jsonl"):
        assert cli.main(["encode", "--model", model, "texts.txt", "-o", output, *options]) == 0
    result = np.load("out.npy")
    assert result.dtype == PRECISIONS[precision] and sizes == [Path("out.npy").stat().st_size]
    np.testing.assert_allclose(result, expected, rtol=0, atol=1 if "int8" in precision else 1e-3)
    rows = [json.loads(line)["embedding"] for line in Path("out.jsonl").read_text().splitlines()]
    assert np.array_equal(np.array(rows, result.dtype), result)
    kind = float if "float" in precision else int
    assert all(type(value) is kind and len(str(abs(value))) <= 13 for row in rows for value in row)


def test_encode_options_reach_the_encoder(folder, prompted):
    encoder = SentenceEncoder.from_pretrained(prompted)
    for arguments, options in (
        ([], {"prompt_name": "other"}),
        (["--prompt", "rain "], {"prompt_name": "document"}),
        (["--prompt", ""], {"prompt": ""}),
        (["--prompt-name", "query"], {"prompt": "the bird "}),
        (["--truncate-dim", "3", "--normalize"], {"truncate_dim": 3, "normalize_embeddings": True}),
    ):
        assert cli.main(["encode", "--model", prompted, "texts.txt", "-o", "out.npy", *arguments]) == 0
        np.testing.assert_allclose(np.load("out.npy"), encoder.encode(LINES, **options), rtol=0, atol=1e-6)
    assert cli.main(["encode", "--model", prompted, "texts.txt", "-o", "out.npy", "--devices", "999"]) == 2
    encoder.max_seq_length = 4
    assert cli.main(["encode", "--model", prompted, "texts.txt", "-o", "out.npy", "--max-seq-length", "4"]) == 0
    np.testing.assert_allclose(np.load("out.npy"), encoder.encode(LINES), rtol=0, atol=1e-6)


def test_ranges_of_one_text_are_refused(folder, capsys):
    Path("one.txt").write_text("rain\n")
    message = fails(capsys, "encode", "--model", "m", "one.txt", "-o", "-", "--precision", "uint8")
    assert message == "--precision uint8 takes its ranges from the texts and needs more than one"


def test_jsonl_flag_reads_any_file(folder, model, embeddings, monkeypatch):
    data = "".join(json.dumps({"text": line, "id": 7}) + "\n" for line in LINES).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    Path("in.ndjson").write_bytes(data)
    for file in ("-", "in.ndjson"):
        assert cli.main(["encode", "--model", model, "--jsonl", file, "-o", "out.jsonl"]) == 0
        rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
        np.testing.assert_allclose([row.pop("embedding") for row in rows], embeddings, rtol=0, atol=1e-6)
        assert rows == [{"text": line, "id": 7} for line in LINES]


def test_jsonl_keeps_every_digit(folder, model):
    for output in ("out.npy", "out.jsonl"):
        assert cli.main(["encode", "--model", model, "texts.txt", "-o", output]) == 0
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == LINES
    assert np.array_equal(np.array([row["embedding"] for row in rows], np.float32), np.load("out.npy"))


def test_lines_end_only_at_newlines(folder, model):
    texts = ["rain\x0criver", "rain\u2028river", "tree", "", ""]
    Path("in.txt").write_bytes(b"\xef\xbb\xbf" + "\n".join(texts).encode() + b"\n")
    assert cli.main(["encode", "--model", model, "in.txt", "-o", "out.jsonl"]) == 0
    written = Path("out.jsonl").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    assert [json.loads(line)["text"] for line in written] == texts


@pytest.mark.parametrize("exception", [KeyboardInterrupt, OSError(28, "No space left on device"), ZeroDivisionError])
def test_failed_write_keeps_the_old_output(folder, model, monkeypatch, capsys, exception):
    def save(file, array):
        file.write(b"half of it")
        raise exception

    monkeypatch.setattr(np, "save", save)
    Path("out.npy").write_text("an older result")
    arguments = ["encode", "--model", model, "texts.txt", "-o", "out.npy"]
    if exception is ZeroDivisionError:  # a bug keeps its traceback
        with pytest.raises(ZeroDivisionError):
            cli.main(arguments)
    else:
        assert cli.main(arguments) == (130 if exception is KeyboardInterrupt else 2)
        last = capsys.readouterr().err.splitlines()[-1]
        assert last in ("jaxft: interrupted", "jaxft: error: cannot write out.npy: No space left on device")
    assert Path("out.npy").read_text() == "an older result"
    assert names(folder) == ["out.npy", "texts.txt"]


def run_limited(size, *arguments):
    """Runs a command that can write no larger files, as on a full disk, and returns its line of error."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))"
    code = f"{limit}; import sys; from jaxft import cli; sys.exit(cli.main())"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2
    return done.stderr.splitlines()


@pytest.mark.parametrize("output", ["out.npy", *slow("out.jsonl")])
def test_full_disk_gives_one_line(folder, model, output):
    Path("many.txt").write_text("rain\n" * 1000)
    lines = run_limited(16384, "encode", "--model", model, "many.txt", "-o", output)
    assert lines[-1] == f"jaxft: error: cannot write {output}: File too large"
    assert len(lines) == 1 or output == "out.jsonl"  # progress: its size is not known before
    assert names(folder) == ["many.txt", "texts.txt"]


def test_npy_is_allocated_before_encoding(folder, model, monkeypatch, capsys):
    def full(descriptor, offset, size):
        sizes.append(size)
        raise OSError(errno.ENOSPC, "No space left on device")

    sizes = []
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    monkeypatch.setattr(SentenceEncoder, "encode", None)  # must not be called
    message = fails(capsys, "encode", "--model", model, "texts.txt", "-o", "out.npy")
    assert message == "cannot write out.npy: No space left on device"
    assert sizes == [128 + 4 * tiny.WIDTH * 4] and names(folder) == ["texts.txt"]


@pytest.mark.parametrize("supported", [True, False])
def test_allocated_npy_is_what_numpy_writes(folder, model, embeddings, monkeypatch, supported):
    def unsupported(descriptor, offset, size):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    if not supported:
        monkeypatch.setattr(os, "posix_fallocate", unsupported, raising=False)
    assert cli.main(["encode", "--model", model, "texts.txt", "-o", "out.npy"]) == 0
    np.save("expected.npy", np.load("out.npy"))
    assert Path("out.npy").read_bytes() == Path("expected.npy").read_bytes()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(("argument", "unbuffered"), [("--version", ""), *slow_cases(("info", ""), ("info", "1"))])
def test_stdout_on_a_full_disk_gives_one_line(argument, unbuffered):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "jaxft.cli", argument]
        environment = ENVIRONMENT | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert (done.returncode, done.stderr) == (2, "jaxft: error: cannot write stdout: No space left on device\n")


def test_encode_removes_what_a_killed_process_left(folder, model):
    process = start("encode", "--model", model, "-o", "out.npy")
    while not any(name.startswith(".jaxft-") for name in names(folder)):  # it now waits for stdin
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.communicate()
    assert len(names(folder)) == 2
    assert cli.main(["encode", "--model", model, "texts.txt", "-o", "other.npy"]) == 0
    assert names(folder) == ["other.npy", "texts.txt"]


def test_output_follows_a_link_and_keeps_the_mode(folder, model):
    Path("real.npy").write_text("an older result")
    Path("real.npy").chmod(0o620)
    Path("out.npy").symlink_to("real.npy")
    assert cli.main(["encode", "--model", model, "texts.txt", "-o", "out.npy"]) == 0
    assert Path("out.npy").is_symlink() and np.load("real.npy").shape == (4, tiny.WIDTH)
    assert Path("real.npy").stat().st_mode & 0o777 == 0o620


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("no/such/out.npy", "cannot write no/such/out.npy: No such file or directory"),
        ("texts.txt/out.npy", "cannot write texts.txt/out.npy: Not a directory"),
        ("x" * 300 + ".jsonl", f"cannot write {'x' * 300}.jsonl: File name too long"),
        ("out.txt", "output 'out.txt' must end in .npy or .jsonl, or be - for stdout"),
    ],
)
def test_unwritable_output_fails_before_encoding(folder, capsys, monkeypatch, output, message):
    monkeypatch.setattr(SentenceEncoder, "from_pretrained", None)  # must not be called
    assert fails(capsys, "encode", "--model", "m", "texts.txt", "-o", output) == message
    assert names(folder) == ["texts.txt"]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("in.txt", None, "cannot read in.txt: No such file or directory"),
        ("in.txt", b"", "in.txt is empty"),
        ("in.txt", b"one\ntwo\n\xff\n", "in.txt, line 3: not valid UTF-8"),
        ("in.jsonl", b"", "in.jsonl is empty"),
        ("in.jsonl", b'"one"\n{"text": "two"\n', "in.jsonl, line 2: not valid JSON: .*"),
        ("in.jsonl", b'"one"\n\n"two"\n', "in.jsonl, line 2: not valid JSON: .*"),
        ("in.jsonl", b"[" * 100_000, "in.jsonl, line 1: not valid JSON: .*"),
        ("in.jsonl", b'"one"\n3\n', 'in.jsonl, line 2: expected a JSON string or an object with a string field "text"'),
        ("in.jsonl", b'{"texts": "one"}', 'in.jsonl, line 1: expected a JSON string or .* field "text"'),
        ("in.jsonl", b'{"text": 1}', 'in.jsonl, line 1: expected a JSON string or .* field "text"'),
        ("in.jsonl", b'"\\ud800"', "in.jsonl, line 1: the text is not valid Unicode: .*"),
        ("in.jsonl", b'"one"\n"\xff"', "in.jsonl, line 2: not valid UTF-8"),
    ],
)
def test_bad_input(folder, capsys, file, content, message):
    if content is not None:
        Path(file).write_bytes(content)
    before = names(folder)
    assert re.fullmatch(message, fails(capsys, "encode", "--model", "m", file, "-o", "out.npy"))
    assert names(folder) == before
    assert re.fullmatch(message, fails(capsys, "similar", "--model", "m", file, "rain"))


def test_folder_in_place_of_a_file(folder, capsys):
    message = "the folder . needs an output folder, such as OUT/, got 'out.npy'"
    assert fails(capsys, "encode", "--model", "m", ".", "-o", "out.npy") == message
    assert fails(capsys, "similar", "--model", "m", ".", "rain") == "cannot read .: Is a directory"


def test_bad_stdin(folder, capsys, monkeypatch):
    for data, message in ((b"", "stdin is empty"), (b"\xff", "stdin, line 1: not valid UTF-8")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert fails(capsys, "encode", "--model", "m", "-o", "out.npy") == message


def test_bad_model(folder, capsys):
    assert "no/such/model" in fails(capsys, "encode", "--model", "no/such/model", "texts.txt", "-o", "out.npy")
    Path("empty").mkdir()
    assert "config.json" in fails(capsys, "encode", "--model", "empty", "texts.txt", "-o", "out.npy")
    assert names(folder) == ["empty", "texts.txt"]


def test_errors_while_encoding(folder, model, capsys, monkeypatch):
    for error in (NotImplementedError("attention: no\nkernel"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")):

        def encode(*args, error=error, **kwargs):
            raise error

        monkeypatch.setattr(SentenceEncoder, "encode", encode)
        line = fails(capsys, "encode", "--model", model, "texts.txt", "-o", "out.npy")
        assert line == str(error).replace("\n", " ")
    assert names(folder) == ["texts.txt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt-name", "none"], "encode: prompt_name must be the name of one of the prompts, .*, got 'none'"),
        (["--max-seq-length", "1"], ".*: max_seq_length must be above 2, .*, got 1"),
        (["--max-seq-length", "999"], ".*: max_seq_length must be at most 64, .*, got 999"),
    ],
)
def test_options_that_do_not_fit_the_model(folder, model, capsys, options, message):
    Path("texts.txt").write_text("rain\n")
    for command in ("encode", "similar"):
        assert re.fullmatch(message, fails(capsys, command, "--model", model, *COMMANDS[command], *options))
    assert names(folder) == ["texts.txt"]


def test_lack_of_memory_gives_one_line(folder, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_read_records", lambda *_: bytearray(1 << 60))  # as an endless line
    assert fails(capsys, "encode", "--model", "m", "texts.txt", "-o", "out.npy") == "out of memory"
    assert names(folder) == ["texts.txt"]


def test_no_device(folder, capsys, monkeypatch):
    def device_kind():
        raise RuntimeError("Unable to initialize\nbackend 'cuda'")

    monkeypatch.setattr(dispatch, "device_kind", device_kind)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    for arguments in (["info"], ["encode", "--model", "m", "texts.txt", "-o", "out.npy"]):
        line = fails(capsys, *arguments)
        assert line == "JAX found no device (JAX_PLATFORMS is 'cuda'). Unable to initialize backend 'cuda'"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "argument COMMAND: invalid choice: 'train' .*"),
        (["encode", "-o", "out.npy"], "the following arguments are required: --model"),
        (["encode", "--model", "m"], "the following arguments are required: -o/--output"),
        (["encode", "--model", "m", "-o", "o.npy", "--batch-size", "0"],
         "argument --batch-size: expected a positive integer below 2..31, got '0'"),
        (["encode", "--model", "m", "-o", "o.npy", "--batch-size", "x"],
         "argument --batch-size: expected a positive integer below 2..31, got 'x'"),
        (["encode", "--model", "m", "-o", "o.npy", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8' .*"),
        (["encode", "--model", "m", "-o", "o.npy", "--implementation", "cudnn"],
         "argument --implementation: invalid choice: 'cudnn' .*"),
        (["encode", "--model", "m", "-o", "o.npy", "--precision", "int4"], "argument --precision: invalid choice: .*"),
        (["encode", "--model", "m", "-o", "o.npy", "--truncate-dim", "0"],
         "argument --truncate-dim: expected a positive integer below 2..31, got '0'"),
        (["encode", "--model", "m", "-o", "o.npy", "--prompt", "a", "--prompt-name", "b"],
         "argument --prompt-name: not allowed with argument --prompt"),
        (["similar", "--model", "m", "texts.txt", "q", "--prompt", "a", "--prompt-name", "b"],
         "argument --prompt-name: not allowed with argument --prompt"),
        (["rerank", "--model", "m", "q", "texts.txt", "--max-seq-length", "x"],
         "argument --max-seq-length: expected a positive integer below 2..31, got 'x'"),
        (["rerank", "--model", "m", "q"], "the following arguments are required: FILE"),
        (["similar", "--model", "m", "texts.txt", "--precision", "int8", "q"],
         "unrecognized arguments: --precision .*"),
        (["similar", "--model", "m", "texts.txt"], "the following arguments are required: QUERY"),
        (["bench", "--model", "m", "--batch", str(2**31)],
         "argument --batch: expected a positive integer below 2..31, got '2147483648'"),
        (["encode", "--model", "m", "\0", "-o", "o.npy"], "cannot read '?.*: embedded null byte"),
        (["encode", "--model", "m", "", "-o", "o.npy"], "cannot read '': No such file or directory"),
        (["encode", "--model", ".", "texts.txt", "-o", "o.npy"],
         "config.json does not exist; the folder of a checkpoint has one"),
        (["info", "--length", "0"], "argument --length: expected a positive integer below 2..31, got '0'"),
        (["similar", "--model", "m", "texts.txt", "q", "--top", "-1"],
         "argument --top: expected a positive integer below 2..31, got '-1'"),
    ],
)  # fmt: skip
def test_bad_arguments(folder, capsys, arguments, message):
    assert re.fullmatch(message, fails(capsys, *arguments))


def test_help_is_shown_without_a_command(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main([])
    captured = capsys.readouterr()
    assert exit.value.code == 2 and captured.out == ""
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert captured.err == capsys.readouterr().out and "encode" in captured.err


def test_terminals_say_that_the_model_loads(folder, model, capsys, monkeypatch):
    def from_pretrained(*args, **kwargs):
        said.append(capsys.readouterr().err)
        raise CheckpointError("no model")

    said = []
    for owner in (SentenceEncoder, CrossEncoder, BertModel):
        monkeypatch.setattr(owner, "from_pretrained", from_pretrained)
    Path("texts.txt").write_text("rain\n")
    commands = [*([name, *arguments] for name, arguments in COMMANDS.items()), ["bench"]]
    for terminal in (True, False):
        for command, *arguments in commands:
            monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal, raising=False)
            fails(capsys, command, "--model", model, *arguments)
    assert all(text.endswith(f"jaxft: loading {model}\n") for text in said[:4]) and len(said) == 8
    assert not any("loading" in text for text in said[4:])


def test_input_is_read_line_by_line(folder, model):
    """Only the line that is read is in memory."""
    lines = 0

    class Lines(io.BytesIO):
        def read(self, size=-1):
            raise AssertionError

        def readline(self, size=-1):
            nonlocal lines
            lines += 1
            return super().readline(size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(Lines(b"\xef\xbb\xbfone\r\n\xef\xbb\xbftwo\n\nlast")))
        for number, text in enumerate(cli._read_records("-", jsonl=False), 1):
            assert lines == number and text == ["one", "\ufefftwo", "", "last"][number - 1]
    assert lines == 5


# --- similar and info --------------------------------------------------------------------------------------------


def test_similar(folder, model, embeddings, capsys):
    Path("in.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in [*LINES, "the\told\ntree falls"]))
    assert cli.main(["similar", "--model", model, "in.jsonl", "the old tree falls", "--top", "4"]) == 0
    captured = capsys.readouterr()
    rows = [line.split("\t") for line in captured.out.splitlines()]
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    cosines = unit @ unit[3]
    assert rows[:2] == [["1.0000", "4", LINES[3]], ["1.0000", "5", LINES[3]]]
    best = [i for i in np.argsort(-cosines[:3]) if LINES[i]]
    assert [(int(number), text) for _, number, text in rows[2:]] == [(i + 1, LINES[i]) for i in best]
    np.testing.assert_allclose([float(row[0]) for row in rows[2:]], cosines[best], rtol=0, atol=1e-4)
    assert "5 texts in" in captured.err and "1 of 5 texts are empty and skipped" in captured.err


@pytest.mark.parametrize(
    ("arguments", "prompt"),
    [([], "the bird "), (["--prompt", "rain "], "rain "), (["--prompt-name", "other"], "the old tree ")],
)
def test_similar_uses_prompts_of_queries_and_documents(folder, prompted, capsys, arguments, prompt):
    options = [*arguments, "--truncate-dim", "4", "--max-seq-length", "5"]
    assert cli.main(["similar", "--model", prompted, "texts.txt", "the river", *options]) == 0
    found = {int(row.split("\t")[1]): float(row.split("\t")[0]) for row in capsys.readouterr().out.splitlines()}
    encoder = SentenceEncoder.from_pretrained(prompted, truncate_dim=4, max_seq_length=5)
    query = encoder.encode("the river", prompt=prompt)
    texts = encoder.encode([line for line in LINES if line], prompt="rain ")
    cosines = encoder.similarity(query, texts)[0]
    np.testing.assert_allclose([found[1], found[3], found[4]], cosines, rtol=0, atol=1e-4)


def test_similar_skips_empty_texts(folder, model, capsys):
    Path("in.txt").write_text("\ufeff\nrain\n \t\nthe old tree\n\u200b\u3164\0 \n")
    assert cli.main(["similar", "--model", model, "in.txt", "tree", "--top", "9"]) == 0
    captured = capsys.readouterr()
    assert sorted(line.split("\t")[1:] for line in captured.out.splitlines()) == [["2", "rain"], ["4", "the old tree"]]
    assert "jaxft: 3 of 5 texts are empty and skipped\n" in captured.err
    Path("in.txt").write_text("\n\n")
    assert fails(capsys, "similar", "--model", "m", "in.txt", "tree") == "in.txt: all texts are empty"
    assert fails(capsys, "similar", "--model", "m", "texts.txt", " \u200d") == "the query is empty"


def test_similar_escapes_what_stdout_cannot_encode(folder, model, monkeypatch):
    Path("in.txt").write_text('"the äöü 雨"\n', encoding="utf-8")
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert cli.main(["similar", "--model", model, "in.txt", "--jsonl", '"the äöü 雨"']) == 0
    assert stdout.buffer.getvalue().decode("latin-1").split("\t")[1:] == ["1", "the äöü \\u96e8\n"]


def test_similar_shows_at_most_all_texts(folder, model, capsys):
    Path("many.txt").write_text("rain\n" * 9)
    for arguments, count in ((["many.txt", "tree"], 5), (["texts.txt", "tree", "--top", "99"], 3)):
        assert cli.main(["similar", "--model", model, *arguments]) == 0
        assert len(capsys.readouterr().out.splitlines()) == count


def test_similar_query_must_be_unicode(folder, capsys):
    line = fails(capsys, "similar", "--model", "m", "texts.txt", "\udcff")
    assert line.startswith("the query: the text is not valid Unicode")


# --- rerank ------------------------------------------------------------------------------------------------------


def test_rerank(folder, ranker, capsys):
    assert cli.main(["rerank", "--model", ranker, "the old tree", "texts.txt", "--top", "2"]) == 0
    captured = capsys.readouterr()
    documents = [line for line in LINES if line]
    best = CrossEncoder.from_pretrained(ranker).rank("the old tree", documents, return_documents=True)
    rows = [line.split("\t") for line in captured.out.splitlines()]
    assert [row[2] for row in rows] == [entry["text"] for entry in best[:2]]
    assert [LINES[int(row[1]) - 1] for row in rows] == [row[2] for row in rows]
    np.testing.assert_allclose([float(row[0]) for row in rows], [entry["score"] for entry in best[:2]], atol=1e-4)
    assert "3 texts in" in captured.err and "1 of 4 texts are empty and skipped" in captured.err


def test_rerank_reads_json_lines(folder, ranker, capsys, monkeypatch):
    data = "".join(json.dumps({"text": line, "id": 7}) + "\n" for line in LINES).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    Path("in.jsonl").write_bytes(data)
    outputs = []
    for file in (["texts.txt"], ["in.jsonl"], ["-", "--jsonl"]):
        assert cli.main(["rerank", "--model", ranker, "rain", *file]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0].count("\n") == 3 and len(set(outputs)) == 1


def test_rerank_passes_its_options_on(folder, ranker, monkeypatch, capsys):
    loaded, ranked = {}, {}
    from_pretrained = CrossEncoder.from_pretrained

    def load(model, **options):
        loaded.update(options)
        return from_pretrained(model, max_length=options["max_length"], dtype=options["dtype"])

    def rank(self, query, documents, **options):
        ranked.update(options)
        return []

    monkeypatch.setattr(CrossEncoder, "from_pretrained", load)
    monkeypatch.setattr(CrossEncoder, "rank", rank)
    given = ["--revision", "v1", "--dtype", "bfloat16", "--implementation", "xla", "--max-seq-length", "9"]
    given += ["--quantization", "fp8"]
    given += ["--batch-size", "2", "--top", "3", "--prompt-name", "p", "--devices", "0"]
    assert cli.main(["rerank", "--model", ranker, "rain", "texts.txt", *given]) == 0
    options = {"revision": "v1", "dtype": "bfloat16", "implementation": "xla", "max_length": 9}
    assert loaded == options | {"quantization": "fp8"}
    assert ranked == {
        "batch_size": 2, "top_k": 3, "show_progress_bar": True, "prompt": None, "prompt_name": "p", "devices": [0],
    }  # fmt: skip
    assert cli.main(["rerank", "--model", ranker, "rain", "texts.txt", "--prompt", "x"]) == 0
    assert ranked["prompt"] == "x" and (loaded["dtype"], loaded["quantization"]) == (None, None)
    assert cli.main(["rerank", "--model", ranker, "rain", "texts.txt", "--quantization", "fp8"]) == 0
    assert loaded["dtype"] == "bfloat16" and "bfloat16 by default)" in capsys.readouterr().err


def test_models_in_float8_need_no_option(folder, tmp_path_factory, capsys):
    """The summary says in what a model runs. FP8 does not cover a width of 16."""
    home = tmp_path_factory.mktemp("models")
    tiny.write_model(home / "wide", hidden_size=128, intermediate_size=128)
    tiny.write_model(home / "small")
    SentenceEncoder.from_pretrained(home / "wide", quantization="fp8").save_pretrained(home / "narrow")
    found = {}
    for name, options, summary in (
        ("wide", ["--quantization", "fp8"], "bfloat16 by default, fp8"), ("narrow", [], "bfloat16 by default, fp8"),
        ("narrow", ["--dtype", "float16"], "float16, fp8"), ("small", ["--quantization", "fp8"], "bfloat16 by default"),
    ):  # fmt: skip
        assert cli.main(["encode", "--model", str(home / name), "texts.txt", "-o", "out.npy", *options]) == 0
        assert capsys.readouterr().err.endswith(f", compilation included ({dispatch.device_kind()}, {summary})\n")
        found[name, *options] = np.load("out.npy")
    np.testing.assert_array_equal(found["narrow",], found["wide", "--quantization", "fp8"])
    message = fails(capsys, "encode", "--model", str(home / "narrow"), "texts.txt", "-o", "-", "--dtype", "float32")
    assert message == "from_pretrained: dtype must be bfloat16 or float16 for a model in float8, got float32"
    (folder / "out.npy").unlink()


def test_rerank_errors_take_one_line(folder, model, ranker, tmp_path, capsys):
    Path("texts.txt").write_text("rain\n")
    assert "SentenceEncoder" in fails(capsys, "rerank", "--model", model, "rain", "texts.txt")
    assert fails(capsys, "rerank", "--model", "m", " ", "texts.txt") == "the query is empty"
    assert fails(capsys, "rerank", "--model", "m", "rain", "no.txt") == "cannot read no.txt: No such file or directory"
    (tmp_path / "labels").mkdir()
    several = str(tiny.write_classifier(tmp_path / "labels", num_labels=3))
    message = fails(capsys, "rerank", "--model", several, "rain", "texts.txt")
    assert message == "rank: the model must have one label, a score, got 3 labels"
    Path("in.txt").write_text("\n\n")
    assert fails(capsys, "rerank", "--model", ranker, "rain", "in.txt") == "in.txt: all texts are empty"


# --- All commands ------------------------------------------------------------------------------------------------

COMMANDS = {
    "encode": ["texts.txt", "-o", "out.npy"], "similar": ["texts.txt", "rain"], "rerank": ["rain", "texts.txt"]
}  # fmt: skip


@pytest.mark.parametrize(
    ("platform", "command"),
    [*(("cuda", command) for command in COMMANDS), ("cpu", "encode"),
     *slow_cases(*(("cpu", command) for command in COMMANDS if command != "encode"))],
)  # fmt: skip
def test_dtype_is_bfloat16_on_a_gpu_by_default(folder, model, ranker, capsys, monkeypatch, command, platform):
    monkeypatch.setattr(cli, "_device", lambda: {"device": "card", "platform": platform})
    name = ranker if command == "rerank" else model
    default = "bfloat16 by default" if platform == "cuda" else "float32"
    for options, summary in (([], default), (["--dtype", "float16"], "float16")):
        assert cli.main([command, "--model", name, *COMMANDS[command], *options]) == 0
        assert capsys.readouterr().err.endswith(f", compilation included (card, {summary})\n")


def test_info(capsys):
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert cli.main(["info", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["versions"].keys() == {"python", "jaxft", "jax", "jaxlib", "flax"}
    assert info["versions"]["jax"] == jax.__version__
    assert info["device"] == {"device": dispatch.device_kind(), "platform": dispatch.platform()}
    assert bool(info["configs"]) == (dispatch.platform() == "cuda")
    for value in (*info["versions"].values(), *info["device"].values()):
        assert value in text
    ops = {"qkv_attention", "bias_residual_layer_norm", "bias_activation", "embeddings_layer_norm"}
    assert ops <= {row["op"] for row in info["ops"]}
    for row in info["ops"]:
        assert row["forward"] and row["backward"]
        line = " +".join(re.escape(row[name]) for name in ("op", "forward", "backward", "reason"))
        assert re.search(rf"^{line}$", text, re.MULTILINE), line
    assert info["buckets"] == [dataclasses.asdict(bucket) for bucket in batching.buckets(32, 512)]


def test_info_says_where_configs_come_from(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning_cache.load.cache_clear()

    def configs(kind):
        with dispatch.target(kind):
            assert cli.main(["info"]) == 0
        text = capsys.readouterr().out
        assert "what each op runs on, 32x128 tokens of BERT-base, bfloat16:" in text
        return re.search(r"^configs +(.*)$", text, re.MULTILINE)[1]

    assert configs("NVIDIA H200") == "jaxft's table, heuristics"
    assert configs("NVIDIA H100 PCIe") == "heuristics"
    file = tuning_cache.path("NVIDIA H200")
    tuning_cache.check_writable(file)
    tuning_cache.save(file, "softmax", "rows=8,width=32,itemsize=4", tuning_table.RowConfig(1, 32, 1))
    assert configs("NVIDIA H200") == f"{file}, jaxft's table, heuristics"
    tuning_cache.load.cache_clear()


def test_info_lists_the_shapes_of_packed_batches(capsys):
    options = ["--batch-size", "4", "--length", "48"]
    assert cli.main(["info", *options]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "4 shapes of packed batches (--batch-size 4 --length 48):",
        "texts of up to   32 tokens, tokens x texts: 192x24",
        "texts of up to   48 tokens, tokens x texts: 64x10 128x21 192x16",
    ]
    assert cli.main(["info", "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)["buckets"]
    assert len(found) == 4 and found[0] == {"capacity": 192, "count": 24, "longest": 32}
    with pytest.raises(SystemExit):
        cli.main(["info", "--help"])
    assert "the shapes of all batches" in " ".join(capsys.readouterr().out.split())


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["--version"])
    assert exit.value.code == 0
    assert re.fullmatch(r"jaxft \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)
