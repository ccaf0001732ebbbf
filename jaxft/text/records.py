"""Reads texts from files of any size: lines, JSON lines and parquet, also compressed, in constant memory."""

import contextlib
import dataclasses
import gzip
import hashlib
import io
import itertools
import os
import unicodedata
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from jaxft.checkpoint.files import parse_json

LONGEST_LINE = 1 << 28  # bytes; endless devices such as /dev/zero have more
MOST_EXPANSION = 200  # times its size that a compressed file may expand to; text takes about 4
_LEAST_CAP = 1 << 28  # bytes that every compressed file may expand to
_LINE_BYTES = 64  # memory of a line beside its bytes
# Limits of a block of rows. The thread that reads waits for the interpreter lock about twenty times a block.
_BLOCK_BYTES, _BLOCK_ROWS = 1 << 24, 1 << 11
_FEW_ROWS, _GROWTH = 16, 32  # rows of the first block of a parquet file; how much larger the next one may be
_SHARED_ROWS = 1 << 14  # of a block of a dictionary column, whose texts are in memory once
_BUFFER = 1 << 22  # bytes of a parquet column that are read at once
_END = 1 << 16  # bytes at the end of a file that tell whether it has changed
_SAMPLE = 1000  # first records of JSON lines, which tell whether fields exist, and the types of kept fields
SUFFIXES = (".parquet", ".jsonl", ".txt", ".jsonl.gz", ".txt.gz")


class DataError(ValueError):
    """A file of texts that cannot be read. The message names the file and the row."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A file of texts."""

    name: str  # as given, or found in a folder that was given
    path: str  # in its file system
    system: Any  # a `pyarrow.fs.FileSystem`
    kind: str  # ".parquet", ".jsonl" or ".txt"
    is_compressed: bool
    size: int | None


@dataclasses.dataclass
class Block:
    """Consecutive rows of a file."""

    source: Source
    row: int  # of the first text in the file, from 0
    texts: list[str | None]
    kept: Any  # `pyarrow.RecordBatch` of the kept columns

    def __getitem__(self, rows: slice) -> "Block":
        first, stop, _ = rows.indices(len(self.texts))
        return Block(self.source, self.row + first, self.texts[first:stop], self.kept.slice(first, stop - first))


def arrow() -> Any:
    """Imports pyarrow. Raises a DataError that says how to install it."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.fs
        import pyarrow.parquet
    except ImportError as error:
        raise DataError("corpora need pyarrow: pip install 'jaxft[data]'") from error
    return pyarrow


# --- Lines -------------------------------------------------------------------------------------------------------


def lines(file: "IO[bytes] | Expanded", name: str) -> Iterator[str]:
    """Yields the lines of a binary file, without their ends."""
    # Lines end at newlines only. str.splitlines also splits at form feeds and other characters inside a text.
    for number, data in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
        if len(data) > LONGEST_LINE:
            raise DataError(f"{name}, line {number}: has more than {LONGEST_LINE} bytes")
        try:
            yield data.removesuffix(b"\n").decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{name}, line {number}: not valid UTF-8") from error


def record(line: str, where: str, column: str = "text", *, nulls: bool = False) -> dict[str, Any]:
    """Parses a JSON line. With `nulls`, the text may be null."""
    try:
        value = parse_json(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON: {error}") from error
    if isinstance(value, str):
        value = {column: value}
    if not isinstance(value, dict) or not isinstance(value.get(column), str | None if nulls else str):
        raise DataError(f'{where}: expected a JSON string or an object with a string field "{column}"')
    checked(value.get(column) or "", where)
    return value


def checked(text: str, where: str) -> str:
    """Returns a text. Raises a DataError if it is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: the text is not valid Unicode: {error.reason}") from error
    return text


def is_blank(text: str) -> bool:
    """Returns whether a text has no visible character."""
    return all(unicodedata.category(x) in _INVISIBLE or x in _FILLERS for x in text)


_INVISIBLE = ("Cc", "Cf", "Zl", "Zp", "Zs")
# Characters of other categories that fonts show as nothing: fillers, vowels of Khmer, variation selectors.
_FILLERS = "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u2800\u3164\ufe0e\ufe0f\uffa0"


class Expanded:
    """Lines of a gzip file of `size` bytes. They raise a DataError if the file expands too much.

    Each line counts a few bytes more, because a file of a megabyte may have a billion empty lines.
    """

    def __init__(self, file: Any, name: str, size: int | None) -> None:
        self._file, self._name = gzip.GzipFile(fileobj=file), name
        self._left = max(_LEAST_CAP, MOST_EXPANSION * (size or 0))

    def readline(self, most: int) -> bytes:
        """Reads a line, or its first `most` bytes."""
        try:
            data = self._file.readline(most)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{self._name}: cannot be decompressed: {error}") from error
        self._left -= len(data) + _LINE_BYTES
        if self._left < 0:
            raise DataError(f"{self._name}: expands to more than {MOST_EXPANSION} times its size; decompress it first")
        return data


# --- Sources -----------------------------------------------------------------------------------------------------


def sources(data: Sequence[str], *, result: Path | None = None, jsonl: bool = False) -> list[Source]:
    """Returns the files of paths, folders and URIs, in the order of `data`; the files of a folder in order of name.

    Of a folder, files are left out if their name, or the name of a folder below it, begins with "." or "_", and if they
    are in the folder of the `result`, which may be below the folder of the data.

    Raises a DataError for a file that is missing, of another kind or in the folder of the `result`, and for files of
    several kinds.
    """
    fs = arrow().fs
    found, target = [], result and result.resolve()

    def is_result(system: Any, path: str) -> bool:
        is_local = target is not None and system.type_name == "local"
        return is_local and target in Path(os.path.realpath(path)).parents

    if not data or "" in data:
        raise DataError("cannot read '': name a file, a folder or a URI")
    for name in data:
        try:
            if "://" in name:
                system, path = fs.FileSystem.from_uri(name)
            else:
                system, path = fs.LocalFileSystem(), os.path.abspath(name)
            info = system.get_file_info(path)
            inside = others = []
            if info.type == fs.FileType.Directory:
                inside = system.get_file_info(fs.FileSelector(path, recursive=True))
                inside = [one for one in inside if one.is_file and one.base_name.endswith(SUFFIXES)]
                others = [one for one in inside if not is_result(system, one.path)]
                below = {one.path.removeprefix(path.rstrip("/")): one for one in others}
                # Logs, caches and unfinished files of other programs are in folders of such names.
                below = {its: below[its] for its in sorted(below) if "/." not in its and "/_" not in its}
                infos, names = [*below.values()], [name.rstrip("/") + its for its in below]
            else:
                infos, names = [info], [name]
        except (OSError, ValueError, arrow().ArrowException) as error:
            raise DataError(f"cannot read {name}: {error}") from error
        if inside and not others:
            raise DataError(f"{name}: all of its files are inside of {result}, the folder of the result")
        if not infos:
            raise DataError(f"{name}: has no files that end in {', '.join(SUFFIXES)}")
        for one, its_name in zip(infos, names, strict=True):
            if one.type == fs.FileType.NotFound:
                raise DataError(f"cannot read {its_name}: No such file or directory")
            if info.type != fs.FileType.Directory and is_result(system, one.path):
                raise DataError(f"{its_name}: is inside of {result}, the folder of the result")
            stem = its_name.removesuffix(".gz")
            kind = Path(stem).suffix
            if kind not in (".parquet", ".jsonl", ".txt") and not jsonl:
                raise DataError(f"{its_name}: expected a file that ends in {', '.join(SUFFIXES)}")
            kind = ".jsonl" if jsonl and kind != ".parquet" else kind
            found.append(Source(its_name, one.path, system, kind, stem != its_name, one.size))
    if len(kinds := {source.kind for source in found}) > 1:
        raise DataError(f"the files must be of one kind, got {' and '.join(sorted(kinds))}")
    return found


def facts(files: Sequence[Source]) -> list[list[Any]]:
    """Returns name, size and a checksum of the end of each file, where parquet and gzip have facts about all of it.

    Raises a DataError for a file that cannot be read.
    """

    def of(source: Source) -> list[Any]:
        with _reading(source), source.system.open_input_file(source.path) as file:
            size = file.size()
            end = file.read_at(min(size, _END), max(size - _END, 0))
        return [source.name, source.size, hashlib.sha256(end).hexdigest()]

    return _of_each(of, files)


def _of_each(function: Callable[[Source], Any], files: Sequence[Source]) -> list[Any]:
    """Returns the results of a function for each file. Threads wait for remote files."""
    with ThreadPoolExecutor(max_workers=16) as threads:
        return [*threads.map(function, files)]


def schema(files: Sequence[Source], column: str, keep: Sequence[str]) -> Any:
    """Returns the `pyarrow.Schema` of the kept columns. Raises a DataError unless all files have these columns."""
    pa = arrow()
    if files[0].kind == ".parquet":
        schemas = _of_each(_schema, files)
        for source, its in zip(files, schemas, strict=True):
            for name in dict.fromkeys((column, *keep)):
                if its.get_field_index(name) < 0:
                    option = "--text-column" if name == column else "--keep"
                    raise DataError(
                        f"{source.name}: has no column {name!r} ({option}); its columns are {', '.join(its.names)}"
                    )
            if not _holds_strings(its.field(column).type):
                raise DataError(f"{source.name}: column {column!r} must hold strings, got {its.field(column).type}")
            for name in keep:
                if its.field(name).type != schemas[0].field(name).type:
                    raise DataError(
                        f"{source.name}: column {name!r} must be {schemas[0].field(name).type} as in "
                        f"{files[0].name}, got {its.field(name).type}"
                    )
        return pa.schema([pa.field(name, schemas[0].field(name).type) for name in keep])
    if files[0].kind == ".txt":
        if wrong := [name for name in keep if name != column]:
            raise DataError(f"{files[0].name}: lines of text have no column {wrong[0]!r} (--keep), only {column!r}")
        return pa.schema([pa.field(name, pa.string()) for name in keep])
    records = (_record(source, row, line, column) for source in files for row, line in enumerate(_lines(source)))
    sample = [*itertools.islice(records, _SAMPLE)]
    fields = dict.fromkeys(itertools.chain.from_iterable(sample))
    for name in (column, *keep):
        # Writers may leave out a field that is null, but hardly in all of the first records.
        if sample and name not in fields:
            option = "--text-column" if name == column else "--keep"
            raise DataError(
                f"{files[0].name}: the first records have no field {name!r} ({option}); their fields are "
                f"{', '.join(fields)}"
            )
    types = []
    for name in keep:
        values = [value for fields in sample if (value := fields.get(name)) is not None]
        kinds = {type(value) for value in values}
        known = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
        if kinds == {int, float}:
            kinds = {float}
        if len(kinds) > 1 or not kinds <= known.keys():
            raise DataError(f"{files[0].name}: field {name!r} (--keep) must hold strings, numbers or booleans only")
        types.append(pa.field(name, known[kinds.pop()] if kinds else pa.string()))
    return pa.schema(types)


def blocks(
    files: Sequence[Source], column: str, kept: Any, wanted: Callable[[int, int], bool]
) -> Iterator[tuple[int, Block]]:
    """Yields (position of the first row among the rows of all files, block).

    `wanted(first, stop)` says whether the rows of a range are needed. Other rows may be left out.
    """
    first = 0
    for source in files:
        read = _parquet_blocks if source.kind == ".parquet" else _line_blocks
        first += yield from read(source, column, kept, first, wanted)


# --- Files of lines ----------------------------------------------------------------------------------------------


def _lines(source: Source) -> Iterator[str]:
    try:
        with source.system.open_input_stream(source.path, compression=None) as stream:
            is_compressed = source.is_compressed
            file: Any = Expanded(stream, source.name, source.size) if is_compressed else io.BufferedReader(stream)
            yield from lines(file, source.name)
    except OSError as error:
        raise DataError(f"cannot read {source.name}: {error.strerror or error}") from error


def _record(source: Source, row: int, line: str, column: str) -> dict[str, Any]:
    if source.kind == ".txt":
        return {column: line.removesuffix("\r")}
    return record(line, f"{source.name}, line {row + 1}", column, nulls=True)


def _line_blocks(
    source: Source, column: str, kept: Any, first: int, wanted: Callable[[int, int], bool]
) -> Generator[tuple[int, Block], None, int]:
    """Yields the blocks of a file of lines, and returns the number of lines."""
    row, waiting, size = 0, list[str](), 0
    for line in itertools.chain(_lines(source), [None]):
        if waiting and (line is None or size + len(line) > _BLOCK_BYTES or len(waiting) == _BLOCK_ROWS):
            if wanted(first + row, first + row + len(waiting)):
                found = [_record(source, number, text, column) for number, text in enumerate(waiting, row)]
                texts = [fields.get(column) for fields in found]
                yield first + row, Block(source, row, texts, _columns(source, row, found, kept))
            row, waiting, size = row + len(waiting), [], 0
        if line is not None:
            waiting.append(line)
            size += len(line)
    return row


def _columns(source: Source, row: int, found: list[dict[str, Any]], kept: Any) -> Any:
    """Converts the kept fields of records to a `pyarrow.RecordBatch`."""
    pa = arrow()
    exact: dict[Any, Any] = {pa.string(): str, pa.bool_(): bool, pa.int64(): int, pa.float64(): (int, float)}
    arrays = []
    for field in kept:
        values = [fields.get(field.name) for fields in found]
        for number, value in enumerate(values, row + 1):
            fits = isinstance(value, exact[field.type]) and (type(value) is not bool or field.type == pa.bool_())
            if value is not None and not fits:
                name = f"{source.name}, line {number}: field {field.name!r}"
                raise DataError(f"{name} must be {field.type} as in the first records, got {value!r:.80}")
        arrays.append(_array(source, row, field, values))
    if not arrays:
        return pa.table({"": pa.nulls(len(found))}).to_batches()[0].select([])
    return pa.RecordBatch.from_arrays(arrays, schema=kept)


def _array(source: Source, row: int, field: Any, values: list[Any]) -> Any:
    """Converts the values of a field. Raises a DataError that names the line of a value that does not fit."""
    pa = arrow()
    try:
        return pa.array(values, field.type)
    except (pa.ArrowInvalid, OverflowError, UnicodeEncodeError) as error:
        if len(values) == 1:
            raise DataError(f"{source.name}, line {row + 1}: field {field.name!r}: {error}") from error
    half = len(values) // 2
    halves = _array(source, row, field, values[:half]), _array(source, row + half, field, values[half:])
    return pa.concat_arrays(halves)


# --- Parquet -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _parquet(source: Source) -> Iterator[tuple[Any, Any]]:
    """Opens two `pyarrow.parquet.ParquetFile` of one file: one reads a row group at once, one in small pieces."""
    with contextlib.ExitStack() as stack:
        with _reading(source):
            file, kind = stack.enter_context(source.system.open_input_file(source.path)), arrow().parquet.ParquetFile
            whole = kind(file, pre_buffer=True)
            found = whole, kind(file, metadata=whole.metadata, buffer_size=_BUFFER, pre_buffer=False)
        yield found


def _schema(source: Source) -> Any:
    with _parquet(source) as (file, _):
        return file.schema_arrow


@contextlib.contextmanager
def _reading(source: Source) -> Iterator[None]:
    """Makes an error of the block name the file."""
    try:
        yield
    except (OSError, ValueError, arrow().ArrowException) as error:
        raise DataError(f"cannot read {source.name}: {error}") from error


def _parquet_blocks(
    source: Source, column: str, kept: Any, first: int, wanted: Callable[[int, int], bool]
) -> Generator[tuple[int, Block], None, int]:
    """Yields the blocks of a parquet file, and returns the number of rows. Unwanted row groups are not read."""
    row, size, columns = 0, _FEW_ROWS, [*dict.fromkeys((column, *kept.names))]
    with _parquet(source) as (whole, pieces):
        is_shared = arrow().types.is_dictionary(whole.schema_arrow.field(column).type)
        limit = _SHARED_ROWS if is_shared else _BLOCK_ROWS
        for number in range(whole.metadata.num_row_groups):
            group = whole.metadata.row_group(number)
            count, nbytes = group.num_rows, group.total_byte_size
            if wanted(first + row, first + row + count):
                most = min(max(_BLOCK_BYTES * count // max(nbytes, 1), 1), limit)
                file = whole if nbytes <= _BUFFER else pieces
                for at, size_now, batch in _batches(source, file, number, columns, min(size, most), most):
                    size = size_now
                    with _reading(source):
                        texts = _strings(batch.column(column))
                    yield first + row + at, Block(source, row + at, texts, batch.select(kept.names))
            row += count
    return row


def _batches(
    source: Source, file: Any, group: int, columns: list[str], size: int, most: int
) -> Iterator[tuple[int, int, Any]]:
    """Yields (first row, rows of a batch, `pyarrow.RecordBatch`) of a row group.

    A file may have a long text once for many rows, so only a batch itself tells how many bytes its rows take. If they
    take too many, the group is read again from its start in smaller batches, and the rows that were yielded are left
    out. A single long text does not count, since the rows after it may be short. If a batch of fewer than `most` rows
    takes few bytes, the group is read again in larger batches.
    """
    done = 0  # rows that were yielded
    while True:
        at = 0
        batches = file.iter_batches(size, row_groups=[group], columns=columns)
        while True:
            with _reading(source):
                if (batch := next(batches, None)) is None:
                    return
            plain = [array for array in batch.columns if not hasattr(array, "dictionary")]
            nbytes = sum(array.nbytes for array in plain) - max(map(_longest, plain), default=0)
            right = max(len(batch) * _BLOCK_BYTES // max(nbytes, 1), 1)
            if size > 4 * right:
                size = most = min(most, right)
                break
            if len(batch) == size < min(most, right):
                size = min(most, right, _GROWTH * size)
                break
            most = size
            if at + len(batch) > done:
                yield max(at, done), size, batch.slice(max(done - at, 0))
            at += len(batch)
            done = max(done, at)


def _longest(array: Any) -> int:
    """Returns the number of bytes of the longest string of an Arrow array, or 0 if it has no strings."""
    if str(array.type) not in ("string", "large_string"):
        return 0
    return arrow().compute.max(arrow().compute.binary_length(array)).as_py() or 0


def _strings(array: Any) -> list[str | None]:
    """Returns the items of an Arrow array. Rows that have an item of a dictionary share it."""
    if not hasattr(array, "dictionary"):
        return array.to_pylist()
    # The dictionary of a batch also has the texts of earlier batches.
    used = array.indices.unique().drop_null()
    if 2 * len(used) > len(array):  # few rows share an item
        return array.dictionary.take(array.indices).to_pylist()
    words = {None: None, **dict(zip(used.to_pylist(), array.dictionary.take(used).to_pylist(), strict=True))}
    return [words[index] for index in array.indices.to_pylist()]


def _holds_strings(kind: Any) -> bool:
    kind = kind.value_type if arrow().types.is_dictionary(kind) else kind
    return str(kind) in ("string", "large_string", "string_view")
