"""Command line `jaxft encode | similar | rerank | warmup | bench | fuse | info`. Results go to stdout or a file.

Messages go to stderr.
"""

import os
import signal
import sys
from types import FrameType

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def _end_early(number: int, frame: FrameType | None) -> None:
    try:
        if number == signal.SIGINT:
            os.write(2, b"jaxft: interrupted\n")
    finally:
        os._exit(128 + number)


# The imports take a while. Until `main` calls `atomic.end_at_signals`, there is nothing to tidy up.
_IS_PROGRAM = __name__ == "__main__" or os.path.splitext(os.path.basename("".join(sys.argv[:1])))[0] == "jaxft"
if _IS_PROGRAM:
    for _early in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(_early) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(_early, _end_early)

# ruff: noqa: E402
import argparse
import contextlib
import dataclasses
import errno
import io
import json
import stat
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from jaxft import atomic
from jaxft._version import __version__
from jaxft.text import records

if TYPE_CHECKING:
    import numpy as np

    from jaxft.models.float8 import Float8Recipe
    from jaxft.text.sentence_encoder import SentenceEncoder

# Modules that take long to load, NumPy and JAX above all, are imported by the functions that need them: signals are
# handled from the start.
_BROKEN_PIPE = 141  # 128 + SIGPIPE
_DTYPES = ("float32", "float16", "bfloat16")
_WARMED = ("encode", "similar", "rerank")  # commands that `warmup` compiles for
_PRECISIONS = ("float32", "float16", "int8", "uint8", "binary", "ubinary")  # of jaxft.text.quantization


class _UserError(Exception):
    """An error that the user can fix. `main` prints it as one line, without a traceback."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"jaxft: error: {message}\n")


def main(argv: list[str] | None = None) -> int:
    """Runs a command line, by default `sys.argv[1:]`, and returns the exit code.

    The code is 0, 2 after an error (one line on stderr), 130 after Ctrl-C, or 141 if the reader of stdout closed the
    pipe. Raises SystemExit for wrong arguments (2), without arguments (2, with the help on stderr), and for `--help`
    and `--version` (0). Without `argv` it is the program: until the process ends, Ctrl-C, SIGTERM and SIGHUP end it at
    once, with 130, 143 and 129, and compiled programs are kept (`jaxft.use_compilation_cache`).
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the shell, as in `jaxft ... >&-`
            setattr(sys, name, open(os.devnull, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for characters that its encoding lacks, as stderr does
    if argv is None and threading.current_thread() is threading.main_thread():
        atomic.end_at_signals(lambda number: "jaxft: interrupted" if number == signal.SIGINT else "")
    try:
        try:
            args = _parser().parse_args(argv)
            args.is_program = argv is None
            args.run(args)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        _discard_stdout()
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        print("jaxft: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except (_UserError, OSError, MemoryError) as error:
        message = str(error) or "out of memory"
        if isinstance(error, OSError) and error.strerror and not error.filename:
            message = error.strerror
            if error.__cause__ is None:  # `atomic.writing` has named no file: it is stdout
                message = f"cannot write stdout: {message}"
                _discard_stdout()
        print("jaxft: error:", " ".join(message.split()), file=sys.stderr)
        return 2
    return 0


def _discard_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python's flush at exit does not fail


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="jaxft", description="A fast BERT encoder for JAX.")
    parser.add_argument("--version", action="version", version=f"jaxft {__version__}")
    parser.set_defaults(run=lambda _: parser.exit(2, parser.format_help()))  # without a command
    commands = parser.add_subparsers(metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], None], summary: str, description: str) -> _Parser:
        added = commands.add_parser(name, help=summary, description=description)
        added.set_defaults(run=run)
        return added

    encode = command(
        "encode", _run_encode, "turn texts into embeddings",
        "Writes the embedding of each text. An empty line is an empty text, so that rows match lines. FILE.jsonl, and "
        'with --jsonl any FILE, holds on each line a JSON string or an object with a "text" field; any other FILE '
        "holds one text a line. OUT.npy gets an array [texts, width], float32 or as --precision says; OUT.jsonl, and "
        'stdout for -, gets the fields of each input object (of a plain line: "text") and "embedding". The output file '
        "appears whole or not at all. If OUT is a folder or ends in /, or DATA is parquet, then DATA are any number of "
        "files of any size, and folders of them: parquet, .jsonl and .txt, the latter two also with .gz. OUT gets "
        "parquet files of --rows-per-part rows with the column \"embedding\". The same command again skips the parts "
        "that are there, so that it goes on after an interruption. This needs jaxft[data].",
    )  # fmt: skip
    _add_model_arguments(encode)
    encode.add_argument("data", metavar="DATA", nargs="*", help="FILE with the texts; -, the default, is stdin")
    encode.add_argument(
        "-o", "--output", metavar="OUT", required=True,
        help="file to write, ending in .npy or .jsonl; - writes JSON lines to stdout; or a folder for parquet files",
    )  # fmt: skip
    corpus = encode.add_argument_group("if OUT is a folder")
    corpus.add_argument(
        "--text-column", metavar="NAME", help="column or field with the texts (default: text); null gives null"
    )
    corpus.add_argument("--keep", metavar="NAME", nargs="+", help="columns or fields to copy (default: none)")
    corpus.add_argument("--rows-per-part", metavar="N", type=_positive, help="rows of a file (default: 100000)")
    corpus.add_argument(
        "--shard", metavar="I/N", type=_shard, help="compute each N-th file, from file I on, 0 <= I < N (default: 0/1)"
    )
    encode.add_argument("--normalize", action="store_true", help="scale every embedding to length 1")
    _add_prompt_arguments(encode, "every text", "the model's default prompt, if it has one")

    similar = command(
        "similar", _run_similar, "show the texts nearest to a query",
        "Prints the texts of FILE that are most similar to QUERY: cosine, line number and text, separated by tabs. "
        "Lines without a visible character are skipped. QUERY gets the model's prompt for queries, and the texts "
        "its prompt for documents, where the model has such prompts.",
    )  # fmt: skip
    _add_model_arguments(similar)
    similar.add_argument("file", metavar="FILE", help="the texts, as for encode")
    similar.add_argument("query", metavar="QUERY")
    _add_prompt_arguments(similar, "QUERY", "the model's prompt for queries")

    rerank = command(
        "rerank", _run_rerank, "show the texts that a cross-encoder scores highest for a query",
        "Scores each text of FILE together with QUERY and prints the best: score, line number and text, separated by "
        "tabs. Lines without a visible character are skipped. The model must be a cross-encoder with one score.",
    )  # fmt: skip
    _add_model_arguments(rerank)
    rerank.add_argument("query", metavar="QUERY")
    rerank.add_argument("file", metavar="FILE", help="the texts, as for encode")
    _add_prompt_arguments(rerank, "QUERY", "the model's default prompt, if it has one")

    warmup = command(
        "warmup", _run_warmup, "compile all programs of a model, for later commands and processes",
        "Compiles the programs that a command needs for texts of any length, several at a time, and keeps them in the "
        "compilation cache. The command finds them there if it gets the same options. A Python program finds them "
        "after jaxft.use_compilation_cache().",
    )  # fmt: skip
    _add_model_arguments(warmup)
    warmup.add_argument(
        "--for", choices=_WARMED, default="encode", dest="command", help="the command (default: encode)"
    )
    warmup.add_argument("--normalize", action="store_true", help="as for encode; similar always normalizes")
    _add_prompt_arguments(warmup, "the texts", "as for the command")

    for writes in (encode, warmup):
        writes.add_argument(
            "--precision", choices=_PRECISIONS, default="float32",
            help="of the embeddings (default: float32); int8 and uint8 take their ranges from the texts, binary and "
            "ubinary keep one bit of each component, eight in a byte",
        )  # fmt: skip
    for embeds in (encode, similar, warmup):
        embeds.add_argument(
            "--truncate-dim", metavar="D", type=_positive,
            help="keep the first D components of every embedding (default: the number in the model's files, else all)",
        )  # fmt: skip
    for ranks in (similar, rerank):
        ranks.add_argument("--top", metavar="K", type=_positive, default=5, help="how many to show (default: 5)")

    bench = command(
        "bench", _run_bench, "time the encoder on this device beside plain JAX",
        "Times the layers of a checkpoint's encoder as jaxft runs them, in plain JAX under XLA and, in 16 bits on an "
        "NVIDIA GPU, with cuDNN attention, on full batches of random inputs. Prints a table of median microseconds: "
        "queued, of a call among many in a row, and blocking, until one call's result is there. jaxft's result is "
        "checked first.",
    )  # fmt: skip
    _add_checkpoint_argument(bench)
    bench.add_argument("--batch", metavar="B", type=_positive, nargs="+", help="(default: 1 8 32)")
    bench.add_argument("--length", metavar="T", type=_positive, nargs="+", help="(default: 128)")
    _add_dtype_argument(bench, "of parameters and arithmetic")
    bench.add_argument("-o", "--output", metavar="OUT.json", help="file to write the times to as well")
    bench.add_argument("--chart", metavar="OUT.png", help="file to draw them to; needs jaxft[plot]")
    bench.add_argument(
        "--latency", action="store_true",
        help="time single queries instead, from text to embedding: percentiles of one caller and of several callers, "
        "beside plain JAX and, where it is installed, sentence-transformers",
    )  # fmt: skip
    bench.add_argument(
        "--callers", metavar="N", type=_positive, nargs="+", help="threads that call at a time (default: 1 8)"
    )
    bench.add_argument("--calls", metavar="N", type=_positive, help="calls of each thread (default: 400 in all)")

    fuse = command(
        "fuse", _run_fuse, "show which parts of a function jaxft.fuse replaces",
        "Traces a function of yours and prints what jaxft.fuse replaces in it on this device, and what it nearly "
        "replaces and why not. Modules are also looked for in the current folder.",
    )  # fmt: skip
    fuse.add_argument("function", metavar="MODULE:FUNCTION", help="the function, as package.module:function")
    fuse.add_argument(
        "--args", metavar="MODULE:NAME", required=True,
        help="a tuple with the arguments of the function, or a function that returns it",
    )  # fmt: skip
    fuse.add_argument("--force", action="store_true", help="report what is recognised, whether it is worth it or not")

    for reads_texts in (encode, similar, rerank):
        reads_texts.add_argument("--jsonl", action="store_true", help="FILE's lines are JSON, whatever its name")

    info = command(
        "info", _run_info, "show versions, the device, what each op runs on, and the shapes of packed batches",
        "Prints versions, the device, for each op the implementation it uses on this device and why, and the shapes of "
        "all batches that encode makes where it packs texts without padding, as on an NVIDIA GPU: at most one program "
        "is compiled for each.",
    )  # fmt: skip
    info.add_argument("--json", action="store_true", help="as one JSON object")
    info.add_argument("--batch-size", metavar="N", type=_positive, default=32, help="as for encode (default: 32)")
    info.add_argument("--length", metavar="T", type=_positive, default=512, help="most tokens of a text (default: 512)")
    return parser


def _add_checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="M", required=True, help="a checkpoint folder or an id on Hugging Face")
    parser.add_argument(
        "--no-compilation-cache", action="store_true",
        help="compile all programs and keep none (default: keep them in the folder that the environment variable "
        "JAXFT_COMPILATION_CACHE names, or in the user's cache)",
    )  # fmt: skip


def _add_dtype_argument(parser: argparse.ArgumentParser, what: str) -> None:
    default = "(default: bfloat16 on an NVIDIA GPU and for a model in float8, else float32)"
    parser.add_argument("--dtype", choices=_DTYPES, help=f"{what} {default}")
    parser.add_argument(
        "--quantization", choices=("fp8",),
        help="fp8: store and multiply the linear layers in float8_e4m3fn; a model that is saved so needs no option",
    )  # fmt: skip


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint_argument(parser)
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a model on Hugging Face")
    parser.add_argument("--batch-size", metavar="N", type=_positive, default=32, help="texts at a time (default: 32)")
    parser.add_argument(
        "--devices", metavar="I,J", type=_indices, dest="on",
        help="indices of the devices that compute, such as 0,1 (default: all GPUs, or one device of another kind)",
    )  # fmt: skip
    parser.add_argument(
        "--max-seq-length", metavar="T", type=_positive,
        help="most tokens of a text, or of a pair for rerank; longer ones are cut (default: as the model's files say)",
    )  # fmt: skip
    _add_dtype_argument(parser, "of parameters and arithmetic; results are float32")
    parser.add_argument(
        "--implementation", choices=("triton", "xla"),  # the implementations that every op has
        help="of every op (default: the fastest for the device; see jaxft info)",
    )  # fmt: skip


def _add_prompt_arguments(parser: argparse.ArgumentParser, before: str, default: str) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--prompt", metavar="TEXT", help=f"text to put before {before} (default: {default})")
    group.add_argument(
        "--prompt-name", metavar="NAME", help=f"name of one of the model's prompts to put before {before}"
    )


def _positive(value: str) -> int:
    try:
        number = int(value)
    except ValueError:
        number = 0
    if not 0 < number < 1 << 31:
        raise argparse.ArgumentTypeError(f"expected a positive integer below 2**31, got {value!r:.200}")
    return number


def _indices(value: str) -> list[int]:
    try:
        return [*map(int, value.split(","))]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected indices such as 0,1, got {value!r}") from None


def _shard(value: str) -> tuple[int, int]:
    index, _, count = value.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"expected I/N with 0 <= I < N, got {value!r}")
    return int(index), int(count)


def _run_encode(args: argparse.Namespace) -> None:
    args.data = args.data or ["-"]
    is_folder = args.output.endswith("/") or os.path.isdir(args.output)
    if is_folder or any(name.endswith(".parquet") for name in args.data):
        if not is_folder and (args.output == "-" or Path(args.output).suffix in (".npy", ".jsonl", ".parquet")):
            raise _UserError(f"output {args.output!r} must be a folder for these data; a new one may end in /")
        _run_corpus(args)
        return
    for option in ("text_column", "keep", "rows_per_part", "shard"):
        if getattr(args, option) is not None:
            raise _UserError(f"--{option.replace('_', '-')} needs an output folder, such as OUT/, got {args.output!r}")
    if len(args.data) > 1 or os.path.isdir(args.data[0]):
        which = "several DATA need" if len(args.data) > 1 else f"the folder {args.data[0]} needs"
        raise _UserError(f"{which} an output folder, such as OUT/, got {args.output!r}")
    (args.file,) = args.data
    if args.output != "-" and Path(args.output).suffix not in (".npy", ".jsonl"):
        raise _UserError(f"output {args.output!r} must end in .npy or .jsonl, or be - for stdout")
    if os.path.exists(args.file) and os.path.exists(args.output) and os.path.samefile(args.file, args.output):
        raise _UserError(f"cannot write {args.output}: it is the file with the texts")
    import numpy as np

    with contextlib.nullcontext() if args.output == "-" else _new_file(args.output) as output:
        records = [*_read_records(args.file, args.jsonl)]
        texts = [*map(_text, records)]
        if len(texts) == 1 and args.precision in ("int8", "uint8"):
            raise _UserError(f"--precision {args.precision} takes its ranges from the texts and needs more than one")
        with _model_errors(args.file, range(1, len(texts) + 1)):
            encoder, device = _load_encoder(args)
            if output and output.suffix == ".npy":
                from jaxft.text.quantization import PRECISIONS

                width = encoder.embedding_dimension
                width = -(-width // 8) if args.precision.endswith("binary") else width
                with atomic.writing(args.output):  # room for header and values
                    _allocate(output, 128 + len(records) * width * np.dtype(PRECISIONS[args.precision]).itemsize)
            with _timed(len(texts), device):
                embeddings = encoder.encode(
                    texts, batch_size=args.batch_size, show_progress_bar=True, normalize_embeddings=args.normalize,
                    precision=args.precision, prompt=args.prompt, prompt_name=args.prompt_name, devices=args.on,
                )  # fmt: skip
        if output is None:
            _write_lines(sys.stdout.buffer, records, embeddings)
            return
        with atomic.writing(args.output), output.open("r+b" if output.exists() else "wb") as file:
            if output.suffix == ".npy":
                # Not the file itself, for which NumPy leaves out why an error has occurred.
                np.save(types.SimpleNamespace(write=file.write), embeddings)
                file.truncate()
            else:
                _write_lines(file, records, embeddings)


def _run_corpus(args: argparse.Namespace) -> None:
    if "-" in args.data:
        raise _UserError("a folder of parquet files cannot be made from stdin; name the files")
    if "://" in args.output:
        raise _UserError(f"output {args.output!r} must be a local folder for these data")
    target = Path(args.output)
    if target.exists() and not target.is_dir():
        raise _UserError(f"cannot write {args.output}: it is no folder")
    with _model_errors(None, ()):
        from jaxft.checkpoint import files as checkpoint_files
        from jaxft.text import corpora

        records.sources(args.data, result=target, jsonl=args.jsonl)  # finds mistakes before the model is loaded
        encoder, device = _load_encoder(args)
        folder = checkpoint_files.resolve(args.model, revision=args.revision)
        dtype, recipe = _precision(encoder)
        model = {
            "model_sha256": corpora.model_digest(folder), "dtype": dtype,
            "quantization": None if recipe is None else dataclasses.asdict(recipe),
            "implementation": args.implementation, "_model": args.model, "_revision": args.revision,
            "_device": _device()["device"], "_versions": _versions(),
        }  # fmt: skip
        start = time.perf_counter()
        done = corpora.encode_corpus(
            encoder, args.data, target, text_column=args.text_column or "text", keep=args.keep or (),
            rows_per_part=args.rows_per_part or 100_000, shard=args.shard or (0, 1), jsonl=args.jsonl, model=model,
            prompt=args.prompt, prompt_name=args.prompt_name, batch_size=args.batch_size, precision=args.precision,
            normalize_embeddings=args.normalize, devices=args.on, show_progress_bar=True,
        )  # fmt: skip
    if done.nulls:
        print(f"jaxft: {done.nulls:,} rows have no text; all components of their embeddings are null", file=sys.stderr)
    print(f"jaxft: parts: {done.written:,} written, {done.found:,} were there", file=sys.stderr)
    _print_speed(done.texts, time.perf_counter() - start, device)


def _write_lines(file: IO[bytes], records: Sequence[str | dict[str, Any]], embeddings: "np.ndarray") -> None:
    """Writes JSON lines: the fields of each record and its embedding, with the digits that distinguish all values."""
    digits = {4: 9, 2: 5}.get(embeddings.dtype.itemsize)  # float32, float16
    for record, row in zip(records, embeddings.tolist(), strict=True):
        embedding = row if digits is None else [float(f"{value:.{digits}g}") for value in row]
        fields = {"text": record} if isinstance(record, str) else record
        line = json.dumps(fields | {"embedding": embedding}, ensure_ascii=False, allow_nan=False)
        # A lone surrogate is valid in JSON but not in UTF-8: write it as a \u escape again.
        file.write(line.encode("utf-8", "backslashreplace") + b"\n")


def _allocate(file: Path, size: int) -> None:
    """Makes a file of `size` bytes, so that a disk without room for it is known before the work."""
    with file.open("wb") as new:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(new.fileno(), 0, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # this file system cannot
                    raise


def _run_similar(args: argparse.Namespace) -> None:
    lines, numbers = _read_documents(args)
    options = {"batch_size": args.batch_size, "normalize_embeddings": True, "devices": args.on}
    with _model_errors(args.file, numbers):
        encoder, device = _load_encoder(args)
        with _timed(len(numbers) + 1, device):
            with _model_errors(None, ()):
                query = encoder.encode_query(args.query, prompt=args.prompt, prompt_name=args.prompt_name, **options)
            documents = [lines[number - 1] for number in numbers]
            embeddings = encoder.encode_document(documents, show_progress_bar=True, **options)
    import numpy as np

    cosines = embeddings @ query
    best = np.argsort(-cosines, kind="stable")[: args.top]
    _print_ranking(((cosines[index], numbers[index]) for index in best), lines)


def _run_rerank(args: argparse.Namespace) -> None:
    lines, numbers = _read_documents(args)
    with _model_errors(args.file, numbers):
        encoder, device = _load_ranker(args)
        with _timed(len(numbers), device):
            found = encoder.rank(
                args.query, [lines[number - 1] for number in numbers], top_k=args.top, batch_size=args.batch_size,
                show_progress_bar=True, prompt=args.prompt, prompt_name=args.prompt_name, devices=args.on,
            )  # fmt: skip
    _print_ranking(((entry["score"], numbers[entry["corpus_id"]]) for entry in found), lines)


def _run_warmup(args: argparse.Namespace) -> None:
    if args.no_compilation_cache or os.environ.get("JAXFT_COMPILATION_CACHE") == "off":
        raise _UserError("warmup needs the compilation cache, which is turned off")
    options = {
        "batch_size": args.batch_size, "devices": args.on, "show_progress_bar": True, "prompt": args.prompt,
        "prompt_name": args.prompt_name,
    }  # fmt: skip
    if args.command != "encode" and args.precision != "float32":
        raise _UserError(f"--precision has no meaning for {args.command}")
    with _model_errors(None, ()), _kept_programs():
        start = time.perf_counter()
        if args.command == "rerank":
            if args.normalize or args.truncate_dim:
                raise _UserError("--normalize and --truncate-dim have no meaning for rerank")
            encoder, device = _load_ranker(args)
            encoder.warmup(**options)
        else:
            encoder, device = _load_encoder(args)
            if args.command == "similar":
                encoder.warmup(task="query", normalize_embeddings=True, **options)
                options |= {"task": "document", "prompt": None, "prompt_name": None}
            options |= {"normalize_embeddings": args.normalize or args.command == "similar"}
            encoder.warmup(precision=args.precision, **options)
            if args.precision in ("int8", "uint8"):  # for output folders, which get their ranges from the first texts
                encoder.warmup(precision=args.precision, ranges=[[0] * encoder.embedding_dimension] * 2, **options)
    print(f"jaxft: ready after {time.perf_counter() - start:.1f} s ({device})", file=sys.stderr)


@contextmanager
def _kept_programs() -> Iterator[None]:
    """Makes it an error of the block that a program cannot be written, for which JAX only warns."""
    of_jax = "Error writing persistent compilation cache"
    found: list[Warning | str] = []  # by all threads that compile

    def note(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> None:
        if not str(message).startswith(of_jax):
            return show(message, category, *place, **options)
        found.append(message)
        raise category(message)

    try:
        with warnings.catch_warnings():
            show, warnings.showwarning = warnings.showwarning, note
            warnings.filterwarnings("always", of_jax)
            yield
    except UserWarning as warning:
        from jaxft import compilation_cache

        warnings.filterwarnings("ignore", of_jax)  # other threads still compile
        # The first one has the reason. JAX fails at later programs because a part of the first one has no time.
        first = [*found, warning][0]
        raise _UserError(f"cannot write the compilation cache {compilation_cache.folder()}: {first}") from warning


def _read_documents(args: argparse.Namespace) -> tuple[list[str], list[int]]:
    """Reads the texts to rank for a query. Returns the texts of all lines, and the numbers of the lines to rank."""
    try:
        records.checked(args.query, "the query")
    except records.DataError as error:
        raise _UserError(str(error)) from error
    if records.is_blank(args.query):
        raise _UserError("the query is empty")
    lines = [*map(_text, _read_records(args.file, args.jsonl))]
    numbers = [number for number, text in enumerate(lines, 1) if not records.is_blank(text)]
    if not numbers:
        raise _UserError(f"{_name(args.file)}: all texts are empty")
    if len(numbers) < len(lines):
        print(f"jaxft: {len(lines) - len(numbers):,} of {len(lines):,} texts are empty and skipped", file=sys.stderr)
    return lines, numbers


def _print_ranking(found: Iterable[tuple[float, int]], lines: Sequence[str]) -> None:
    for score, number in found:
        print(f"{score:.4f}", number, " ".join(lines[number - 1].split()), sep="\t")


def _run_info(args: argparse.Namespace) -> None:
    device = _device()
    from jaxft.ops import plans, samples
    from jaxft.text import batching
    from jaxft.tuning import table as tuning_table

    configs = tuning_table.sources(device["device"]) if device["platform"] == "cuda" else []
    size, dtype = "32x128", "bfloat16" if device["platform"] == "cuda" else "float32"
    rows: list[tuple[str, ...]] = [("op", "forward", "backward", "why not another")]
    for name, plan in samples.plan_table(size, dtype).items():
        passes = (plans.describe(plan, direction, with_config=False) for direction in ("forward", "backward"))
        rows.append((name, *passes, plan.why))
    versions = _versions()
    buckets = batching.buckets(args.batch_size, args.length)
    if args.json:
        names = ("op", "forward", "backward", "reason")
        choices = [dict(zip(names, row, strict=True)) for row in rows[1:]]
        shapes = [dataclasses.asdict(bucket) for bucket in buckets]
        info = {"versions": versions, "device": device, "configs": configs, "ops": choices, "buckets": shapes}
        print(json.dumps(info, indent=2, allow_nan=False))
        return
    for name, value in (versions | device).items():
        print(f"{name:<9} {value}")
    if configs:
        print(f"{'configs':<9} {', '.join(configs)}")
    print(f"\nwhat each op runs on, {size} tokens of BERT-base, {dtype}:")
    print("\n".join(plans.table_lines(rows)))
    print(f"\n{len(buckets)} shapes of packed batches (--batch-size {args.batch_size} --length {args.length}):")
    for longest in sorted({bucket.longest for bucket in buckets}):
        line = " ".join(f"{b.capacity}x{b.count}" for b in buckets if b.longest == longest)
        print(f"texts of up to {longest:>4} tokens, tokens x texts: {line}")


def _versions() -> dict[str, str]:
    import importlib.metadata
    import platform

    versions = {"python": platform.python_version(), "jaxft": __version__}
    return versions | {package: importlib.metadata.version(package) for package in ("jax", "jaxlib", "flax")}


def _run_bench(args: argparse.Namespace) -> None:
    import importlib.util

    for name, suffix in (("output", ".json"), ("chart", ".png")):
        path = getattr(args, name)
        if path is not None and Path(path).suffix != suffix:
            raise _UserError(f"{name} {path!r} must end in {suffix}")
    if args.chart is not None and importlib.util.find_spec("matplotlib") is None:
        raise _UserError("--chart needs matplotlib: pip install 'jaxft[plot]'")
    for name in ("batch", "length", "chart") if args.latency else ("callers", "calls"):
        if getattr(args, name) is not None:
            raise _UserError(f"--{name} has no meaning {'with' if args.latency else 'without'} --latency")
    if args.latency:
        _run_latency(args)
        return
    args.batch, args.length = args.batch or [1, 8, 32], args.length or [128]
    _start_loading(args)
    device = _device()
    dtype = _dtype(args, device["platform"])
    import jax
    from tqdm import tqdm

    from jaxft import comparison
    from jaxft.checkpoint import files as checkpoint_files
    from jaxft.models.bert import BertModel
    from jaxft.models.float8 import as_recipe, check_dtype

    with contextlib.ExitStack() as files:
        output, chart = (path and files.enter_context(_new_file(path)) for path in (args.output, args.chart))
        with _model_errors(None, ()):
            recipe = None if args.quantization is None else as_recipe("--quantization", args.quantization)
            if recipe is not None:
                check_dtype("--dtype", jax.numpy.dtype(dtype))
            folder = checkpoint_files.resolve(args.model)
            _refuse_float8(args.model, folder)
            model = BertModel.from_pretrained(folder, dtype=dtype)
            dtype, _ = _precision(model)
            if reason := comparison.without_counterpart(model):
                raise _UserError(f"{args.model}: bench compares layers like BERT's only, but {reason}")
            if recipe is not None and (reason := model.layers[0].not_in_float8()):
                raise _UserError(f"{args.model}: no layer of the model runs in float8: {reason}")
            for length in args.length:
                if length > model.config.most_tokens:
                    raise _UserError(f"length {length}: the model takes at most {model.config.most_tokens}")
            cases = list(dict.fromkeys((batch, length) for length in args.length for batch in args.batch))
            done, failed = {}, []
            with tqdm(cases, desc="bench", unit="case", disable=None) as bar:
                for batch, length in bar:
                    try:
                        done[batch, length] = comparison.compare(model, batch, length, recipe)
                    except (comparison.ComparisonError, jax.errors.JaxRuntimeError) as error:
                        # The other cases may still succeed, for example if this case ran out of memory.
                        failed.append(f"{batch}x{length}: {error}")
        if not done:
            raise _UserError("\n".join(failed))
        cases, times = list(done), list(done.values())
        print(f"{args.model}, {dtype}, {device['device']}, JAX {jax.__version__}; microseconds\n")
        for line in comparison.table(cases, times):
            print(line)
        if output:
            results = [
                {"batch": batch, "length": length, "us": {name: dataclasses.asdict(t) for name, t in found.items()}}
                for (batch, length), found in done.items()
            ]
            head = {"versions": _versions(), **device, "model": args.model, "dtype": dtype}
            with atomic.writing(args.output):
                output.write_text(json.dumps(head | {"results": results}, indent=2, allow_nan=False) + "\n", "utf-8")
        if chart:
            with atomic.writing(args.chart), chart.open("wb") as file:
                comparison.draw(cases, times, f"{dtype}, {device['device']}", file)
    if failed:
        raise _UserError("\n".join(failed))


def _refuse_float8(name: str, folder: Path) -> None:
    """Raises a `_UserError` if the model in a folder is in float8: plain JAX has no counterpart of it."""
    from jaxft.checkpoint import files as checkpoint_files
    from jaxft.models.float8 import read_settings

    _, saved = checkpoint_files.read_config(folder, read_settings)
    if saved is not None:
        raise _UserError(f"{name}: is in float8; bench needs the 16-bit model, with --quantization fp8")


def _run_latency(args: argparse.Namespace) -> None:
    _start_loading(args)
    device = _device()
    dtype = _dtype(args, device["platform"]) or "float32"
    from jaxft import latency
    from jaxft.checkpoint import files as checkpoint_files
    from jaxft.text import module_files

    results: list[dict[str, Any]] = []
    with contextlib.nullcontext() if args.output is None else _new_file(args.output) as output:
        with _model_errors(None, ()):
            try:
                folder = checkpoint_files.resolve(args.model)
                _refuse_float8(args.model, module_files.read_sentence_encoder(folder).transformer)
                callers = list(dict.fromkeys(args.callers or [1, 8]))
                for count, name, times in latency.compare(folder, dtype, callers, args.calls, args.quantization):
                    if not results:
                        kinds = f"single queries of {len(latency.QUERIES)} kinds"
                        precision = f"{dtype}, jaxft in {args.quantization}" if args.quantization else dtype
                        head = f"{args.model}, {precision}, {device['device']}; {kinds}"
                        print(f"{head}\n\n{latency.row(*latency.COLUMNS)}")
                    print(latency.row(count, name, times), flush=True)
                    results.append({"callers": count, "variant": name} | times._asdict())
            except latency.LatencyError as error:
                raise _UserError(str(error)) from error
        if output:
            facts = {"versions": _versions(), **device, "model": args.model, "dtype": dtype}
            facts |= {"quantization": args.quantization, "results": results}
            with atomic.writing(args.output):
                output.write_text(json.dumps(facts, indent=2, allow_nan=False) + "\n", "utf-8")


def _run_fuse(args: argparse.Namespace) -> None:
    sys.path.insert(0, os.getcwd())
    function, given = _named_object("MODULE:FUNCTION", args.function), _named_object("--args", args.args)
    try:
        arguments = given() if callable(given) else given
    except (Exception, SystemExit) as error:  # code of the user
        raise _UserError(f"--args {args.args} raised {_details(error)}") from error
    if not isinstance(arguments, tuple):
        raise _UserError(f"--args {args.args} must be a tuple of arguments, got {type(arguments).__name__}")
    from jaxft.fusion.transform import fuse

    try:
        fused = fuse(function, force=args.force)
    except TypeError as error:
        raise _UserError(f"{args.function}: {error}") from error
    try:
        report = fused.report(*arguments)
    except (Exception, SystemExit) as error:  # code of the user, or arguments that it does not take
        raise _UserError(f"{args.function} with --args {args.args} raised {_details(error)}") from error
    print(report)


def _named_object(argument: str, name: str) -> Any:
    """Returns what a name such as package.module:function stands for."""
    import pkgutil

    module, _, path = name.partition(":")
    if not module or not path:
        raise _UserError(f"{argument}: expected a name such as package.module:function, got {name!r:.200}")
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise _UserError(f"cannot find {name}: {error}") from error
    except (Exception, SystemExit) as error:  # code of the user
        raise _UserError(f"importing {name} raised {_details(error)}") from error


def _details(error: BaseException) -> str:
    """Returns type and message of an error in code of the user, and the line of that code."""
    import sysconfig

    others = (os.path.dirname(__file__), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), "<")
    frames = [x for x in traceback.extract_tb(error.__traceback__) if not x.filename.startswith(others)]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _device() -> dict[str, str]:
    from jaxft import dispatch

    try:
        return {"device": dispatch.device_kind(), "platform": dispatch.platform()}
    except (RuntimeError, AssertionError) as error:  # from JAX, if JAX_PLATFORMS names a missing platform
        asked = os.environ.get("JAX_PLATFORMS", "")
        raise _UserError(f"JAX found no device (JAX_PLATFORMS is {asked!r}). {error}") from error


def _start_loading(args: argparse.Namespace) -> None:
    """Says that a model is loaded, and keeps compiled programs if this is the program."""
    if sys.stderr.isatty():
        print(f"jaxft: loading {args.model}", file=sys.stderr, flush=True)
    if not args.is_program:
        return
    import jax

    from jaxft import compilation_cache

    if args.no_compilation_cache:
        jax.config.update("jax_enable_compilation_cache", False)  # JAX_COMPILATION_CACHE_DIR may be set
        return
    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]  # the user's own
        if args.run is _run_warmup and jax.config.jax_persistent_cache_min_compile_time_secs > 0:  # type: ignore[attr-defined]
            raise _UserError(
                "warmup needs all programs to be kept, but JAX_COMPILATION_CACHE_DIR is set, where JAX keeps slow ones"
                " only: set JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0, or unset JAX_COMPILATION_CACHE_DIR"
            )
        return
    try:
        is_kept = compilation_cache.use_compilation_cache() is not None
    except OSError as error:
        reason = str(error.strerror).removeprefix("use_compilation_cache: ")
        if os.environ.get(compilation_cache.VARIABLE):
            raise _UserError(f"{compilation_cache.VARIABLE}: {reason}") from error
        if args.run is _run_warmup:
            raise _UserError(f"warmup needs the compilation cache: {reason}") from error
        print(f"jaxft: compiled programs are not kept: {reason}", file=sys.stderr)
        return
    if args.run is _run_warmup and not is_kept:
        raise _UserError("warmup needs the compilation cache, which JAX's jax_enable_compilation_cache turns off")


def _dtype(args: argparse.Namespace, platform: str) -> str | None:
    """Returns the dtype in which a model is to be loaded. None leaves it to `from_pretrained`."""
    return args.dtype or ("bfloat16" if platform == "cuda" or args.quantization else None)


def _precision(encoder: Any) -> tuple[str, "Float8Recipe | None"]:
    """Returns the dtype in which a `BertModel` or an encoder of texts computes, and its recipe if it is in float8."""
    from jaxft.models.bert import encoder_of

    model = encoder_of(getattr(encoder, "model", encoder))
    return str(model.embeddings.options.dtype), model.recipe


def _load(args: argparse.Namespace, from_pretrained: Callable[..., Any], **options: Any) -> tuple[Any, str]:
    """Loads an encoder. Returns it and, for the summary, the device and the dtype."""
    _start_loading(args)
    device = _device()
    encoder = from_pretrained(
        args.model, revision=args.revision, dtype=_dtype(args, device["platform"]), implementation=args.implementation,
        quantization=args.quantization, **options,
    )  # fmt: skip
    dtype, recipe = _precision(encoder)
    by_default = "" if args.dtype or dtype == "float32" else " by default"
    return encoder, f"{device['device']}, {dtype}{by_default}{'' if recipe is None else ', fp8'}"


def _load_encoder(args: argparse.Namespace) -> tuple["SentenceEncoder", str]:
    from jaxft.text.sentence_encoder import SentenceEncoder

    limits = {"max_seq_length": args.max_seq_length, "truncate_dim": args.truncate_dim}
    return _load(args, SentenceEncoder.from_pretrained, **limits)


def _load_ranker(args: argparse.Namespace) -> tuple[Any, str]:
    from jaxft.text.cross_encoder import CrossEncoder

    return _load(args, CrossEncoder.from_pretrained, max_length=args.max_seq_length)


@contextmanager
def _timed(count: int, device: str) -> Iterator[None]:
    """Prints the speed of the block to stderr, if the block succeeds."""
    start = time.perf_counter()
    yield
    _print_speed(count, time.perf_counter() - start, device)


def _print_speed(count: int, seconds: float, device: str) -> None:
    speed = f"{count:,} texts in {seconds:.1f} s: {count / seconds:,.0f} texts/s, compilation included"
    print(f"{speed} ({device})", file=sys.stderr)


@contextmanager
def _model_errors(file: str | None, numbers: Sequence[int]) -> Iterator[None]:
    """Turns errors of a model and its arguments into a `_UserError`.

    `numbers` are the lines of the texts in `file`. Without a file, the text is the query.
    """
    import jax

    from jaxft.checkpoint.files import CheckpointError
    from jaxft.text.batching import TextError

    try:
        yield
    except TextError as error:
        place = "the query" if file is None else f"{_name(file)}, line {numbers[error.index]}:"
        raise _UserError(f"{place} {error.text!r:.80} {error.reason}") from error
    except (CheckpointError, NotImplementedError, ValueError, jax.errors.JaxRuntimeError) as error:
        raise _UserError(str(error)) from error


def _read_records(file: str, jsonl: bool) -> Iterator[str | dict[str, Any]]:
    """Reads a file ("-": stdin) line by line: yields plain lines, and objects with a field "text" from JSON lines."""
    name, is_compressed = _name(file), file.endswith(".gz")
    jsonl = jsonl or file.removesuffix(".gz").endswith(".jsonl")
    number = 0
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if file == "-" else open(file, "rb") as data:
            opened = records.Expanded(data, name, os.fstat(data.fileno()).st_size) if is_compressed else data
            for number, line in enumerate(records.lines(opened, name), 1):
                yield records.record(line, f"{name}, line {number}") if jsonl else line.removesuffix("\r")
    except records.DataError as error:
        raise _UserError(str(error)) from error
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise _UserError(f"cannot read {name}: {getattr(error, 'strerror', error)}") from error
    if not number:
        raise _UserError(f"{name} is empty")


def _name(file: str) -> str:
    if file == "-":
        return "stdin"
    return file if file.strip() else repr(file)


def _text(record: str | dict[str, Any]) -> str:
    return record if isinstance(record, str) else record["text"]


@contextmanager
def _new_file(path: str) -> Iterator[Path]:
    """Yields a temporary path. What the block writes there replaces `path` (the target of a link) if it succeeds."""
    target = Path(os.path.realpath(path) if os.path.islink(path) else path)
    mode = None
    with atomic.writing(path), contextlib.suppress(FileNotFoundError):
        mode = target.stat().st_mode
    if mode is not None and stat.S_ISDIR(mode):
        raise _UserError(f"cannot write {path}: it is a directory")
    if mode is not None and not (stat.S_ISREG(mode) and os.access(target, os.W_OK)):
        # Refuse pipes, devices and read-only files, because os.replace would replace them.
        why = "it may not be written" if stat.S_ISREG(mode) else "it is no regular file"
        raise _UserError(f"cannot write {path}: {why}")
    with atomic.replacing(target) as (temporary,):
        yield temporary
        if target.exists() and temporary.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))


if __name__ == "__main__":
    sys.exit(main())
