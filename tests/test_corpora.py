"""Corpora: files of texts in, parquet parts out, the same bytes after any interruption; bad data is named."""

import gzip
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
from cases import slow
from jaxft import atomic, cli
from jaxft.text import corpora, inputs, records
from jaxft.text.records import DataError
from jaxft.text.sentence_encoder import SentenceEncoder
from test_cli import ENVIRONMENT, fails

TEXTS = tiny.texts(230)
KINDS = ("parquet", "jsonl", "jsonl.gz", "txt", "txt.gz")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny.write_sentence_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def encoder(model):
    return SentenceEncoder.from_pretrained(model)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path, texts, **columns):
    """Writes texts, and columns if the kind of file has them."""
    kind, path = path.removesuffix(".gz").rpartition(".")[2], Path(path)
    rows = [dict(zip(("text", *columns), row, strict=True)) for row in zip(texts, *columns.values(), strict=True)]
    if kind == "parquet":
        pq.write_table(pa.table({"text": texts, **columns}), path, row_group_size=37)
        return
    lines = [json.dumps(row) if kind == "jsonl" else row["text"] for row in rows]
    data = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def read(folder):
    """Returns the rows of all parts."""
    return pa.concat_tables([pq.read_table(file) for file in sorted(Path(folder).glob("part-*.parquet"))])


def contents(folder):
    return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def vectors(table):
    column = table["embedding"].combine_chunks()
    return column.flatten().to_numpy().reshape(len(column), -1)


# --- What is written ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_in_order(kind, model, encoder):
    for first, name in ((0, "a"), (100, "b")):
        numbers = [*range(first, first + 100 + 30 * (first > 0))]
        write(f"{name}.{kind}", [TEXTS[i] for i in numbers], number=numbers, score=[i / 2 for i in numbers])
    keep = [] if "txt" in kind else ["--keep", "number", "score"]
    command = ["encode", "--model", model, f"a.{kind}", f"b.{kind}", "-o", "out/", "--rows-per-part", "60", *keep]
    assert cli.main(command) == 0
    assert sorted(contents("out")) == sorted(
        ["manifest.json", *(f"part-00000{i}.{suffix}" for i in range(4) for suffix in ("json", "parquet"))]
    )
    table = read("out")
    assert table.column_names == [*keep[1:], "embedding"]
    assert table.schema.field("embedding").type == pa.list_(pa.float32(), tiny.WIDTH)
    assert [len(pq.read_table(f"out/part-00000{i}.parquet")) for i in range(4)] == [60, 60, 60, 50]
    np.testing.assert_allclose(vectors(table), encoder.encode(TEXTS), atol=1e-5)
    if keep:
        assert table["number"].to_pylist() == [*range(230)] and table["score"].to_pylist()[3] == 1.5


def test_folders_and_uris_are_read(encoder, folder):
    (folder / "data" / "deeper").mkdir(parents=True)
    write("data/deeper/a.txt", TEXTS[:3])
    write("data/b.txt", TEXTS[3:5])
    write("data/_part.txt", ["left out"])
    (folder / "data" / "notes.md").write_text("left out")
    assert corpora.encode_corpus(encoder, ["data", f"file://{folder}/data/b.txt"], "out").texts == 7
    np.testing.assert_allclose(vectors(read("out")), encoder.encode([*TEXTS[3:5], *TEXTS[:3], *TEXTS[3:5]]), atol=1e-5)


@pytest.mark.parametrize("precision", ["float16", "int8", "ubinary", *slow("uint8", "binary")])
def test_precisions(precision, encoder):
    write("a.parquet", TEXTS)
    options = {"precision": precision, "rows_per_part": 100, "truncate_dim": np.int64(12), "normalize_embeddings": True}
    for index in (1, 0):
        corpora.encode_corpus(encoder, ["a.parquet"], "out", shard=(index, 2), **options)
    found = vectors(read("out"))
    expected = encoder.encode(TEXTS, precision=precision, truncate_dim=12, normalize_embeddings=True)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert np.mean(found != expected) < 0.02  # batches of other texts round otherwise
    ranges = json.loads(Path("out/manifest.json").read_text())["ranges"]
    assert (np.shape(ranges) == (2, 12)) == precision.endswith("int8")


def test_ranges_are_from_the_first_texts(encoder, monkeypatch):
    monkeypatch.setattr(corpora, "_CALIBRATION", 10)
    write("a.parquet", [None, *TEXTS])
    corpora.encode_corpus(encoder, ["a.parquet"], "out", precision="int8", shard=(1, 2), rows_per_part=50)
    ranges = json.loads(Path("out/manifest.json").read_text())["ranges"]
    first = encoder.encode(TEXTS[:10])
    np.testing.assert_allclose(ranges, [first.min(axis=0), first.max(axis=0)], atol=1e-5)


def test_truncation_above_the_width_changes_nothing(encoder):
    write("a.parquet", TEXTS[:5])
    corpora.encode_corpus(encoder, ["a.parquet"], "out", truncate_dim=1000)
    np.testing.assert_allclose(vectors(read("out")), encoder.encode(TEXTS[:5]), atol=1e-5)


def test_ranges_of_no_texts_are_written(encoder):
    write("a.parquet", pa.array([None] * 3, pa.string()))
    corpora.encode_corpus(encoder, ["a.parquet"], "out", precision="int8")
    assert np.shape(json.loads(Path("out/manifest.json").read_text())["ranges"]) == (2, tiny.WIDTH)
    assert read("out")["embedding"].to_pylist() == [[None] * tiny.WIDTH] * 3


def test_shards_make_the_same_parts(encoder):
    write("a.parquet", TEXTS)
    options = {"rows_per_part": 40}
    corpora.encode_corpus(encoder, ["a.parquet"], "one", **options)
    for index in (2, 0, 1):
        corpora.encode_corpus(encoder, ["a.parquet"], "three", shard=(index, 3), **options)
    assert contents("one") == contents("three")
    summary = corpora.encode_corpus(encoder, ["a.parquet"], "three", shard=(0, 3), **options)
    assert summary == corpora.Summary(found=2)  # parts 0 and 3; the other shards have the other parts


def test_text_of_more_characters_than_a_chunk_is_a_chunk(encoder, monkeypatch):
    write("a.parquet", TEXTS[:5])
    monkeypatch.setattr(inputs, "CHUNK_CHARACTERS", 1)
    assert corpora.encode_corpus(encoder, ["a.parquet"], "out").texts == 5
    assert pq.ParquetFile("out/part-000000.parquet").num_row_groups == 5


def test_text_that_does_not_fit_begins_a_chunk(encoder, monkeypatch):
    write("a.parquet", TEXTS[:1])
    write("b.parquet", TEXTS[1:2])
    monkeypatch.setattr(inputs, "CHUNK_CHARACTERS", max(map(len, TEXTS[:2])))
    corpora.encode_corpus(encoder, ["a.parquet", "b.parquet"], "out")
    assert pq.ParquetFile("out/part-000000.parquet").num_row_groups == 2


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_null_text_gives_a_null_embedding(kind, model, encoder, capsys):
    texts = [*TEXTS[:70], None, *TEXTS[70:90], None]
    write(f"a.{kind}", texts, number=[*range(92)])
    command = ["encode", "--model", model, f"a.{kind}", "-o", "out/", "--rows-per-part", "75", "--keep", "number"]
    assert cli.main(command) == 0
    table = read("out")
    assert table["embedding"].null_count == 0  # old versions of pyarrow read no null among lists of a fixed size
    is_null = np.array([row == [None] * tiny.WIDTH for row in table["embedding"].to_pylist()])
    assert [*np.flatnonzero(is_null)] == [70, 91] and table["number"].to_pylist() == [*range(92)]
    found = vectors(table.filter(~is_null))
    np.testing.assert_allclose(found, encoder.encode(TEXTS[:90]), atol=1e-5)
    assert "2 rows have no text; all components of their embeddings are null" in capsys.readouterr().err


def test_chunks_are_bounded_in_characters(encoder, monkeypatch):
    write("a.parquet", TEXTS[:50])
    corpora.encode_corpus(encoder, ["a.parquet"], "whole")
    monkeypatch.setattr(inputs, "CHUNK_CHARACTERS", 500)
    corpora.encode_corpus(encoder, ["a.parquet"], "cut")
    file = pq.ParquetFile("cut/part-000000.parquet")
    sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    assert len(sizes) > 5 and sum(sizes) == 50
    ends = np.cumsum(sizes)[:-1]
    assert all(sum(map(len, TEXTS[first:stop])) <= 500 < sum(map(len, TEXTS[first : stop + 1]))
               for first, stop in zip([0, *ends], ends, strict=False))  # fmt: skip
    write("b.txt", ["a" * 100] * 10)  # five fit exactly
    corpora.encode_corpus(encoder, ["b.txt"], "exact")
    assert [pq.ParquetFile("exact/part-000000.parquet").metadata.row_group(i).num_rows for i in range(2)] == [5, 5]
    np.testing.assert_allclose(vectors(read("cut")), vectors(read("whole")), atol=1e-5)


def test_strings_of_other_arrow_types(encoder):
    column = pa.array(TEXTS[:9]).dictionary_encode()
    pq.write_table(pa.table({"words": column, "large": pa.array(TEXTS[:9], pa.large_string())}), "a.parquet")
    for name in ("words", "large"):
        corpora.encode_corpus(encoder, ["a.parquet"], name, text_column=name, keep=[name])
        np.testing.assert_allclose(vectors(read(name)), encoder.encode(TEXTS[:9]), atol=1e-5)
        assert read(name)[name].to_pylist() == TEXTS[:9]


def test_batch_reads_only_its_texts_of_a_dictionary():
    words = pa.array([f"text {i}" for i in range(100_000)])
    array = pa.DictionaryArray.from_arrays(pa.array([7, None, 99_999, 7], pa.int32()), words)
    records._strings(array[:1])  # imports what pyarrow needs
    tracemalloc.start()
    try:
        found, most = records._strings(array), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == ["text 7", None, "text 99999", "text 7"] and found[0] is found[3] and most < 1 << 20
    assert records._strings(array[:0]) == [] and records._strings(array[1:2]) == [None]


def test_empty_data_give_no_parts(encoder):
    write("a.parquet", pa.array([], pa.string()))
    assert corpora.encode_corpus(encoder, ["a.parquet"], "out").written == 0
    assert [*contents("out")] == ["manifest.json"]


def test_chunks_are_bounded_in_rows(encoder, monkeypatch):
    """Parts of any number of rows take no more memory."""
    monkeypatch.setattr(corpora, "_CHUNK_BYTES", 20 * 4 * tiny.WIDTH)
    write("a.parquet", [None if i == 30 else text for i, text in enumerate(TEXTS)])
    corpora.encode_corpus(encoder, ["a.parquet"], "out", rows_per_part=110)
    groups = [pq.ParquetFile(file).metadata for file in sorted(Path("out").glob("*.parquet"))]
    assert [[group.row_group(i).num_rows for i in range(group.num_row_groups)] for group in groups] == [
        [20] * 5 + [10], [20] * 5 + [10], [10]
    ]  # fmt: skip
    assert len(read("out")) == len(TEXTS)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_long_texts_are_truncated(kind, encoder):
    write(f"a.{kind}", ["a bird " * 1_400_000, "rain"])
    corpora.encode_corpus(encoder, [f"a.{kind}"], "out")
    np.testing.assert_allclose(vectors(read("out")), encoder.encode(["a bird " * 100, "rain"]), atol=1e-5)


# --- Interruptions -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, model):
    """A file of many texts, a command, and the result of the command."""
    base = tmp_path_factory.mktemp("corpus")
    texts = [TEXTS[i % 230] + f" {i}" for i in range(3000)]
    pq.write_table(
        pa.table({"text": texts, "pad": [random.Random(i).randbytes(20 * (i // 300)).hex() for i in range(3000)]}),
        base / "a.parquet",
    )
    command = ["encode", "--model", model, str(base / "a.parquet"), "--keep", "pad", "--rows-per-part", "100"]
    assert cli.main([*command, "-o", f"{base}/out/"]) == 0
    return command, contents(base / "out")


def start(command):
    return subprocess.Popen([sys.executable, "-m", "jaxft.cli", *command, "-o", "out/"], env=ENVIRONMENT,
                            stderr=subprocess.PIPE, text=True)  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGKILL, *slow(signal.SIGTERM)])
def test_interrupted_command_goes_on(number, corpus, capfd):
    command, expected = corpus
    process = start(command)
    while not Path("out/part-000003.parquet").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.send_signal(number)
    process.communicate()
    assert process.returncode == (143 if number == signal.SIGTERM else -9)
    before = contents_of_parts("out")
    assert 1 <= len(before) < 30 and before.items() <= expected.items()
    assert cli.main([*command, "-o", "out/"]) == 0
    assert contents("out") == expected
    assert f"parts: {30 - len(before)} written, {len(before)} were there" in capfd.readouterr().err


def contents_of_parts(folder):
    return {name: data for name, data in contents_of_files(folder).items() if name.endswith(".parquet")}


def contents_of_files(folder):
    return {file.name: file.read_bytes() for file in Path(folder).iterdir() if file.is_file()}


def test_command_goes_on_after_a_full_disk(corpus):
    """The parts grow, and no file may be larger than one in the middle."""
    command, expected = corpus
    size = len(expected["part-000015.parquet"]) + 1000
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))"
    code = f"{limit}; import sys; from jaxft import cli; sys.exit(cli.main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, *command, "-o", "out/"], env=ENVIRONMENT,
                          capture_output=True, text=True)  # fmt: skip
    *_, line = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("jaxft: error: cannot write out/part-0000"), done.stderr
    assert "Exception ignored" not in done.stderr and "Traceback" not in done.stderr
    before = contents("out")
    assert 20 < len(before) < len(expected) and before.items() <= expected.items()
    assert cli.main([*command, "-o", "out/"]) == 0
    assert contents("out") == expected


def test_two_processes_make_the_same_parts(corpus):
    command, expected = corpus
    processes = [start(command) for _ in range(2)]
    for process in processes:
        error = process.communicate()[1]
        assert process.returncode == 0, error
    assert contents("out") == expected


@pytest.mark.parametrize(
    "damage", ["flipped", "cut", "gone", "no record", "bad record", "deep record", "another record", "another part"]
)
def test_damaged_part_is_computed_again(damage, encoder, caplog):
    write("a.parquet", TEXTS)
    corpora.encode_corpus(encoder, ["a.parquet"], "out", rows_per_part=50)
    expected = contents("out")
    file, record = Path("out/part-000002.parquet"), Path("out/part-000002.json")
    data = file.read_bytes()
    if damage == "flipped":
        file.write_bytes(data[:500] + bytes([data[500] ^ 1]) + data[501:])
    elif damage == "cut":
        file.write_bytes(data[:-100])
    elif damage == "gone":
        file.unlink()
    elif damage == "no record":
        record.unlink()
    elif damage == "another part":
        for copy in (file, record):
            copy.write_bytes(Path(str(copy).replace("2.", "1.")).read_bytes())
    else:
        contents_of = {"bad record": "[]", "deep record": "[" * 200_000}
        record.write_text(contents_of.get(damage) or Path("out/part-000001.json").read_text())
    done = corpora.encode_corpus(encoder, ["a.parquet"], "out", rows_per_part=50)
    assert contents("out") == expected
    assert (done.written, done.found, done.damaged, done.texts) == (1, 4, damage != "gone", 50)
    assert ("part-000002.parquet is damaged and is computed again" in caplog.text) == (damage != "gone")


def test_run_without_new_parts_removes_what_a_killed_one_left(encoder):
    write("a.txt", TEXTS[:3])
    corpora.encode_corpus(encoder, ["a.txt"], "out")
    Path("out/.jaxft-x.tmp").mkdir()
    Path("out/.jaxft-x.tmp/lock").touch()
    assert corpora.encode_corpus(encoder, ["a.txt"], "out").found == 1
    assert sorted(os.listdir("out")) == ["manifest.json", "part-000000.json", "part-000000.parquet"]


def test_failed_write_leaves_no_part(encoder, monkeypatch):
    write("a.parquet", TEXTS)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    monkeypatch.setattr(corpora, "_QUEUED", 100)  # the other parts wait for the writer already
    with pytest.raises(OSError, match=r"cannot write out/part-000000.parquet: No space left on device"):
        corpora.encode_corpus(encoder, ["a.parquet"], "out", rows_per_part=50)
    assert [*contents("out")] == ["manifest.json"] and not atomic._unfinished


@pytest.mark.parametrize("calls", [2, 3])  # the first call has the file without rows
def test_disk_that_fails_later_leaves_no_part(encoder, monkeypatch, calls):
    monkeypatch.setattr(corpora, "_CHUNK_BYTES", 4 * tiny.WIDTH * 5)
    write("a.parquet", TEXTS[:10])
    sync, done = corpora.os.fdatasync, []

    def fail(file):
        sync(file)
        done.append(file)
        if len(done) == calls:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(corpora.os, "fdatasync", fail)
    with pytest.raises(OSError, match=r"cannot write out/part-000000.parquet: Input/output error"):
        corpora.encode_corpus(encoder, ["a.parquet"], "out")
    assert [*contents("out")] == ["manifest.json"] and not atomic._unfinished


def test_memory_of_written_embeddings_is_used_again(encoder, monkeypatch):
    monkeypatch.setattr(corpora, "_CHUNK_BYTES", 4 * tiny.WIDTH * 5)
    add, seen = corpora._Writer.add, []

    def added(writer, chunk, embeddings):
        seen.append((len(embeddings), embeddings.base))
        add(writer, chunk, embeddings)

    write("a.parquet", TEXTS)
    corpora.encode_corpus(encoder, ["a.parquet"], "first", rows_per_part=12)  # compiles, which queues many chunks
    monkeypatch.setattr(corpora._Writer, "add", added)
    corpora.encode_corpus(encoder, ["a.parquet"], "out", rows_per_part=12)
    assert len(seen) == 58 and {rows for rows, _ in seen} == {5, 2}
    assert len({id(memory) for _, memory in seen}) < 40
    np.testing.assert_allclose(vectors(read("out")), encoder.encode(TEXTS), atol=1e-5)


def test_embeddings_are_stored_without_dictionaries(encoder):
    write("a.parquet", TEXTS, number=[*range(230)])
    corpora.encode_corpus(encoder, ["a.parquet"], "out", keep=["number"])
    group = pq.ParquetFile("out/part-000000.parquet").metadata.row_group(0)
    number, embedding = group.column(0), group.column(1)
    assert (number.has_dictionary_page, number.compression, number.is_stats_set) == (True, "ZSTD", True)
    assert (embedding.has_dictionary_page, embedding.compression, embedding.is_stats_set) == (
        False, "UNCOMPRESSED", False
    )  # fmt: skip


def test_few_chunks_wait_for_the_writer(encoder, monkeypatch):
    real, most = corpora._OpenPart.write, []

    def slow_write(part, *chunk):
        time.sleep(0.01)
        real(part, *chunk)

    add = corpora._Writer.add
    monkeypatch.setattr(corpora._OpenPart, "write", slow_write)
    monkeypatch.setattr(corpora._Writer, "add", lambda *args: (add(*args), most.append(len(args[0]._waiting))))
    monkeypatch.setattr(corpora, "_CHUNK_BYTES", 4 * tiny.WIDTH * 5)
    write("a.parquet", TEXTS[:60])
    corpora.encode_corpus(encoder, ["a.parquet"], "out")
    assert max(most) == corpora._QUEUED == 8


def test_three_parts_of_three_chunks_are_written_at_once(encoder, monkeypatch):
    real, third = corpora._OpenPart.write, threading.Event()

    def write_once_the_third_is_open(part, *chunk):
        if part.part == 2:
            third.set()
        assert third.wait(20)
        real(part, *chunk)

    monkeypatch.setattr(corpora._OpenPart, "write", write_once_the_third_is_open)
    monkeypatch.setattr(corpora, "_CHUNK_BYTES", 4 * tiny.WIDTH * 5)
    write("a.parquet", TEXTS[:45])
    assert corpora.encode_corpus(encoder, ["a.parquet"], "out", rows_per_part=15).written == 3


def test_part_is_finished_while_the_next_is_written(encoder, monkeypatch):
    is_next, add, finish = threading.Event(), corpora._OpenPart.write, corpora._OpenPart.finish

    def written(part, *chunk):
        if part.part == 1:
            is_next.set()
        add(part, *chunk)

    def finished(part):
        assert part.part or is_next.wait(10)
        finish(part)

    monkeypatch.setattr(corpora._OpenPart, "write", written)
    monkeypatch.setattr(corpora._OpenPart, "finish", finished)
    write("a.parquet", TEXTS)
    assert corpora.encode_corpus(encoder, ["a.parquet"], "out", rows_per_part=50).written == 5
    assert corpora.encode_corpus(encoder, ["a.parquet"], "out", rows_per_part=50).found == 5


# --- Settings and mistakes ---------------------------------------------------------------------------------------


OTHERS = {
    "rows_per_part 50": {"rows_per_part": 51}, "precision 'float32'": {"precision": "int8"},
    "truncate_dim None": {"truncate_dim": 8}, "normalize_embeddings False": {"normalize_embeddings": True},
    "prompt ''": {"prompt": "x"}, "batch_size 32": {"batch_size": 16}, r"keep \{\}": {"keep": ["number"]},
    "dtype 'float32'": {"model": {"dtype": "bfloat16"}}, r"data \['a.parquet'": {"data": ["b.parquet"]},
    "text_column 'text'": {"text_column": "other"},
}  # fmt: skip


def test_other_settings_are_refused_by_name(encoder):
    write("a.parquet", TEXTS, number=[*range(230)], other=TEXTS)
    write("b.parquet", TEXTS[:9], number=[*range(9)])
    options = {"data": ["a.parquet"], "rows_per_part": 50, "model": {"dtype": "float32", "_name": "x"}}
    corpora.encode_corpus(encoder, folder="out", **options)
    expected = contents("out")
    for message, others in OTHERS.items():
        with pytest.raises(DataError, match=f"^out: its parts were made with {message}.*, not .*; pass the same"):
            corpora.encode_corpus(encoder, folder="out", **(options | others))
    corpora.encode_corpus(encoder, folder="out", **(options | {"model": {"dtype": "float32", "_name": "y"}}))
    assert contents("out") == expected


def test_changed_data_and_another_length_are_refused(encoder, monkeypatch):
    write("a.txt", TEXTS[:9])
    corpora.encode_corpus(encoder, ["a.txt"], "out")
    with monkeypatch.context() as patch:
        patch.setattr(encoder, "max_seq_length", encoder.max_seq_length - 1)
        with pytest.raises(DataError, match="^out: its parts were made with max_seq_length"):
            corpora.encode_corpus(encoder, ["a.txt"], "out")
    for texts in (TEXTS[:8], [*TEXTS[:8], TEXTS[8].swapcase()]):
        write("a.txt", texts)
        with pytest.raises(DataError, match=r"^out: its parts were made with data \['a.txt', \d+, '\w+'\], not"):
            corpora.encode_corpus(encoder, ["a.txt"], "out")


@pytest.mark.parametrize("kind", ["parquet", "txt.gz"])
def test_another_text_of_the_same_length_is_noticed(kind):
    """Also if the file is longer than its end that is compared."""
    words = [random.Random(i).randbytes(16).hex() for i in range(20_000)]
    write(f"a.{kind}", words)
    write(f"b.{kind}", [*words[:9_000], "x" * 32, *words[9_001:]])
    (_, _, one), (_, size, other) = records.facts(records.sources([f"a.{kind}", f"b.{kind}"]))
    assert size > 1 << 17 and one != other


def test_changed_file_among_many_is_named(encoder):
    for i in range(9):
        write(f"{i}.txt", TEXTS[:2])
    names = [f"{i}.txt" for i in range(9)]
    corpora.encode_corpus(encoder, names, "out")
    with pytest.raises(DataError, match=r"with data \['8.txt', \d+, '\w+'\], not None; pass"):
        corpora.encode_corpus(encoder, names[:-1], "out")
    write("7.txt", TEXTS[2:4])
    with pytest.raises(DataError, match=r"with data \['7.txt', .*\], not \['7.txt'"):
        corpora.encode_corpus(encoder, names, "out")


def test_defaults_of_the_encoder_are_settings(model):
    write("a.txt", TEXTS[:9])
    given = {"truncate_dim": 4, "prompts": {"query": "bird "}, "default_prompt_name": "query"}
    changed = SentenceEncoder.from_pretrained(model, **given)
    corpora.encode_corpus(changed, ["a.txt"], "out")
    np.testing.assert_allclose(vectors(read("out")), changed.encode(TEXTS[:9]), atol=1e-5)
    expected = contents("out")
    corpora.encode_corpus(changed, ["a.txt"], "out", truncate_dim=4, prompt="bird ")  # the same
    assert contents("out") == expected
    for name, others in (
        ("prompt 'bird '", {"prompts": {"query": "tree "}}),
        ("prompt 'bird '", {"default_prompt_name": None}),
        ("truncate_dim 4", {"truncate_dim": 5}),
        ("truncate_dim 4", {"truncate_dim": None}),
    ):
        with pytest.raises(DataError, match=f"^out: its parts were made with {name}, not "):
            corpora.encode_corpus(SentenceEncoder.from_pretrained(model, **(given | others)), ["a.txt"], "out")


def test_colon_in_a_name_makes_no_uri(encoder, monkeypatch):
    mkdtemp = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **options: os.path.relpath(mkdtemp(**options)))  # as Python 3.11
    write("a:b.txt", TEXTS[:3])
    corpora.encode_corpus(encoder, ["a:b.txt"], "out:1/s3:x", devices=iter([0]))
    assert read(Path("out:1/s3:x").absolute()).num_rows == 3


def test_part_that_cannot_be_closed_is_closed_once(folder, monkeypatch):
    """Python would print a traceback if the writer tried it again when it is deleted."""
    part, calls = corpora._OpenPart(folder / "a.parquet", 0, pa.schema([("id", pa.int64())]), "{}"), []

    def close():
        calls.append(part._writer)
        raise OSError(28, "No space left on device")

    part.open()
    with part.thread:
        monkeypatch.setattr(part._writer, "close", close)
        part.discard()
        part._writer.__del__()
    assert len(calls) == 1 and not [*folder.iterdir()]


def test_first_manifest_counts(folder):
    """Another process may write it between the look and the write."""
    for ranges in ([[1.0], [2.0]], None):
        assert corpora._write_manifest(folder, {"a": 1}, {"ranges": ranges}) == [[1.0], [2.0]]


def test_digest_of_a_model_follows_all_files_and_their_places(folder):
    files = {"config.json": "{}", "sub/a.json": "1", "sub/b.json": "2", "spiece.model": "3", "vocab.txt": "4"}
    found = []
    for change in ({}, {"sub/a.json": "2", "sub/b.json": "1"}, *({name: "5"} for name in files)):
        for name, text in (files | change).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        found.append(corpora.model_digest(folder))
    (folder / "README.md").write_text("6")
    assert corpora.model_digest(folder) == found[-1] and len({*found}) == len(found)
    (folder / "sub").rename(folder / "sua")  # the order stays
    assert corpora.model_digest(folder) not in found


def test_parts_of_other_settings_are_computed_again_where_the_manifest_is_lost(encoder):
    write("a.parquet", TEXTS)
    corpora.encode_corpus(encoder, ["a.parquet"], "new", rows_per_part=50, prompt="x")
    corpora.encode_corpus(encoder, ["a.parquet"], "out", rows_per_part=50)
    Path("out/manifest.json").unlink()
    done = corpora.encode_corpus(encoder, ["a.parquet"], "out", rows_per_part=50, prompt="x")
    assert (done.damaged, done.found) == (5, 0) and contents("out") == contents("new")


def test_parts_of_other_ranges_are_computed_again_where_the_manifest_is_lost(encoder, monkeypatch):
    write("a.parquet", TEXTS[:60])
    corpora.encode_corpus(encoder, ["a.parquet"], "out", rows_per_part=50, precision="int8")
    Path("out/manifest.json").unlink()
    monkeypatch.setattr(corpora, "_CALIBRATION", 5)
    done = corpora.encode_corpus(encoder, ["a.parquet"], "out", rows_per_part=50, precision="int8")
    assert (done.damaged, done.found) == (2, 0)


def test_another_model_is_refused(model, tmp_path, capsys):
    write("a.parquet", TEXTS[:9])
    (tmp_path / "other").mkdir()
    other = str(tiny.write_sentence_model(tmp_path / "other", normalize=True))
    assert cli.main(["encode", "--model", model, "a.parquet", "-o", "out/"]) == 0
    capsys.readouterr()
    message = fails(capsys, "encode", "--model", other, "a.parquet", "-o", "out/")
    assert message.startswith("out: its parts were made with model_sha256 ")
    message = fails(capsys, "encode", "--model", model, "a.parquet", "-o", "out/", "--dtype", "bfloat16")
    assert message.startswith("out: its parts were made with dtype 'float32', not 'bfloat16'")


def test_options_of_encode_that_change_numbers_are_settings(capsys):
    """The file has JSON lines, which are texts too, so that any option could be forgotten."""
    of_settings = {
        "--max-seq-length": ["9"], "--batch-size": ["2"], "--dtype": ["float16"], "--quantization": ["fp8"],
        "--implementation": ["xla"], "--text-column": ["body"], "--keep": ["text"], "--rows-per-part": ["7"],
        "--normalize": [], "--prompt": ["a "], "--precision": ["float16"], "--truncate-dim": ["4"], "--jsonl": [],
    }  # fmt: skip
    # The texts, the model and the prompt that these options name are settings. The others have other tests.
    others = {"--help", "--model", "--revision", "--prompt-name", "--no-compilation-cache", "--devices", "--output",
              "--shard"}  # fmt: skip
    parser = cli._parser()._subparsers._group_actions[0].choices["encode"]
    assert {action.option_strings[-1] for action in parser._actions if action.option_strings} == others | {*of_settings}
    Path("a.txt").write_text("".join(json.dumps({"text": text, "body": text}) + "\n" for text in TEXTS[:9]))
    model = str(tiny.write_model(Path("wide"), hidden_size=128, intermediate_size=128))  # for float8
    base = ["encode", "--model", model, "a.txt", "-o", "out/", "--dtype", "bfloat16"]
    assert cli.main(base) == 0
    capsys.readouterr()
    for option, value in of_settings.items():
        message = fails(capsys, *base, option, *value)
        name = {"--normalize": "normalize_embeddings"}.get(option, option.removeprefix("--").replace("-", "_"))
        assert message.startswith(f"out: its parts were made with {name} "), (option, message)


@pytest.mark.parametrize("text", [
    "", "{", "[]", "[" * 200_000, '{"settings": 1, "ranges": null}', '{"settings": {}}',
])  # fmt: skip
def test_damaged_manifest_is_refused(encoder, text):
    write("a.parquet", TEXTS[:9])
    Path("out").mkdir()
    Path("out/manifest.json").write_text(text)
    with pytest.raises(DataError, match="out/manifest.json: "):
        corpora.encode_corpus(encoder, ["a.parquet"], "out")


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"text": [1, 2]}, {}, "a.parquet: column 'text' must hold strings, got int64"),
        ({"text": [["a"]]}, {}, "a.parquet: column 'text' must hold strings, got list"),
        ({"words": ["a"]}, {}, "a.parquet: has no column 'text' .--text-column.; its columns are words"),
        ({"text": ["a"]}, {"keep": ["id"]}, "a.parquet: has no column 'id' .--keep.; its columns are text"),
        ({"text": ["a"]}, {"keep": ["embedding"]}, "keep must be different names other than 'embedding'"),
        ({"text": ["a"]}, {"rows_per_part": 0}, "rows_per_part must be a positive integer, got 0"),
        ({"text": ["a"]}, {"shard": (2, 2)}, "shard must be .i, n. with 0 <= i < n, got .2, 2."),
        ({"text": ["a"]}, {"precision": "int4"}, "precision must be one of float32, .*, got 'int4'"),
        ({"text": ["a"]}, {"prompt_name": "none"}, "prompt_name must be the name of one of the prompts"),
        ({"text": ["a"]}, {"devices": [99]}, "devices must be indices below"),
    ],
)  # fmt: skip
def test_wrong_parquet_and_arguments(encoder, columns, options, message):
    pq.write_table(pa.table(columns), "a.parquet")
    with pytest.raises(ValueError, match=message):
        corpora.encode_corpus(encoder, ["a.parquet"], "out", **options)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"no parquet", "cannot read a.parquet: "),
        ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', "a.jsonl, line 2: expected a JSON string or an object"),
        ("a.jsonl", b'{"text": "a"}\n{\n', "a.jsonl, line 2: not valid JSON"),
        ("a.jsonl", b'"\\ud800"\n', "a.jsonl, line 1: the text is not valid Unicode"),
        ("a.txt", b"a\n\xff\n", "a.txt, line 2: not valid UTF-8"),
        ("a.txt.gz", b"no gzip", "a.txt.gz: cannot be decompressed: Not a gzipped file"),
        ("a.txt.gz", gzip.compress(b"a\n" * 99, mtime=0)[:-9], "a.txt.gz: cannot be decompressed: "),
        ("a.csv", b"a\n", "a.csv: expected a file that ends in .parquet, .jsonl, .txt, .jsonl.gz, .txt.gz"),
        ("no.txt", None, "cannot read no.txt: No such file or directory"),
        ("s3:/no", None, "cannot read s3:/no: No such file"),
        ("what://no", None, "cannot read what://no: "),
    ],
)  # fmt: skip
def test_wrong_files(encoder, name, content, message):
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(DataError, match=f"^{message}"):
        corpora.encode_corpus(encoder, [name], "out")


def test_error_in_the_middle_keeps_the_parts_before(encoder):
    write("a.jsonl", ["rain"] * 1000)  # the first records are read beforehand
    Path("b.jsonl").write_text('"rain"\n{"text": 3}\n')
    with pytest.raises(DataError, match=r"b.jsonl, line 2: expected"):
        corpora.encode_corpus(encoder, ["a.jsonl", "b.jsonl"], "out", rows_per_part=250)
    assert set(contents("out")) <= {
        "manifest.json",
        *(f"part-00000{i}.{s}" for i in range(4) for s in ("json", "parquet")),
    }


def test_text_that_cannot_be_encoded_is_named(encoder, monkeypatch):
    write("a.parquet", TEXTS[:60])
    write("b.parquet", [TEXTS[0], None, "rain", "no"])
    real = encoder._texts(None)
    monkeypatch.setattr(encoder, "_texts", lambda task: real)
    encodings = real.encodings

    def failing(prompt, texts):
        for index, text in enumerate(texts):
            if text == "no":
                raise corpora.TextError(index, text, "cannot be tokenised")
        return encodings(prompt, texts)

    monkeypatch.setattr(real, "encodings", failing)
    with pytest.raises(DataError, match=r"^b.parquet, row 4: 'no' cannot be tokenised$"):
        corpora.encode_corpus(encoder, ["a.parquet", "b.parquet"], "out", rows_per_part=50)


@pytest.mark.parametrize("first", ["", None])
def test_text_that_fails_after_other_chunks_were_written_is_named(first, encoder, monkeypatch):
    write("a.parquet", [first, *TEXTS[1:]])
    real = encoder.encode

    def failing(inputs, **options):
        results = real(inputs, **options)

        def some():
            yield from itertools.islice(results, 2)
            next(results)
            raise corpora.TextError(11 - (first is None), TEXTS[11], "cannot be tokenised")

        return results if isinstance(inputs, list) else some()

    monkeypatch.setattr(encoder, "encode", failing)
    with pytest.raises(DataError, match=rf"^a.parquet, row 12: {TEXTS[11]!r:.80} cannot be tokenised$"):
        corpora.encode_corpus(encoder, ["a.parquet"], "out", rows_per_part=5)


def test_compressed_files_are_capped(encoder, monkeypatch):
    monkeypatch.setattr(records, "_LEAST_CAP", 1000)
    monkeypatch.setattr(records, "_LINE_BYTES", 0)
    Path("a.txt.gz").write_bytes(gzip.compress(b"a bird sings\n" * 100_000))
    with pytest.raises(DataError, match="^a.txt.gz: expands to more than 200 times its size; decompress it first"):
        corpora.encode_corpus(encoder, ["a.txt.gz"], "out")
    Path("b.txt.gz").write_bytes(gzip.compress(b"rain\n" * 210))  # more than the least cap, and about 30 times its size
    assert corpora.encode_corpus(encoder, ["b.txt.gz"], "other").texts == 210


def test_files_of_several_kinds_are_refused(encoder):
    write("a.parquet", TEXTS[:3])
    write("a.txt", TEXTS[:3])
    with pytest.raises(DataError, match="the files must be of one kind, got .parquet and .txt"):
        corpora.encode_corpus(encoder, ["a.parquet", "a.txt"], "out")
    Path("out").mkdir()
    write("out/a.txt", TEXTS[:3])
    with pytest.raises(DataError, match="out/a.txt: is inside of out, the folder of the result"):
        corpora.encode_corpus(encoder, ["out/a.txt"], "out")
    with pytest.raises(DataError, match="^out: all of its files are inside of out, the folder of the result"):
        corpora.encode_corpus(encoder, ["out"], "out")


@pytest.mark.parametrize("data", ["data", "link/", "file://{folder}/data"])
def test_folder_of_the_result_may_be_below_the_data(data, encoder, folder):
    Path("data").mkdir()
    Path("link").symlink_to("data")
    write("data/a.parquet", TEXTS)
    for written in (3, 0):
        done = corpora.encode_corpus(encoder, [data.format(folder=folder)], "data/out", rows_per_part=100)
        assert done.written == written


def test_kept_fields_of_json(encoder):
    rows = [
        {"text": "rain", "s": "x", "i": 1, "f": 1, "b": True},
        {"text": "a", "f": 2.5},
        {"text": "the", "i": None, "none": None},
    ]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keep = ["s", "i", "f", "b", "none"]
    corpora.encode_corpus(encoder, ["a.jsonl"], "out", keep=keep)
    table = read("out").select(keep)
    assert [str(field.type) for field in table.schema] == ["string", "int64", "double", "bool", "string"]
    assert table["f"].to_pylist() == [1.0, 2.5, None] and table["i"].to_pylist() == [1, None, None]
    for row, message in (({"i": "x"}, "'i' must be int64"), ({"i": True}, "'i' must be int64"), ({"s": 1}, "'s' must")):
        Path("b.jsonl").write_text(json.dumps({"text": "a"} | row) + "\n")
        with pytest.raises(DataError, match=f"b.jsonl, line 1: field {message}.* as in the first records"):
            corpora.encode_corpus(encoder, ["a.jsonl"] * 400 + ["b.jsonl"], f"out{list(row.values())}", keep=keep)
    Path("c.jsonl").write_text('{"text": "a", "x": [1]}\n')
    with pytest.raises(DataError, match="c.jsonl: field 'x' .--keep. must hold strings, numbers or booleans only"):
        corpora.encode_corpus(encoder, ["c.jsonl"], "out3", keep=["x"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.txt", "b.txt", "-o", "x.npy"], "several DATA need an output folder, such as OUT/, got 'x.npy'"),
        (["in", "-o", "x"], "the folder in needs an output folder, such as OUT/, got 'x'"),
        (["a.txt", "-o", "x.npy", "--keep", "a"], "--keep needs an output folder, such as OUT/, got 'x.npy'"),
        (["a.txt", "-o", "x.npy", "--shard", "0/2"], "--shard needs an output folder, such as OUT/, got 'x.npy'"),
        (["a.parquet", "-o", "x.npy"], "output 'x.npy' must be a folder for these data; a new one may end in /"),
        (["a.parquet", "-o", "-"], "output '-' must be a folder for these data; a new one may end in /"),
        (["-", "-o", "x/"], "a folder of parquet files cannot be made from stdin; name the files"),
        (["a.parquet", "-o", "file"], "cannot write file: it is no folder"),
        (["a.txt", "-o", "x/", "--shard", "2/2"], "argument --shard: expected I/N with 0 <= I < N, got '2/2'"),
        (["a.parquet", "-o", "s3://x/"], "output 's3://x/' must be a local folder for these data"),
        (["", "-o", "x/"], "cannot read '': name a file, a folder or a URI"),
        (["a.txt", "-", "-o", "x/"], "a folder of parquet files cannot be made from stdin; name the files"),
        (["a.txt", "-o", "x/", "--devices", "a"], "argument --devices: expected indices such as 0,1, got 'a'"),
        (["no.parquet", "-o", "x/"], "cannot read no.parquet: No such file or directory"),
    ],
)  # fmt: skip
def test_wrong_commands(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(SentenceEncoder, "from_pretrained", None)  # must not be called
    Path("file").write_text("")
    Path("in").mkdir()
    write("a.parquet", TEXTS[:3])
    assert fails(capsys, "encode", "--model", "m", *arguments) == message
    assert not Path("x").exists()


def test_names_to_keep_differ(encoder):
    write("a.parquet", TEXTS[:3], id=[1, 2, 3])
    with pytest.raises(ValueError, match="encode_corpus: keep must be different names other than 'embedding'"):
        corpora.encode_corpus(encoder, ["a.parquet"], "out", keep=["id", "id"])


def test_facts_about_the_run_may_differ(encoder):
    write("a.parquet", TEXTS[:3])
    for device in ("cpu", "gpu"):
        facts = {"sha256": "1", "_device": device}
        summary = corpora.encode_corpus(encoder, ["a.parquet"], "out", model=facts)
        assert (summary.written, summary.found) == ((1, 0) if device == "cpu" else (0, 1))
    manifest = json.loads(Path("out/manifest.json").read_text())
    assert manifest["about"] == {"device": "cpu"} and manifest["settings"]["sha256"] == "1"
    for facts, other in (({"sha256": "2"}, "sha256 '1', not '2'"), ({}, "sha256 '1', not None"),
                         ({"sha256": "1", "quantization": 1}, "quantization None, not 1")):  # fmt: skip
        with pytest.raises(DataError, match=f"its parts were made with {other}"):
            corpora.encode_corpus(encoder, ["a.parquet"], "out", model=facts)


def test_options_reach_the_corpus(model, monkeypatch, capsys):
    def record(encoder, data, folder, **options):
        seen.append(
            {"encoder": (encoder.max_seq_length, encoder.truncate_dim), "data": data, "to": str(folder), **options}
        )
        return corpora.Summary(texts=6, nulls=2, written=3, found=4)

    seen: list = []
    write("texts.txt", TEXTS[:3])
    monkeypatch.setattr(corpora, "encode_corpus", record)
    given = {
        "--text-column": "body", "--rows-per-part": "7", "--shard": "1/3", "--batch-size": "2", "--precision": "int8",
        "--devices": "0", "--max-seq-length": "9", "--truncate-dim": "4", "--prompt": "a ", "--dtype": "bfloat16",
    }  # fmt: skip
    words = [word for option in given.items() for word in option]
    begin = ["encode", "--model", model, "texts.txt", "-o", "out/"]
    assert cli.main([*begin, *words, "--keep", "id", "--normalize", "--jsonl", "--implementation", "xla"]) == 0
    shown = capsys.readouterr().err
    assert (
        "2 rows have no text; all components of their embeddings are null" in shown
        and "parts: 3 written, 4 were there" in shown
    )
    assert cli.main([*begin, "--prompt-name", "query"]) == 0
    common = {"data": ["texts.txt"], "to": "out", "show_progress_bar": True}
    (about, own), defaults = ([options.pop("model") for options in seen], seen[1])
    assert seen[0] == common | {
        "encoder": (9, 4), "text_column": "body", "keep": ["id"], "rows_per_part": 7, "shard": (1, 3), "batch_size": 2,
        "jsonl": True, "precision": "int8", "prompt": "a ", "prompt_name": None, "devices": [0],
        "normalize_embeddings": True,
    }  # fmt: skip
    assert defaults == common | {
        "encoder": (defaults["encoder"][0], None), "text_column": "text", "keep": (), "rows_per_part": 100_000,
        "shard": (0, 1), "batch_size": 32, "jsonl": False, "precision": "float32", "prompt": None,
        "prompt_name": "query", "devices": None, "normalize_embeddings": False,
    }  # fmt: skip
    assert (about["dtype"], about["implementation"], about["_model"]) == ("bfloat16", "xla", model)
    assert (own["dtype"], own["implementation"], own["_revision"]) == ("float32", None, None)
    assert about["model_sha256"] == own["model_sha256"] == corpora.model_digest(Path(model))
    tiny.write_model(Path("wide"), hidden_size=128, intermediate_size=128)
    begin[2] = "wide"
    for options, expected in ([], None), (["--quantization", "fp8"], {"activation_scale": 1.0}):
        assert cli.main([*begin, *options]) == 0
        assert seen[-1]["model"]["quantization"] == expected


def test_compressed_file_without_a_folder(model, encoder):
    write("a.jsonl.gz", TEXTS[:5])
    assert cli.main(["encode", "--model", model, "a.jsonl.gz", "-o", "x.npy"]) == 0
    np.testing.assert_allclose(np.load("x.npy"), encoder.encode(TEXTS[:5]), atol=1e-5)


def test_pyarrow_is_imported_for_corpora_only():
    code = "import sys, jaxft; from jaxft import cli, SentenceEncoder; from jaxft.text import corpora, records\n"
    code += "assert 'pyarrow' not in sys.modules; sys.modules['pyarrow'] = None; records.arrow()"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True)
    assert done.stderr.rstrip().endswith("corpora need pyarrow: pip install 'jaxft[data]'")
