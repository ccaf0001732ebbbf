"""Writes the README's results, tables between its markers and a chart, and a page of all others, from the CSV files.

Of the rows with the same op, implementation, direction, shape, dtype and metric, the newest counts. Running it twice
changes nothing.
"""

import csv
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import timing

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
TITLES = {
    "encoder": "Encoder, forward (microseconds for the whole stack, embeddings not included)",
    "training step": "Training step, value and gradients of the whole stack (until commit 8b9c7a7 with XLA's defaults; "
    "cuDNN with dropout outside of CUDA graphs)",
    "pretraining example": "Pretraining, data and optimiser included, packed tokens",
    "encode docstrings": "Texts to embeddings, tokeniser included (microseconds for so many texts)",
    "encode one text": "One text of so many tokens to its embedding, tokeniser included (microseconds)",
    "attention, back to back": "Attention of so many rows, sequences and tokens of the longest (microseconds)",
    "attention": "Attention, from packed QKV (microseconds)",
    "dense": "Dense layers (microseconds)",
    "linear_cross_entropy": "Loss and gradients of a linear classifier (microseconds)",
    "configuration": "Kernels as tuned, and with the heuristic's configuration (microseconds)",
    "other": "Row and layout kernels (microseconds)",
}
# What the README itself shows.
SHORT = ("encoder", "training step", "pretraining example", "encode docstrings", "encode one text",
         "attention, back to back", "attention")  # fmt: skip
METRICS = {
    "queued_us": "wall time per call, calls queued back to back",
    "blocking_us": "wall time of a call and the wait for its result",
    "device_us": "how long the call's kernels run on the GPU (until commit a358cbd the sum of their times)",
    "wall_us": "wall time of one call",
    "temporary_mib": "MiB of memory beside arguments and results",
}


def newest(path: Path) -> list[timing.Row]:
    """The rows of a results file, each key once: the row of the latest date, and of those the last one written."""
    with path.open(newline="") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: row["date"])
    return list({tuple(row[column] for column in timing.KEY): row for row in rows}.values())


def by_case(row: timing.Row) -> tuple[str, bool, str, list[int]]:
    shape = [int(n) for n in row["shape"].split("x")]
    return row["op"], row["direction"] != "forward", row["dtype"], shape


def section(row: timing.Row) -> str:
    return next((name for name in TITLES if row["op"].startswith(name)), "other")


def metrics_of(name: str) -> tuple[str, ...]:
    """A whole encoder is what a user waits for, host and all; a single short kernel is measured on the device alone."""
    metrics = {
        "encoder": ("queued_us", "blocking_us", "device_us"),
        "training step": ("queued_us", "temporary_mib"),
        "pretraining example": (),  # see `pretraining`
        "encode docstrings": ("wall_us",),
        "encode one text": ("wall_us",),
        "linear_cross_entropy": ("device_us", "temporary_mib"),
    }
    return metrics.get(name, ("device_us",))


def markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *body = lines
    rule = ["---"] * 3 + ["---:"] * (len(head) - 3)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))


def tables(rows: Sequence[timing.Row], names: Collection[str]) -> str:
    parts = []
    for name, title in TITLES.items():
        if name not in names:
            continue
        if name == "pretraining example" and (found := pretraining(rows)):
            parts += [f"**{title}**", found]
        for metric in metrics_of(name):
            chosen = [row for row in rows if section(row) == name and row["metric"] == metric]
            if chosen:
                chosen.sort(key=by_case)
                head, *lines = timing.table(chosen, metric=metric)
                if metric == "temporary_mib":
                    head = ["saving" if cell == "speedup" else cell for cell in head]
                parts += [f"**{title}**; {METRICS[metric]}", markdown([head, *lines])]
        if name == "encode docstrings" and (found := throughput(rows)):
            parts += ["Packed, in the same runs; beside the device alone, with batches that lie there already:", found]
    return "\n\n".join(parts)


def pretraining(rows: Sequence[timing.Row]) -> str:
    """A line for each preset that was timed."""
    body, values = [], {(row["op"], row["metric"]): row for row in rows if section(row) == "pretraining example"}
    for (op, metric), row in values.items():
        if metric == "step_us":
            tokens, mfu = float(values[op, "tokens_per_s"]["p50"]), values.get((op, "mfu_percent"))
            cells = f"{float(row['p50']) / 1e3:.2f}", f"{tokens:,.0f}", row["rate"], f"{mfu['p50']} %" if mfu else "-"
            body.append([op, row["shape"], row["dtype"], *cells])
    head = ["op", "tokens a step", "dtype", "ms a step", "tokens/s", "model TFLOP/s", "of the peak (MFU)"]
    return markdown([head, *body]) if body else ""


def throughput(rows: Sequence[timing.Row]) -> str:
    """Texts and tokens a second of `SentenceEncoder.encode`, and what the host adds to the device's time."""
    body = []
    for row in rows:
        if section(row) != "encode docstrings" or (row["implementation"], row["metric"]) != ("jaxft", "wall_us"):
            continue
        op, texts, wall = row["op"], math.prod(map(int, row["shape"].split("x"))), float(row["p50"])
        alone = [float(other["p50"]) for other in rows if (other["op"], other["metric"]) == (op, "device_only_us")]
        tokens, adds = f"{float(row['rate']):.2f} million", f"{wall / alone[0] - 1:.0%}" if alone else "-"
        body.append([op, row["shape"], row["dtype"], f"{texts / wall * 1e6:,.0f}", tokens, adds])
    return markdown([["op", "shape", "dtype", "texts/s", "tokens/s", "the host adds"], *body]) if body else ""


def chart(rows: Sequence[timing.Row], path: Path, device: str) -> None:
    """Bars: for each encoder in bfloat16, time relative to plain XLA; of the peers' two forms the faster one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chosen = [row for row in rows if section(row) == "encoder" and row["dtype"] == "bfloat16"]
    head, *lines = timing.table(sorted(chosen, key=by_case), metric=metrics_of("encoder")[0])
    shown = {
        "jaxft": ["jaxft"],
        "XLA": ["xla", "xla, separate qkv"],
        "XLA with cuDNN": ["xla+cudnn", "xla+cudnn, packed qkv"],
    }
    panels: dict[str, dict[str, dict[str, float]]] = {"erf GELU": {}, "tanh GELU": {}}
    for case in (dict(zip(head, line, strict=True)) for line in lines):
        for gelu, cases in panels.items():
            if gelu in case["op"]:
                label = f"{case['op'].removeprefix('encoder ').replace(f' {gelu}', '')}, {case['shape']}"
                given = {
                    name: [float(case[n]) for n in names if case.get(n, "-") != "-"] for name, names in shown.items()
                }
                cases[label] = {name: min(times) for name, times in given.items() if times}
    panels = {gelu: cases for gelu, cases in panels.items() if cases}
    labels = list(dict.fromkeys(label for cases in panels.values() for label in cases))
    height = 0.8 / len(shown)
    figure: Any
    figure, ((*axes,),) = pyplot.subplots(
        1, len(panels), sharex=True, sharey=True, squeeze=False, figsize=(2 + 4.5 * len(panels), 1 + 0.5 * len(labels))
    )
    for panel, (gelu, cases) in zip(axes, panels.items(), strict=True):
        for i, name in enumerate(shown):
            own = [
                (y + i * height, cases[label][name] / cases[label]["XLA"])
                for y, label in enumerate(labels) if {name, "XLA"} <= cases.get(label, {}).keys()
            ]  # fmt: skip
            panel.barh([y for y, _ in own], [share for _, share in own], height, label=name)
        panel.set_title(gelu)
    axes[0].set_yticks([y + 0.4 - height / 2 for y in range(len(labels))])
    axes[0].set_yticklabels(labels)
    axes[0].invert_yaxis()
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.supxlabel(f"time of the encoder relative to plain XLA, bfloat16, {device} (shorter is faster)", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120, bbox_inches="tight", metadata={"Software": None})  # the same bytes every time
    pyplot.close(figure)


def write(readme: Path, results: Path) -> None:
    text = readme.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"{readme}: expected one line {BEGIN} and one line {END}")
    parts = []
    for path in sorted(results.glob("*.csv"), key=lambda file: (-file.stat().st_size, file)):  # the longest first
        rows, device = newest(path), path.stem.replace("_", " ")
        versions = ", ".join(sorted({row["jax"] for row in rows}))
        dates = sorted({row["date"] for row in rows})
        measured = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        parts.append(
            f"### {device}\n\nMeasured {measured} with JAX {versions}, from `{path.relative_to(readme.parent)}`."
        )
        if any(section(row) == "encoder" and row["dtype"] == "bfloat16" for row in rows):
            image = path.with_suffix(".png")
            chart(rows, image, device)
            parts.append(f"![Encoder times on {device}]({image.relative_to(readme.parent)})")
        parts.append(tables(rows, SHORT))
        if others := tables(rows, TITLES.keys() - SHORT):
            page = path.with_suffix(".md")
            page.write_text(f"# {device}\n\nMeasured {measured} with JAX {versions}, from `{path.name}`.\n\n{others}\n")
            parts.append(f"The other kernels: [{page.relative_to(readme.parent)}]({page.relative_to(readme.parent)}).")
    head, rest = text.split(BEGIN)
    body = "\n\n".join(parts) or "No results yet."
    readme.write_text(f"{head}{BEGIN}\n\n{body}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    write(README, timing.RESULTS)
