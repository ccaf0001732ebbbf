"""Files of texts, without an encoder: which files are read, what a line is, the types of kept fields, the blocks."""

import dataclasses
import gzip
import io
import itertools
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxft.text import records
from jaxft.text.records import DataError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(*names, column="text", keep=(), jsonl=False, wanted=lambda *_: True):
    """Returns the blocks of files."""
    files = records.sources(names, jsonl=jsonl)
    return [*records.blocks(files, column, records.schema(files, column, keep), wanted)]


def texts(*names, **options):
    return [text for _, block in read(*names, **options) for text in block.texts]


def test_lines_end_at_newlines_only():
    Path("a.txt").write_bytes(b"\xef\xbb\xbfa\x0cb\r\n\n\n c \n\xef\xbb\xbfd\n\re\r\r\n")
    assert texts("a.txt") == ["a\x0cb", "", "", " c ", "\ufeffd", "\re\r"]


def test_longest_line_is_read(monkeypatch):
    monkeypatch.setattr(records, "LONGEST_LINE", 4)
    Path("a.txt").write_bytes(b"abc\nabcd")
    assert texts("a.txt") == ["abc", "abcd"]
    Path("a.txt").write_bytes(b"abc\nabcde")
    with pytest.raises(DataError, match="^a.txt, line 2: has more than 4 bytes$"):
        texts("a.txt")


def test_files_of_a_folder_are_in_order_of_their_paths():
    hidden = (".hidden.txt", "_part.txt", "_temporary/0/e.txt", "a/.cache/f.txt")
    for name in ("b.txt", "a/c.txt", *hidden, "notes.md", "d.txt.gz"):
        Path("in", name).parent.mkdir(parents=True, exist_ok=True)
        data = name.encode()
        Path("in", name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert texts("in") == texts("in/") == ["a/c.txt", "b.txt", "d.txt.gz"]
    assert [source.name for source in records.sources(["in/"])] == ["in/a/c.txt", "in/b.txt", "in/d.txt.gz"]
    assert [source.is_compressed for source in records.sources(["in"])] == [False, False, True]


@pytest.mark.parametrize(
    ("files", "names", "options", "message"),
    [
        ({"in/notes.md": b"a"}, ["in"], {}, r"^in: has no files that end in .parquet, .jsonl"),
        ({}, ["none.txt"], {}, "^cannot read none.txt: No such file"),
        ({"a.md": b"a"}, ["a.md"], {}, "^a.md: expected a file that ends in"),
        ({"a.jsonl": b'"a"\n3'}, ["a.jsonl"], {}, '^a.jsonl, line 2: expected a JSON string or an object with a str'),
        ({"a.jsonl": b'{"b": 1}'}, ["a.jsonl"], {"column": "b"}, '^a.jsonl, line 1: expected .* field "b"$'),
        ({"a.jsonl": b'"\\ud800"'}, ["a.jsonl"], {}, "^a.jsonl, line 1: the text is not valid Unicode"),
        ({"a.jsonl": b'{"text": "\\ud800"}'}, ["a.jsonl"], {}, "^a.jsonl, line 1: the text is not valid Unicode"),
        ({"a.txt": b"a\n\xff"}, ["a.txt"], {}, "^a.txt, line 2: not valid UTF-8$"),
        ({"a.txt": b"a"}, ["a.txt"], {"keep": ["text", "b"]}, "^a.txt: lines of text have no column 'b'"),
        ({"a.txt.gz": gzip.compress(b"a" * 99)[:-9]}, ["a.txt.gz"], {}, "^a.txt.gz: cannot be decompressed"),
        ({"a.txt.gz": b"abc"}, ["a.txt.gz"], {}, "^a.txt.gz: cannot be decompressed"),
        ({"a.txt": b"a", "b.jsonl": b"1"}, ["a.txt", "b.jsonl"], {}, "must be of one kind, got .jsonl and .txt"),
        ({"a.jsonl": b'{"text": "a", "n": "\\ud800"}'}, ["a.jsonl"], {"keep": ["n"]}, "^a.jsonl, line 1: field"),
        (
            {"a.jsonl": b'{"text": "", "n": 1}\n' * 7 + b'{"text": "a", "n": 9223372036854775808}\n"b"\n'},
            ["a.jsonl"], {"keep": ["n"]}, "^a.jsonl, line 8: field 'n': ",
        ),
        (
            {"a.jsonl": b'{"id": 1}\n{"body": "a"}'}, ["a.jsonl"], {},
            "^a.jsonl: the first records have no field 'text' .--text-column.; their fields are id, body$",
        ),
        ({"a.jsonl": b'"a"'}, ["a.jsonl"], {"keep": ["n"]}, "have no field 'n' .--keep.; their fields are text$"),
        ({"a.txt": b"a"}, [""], {}, "^cannot read '': name a file, a folder or a URI$"),
        ({"a.txt": b"a"}, [], {}, "^cannot read '': name a file"),
        ({"a.jsonl": b'{"text": "", "n": 1}\n{"text": "", "n": "x"}'}, ["a.jsonl"], {"keep": ["n"]}, "field 'n' .--k"),
    ],
)  # fmt: skip
def test_unreadable_files_are_named(files, names, options, message):
    for name, data in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        texts(*names, **options)


def test_null_text_needs_nulls():
    assert records.record('{"text": null}', "a", nulls=True) == {"text": None}
    with pytest.raises(DataError, match="^a: expected a JSON string"):
        records.record('{"text": null}', "a")


def test_json_lines_may_have_any_name():
    Path("a.log").write_text('"a"\n{"text": null}\n')
    Path("b.txt").write_text('"b"')
    assert texts("a.log", "b.txt", jsonl=True) == ["a", None, "b"]
    pq.write_table(pa.table({"text": ["c"]}), "c.parquet")
    assert texts("c.parquet", jsonl=True) == ["c"]


@pytest.mark.parametrize("size", [None, 10, 40])
def test_expansion_is_capped_by_the_size(size, monkeypatch):
    monkeypatch.setattr(records, "_LEAST_CAP", 3000)
    monkeypatch.setattr(records, "_LINE_BYTES", 0)
    Path("a.gz").write_bytes(gzip.compress(b"ab\n" * 2000))
    with open("a.gz", "rb") as file:
        expanded = records.Expanded(file, "a.gz", size)
        assert [*records.lines(records.Expanded(io.BytesIO(gzip.compress(b"ab\n" * 900)), "b.gz", size), "b.gz")]
        if size == 40:  # 8,000 bytes may come
            assert len([*records.lines(expanded, "a.gz")]) == 2000
        else:
            with pytest.raises(DataError, match="expands to more than 200 times its size"):
                [*records.lines(expanded, "a.gz")]


def test_lines_of_compressed_files_count_what_they_take_in_memory(monkeypatch):
    monkeypatch.setattr(records, "_LEAST_CAP", 1 << 20)
    bomb = records.Expanded(io.BytesIO(gzip.compress(b"\n" * (1 << 19))), "a.gz", None)
    with pytest.raises(DataError, match="a.gz: expands to more than"):
        [*records.lines(bomb, "a.gz")]


@pytest.mark.parametrize("text", ["", " \t\r", "\ufeff", "\u200b\u200d\u2060\u00ad", "\0\x1f\x7f", "\u2028\u3000\u00a0",
                                  "\u115f\u3164\uffa0", "\ufe0f\u034f"])  # fmt: skip
def test_text_without_a_visible_character_is_blank(text):
    assert records.is_blank(text) and not records.is_blank(f"{text}.") and not records.is_blank(f"\u0301{text}")


def test_types_of_kept_fields_are_inferred(monkeypatch):
    rows = [{"text": "a", "s": "x", "i": 1, "n": 1, "b": True}, {"text": "b", "n": 2.5, "s": None, "none": None}]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = records.sources(["a.jsonl"])
    found = records.schema(files, "text", ["s", "i", "n", "b", "none"])
    assert [str(kind) for kind in found.types] == ["string", "int64", "double", "bool", "string"]
    ((_, block),) = read("a.jsonl", keep=["n", "b"])
    assert block.kept.to_pydict() == {"n": [1.0, 2.5], "b": [True, None]}
    assert block[1:2].texts == ["b"] and block[1:2].row == 1 and block[1:2].kept["n"].to_pylist() == [2.5]
    monkeypatch.setattr(records, "_SAMPLE", 1)  # the second record does not fit
    with pytest.raises(DataError, match="^a.jsonl, line 2: field 'n' must be int64 as in the first records, got 2.5$"):
        read("a.jsonl", keep=["n"])
    Path("b.jsonl").write_text('{"text": "a", "b": 1}\n{"text": "a", "b": true}\n')
    with pytest.raises(DataError, match="^b.jsonl, line 2: field 'b' must be int64"):
        read("b.jsonl", keep=["b"])


def test_types_come_from_a_thousand_records():
    rows = [{"text": "a", "n": 1}] * 999 + [{"text": "a", "n": 2.5}] * 2
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert str(records.schema(records.sources(["a.jsonl"]), "text", ["n"]).field("n").type) == "double"


def test_blocks_are_bounded_and_unwanted_ones_left_out(monkeypatch):
    monkeypatch.setattr(records, "_BLOCK_BYTES", 10)
    monkeypatch.setattr(records, "_BLOCK_ROWS", 3)
    Path("a.txt").write_text("aaaaa\nbbbbb\nccccc\nd\nd\nd\nd\n" + "e" * 20 + "\n")
    Path("b.txt").write_text("f\ng\n")
    found = read("a.txt", "b.txt")
    assert [(first, block.row, len(block.texts)) for first, block in found] == [
        (0, 0, 2), (2, 2, 3), (5, 5, 2), (7, 7, 1), (8, 0, 2)
    ]  # fmt: skip
    assert [block.source.name for _, block in found] == ["a.txt"] * 4 + ["b.txt"]
    asked = []
    left = read("a.txt", "b.txt", wanted=lambda first, stop: asked.append((first, stop)) or first in (2, 8))
    assert [first for first, _ in left] == [2, 8] and asked == [(0, 2), (2, 5), (5, 7), (7, 8), (8, 10)]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_row_groups_of_parquet_are_read_where_wanted(kind, monkeypatch):
    monkeypatch.setattr(records, "_BLOCK_ROWS", 2)
    monkeypatch.setattr(records, "_SHARED_ROWS", 2)
    rows = [None if number == 4 else f"text {number // 2}" for number in range(9)]
    pq.write_table(pa.table({"text": pa.array(rows).cast(kind), "n": [*range(9)]}), "a.parquet", row_group_size=3)
    found = read("a.parquet", keep=["n", "text"], wanted=lambda first, _: first != 3)
    assert [(first, block.row) for first, block in found] == [(0, 0), (2, 2), (6, 6), (8, 8)]
    assert [text for _, block in found for text in block.texts] == rows[:3] + rows[6:]
    assert [n for _, block in found for n in block.kept["n"].to_pylist()] == [0, 1, 2, 6, 7, 8]
    assert {str(block.kept["text"].type) for _, block in found} == {str(records.schema(
        records.sources(["a.parquet"]), "text", ["text"]).field("text").type)}  # fmt: skip
    assert texts("a.parquet", "a.parquet") == rows * 2
    assert [first for first, _ in read("a.parquet", "a.parquet")][-1] == 17


def test_wrong_columns_of_parquet_are_named():
    pq.write_table(pa.table({"text": ["a"], "n": [1]}), "a.parquet")
    pq.write_table(pa.table({"text": ["a"], "n": ["b"]}), "b.parquet")
    with pytest.raises(DataError, match="^b.parquet: column 'n' must be int64 as in a.parquet, got string$"):
        read("a.parquet", "b.parquet", keep=["n"])
    with pytest.raises(DataError, match="^a.parquet: column 'n' must hold strings, got int64$"):
        read("a.parquet", column="n")
    with pytest.raises(DataError, match=r"^a.parquet: has no column 'x' \(--keep\); its columns are text, n$"):
        read("a.parquet", keep=["x"])


@pytest.mark.parametrize("rows", [[0, 0, 0, None, 0, 1, 1, 1], [0, 1, None, 2]])
def test_items_of_a_dictionary_are_shared_if_few_are_used(rows):
    array = pa.DictionaryArray.from_arrays(pa.array(rows, pa.int32()), pa.array(["some text", "other text", "third"]))
    found = records._strings(array)
    assert found == array.to_pylist()
    assert (found[-1] is found[-2]) == (len(rows) == 8)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of up to eight rows and about a hundred bytes."""
    monkeypatch.setattr(records, "_BLOCK_ROWS", 8)
    monkeypatch.setattr(records, "_BLOCK_BYTES", 100)


# Texts of a row group that are short or long, and that many rows share or not. Each order takes another way through
# the reader.
SHORT, SHARED = [f"t{i}" for i in range(40)], ["x" * 50] * 40
LONG = [f"{i:050}" for i in range(40)]


@pytest.mark.parametrize("rows", [
    SHORT, SHARED, LONG, SHARED + SHORT, SHORT + SHARED, SHORT + LONG, SHARED + LONG + SHORT, ["a", None] * 20,
    [None] * 20, [*SHARED, None, *SHORT, None, *LONG],
])  # fmt: skip
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
@pytest.mark.parametrize("keep", [(), ("n",), ("n", "text")])
def test_any_row_group_of_parquet_is_read_in_order(rows, kind, keep, small_blocks):
    table = pa.table({"text": pa.array(rows, pa.string()).cast(kind), "n": [*range(len(rows))]})
    pq.write_table(table, "a.parquet", dictionary_pagesize_limit=60, write_batch_size=2)
    found = read("a.parquet", keep=keep)
    assert [text for _, block in found for text in block.texts] == rows
    assert [first for first, _ in found] == [block.row for _, block in found]
    assert [first for first, _ in found] == [*itertools.accumulate((len(b.texts) for _, b in found[:-1]), initial=0)]
    for name in keep:
        assert [x for _, block in found for x in block.kept[name].to_pylist()] == table[name].to_pylist()
        assert {block.kept[name].type for _, block in found} == {pq.read_schema("a.parquet").field(name).type}


def test_blocks_of_parquet_become_smaller_with_longer_texts(small_blocks):
    pq.write_table(pa.table({"text": [*SHORT * 10, *["x" * 300] * 4]}), "a.parquet", use_dictionary=False)
    sizes = [len(block.texts) for _, block in read("a.parquet")]
    assert sizes == [8] * 50 + [1] * 4


def test_row_group_of_parquet_is_not_read_as_a_whole():
    """100,000 texts of 1,400 characters in one row group: 147 MB in a file of a megabyte."""
    pq.write_table(pa.table({"text": [f"{'a' * 1400}{i}" for i in range(100_000)]}), "a.parquet", compression="zstd")
    before, most = pa.total_allocated_bytes(), 0
    for _, block in records.blocks(records.sources(["a.parquet"]), "text", pa.schema([]), lambda *_: True):
        most = max(most, pa.total_allocated_bytes() - before)
        assert len(block.texts) <= records._BLOCK_ROWS
    assert 0 < most < 50 << 20


def test_first_blocks_of_parquet_have_few_rows(monkeypatch):
    """A row group may have a long text once for many rows. The number of rows goes on in the next row group."""
    monkeypatch.setattr(records, "_FEW_ROWS", 8)
    monkeypatch.setattr(records, "_BLOCK_ROWS", 64)
    monkeypatch.setattr(records, "_BLOCK_BYTES", 1000)

    passes, real = [], pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile, "iter_batches", lambda self, size, **options: passes.append(size) or real(self, size, **options)
    )

    def sizes(rows, group=100):
        pq.write_table(pa.table({"text": rows}), "a.parquet", row_group_size=group)
        passes.clear()
        found = read("a.parquet")
        assert [text for _, block in found for text in block.texts] == rows
        return [len(block.texts) for _, block in found]

    assert sizes(["x" * 100] * 100) == [10] * 10  # a dictionary of one text: 64 rows by the size of the group
    assert sizes(["x" * 2000] * 100) == [1] * 100
    assert sizes(["x"] * 200) == [64, 36] * 2 and passes == [8, 64, 64]
    assert sizes(["x" * 2000] * 100 + ["x"] * 100) == [1] * 100 + [64, 36]
    assert sizes(["x"] * 100 + ["x" * 2000] * 100) == [64, 36] + [1] * 100
    assert sizes(["x"] * 3) == [3] and passes == [8]
    with monkeypatch.context() as patch:  # the second block tells more than the first one
        patch.setattr(records, "_GROWTH", 4)
        assert sizes(["x"] * 200) == [64, 36] * 2 and passes == [8, 32, 64, 64]
        assert sizes(["x"] * 8 + ["x" * 500] * 92) == [2] * 50 and passes == [8, 32, 2]
    # A single long text is not repeated, for all that is known.
    assert sizes(["y" * 5000, *["x"] * 99]) == [19] * 5 + [5]  # by the size of the group
    assert sizes([*["x"] * 99, "y" * 5000]) == [19] * 5 + [5] and passes == [8, 19]
    # A batch that takes too much after others: the rest is read in smaller ones, from a row in the middle of one.
    found = sizes(["x"] * 700 + [f"{i:0400}" for i in range(100)], group=800)
    assert len(passes) == 3 and passes[-1] == 2 and found[-3:] == [2, 2, 2] and 1 in found


def test_text_of_many_rows_takes_little_memory():
    """A dictionary with one long text: two GB in a file of a few kilobytes."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), pa.array(["a bird " * 150_000]))
    pq.write_table(pa.table({"text": column}), "a.parquet", store_schema=False)
    before, most, count = pa.total_allocated_bytes(), 0, 0
    for _, block in records.blocks(records.sources(["a.parquet"]), "text", pa.schema([]), lambda *_: True):
        most, count = max(most, pa.total_allocated_bytes() - before), count + len(block.texts)
    assert count == 2000 and most < 100 << 20


@pytest.mark.parametrize("keep", [(), ("a",), ("a.b",), ("list", "a")])
def test_columns_with_dots_are_no_paths(keep):
    table = pa.table({
        "a": pa.array([{"b": "inside"}] * 3), "a.b": ["one", None, "three"],
        "list": pa.array([[1], [], None], pa.list_(pa.int64())), "list.list.element": ["x", "y", "z"],
    })  # fmt: skip
    pq.write_table(table, "a.parquet")
    for column in ("a.b", "list.list.element"):
        ((first, block),) = read("a.parquet", column=column, keep=keep)
        assert first == 0 and block.texts == table[column].to_pylist()
        assert block.kept.schema.names == [*keep] and block.kept.to_pydict() == table.select(keep).to_pydict()


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN"])
def test_encodings_of_parquet(encoding):
    pq.write_table(pa.table({"text": SHORT}), "a.parquet", use_dictionary=False, column_encoding={"text": encoding})
    assert texts("a.parquet") == SHORT


def test_wide_kept_columns_make_blocks_smaller(small_blocks):
    pq.write_table(pa.table({"text": SHORT, "wide": ["y" * 60] * 40}), "a.parquet")
    assert max(len(block.texts) for _, block in read("a.parquet", keep=("wide",))) <= 4


def test_file_with_many_row_groups_is_opened_once(monkeypatch):
    pq.write_table(pa.table({"text": SHORT}), "a.parquet", row_group_size=2)
    (source,) = records.sources(["a.parquet"])
    opened, system = [], source.system

    class Counting:
        def open_input_file(self, path):
            opened.append(path)
            return system.open_input_file(path)

    source = dataclasses.replace(source, system=Counting())
    assert len([*records.blocks([source], "text", pa.schema([]), lambda *_: True)]) == 20 and len(opened) == 1


@pytest.mark.parametrize("small", [True, False])
def test_small_row_groups_are_read_at_once(small, monkeypatch):
    """A remote file then takes one request for all columns of a group."""
    monkeypatch.setattr(records, "_BUFFER", 1 << 20 if small else 10)
    pq.write_table(pa.table({"text": SHORT}), "a.parquet")
    kinds, real = [], records._batches
    monkeypatch.setattr(
        records, "_batches", lambda source, file, *rest: kinds.append(file) or real(source, file, *rest)
    )
    opened, of_file = [], pq.ParquetFile
    monkeypatch.setattr(
        pq, "ParquetFile", lambda *args, **options: opened.append((of_file(*args, **options), options)) or opened[-1][0]
    )
    assert texts("a.parquet") == SHORT
    (used,) = [options["pre_buffer"] for file, options in opened if file is kinds[0]]
    assert used == small


def test_dictionaries_of_parquet_have_larger_blocks():
    """Each block copies the dictionary."""
    column = pa.array([f"text {i % 9}" for i in range(5000)]).dictionary_encode()
    pq.write_table(pa.table({"text": column}), "a.parquet")
    found = read("a.parquet")
    assert [len(block.texts) for _, block in found] == [5000] and len({*map(id, found[0][1].texts)}) == 9
