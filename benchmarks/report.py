"""Writes docs/benchmarks/ and the tables of README.md and docs/startup.md from the CSV files in benchmarks/results/.

Running it twice changes nothing. `--check` writes nothing and exits with 1 if a file is not what it would write.
"""

import argparse
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import shapes
import timing

ROOT = Path(__file__).resolve().parents[1]
BEGIN, LATENCY, END = "<!-- table: peers -->", "<!-- table: latency -->", "<!-- end -->"
PEERS = "peers, "
#: Start of an op -> title of its section. An op belongs to the first that fits. Ops of FP8 belong to "fp8".
TITLES = {
    "modern": "Modern encoders with embeddings, beside plain JAX and transformers",
    "fp8": "FP8 inference beside bfloat16",
    "encoder": "Encoder, forward pass of all layers, without embeddings",
    "training step": "Training step, value and gradients of all layers",
    "contrastive step": "Contrastive training step with embeddings, pooling and loss: pairs, tokens of a text",
    "pretraining example": "Pretraining example with data and optimiser, packed tokens",
    "encode docstrings": "Texts to embeddings with the tokenizer",
    "encode options": "Options of encode beside the plain call, for the same tokens",
    "encode on GPUs": "Texts to embeddings on one and several GPUs, with the tokenizer",
    "train on GPUs": "Training steps on one and several GPUs, the same number of texts for each GPU",
    "encode short texts": "Short texts from memory, and from parquet to parquet",
    "encode one text": "One text to its embedding with the tokenizer",
    "start-up": "Fresh processes: the first query, then 3,000 texts, with stored programs and without",
    "attention, back to back": "Attention of packed sequences: rows, sequences, longest, heads, head size",
    "attention, relative bias": "Attention with a table of biases by relative position",
    "attention": "Attention from packed QKV",
    "dense": "Dense layers",
    "linear_cross_entropy": "Loss and gradients of a linear classifier",
    "semantic_search": "Search in a corpus on the device: queries, entries, components",
    "fuse corpus": "Functions in which `jaxft.fuse` replaces something, as they were and fused",
    "fuse": "Networks of Flax Linen, as they are and fused by `jaxft.fuse`",
    "configuration": "Kernels with the tuned configuration and with the heuristic's",
    "other": "Row and layout kernels",
}
METRICS = {
    "queued_us": "wall time per call, microseconds, with calls queued",
    "blocking_us": "wall time of a call and the wait for its result, microseconds",
    "device_us": "time that a call keeps the GPU busy, microseconds",
    "sustained_us": "wall time per call, microseconds, in at least 30 s of queued calls",
    "wall_us": "wall time of a call, microseconds",
    "temporary_mib": "memory beside arguments and results, MiB",
}


class Figure(NamedTuple):
    """A PNG file. The file holds a digest of the data, which tells whether it is current."""

    data: Any
    draw: Callable[[Any], Any]

    def digest(self) -> str:
        """Returns the digest."""
        return hashlib.sha256(json.dumps(self.data, allow_nan=False).encode()).hexdigest()

    def save(self, path: Path) -> None:
        """Draws the file."""
        figure = self.draw(self.data)
        figure.savefig(path, dpi=120, bbox_inches="tight", metadata={"Software": None, "Comment": self.digest()})


def by_case(row: timing.Row) -> tuple[str, bool, str, list[int]]:
    """Returns the sort key of a row."""
    return row["op"], row["direction"] != "forward", row["dtype"], [int(n) for n in row["shape"].split("x")]


def section(row: timing.Row) -> str:
    """Returns the key of `TITLES` that a row belongs to."""
    if row["op"].startswith(PEERS):
        return "peers"
    if "fp8" in row["op"]:
        return "fp8"
    return next((name for name in TITLES if row["op"].startswith(name)), "other")


def metrics_of(name: str) -> tuple[str, ...]:
    """Returns the metrics that a section shows: wall times of what a user waits for, device times of single kernels."""
    metrics = {
        "fp8": ("device_us", "sustained_us"),
        "encoder": ("queued_us", "blocking_us", "device_us"),
        "training step": ("queued_us", "temporary_mib"),
        "contrastive step": ("queued_us", "temporary_mib"),
        "pretraining example": (),  # see `pretraining`
        "encode docstrings": ("wall_us",),
        "encode options": ("wall_us",),
        "encode on GPUs": ("wall_us",),
        "train on GPUs": ("wall_us",),
        "encode short texts": ("wall_us",),
        "encode one text": ("wall_us",),
        "start-up": ("wall_us",),
        "linear_cross_entropy": ("device_us", "temporary_mib"),
        "semantic_search": ("wall_us",),
        "fuse": ("device_us", "queued_us", "temporary_mib"),
    }
    return metrics.get(name, ("device_us",))


def markdown(lines: Sequence[Sequence[str]], texts: int = 3) -> str:
    """Returns a table, of which the first `texts` columns are text and the others numbers."""
    head, *body = lines
    rule = ["---"] * texts + ["---:"] * (len(head) - texts)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))


def tables(rows: Sequence[timing.Row]) -> list[str]:
    """Returns the sections of a device's page, but for other libraries."""
    parts = []
    for name, title in TITLES.items():
        own = sorted((row for row in rows if section(row) == name), key=by_case)
        if not own:
            continue
        parts.append(f"## {title}")
        if name == "modern":
            parts += modern_tables(own)
            continue
        if name == "pretraining example":
            parts.append(pretraining(own))
        for metric in metrics_of(name):
            if chosen := [row for row in own if row["metric"] == metric]:
                head, *lines = timing.table(chosen, metric=metric)
                if name.startswith("fuse"):
                    # The last column compares the fused function with the original, and not with jaxft's own model.
                    at = head.index("xla"), head.index("fused")
                    lines = [[*line[:-1], f"{float(line[at[0]]) / float(line[at[1]]):.2f}x"] for line in lines]
                if metric == "temporary_mib":
                    head = ["saving" if cell == "speedup" else cell for cell in head]
                if name == "encode short texts":  # the second column is no peer
                    head, lines = head[:-1], [line[:-1] for line in lines]
                parts += [f"{METRICS[metric][0].upper()}{METRICS[metric][1:]}:", markdown([head, *lines])]
        if name == "fp8" and (notes := [row for row in own if row["note"]]):  # power and clock
            parts.append("\n".join(f"- {r['op']} {r['shape']}, {r['implementation']}: {r['note']}." for r in notes))
        if name == "encode docstrings" and (found := throughput(own)):
            parts += ["Packed, in the same runs; the last column compares with batches on the device already:", found]
    return parts


def modern_tables(rows: Sequence[timing.Row]) -> list[str]:
    """Returns tables of `bench_modern_encoders.py`: times, speedups over each kind of peer, and their targets."""
    parts = []
    for metric in ("queued_us", "device_us"):
        chosen = [row for row in rows if row["metric"] == metric]
        if not chosen:
            continue
        head, *lines = timing.table(chosen, metric=metric)
        names = head[3:-1]
        head = [*head[:-1], "over plain JAX", "over transformers", "targets"]
        body = []
        for line in lines:
            times = {name: float(cell) for name, cell in zip(names, line[3:], strict=False) if cell[0].isdigit()}
            kinds = {
                kind: [us for name, us in times.items() if name.startswith(kind)]
                for kind in ("xla", ("transf", "torch"))
            }
            ours = times.get("jaxft", math.nan)
            over = [f"{min(found) / ours:.2f}x" if found and ours > 0 else "-" for found in kinds.values()]
            aims = [f"{aim:.1f}x" if aim else "-" for aim in shapes.modern_targets(line[0])]
            body.append([*line[:-1], *over, ", ".join(aims)])
        parts += [f"{METRICS[metric][0].upper()}{METRICS[metric][1:]}:", markdown([head, *body])]
    failures = {
        f"{row['op']} {row['shape']}, {row['implementation']}: {row['note']}." for row in rows if "fail" in row["note"]
    }
    return [*parts, "\n".join(f"- {line}" for line in sorted(failures))] if failures else parts


def pretraining(rows: Sequence[timing.Row]) -> str:
    """Returns a table with a line for each preset."""
    body, values = [], {(row["op"], row["metric"]): row for row in rows}
    for (op, metric), row in values.items():
        if metric == "step_us":
            tokens, mfu = float(values[op, "tokens_per_s"]["p50"]), values.get((op, "mfu_percent"))
            cells = f"{float(row['p50']) / 1e3:.2f}", f"{tokens:,.0f}", row["rate"], f"{mfu['p50']} %" if mfu else "-"
            body.append([op, row["shape"], row["dtype"], *cells])
    return markdown([["op", "tokens a step", "dtype", "ms a step", "tokens/s", "model TFLOP/s", "MFU"], *body])


def throughput(rows: Sequence[timing.Row]) -> str:
    """Returns a table of texts and tokens per second of `SentenceEncoder.encode`."""
    body = []
    for row in rows:
        if (row["implementation"], row["metric"]) != ("jaxft", "wall_us"):
            continue
        op, texts, wall = row["op"], math.prod(map(int, row["shape"].split("x"))), float(row["p50"])
        alone = [float(other["p50"]) for other in rows if (other["op"], other["metric"]) == (op, "device_only_us")]
        tokens, adds = f"{float(row['rate']):.2f} million", f"{wall / alone[0] - 1:.0%}" if alone else "-"
        body.append([op, row["shape"], row["dtype"], f"{texts / wall * 1e6:,.0f}", tokens, adds])
    return markdown([["op", "shape", "dtype", "texts/s", "tokens/s", "the host adds"], *body]) if body else ""


# --- Other libraries -----------------------------------------------------------------------------------------------


def peer_cases(rows: Sequence[timing.Row]) -> dict[str, dict[str, timing.Row]]:
    """Returns the rows of `bench_peers.py`: case -> library -> row, with jaxft first and texts before layers."""
    cases: dict[str, dict[str, timing.Row]] = {}
    order = ("encode docstrings", "encode one query", "rank", "encoder", "training")

    def place(row: timing.Row) -> tuple[Any, ...]:
        op = row["op"].removeprefix(PEERS)
        number = next((i for i, start in enumerate(order) if op.startswith(start)), len(order))
        return number, *by_case(row), row["implementation"] != "jaxft"

    own = [row for row in rows if section(row) == "peers"]
    # Python's version decides how many docstrings there are. The newest number counts.
    texts = {row["op"]: row["shape"] for row in sorted(own, key=lambda row: row["date"]) if row["metric"] == "wall_us"}
    for row in sorted(own, key=place):
        op = row["op"].removeprefix(PEERS)
        if row["op"] not in texts:
            cases.setdefault(f"{op}, {row['shape']}", {})[row["implementation"]] = row
        elif texts[row["op"]] == row["shape"]:
            cases.setdefault(op, {})[row["implementation"]] = row
    return cases


def peer_value(row: timing.Row | None) -> str:
    """Returns the cell of the README's table: texts per second, or a duration."""
    if row is None:
        return "-"
    us = float(row["p50"])
    if math.isnan(us):
        return "failed"
    if "docstrings" in row["op"]:
        return f"{int(row['shape']) / us * 1e6:,.0f} texts/s"
    return duration(us)


def duration(us: float) -> str:
    """Returns microseconds as milliseconds or seconds, with three digits."""
    value, unit = (us / 1e3, "ms") if us < 999.5e3 else (us / 1e6, "s")
    return f"{value:#.3g}".removesuffix(".") + f" {unit}"


def peers_table(rows: Sequence[timing.Row]) -> list[str]:
    """Returns the table of other libraries, in lines, with where it is from."""
    cases = peer_cases(rows)
    names = list(dict.fromkeys(name for case in cases.values() for name in case))
    names.sort(key=lambda name: name != "jaxft")
    body, reasons = [], []
    for label, case in cases.items():
        times = {name: float(row["p50"]) for name, row in case.items()}
        best = min((us for name, us in times.items() if name != "jaxft" and us > 0), default=math.nan)
        speedup = best / times.get("jaxft", math.nan)
        cells = [peer_value(case.get(name)) for name in names]
        body.append([label, *cells, "-" if math.isnan(speedup) else f"{speedup:.2f}x"])
        reasons += [f"{label}, {name}: {row['note']}." for name, row in case.items() if math.isnan(float(row["p50"]))]
    used = [row for case in cases.values() for row in case.values()]
    measured = [row for row in used if not row["note"].startswith("failed")]
    versions = sorted({part for row in measured for part in row["note"].split("; ")[-1].split(", ") if part})
    dates = sorted({row["date"] for row in used})
    source = f"Medians, bfloat16, {' and '.join(dates)}: {', '.join(versions)}."
    return [*markdown([["", *names, "speedup"], *body], texts=1).split("\n"), "", source, *dict.fromkeys(reasons)]


def draw_peers(data: Mapping[str, Any]) -> Any:
    """Draws the time of each library relative to jaxft. `data`: title, and case -> library -> ratio."""
    figure, axes, pyplot = new_figure((8, 1.2 + 0.28 * sum(map(len, data["cases"].values()))))
    names = list(dict.fromkeys(name for case in data["cases"].values() for name in case))
    y, ticks = 0.0, []
    for case in data["cases"].values():
        ticks.append(y + (len(case) - 1) / 2)
        for name, ratio in case.items():
            axes.barh(y, ratio, 0.9, color=f"C{names.index(name)}")
            axes.text(ratio, y, f" {ratio:.1f}", va="center", fontsize=8)
            y += 1
        y += 0.8
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(ticks, list(data["cases"]))
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_xlabel("time relative to jaxft (the line; shorter is faster)")
    axes.set_title(data["title"])
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=f"C{i}") for i in range(len(names))]
    axes.legend(handles, names, loc="lower right", frameon=False)
    return figure


def peers_figure(rows: Sequence[timing.Row], device: str) -> Figure:
    """Returns the figure of other libraries."""
    cases: dict[str, dict[str, float]] = {}
    for label, case in peer_cases(rows).items():
        times = {name: float(row["p50"]) for name, row in case.items() if not math.isnan(float(row["p50"]))}
        if "jaxft" in times and len(times) > 1:
            ours = times.pop("jaxft")
            cases[label] = {name: round(us / ours, 3) for name, us in times.items()}
    return Figure({"title": f"bfloat16, {device}", "cases": cases}, draw_peers)


# --- Encoders ------------------------------------------------------------------------------------------------------


def encoder_figure(rows: Sequence[timing.Row], device: str) -> Figure | None:
    """Returns the figure of encoders in bfloat16 beside plain XLA. Of the peers' two forms, the faster one counts."""
    chosen = [row for row in rows if section(row) == "encoder" and row["dtype"] == "bfloat16"]
    if not chosen:
        return None
    head, *lines = timing.table(sorted(chosen, key=by_case), metric="queued_us")
    shown = {
        "jaxft": ["jaxft"],
        "XLA": ["xla", "xla, separate qkv"],
        "XLA with cuDNN": ["xla+cudnn", "xla+cudnn, packed qkv"],
    }
    panels: dict[str, dict[str, dict[str, float]]] = {"erf GELU": {}, "tanh GELU": {}}
    for case in (dict(zip(head, line, strict=True)) for line in lines):
        for gelu, cases in panels.items():
            if gelu in case["op"]:
                times = {
                    name: min(found) for name, names in shown.items()
                    if (found := [float(case[n]) for n in names if case.get(n, "-") != "-"])
                }  # fmt: skip
                label = f"{case['op'].removeprefix('encoder ').replace(f' {gelu}', '')}, {case['shape']}"
                if "XLA" in times:
                    cases[label] = {name: round(us / times["XLA"], 4) for name, us in times.items()}
    return Figure({"device": device, "panels": {gelu: cases for gelu, cases in panels.items() if cases}}, draw_encoders)


def draw_encoders(data: Mapping[str, Any]) -> Any:
    """Draws a panel for each form of GELU."""
    panels = data["panels"]
    labels = list(dict.fromkeys(label for cases in panels.values() for label in cases))
    names = list(dict.fromkeys(name for cases in panels.values() for case in cases.values() for name in case))
    height = 0.8 / len(names)
    size = (2 + 4.5 * len(panels), 1 + 0.5 * len(labels))
    figure, all_axes, _ = new_figure(size, ncols=len(panels), sharex=True, sharey=True, squeeze=False)
    axes = all_axes[0]
    for panel, (gelu, cases) in zip(axes, panels.items(), strict=True):
        for i, name in enumerate(names):
            shares = {y: cases[label][name] for y, label in enumerate(labels) if name in cases.get(label, {})}
            panel.barh([y + i * height for y in shares], list(shares.values()), height, label=name)
        panel.set_title(gelu)
    axes[0].set_yticks([y + 0.4 - height / 2 for y in range(len(labels))])
    axes[0].set_yticklabels(labels)
    axes[0].invert_yaxis()
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    title = f"time of the encoder relative to plain XLA, bfloat16, {data['device']} (shorter is faster)"
    figure.supxlabel(title, fontsize=10)
    figure.tight_layout()
    return figure


def new_figure(size: tuple[float, float], **options: Any) -> tuple[Any, Any, Any]:
    """Returns a figure, its axes and pyplot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=size, **options)
    return figure, axes, pyplot


# --- Latency -------------------------------------------------------------------------------------------------------


class Goal(NamedTuple):
    """A time that jaxft should reach: a multiple of the time of `other`, or a number of microseconds."""

    text: str
    op: str
    shape: str
    metric: str
    limit: float
    other: str | None = None
    ours: str = "jaxft"


_LAYERS, _ONE = "encoder BERT-base erf GELU", "peers, encode one query, "
GOALS = (
    Goal("BERT-base, 1x16, call", _LAYERS, "1x16", "blocking_us", 1.08, "jaxft, constants"),
    Goal("the same, `join_kernels`", _LAYERS, "1x16", "blocking_us", 1.08, "jaxft, constants", "jaxft, joined"),
    Goal("BERT-base, 1x128, GPU", _LAYERS, "1x128", "device_us", 0.55, "xla"),
    Goal("BERT-base, 1x16, GPU", _LAYERS, "1x16", "device_us", 0.66, "xla"),
    Goal("one query, BERT-base", f"{_ONE}BERT-base", "1", "wall_us", 1 / 10, "sentence-transformers"),
    Goal("one query, MiniLM", f"{_ONE}MiniLM-L6", "1", "wall_us", 1 / 6, "sentence-transformers"),
    Goal("first query", "start-up MiniLM-L6", "1", "wall_us", 1e6, ours="jaxft, empty cache"),
    Goal("first query, stored programs", "start-up MiniLM-L6", "1", "wall_us", 0.3e6),
    Goal("3,000 texts after it", "start-up MiniLM-L6", "3000", "wall_us", 8e6, ours="jaxft, empty cache"),
    Goal("3,000 texts, stored programs", "start-up MiniLM-L6", "3000", "wall_us", 1.5e6),
)


def latency_table(rows_of: Mapping[str, Sequence[timing.Row]]) -> list[str]:
    """Returns the table of `GOALS`, in lines. It compares rows of one commit, the newest ones. `rows_of`: by device."""
    lines = [["what", "GPU and date", "compared with", "time", "time of the other", "ratio", "goal"]]
    for goal in GOALS:
        found: list[tuple[str, str, float, float]] = []
        for device, rows in rows_of.items():
            times = {
                row["implementation"]: row
                for row in rows
                if (row["op"], row["shape"], row["metric"], row["dtype"]) == (*goal[1:4], "bfloat16")
            }
            own, other = times.get(goal.ours), times.get(goal.other or goal.ours)
            if own and other and own["commit"] == other["commit"]:
                found.append((own["date"], device, float(own["p50"]), float(other["p50"])))
        if not found:
            lines.append([goal.text, "not measured", goal.other or "-", "-", "-", "-", _goal(goal)])
            continue
        date, device, ours, others = max(found)
        cells = [duration(others), f"{ours / others:.2f}"] if goal.other else ["-", "-"]
        lines.append([goal.text, f"{device}, {date}", goal.other or "-", duration(ours), *cells, _goal(goal)])
    return markdown(lines).splitlines()


def _goal(goal: Goal) -> str:
    return f"{goal.limit:.2f}" if goal.other else duration(goal.limit)


# --- Files ---------------------------------------------------------------------------------------------------------


def outputs(root: Path) -> dict[Path, str | Figure]:
    """Returns what the files must hold."""
    docs, found, lines = root / "docs" / "benchmarks", dict[Path, str | Figure](), []
    compared: list[tuple[int, str, str, list[timing.Row]]] = []  # number, newest date, device, rows beside libraries
    rows_of: dict[str, list[timing.Row]] = {}
    for path in sorted((root / "benchmarks" / "results").glob("*.csv")):
        rows, device = timing.newest(timing.read_rows(path)), path.stem.replace("_", " ")
        rows_of[device] = rows
        dates, versions = (sorted({row[column] for row in rows}) for column in ("date", "jax"))
        measured = f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))} with JAX {', '.join(versions)}"
        parts = [f"# {device}", f"Measured {measured}. `benchmarks/results/{path.name}` has the numbers."]
        if others := [row for row in rows if section(row) == "peers"]:
            compared.append((len(others), max(row["date"] for row in others), device, others))
            parts += ["## Other libraries", "\n".join(peers_table(others))]
        if (figure := encoder_figure(rows, device)) is not None:
            found[docs / f"{path.stem}.png"] = figure
            parts.append(f"![Time of encoders on {device} relative to plain XLA]({path.stem}.png)")
        found[docs / f"{path.stem}.md"] = "\n\n".join([*parts, *tables(rows)]) + "\n"
        lines.append(f"| [{device}]({path.stem}.md) | {len(rows):,} | {measured} |")
    found[docs / "index.md"] = INDEX + "\n".join(["| device | rows | measured |", "|---|---:|---|", *lines]) + "\n"
    if compared:
        *_, device, others = max(compared)  # the device with the most cases
        found[docs / "peers.png"] = peers_figure(others, device)
        lines = [f"{device}. {line}" if line.startswith("Medians") else line for line in peers_table(others)]
        found[root / "README.md"] = between(root / "README.md", BEGIN, lines)
    found[root / "docs" / "startup.md"] = between(root / "docs" / "startup.md", LATENCY, latency_table(rows_of))
    return found


def between(path: Path, begin: str, lines: Sequence[str]) -> str:
    """Returns the text of a file with other lines between the line `begin` and the line `END` after it."""
    before, first, rest = path.read_text().partition(f"{begin}\n")
    _, end, after = rest.partition(END)
    if not (first and end):
        raise SystemExit(f"{path}: expected a line {begin} and after it a line {END}")
    return "\n".join([f"{before}{begin}", *lines, f"{END}{after}"])


INDEX = """# Benchmarks

`benchmarks/report.py` writes these pages from `benchmarks/results/`, which keeps the newest row of each case. A script
for each operation (`benchmarks/bench_<op>.py`) checks the results first. Then it times the variants in turns in one
process. `bench_peers.py` runs each library in a process of its own and compares their numbers before it times them.

| metric | meaning |
|---|---|
"""
INDEX += "\n".join(f"| `{name}` | {meaning} |" for name, meaning in METRICS.items()) + "\n\n"


def stale(root: Path) -> list[Path]:
    """Returns the files that are not current, and those in docs/benchmarks/ that nothing is written to any more."""
    wanted = outputs(root)
    found = []
    for path, content in wanted.items():
        if isinstance(content, Figure):
            current = path.exists() and content.digest().encode() in path.read_bytes()
        else:
            current = path.exists() and path.read_text() == content
        found += [] if current else [path]
    return found + sorted(set((root / "docs" / "benchmarks").glob("*")) - wanted.keys())


def write(root: Path) -> None:
    """Writes the files that are not current, and removes those that nothing is written to any more."""
    wanted = outputs(root)
    (root / "docs" / "benchmarks").mkdir(parents=True, exist_ok=True)
    for path in stale(root):
        content = wanted.get(path)
        if content is None:
            path.unlink()
        elif isinstance(content, Figure):
            content.save(path)
        else:
            path.write_text(content)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say which files are not current")
    parser.add_argument("--add", nargs="+", type=Path, default=[], metavar="CSV", help="first add rows of other files")
    args = parser.parse_args(argv)
    for path in args.add:
        timing.write_rows(timing.read_rows(path), ROOT / "benchmarks" / "results", path.stem)
    if not args.check:
        return write(ROOT)
    if found := stale(ROOT):
        names = [str(path.relative_to(ROOT)) for path in found]
        raise SystemExit("\n".join(["run `make report`; not current:", *names]))
    return None


if __name__ == "__main__":
    main()
