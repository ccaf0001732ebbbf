"""Embeddings of corpora of any size: files of texts in, parquet parts out. A restart computes what is missing."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxft import atomic, dispatch
from jaxft.checkpoint.files import parse_json
from jaxft.ops import checks
from jaxft.text import arguments, records
from jaxft.text import inputs as text_inputs
from jaxft.text.batching import TextError
from jaxft.text.quantization import PRECISIONS
from jaxft.text.records import Block, DataError

if TYPE_CHECKING:
    from jaxft.text.sentence_encoder import SentenceEncoder

EMBEDDING = "embedding"  # the column of the embeddings
MANIFEST = "manifest.json"
_CALIBRATION = 10_000  # texts from which the ranges of int8 and uint8 are computed
# Most bytes of the embeddings of a chunk in float32. At the end, the devices wait while the last chunk is written.
_CHUNK_BYTES = 1 << 26
# Most chunks that wait to be written. A part of 100,000 rows of width 384 has three chunks, so that three parts are
# written at the same time.
_QUEUED = 8
_STEP = 1 << 23  # bytes of a part that are read at once

_log = logging.getLogger("jaxft")
_END = object()


@dataclasses.dataclass
class Summary:
    """Counts of a run of `encode_corpus`."""

    texts: int = 0  # embeddings computed
    nulls: int = 0  # rows without a text
    written: int = 0  # parts
    found: int = 0  # parts that were there
    damaged: int = 0  # parts that were there and were computed again


@dataclasses.dataclass
class _Chunk:
    """Rows that are encoded together. A part has one chunk or more."""

    part: int
    blocks: list[Block]
    texts: list[str]  # without nulls
    rows: int


def encode_corpus(
    encoder: "SentenceEncoder",
    data: Sequence[str],
    folder: str | Path,
    *,
    text_column: str = "text",
    keep: Sequence[str] = (),
    rows_per_part: int = 100_000,
    shard: tuple[int, int] = (0, 1),
    jsonl: bool = False,
    model: Mapping[str, Any] | None = None,
    prompt: str | None = None,
    prompt_name: str | None = None,
    batch_size: int = 32,
    precision: str = "float32",
    normalize_embeddings: bool = False,
    truncate_dim: int | None = None,
    devices: Any = None,
    show_progress_bar: bool = False,
) -> Summary:
    """Writes the embeddings of the texts of files to parquet files, in the order of the texts.

    Part k of the result, `part-00000k.parquet`, has the rows from `k * rows_per_part` on: the columns `keep` and
    "embedding", a fixed-size list. The components of the embedding of a null text are null. Beside each part is a file
    with its checksum. A call skips the parts that are there and whole, so that the same call goes on after an
    interruption. The parts are then the same, to the byte, if device, versions and memory are the same. manifest.json
    has the settings. Reading, tokenising, computing and writing overlap, and memory does not grow with the data.

    Args:
      encoder: the encoder.
      data: paths and URIs of parquet files, of JSON lines (.jsonl) or of lines of text (.txt), the latter two also with
        .gz, and of folders of them. All are of one kind. pyarrow opens them.
      folder: local folder of the result. It is created if it does not exist.
      text_column: column of parquet files, or field of JSON lines, with the texts.
      keep: columns or fields to copy.
      rows_per_part: rows of a part.
      shard: (i, n) computes part k if `k % n == i`. Processes with different i may run on different machines, with one
        folder or with several.
      jsonl: whether files that are not parquet have JSON lines, whatever their names.
      model: facts about the model for the manifest. Facts whose name begins with "_" are not compared.
      prompt: see `SentenceEncoder.encode`.
      prompt_name: see `SentenceEncoder.encode`.
      batch_size: see `SentenceEncoder.encode`.
      precision: see `SentenceEncoder.encode`. The ranges of "int8" and "uint8" are computed from the first 10,000
        texts of `data`, and kept in the manifest.
      normalize_embeddings: see `SentenceEncoder.encode`.
      truncate_dim: see `SentenceEncoder.encode`.
      devices: see `SentenceEncoder.encode`.
      show_progress_bar: whether to show progress on stderr.

    Returns:
      What was done.

    Raises:
      DataError: pyarrow is missing, a file cannot be read, a text cannot be encoded (the message names file and row),
        or `folder` has parts of other settings (the message names one).
      OSError: a file cannot be written.
      ValueError: `rows_per_part` or `shard` is wrong, or as for `SentenceEncoder.encode`.
      jax.errors.JaxRuntimeError: see `SentenceEncoder.encode`.
    """
    if not (checks.is_natural(rows_per_part) and rows_per_part > 0):
        raise ValueError(f"encode_corpus: rows_per_part must be a positive integer, got {rows_per_part!r:.80}")
    index, count = shard
    if not (checks.is_natural(index) and checks.is_natural(count) and index < count):
        raise ValueError(f"encode_corpus: shard must be (i, n) with 0 <= i < n, got {shard!r:.80}")
    rows_per_part, index, count = int(rows_per_part), int(index), int(count)
    if EMBEDDING in keep or len({*keep}) < len(keep):
        raise ValueError(f"encode_corpus: keep must be different names other than {EMBEDDING!r}, got {keep!r:.200}")
    pa, folder = records.arrow(), Path(folder)
    files = records.sources(data, result=folder, jsonl=jsonl)
    kept = records.schema(files, text_column, keep)
    # The encoder may have defaults for both.
    prompt = arguments.chosen_prompt("encode", encoder.prompts, encoder.default_prompt_name, prompt, prompt_name)
    truncate_dim = encoder.truncate_dim if truncate_dim is None else truncate_dim
    options: dict[str, Any] = {
        "prompt": prompt, "batch_size": batch_size, "truncate_dim": truncate_dim,
        "normalize_embeddings": normalize_embeddings,
    }  # fmt: skip
    settings = {
        **{name: fact for name, fact in (model or {}).items() if name[0] != "_"},
        "max_seq_length": encoder.max_seq_length,
        "data": records.facts(files),
        "jsonl": files[0].kind == ".jsonl",
        "text_column": text_column,
        "keep": {field.name: str(field.type) for field in kept},
        "rows_per_part": rows_per_part,
        "precision": precision,
        **options,
    }
    about = {name[1:]: fact for name, fact in (model or {}).items() if name[0] == "_"}
    if precision not in PRECISIONS:
        raise ValueError(f"encode_corpus: precision must be one of {', '.join(PRECISIONS)}, got {precision!r:.80}")
    if devices is not None:
        devices = dispatch.named_devices("encode", devices)  # an iterator may be read once
    encoder.encode([], devices=devices, **options)  # finds mistakes before anything is written
    settings |= {"batch_size": int(batch_size), "truncate_dim": truncate_dim and int(truncate_dim)}  # as JSON has them
    with atomic.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        atomic.remove_abandoned(folder)  # also if all parts are there
    manifest = _manifest(folder, settings)
    ranges: Any = None if manifest is None else manifest["ranges"]
    if manifest is None and precision in ("int8", "uint8"):
        first = itertools.chain.from_iterable(
            block.texts for _, block in records.blocks(files, text_column, kept, lambda *_: True)
        )
        sample = [*itertools.islice((text for text in first if text is not None), _CALIBRATION)]
        found = encoder.encode(sample or [""], devices=devices, **options)
        ranges = np.stack([found.min(axis=0), found.max(axis=0)]).tolist()
    if manifest is None:
        ranges = _write_manifest(folder, settings, {"ranges": ranges, "about": about})
    most = max(_CHUNK_BYTES // (4 * encoder.embedding_dimension), 1)
    width = min(truncate_dim or encoder.embedding_dimension, encoder.embedder.embedding_dimension)
    width = -(-width // 8) if precision.endswith("binary") else width
    value = pa.from_numpy_dtype(np.dtype(PRECISIONS[precision]))
    schema = pa.schema([*kept, pa.field(EMBEDDING, pa.list_(value, width))])
    checksum = hashlib.sha256(json.dumps([settings, ranges], sort_keys=True, allow_nan=False).encode()).hexdigest()
    summary = Summary()

    @functools.cache
    def is_wanted(part: int) -> bool:
        state = "missing" if part % count != index else _state(folder, part, checksum)
        summary.found += state == "whole"
        if state == "damaged":
            summary.damaged += 1
            _log.warning("%s is damaged and is computed again", _part_file(folder, part))
        return part % count == index and state != "whole"

    def are_wanted(first: int, stop: int) -> bool:
        return any(map(is_wanted, range(first // rows_per_part, (stop - 1) // rows_per_part + 1)))

    rows = records.blocks(files, text_column, kept, are_wanted)
    open_chunks: deque[_Chunk] = deque()
    spare: list[Any] = []  # memory of embeddings that are written; new memory takes longer to fill
    done = 0  # texts of the chunks before `open_chunks`

    def texts() -> Iterator[list[str]]:
        for chunk in chunks:
            open_chunks.append(chunk)
            yield chunk.texts

    def empty(shape: tuple[int, int], dtype: Any) -> np.ndarray:
        return (spare.pop() if spare else np.empty((most, shape[1]), dtype))[: shape[0]]

    with (
        contextlib.closing(_prefetched(_chunks(rows, rows_per_part, most, is_wanted))) as chunks,
        _Writer(folder, schema, checksum, summary, spare) as writer,
    ):
        inputs: Any = text_inputs.Inputs(texts(), are_chunks=True, empty=empty)
        try:
            with contextlib.closing(encoder.encode(
                inputs, precision=precision, ranges=ranges, devices=devices, show_progress_bar=show_progress_bar,
                **options,
            )) as results:  # fmt: skip
                for embeddings in results:
                    chunk = open_chunks.popleft()
                    done += len(chunk.texts)
                    writer.add(chunk, embeddings)
        except TextError as error:
            raise DataError(_place(open_chunks, error.index - done, error)) from error
    return summary


# --- Chunks ------------------------------------------------------------------------------------------------------


def _chunks(
    rows: Iterable[tuple[int, Block]], rows_per_part: int, most: int, is_wanted: Callable[[int], bool]
) -> Iterator[_Chunk]:
    """Cuts rows into chunks of one part each: up to `most` rows of up to `CHUNK_CHARACTERS` in all, or one longer row.

    The chunks of a part depend on the rows of the part only, so that a restart does not change the last bits.
    """
    chunk, characters = _Chunk(-1, [], [], 0), 0
    for first, block in rows:
        start = 0  # the first row of the block that is in no chunk yet
        lengths = [0 if text is None else len(text) for text in block.texts]
        ends = np.append(0, np.cumsum(lengths, dtype=np.int64))
        while start < len(block.texts):
            part = (first + start) // rows_per_part
            stop = min(len(block.texts), (part + 1) * rows_per_part - first)
            if not is_wanted(part):
                start = stop
                continue
            if chunk.part != part:
                if chunk.rows:
                    yield chunk
                chunk, characters = _Chunk(part, [], [], 0), 0
            left = text_inputs.CHUNK_CHARACTERS - characters
            end = int(np.searchsorted(ends, ends[start] + left, side="right")) - 1
            end = max(min(end, start + most - chunk.rows, stop), start)
            if end == start and not chunk.rows:
                end += 1  # a text that is longer than a chunk
            taken = block[start:end]
            chunk.blocks.append(taken)
            chunk.texts += [text for text in taken.texts if text is not None]
            chunk.rows += end - start
            characters += int(ends[end] - ends[start])
            if end < stop:
                yield chunk
                chunk, characters = _Chunk(part, [], [], 0), 0
            start = end
    if chunk.rows:
        yield chunk


def _prefetched(items: Iterator[_Chunk]) -> Generator[_Chunk]:
    """Yields the items. A thread gets the next item while the caller works on one."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        coming: Future[Any] = thread.submit(next, items, _END)
        while (item := coming.result()) is not _END:
            coming = thread.submit(next, items, _END)
            yield item


def _place(chunks: Iterable[_Chunk], index: int, error: TextError) -> str:
    """Returns a message that names the file and the row of the text `index` of chunks."""
    for block in (block for chunk in chunks for block in chunk.blocks):
        for row, text in enumerate(block.texts, block.row + 1):
            if text is not None:
                if index == 0:
                    unit = "row" if block.source.kind == ".parquet" else "line"
                    return f"{block.source.name}, {unit} {row}: {text!r:.80} {error.reason}"
                index -= 1
    return str(error)


# --- Parts -------------------------------------------------------------------------------------------------------


def _part_file(folder: Path, part: int) -> Path:
    return folder / f"part-{part:06}.parquet"


def _state(folder: Path, part: int, settings: str) -> str:
    """Returns whether a part of these settings is "missing", "damaged" or "whole"."""
    file = _part_file(folder, part)
    try:
        expected = parse_json(file.with_suffix(".json").read_text("utf-8"))
        with file.open("rb") as data:
            found = _facts(data, hashlib.sha256(), expected.get("rows"), part, settings)
        return "whole" if expected == found else "damaged"
    except FileNotFoundError:
        return "damaged" if file.exists() else "missing"
    except (ValueError, AttributeError, RecursionError):
        return "damaged"


def model_digest(folder: Path) -> str:
    """Returns a checksum of the files of a checkpoint that `from_pretrained` may read."""
    digest = hashlib.sha256()
    suffixes = (".safetensors", ".json", ".txt", ".model", ".bin")
    for file in sorted(file for file in folder.rglob("*") if file.suffix in suffixes):
        with file.open("rb") as data:
            digest.update(f"{file.relative_to(folder).as_posix()}\n".encode())
            digest.update(hashlib.file_digest(data, "sha256").digest())
    return digest.hexdigest()


def _facts(data: BufferedReader, digest: Any, rows: Any, part: int, settings: str) -> dict[str, Any]:
    """Returns the record of a part. `digest` has the first bytes of `data`, which is read to its end.

    `settings` is the checksum of the settings, because the manifest may be lost.
    """
    _add(data, digest)
    return {"part": part, "rows": rows, "bytes": data.tell(), "sha256": digest.hexdigest(), "settings": settings}


def _add(data: BufferedReader, digest: Any) -> None:
    """Adds the rest of a file to a checksum, in long steps: after each, the thread waits for the interpreter lock."""
    buffer = memoryview(bytearray(_STEP))
    while count := data.readinto(buffer):
        digest.update(buffer[:count])


class _Writer:
    """Writes parts, each in a thread of its own: into a temporary file, which is renamed when the part is complete.

    The memory of embeddings that are written goes to `spare`.
    """

    def __init__(self, folder: Path, schema: Any, settings: str, summary: Summary, spare: list[Any]) -> None:
        self._folder, self._schema, self._settings, self._summary = folder, schema, settings, summary
        self._spare = spare
        self._waiting: deque[list[Future[None]]] = deque()  # the tasks of each chunk
        self._parts: list[_OpenPart] = []  # the last one gets the next rows, others have all their rows

    def __enter__(self) -> "_Writer":
        return self

    def add(self, chunk: _Chunk, embeddings: np.ndarray) -> None:
        """Queues a chunk. Waits if the threads are behind."""
        tasks: list[Future[None]] = []
        if not self._parts or self._parts[-1].part != chunk.part:
            self._finish()
            self._parts = [part for part in self._parts if not part.is_closed]
            file = _part_file(self._folder, chunk.part)
            self._parts.append(part := _OpenPart(file, chunk.part, self._schema, self._settings))
            tasks.append(part.thread.submit(part.open))
        part = self._parts[-1]
        tasks.append(written := part.thread.submit(part.write, chunk, embeddings))
        written.add_done_callback(lambda _: self._spare.append(embeddings.base))
        self._waiting.append(tasks)
        self._summary.texts += len(chunk.texts)
        self._summary.nulls += chunk.rows - len(chunk.texts)
        while len(self._waiting) > _QUEUED:
            self._wait()

    def _wait(self) -> None:
        """Waits until the oldest chunk is written."""
        for task in self._waiting.popleft():
            task.result()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if error is None:
                self._finish()
                while self._waiting:
                    self._wait()
        finally:
            for part in self._parts:
                part.thread.shutdown(cancel_futures=True)
                part.discard()

    def _finish(self) -> None:
        if self._parts:
            part = self._parts[-1]
            self._waiting[-1].append(part.thread.submit(part.finish))  # with the last chunk of the part
            part.thread.shutdown(wait=False)
            self._summary.written += 1


class _OpenPart:
    """A part that is being written."""

    def __init__(self, file: Path, part: int, schema: Any, settings: str) -> None:
        self.part, self.is_closed, self._rows, self._schema, self._settings = part, False, 0, schema, settings
        self.thread = ThreadPoolExecutor(max_workers=1)
        self._stack = contextlib.ExitStack()
        self._file, self._digest = file, hashlib.sha256()
        self._writer: Any = None
        self._has_failed = True  # until it is open

    def open(self) -> None:
        """Opens the temporary files."""
        record = self._file.with_suffix(".json")
        self._new, self._record = self._stack.enter_context(atomic.replacing(self._file, record))
        others = [name for name in self._schema.names if name != EMBEDDING]
        with atomic.writing(self._file):
            self._writer = records.arrow().parquet.ParquetWriter(
                self._new.absolute(), self._schema, use_dictionary=others, write_statistics=others,
                compression={path: "zstd" if path in others else "none" for path in _paths(self._schema)},
            )  # fmt: skip
            self._data = self._stack.enter_context(self._new.open("rb"))
            self._syncer = self._stack.enter_context(ThreadPoolExecutor(max_workers=1))
            self._synced = self._syncer.submit(self._sync)
        self._has_failed = False

    def write(self, chunk: _Chunk, embeddings: np.ndarray) -> None:
        """Writes a chunk as a row group."""
        if self._has_failed:
            return
        self._has_failed = True  # until this chunk is written
        pa = records.arrow()
        kept = pa.Table.from_batches([block.kept for block in chunk.blocks])
        field = self._schema.field(EMBEDDING)
        values, mask = embeddings, None
        if len(chunk.texts) < chunk.rows:
            is_null = np.array([text is None for block in chunk.blocks for text in block.texts])
            values = np.zeros((chunk.rows, embeddings.shape[1]), embeddings.dtype)
            values[~is_null] = embeddings
            # Up to version 24, pyarrow neither writes nor reads lists of a fixed size that are null themselves.
            mask = np.repeat(is_null, embeddings.shape[1])
        column = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1), mask=mask), type=field.type)
        arrays = [kept.column(name) for name in kept.column_names] if len(self._schema) > 1 else []
        with atomic.writing(self._file):
            table = pa.table([*arrays, column], schema=self._schema)
            self._writer.write_table(table, row_group_size=chunk.rows)
            self._synced.result()
        self._synced = self._syncer.submit(self._sync)
        self._rows += chunk.rows
        self._has_failed = False

    def _sync(self) -> None:
        """Adds the new bytes to the checksum and waits for the disk, in a thread, while the next chunk is written."""
        _add(self._data, self._digest)
        if hasattr(os, "fdatasync"):  # now, while the devices compute, and not all at the end of the part
            os.fdatasync(self._data.fileno())

    def finish(self) -> None:
        """Gives the part its name, unless it lacks rows."""
        if self._has_failed:
            return
        try:
            with atomic.writing(self._file):
                self._synced.result()
                self._writer.close()
                facts = _facts(self._data, self._digest, self._rows, self.part, self._settings)
                self._record.write_text(json.dumps(facts, allow_nan=False) + "\n", "utf-8")
            self._stack.close()
            self.is_closed = True
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Removes what was written, unless the part has its name."""
        if self._writer is not None and self._writer.is_open:
            with contextlib.suppress(OSError):
                self._writer.close()
            self._writer.is_open = False  # otherwise it tries again when it is deleted
        self._stack.__exit__(DataError, DataError("not complete"), None)


def _paths(schema: Any) -> list[str]:
    """Returns the paths of the leaves of a schema, as parquet writes them."""
    return [f"{EMBEDDING}.list.element" if name == EMBEDDING else name for name in schema.names]


# --- Manifest ----------------------------------------------------------------------------------------------------


def _manifest(folder: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the manifest of a folder, or None. Raises a DataError if its settings are others."""
    file = folder / MANIFEST
    try:
        found = parse_json(file.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("settings"), dict) or "ranges" not in found:
        raise DataError(f"{file}: has no settings")
    before = found["settings"]
    for name in {**settings, **before}:
        its, value = before.get(name), settings.get(name)  # one of them may lack it
        if its != value:
            if name == "data" and isinstance(its, list):  # of many files, those that differ
                its, value = next((a, b) for a, b in itertools.zip_longest(its, settings[name]) if a != b)
            raise DataError(
                f"{folder}: its parts were made with {name} {its!r:.200}, not {value!r:.200}; pass the same settings, "
                "or another folder"
            )
    return found


def _write_manifest(folder: Path, settings: dict[str, Any], others: dict[str, Any]) -> Any:
    """Writes the manifest unless another process has written it meanwhile. Returns its ranges."""
    with atomic.writing(folder / MANIFEST), atomic.locked(folder):
        if (found := _manifest(folder, settings)) is None:
            with atomic.replacing(folder / MANIFEST) as (new,):
                found = {"settings": settings, **others}
                new.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n", "utf-8")
    return found["ranges"]
