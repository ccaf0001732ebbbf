"""Plants each fault of the lists beside this file in a copy of the tree, and expects that a test fails.

A list is a TOML file with tables such as `[[softmax]]`: `old` and `new` text of a file of jaxft, and the `tests` that
notice the fault, `file::function` in tests/. Some entries have more fields:

- `gpu = true`: only a GPU run notices it. `--gpu` runs these entries and no others.
- `jax = "0.11"`: the tests need this version of JAX or a later one (Mosaic's interpreter). `"<0.11"`: an earlier one.
- `equivalent = "..."`: why the change changes nothing that a test could notice. Such an entry is not run.

Needs JAX, Flax, chex and pytest; no make, network or pytest plugin. The tests run without those marked slow, first on
the tree as it is, where they must pass, then with one fault at a time. The summary goes to stdout and to --out.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from jaxlib.version import __version_info__ as jaxlib_version

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("jaxft", "tests", "benchmarks", "examples", "docs", "pyproject.toml", "README.md", "CHANGELOG.md", "Makefile",
          "CONTRIBUTING.md", "CITATION.cff", "mkdocs.yml")  # fmt: skip
NOTICED, MISSED, ERROR = ("noticed", "noticed by a timeout"), "NOT NOTICED", "ERROR"
LEFT_OUT, EQUIVALENT = "left out", "changes nothing"
LEAST = 0.95  # of the entries that ran
PART = 5  # tests that run in one process without a fault
# As `make test` compiles.
QUICKLY = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
QUICKLY += " --xla_cpu_use_fusion_emitters=false" if jaxlib_version < (0, 11) else ""


@dataclass(frozen=True)
class Mutant:
    """One fault: `file` within jaxft/, and the fields of the lists."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    gpu: bool = False
    jax: str = ""
    equivalent: str = ""

    @property
    def name(self) -> str:
        return f"{self.file}: {self.old!r} -> {self.new!r}"

    def runs_on(self, version: tuple[int, ...]) -> bool:
        """Returns whether the tests run on a version of JAX."""
        earlier = self.jax.startswith("<")
        return not self.jax or (version < tuple(map(int, self.jax.removeprefix("<").split(".")))) == earlier

    def problem(self, root: Path = ROOT) -> str | None:
        """Returns why the entry cannot be planted, or None."""
        path = root / "jaxft" / self.file
        count = path.read_text().count(self.old) if path.is_file() else 0
        if count != 1:
            return f"the old text occurs {count} times" if path.is_file() else "no such file"
        if not self.tests and not self.equivalent:
            return "no tests"
        missing = [name for name in self.tests if not _exists(name, root)]
        return f"no test {missing[0]}" if missing else None


def _exists(test: str, root: Path) -> bool:
    file, _, function = test.partition("[")[0].partition("::")
    path = root / "tests" / file
    return path.is_file() and f"def {function}(" in path.read_text()


def read(folder: Path = Path(__file__).parent) -> list[Mutant]:
    """Reads all lists. `kernels.triton.toml` is about the files of jaxft/kernels/triton, `jaxft.toml` about jaxft/."""
    found = []
    for file in sorted(folder.glob("*.toml")):
        prefix = "" if file.stem == "jaxft" else file.stem.replace(".", "/") + "/"
        for stem, entries in tomllib.loads(file.read_text()).items():
            found += [Mutant(f"{prefix}{stem}.py", **entry | {"tests": tuple(entry.get("tests", ()))})
                      for entry in entries]  # fmt: skip
    return found


@dataclass
class Result:
    """What became of a mutant."""

    name: str
    outcome: str
    seconds: float = 0.0
    detail: str = ""


class Runner:
    """Runs tests in copies of the tree, at most one run in a copy at a time."""

    def __init__(self, folder: Path, jobs: int, timeout: float, until: float, gpu: bool) -> None:
        self.timeout, self.until, self.gpu = timeout, until, gpu
        self.copies: SimpleQueue[Path] = SimpleQueue()
        for i in range(jobs):
            copy = folder / str(i)
            for name in COPIED:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
                elif (ROOT / name).is_file():
                    copy.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / name, copy / name)
            self.copies.put(copy)

    def pytest(self, copy: Path, tests: list[str], *more: str, timeout: float) -> tuple[int | None, str]:
        """Runs tests in a copy. Returns the exit code, None after the timeout, and the end of the output."""
        path = os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"JAXFT_TEST_CASES": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if not self.gpu:
            environment |= {"JAX_PLATFORMS": "cpu"}
            environment.setdefault("XLA_FLAGS", QUICKLY)
        options = ["-o", "addopts=", "--strict-markers", "-p", "no:cacheprovider", "-p", "no:benchmark", "-m",
                   "not slow", "-q", "-x", "--tb=line", "--no-header"]  # fmt: skip
        command = [sys.executable, "-m", "pytest", *options, *more, *(f"tests/{name}" for name in tests)]
        try:
            done = subprocess.run(command, cwd=copy, env=environment, timeout=timeout, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True, errors="replace")  # fmt: skip
        except subprocess.TimeoutExpired:
            return None, ""
        return done.returncode, done.stdout[-1500:]

    def unchanged(self, file: str, tests: list[str]) -> tuple[dict[str, str], str]:
        """Runs tests of one file without a fault. Returns the outcome of each function's tests, and the output."""
        copy = self.copies.get()
        try:
            report = copy / "report.xml"
            report.unlink(missing_ok=True)
            arguments = [f"--junitxml={report}", "--maxfail=1000000"]
            code, output = self.pytest(copy, tests, *arguments, timeout=10 * self.timeout)
            if code not in (0, 1, 5) or not report.is_file():
                return dict.fromkeys(tests, "failed"), f"exit code {code}: {output}"
            found = dict.fromkeys(tests, "left out")
            for case in xml.etree.ElementTree.parse(report).iter("testcase"):
                tags = {child.tag for child in case}
                state = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
                name = f"{file}::{case.get('name', '').partition('[')[0]}"
                found[name] = max(found.get(name, state), state, key=("left out", "skipped", "passed", "failed").index)
            return found, output
        finally:
            self.copies.put(copy)

    def planted(self, mutant: Mutant) -> Result:
        """Runs the tests of a mutant."""
        timeout = min(self.timeout, self.until - time.monotonic())
        if timeout < 10.0:
            return Result(mutant.name, LEFT_OUT, detail="no time left")
        copy = self.copies.get()
        path = copy / "jaxft" / mutant.file
        text, start = path.read_text(), time.perf_counter()
        try:
            path.write_text(text.replace(mutant.old, mutant.new))
            code, output = self.pytest(copy, list(mutant.tests), timeout=timeout)
        finally:
            path.write_text(text)
            self.copies.put(copy)
        outcomes = {0: MISSED, None: NOTICED[1] if timeout == self.timeout else LEFT_OUT, 2: ERROR, 4: ERROR, 5: ERROR}
        outcome = outcomes.get(code, NOTICED[0])  # also where a fault ends the process
        detail = output if outcome == ERROR else "no time left" if outcome == LEFT_OUT else ""
        return Result(mutant.name, outcome, round(time.perf_counter() - start, 1), detail)


def run(mutants: list[Mutant], runner: Runner, jobs: int) -> Iterator[Result]:
    """Runs the tests without a fault, then with each of the faults. Yields the results as they come."""
    names: dict[str, list[str]] = {}
    for test in sorted({test for mutant in mutants for test in mutant.tests}):
        names.setdefault(test.partition("::")[0], []).append(test)
    parts = [(file, tests[i : i + PART]) for file, tests in names.items() for i in range(0, len(tests), PART)]
    states: dict[str, str] = {}
    waiting = list(mutants)
    with ThreadPoolExecutor(jobs) as pool:
        running: dict[Future[Any], bool] = {pool.submit(runner.unchanged, *part): False for part in parts}
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                if running.pop(future):
                    yield future.result()
                    continue
                found, output = future.result()
                states |= found
                for mutant in [m for m in waiting if states.keys() >= {*m.tests}]:
                    waiting.remove(mutant)
                    own = {test: states[test] for test in mutant.tests}
                    if "failed" in own.values() or "passed" not in own.values():
                        yield Result(mutant.name, ERROR, detail=f"without the fault: {own}\n{output}")
                    else:
                        running[pool.submit(runner.planted, mutant)] = True


def main() -> int:
    """Runs the command line. Returns 1 if fewer than 95 % are noticed, or an entry is in error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="texts, one of which must occur in the file's name or the old text")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for the tests of one fault")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no run begins or goes on")
    parser.add_argument("--gpu", action="store_true", help="run the entries with gpu = true on this machine's GPU")
    parser.add_argument("--out", type=Path, help="folder for mutants.json, written after every run")
    args = parser.parse_args()
    start, results, waiting = time.monotonic(), [], []

    def add(result: Result) -> None:
        results.append(result)
        print(
            f"{result.outcome:<12} {result.seconds:6.1f} s  {result.name}  {result.detail[-300:]}".rstrip(), flush=True
        )
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            report = {"summary": summary(), "results": [asdict(result) for result in results]}
            (args.out / "mutants.json").write_text(json.dumps(report, indent=1) + "\n")

    def summary() -> str:
        counts = Counter(result.outcome for result in results)
        noticed = sum(counts[outcome] for outcome in NOTICED)
        others = ", ".join(f"{n} {outcome}" for outcome, n in counts.items() if outcome != NOTICED[0])
        return f"{noticed} of {noticed + counts[MISSED]} faults noticed; {others or 'nothing else'}"

    for mutant in read():
        if args.only and not any(text in mutant.file or text in mutant.old for text in args.only):
            continue
        if reason := mutant.problem():
            add(Result(mutant.name, ERROR, detail=reason))
        elif mutant.equivalent:
            add(Result(mutant.name, EQUIVALENT, detail=mutant.equivalent))
        elif mutant.gpu != args.gpu:
            add(Result(mutant.name, LEFT_OUT, detail="needs a GPU" if mutant.gpu else "needs no GPU"))
        elif not mutant.runs_on(jaxlib_version):
            add(Result(mutant.name, LEFT_OUT, detail=f"needs JAX {mutant.jax}"))
        else:
            waiting.append(mutant)
    if waiting:
        with tempfile.TemporaryDirectory(prefix="jaxft-mutants-") as folder:
            jobs = max(1, min(args.jobs, len(waiting)))
            runner = Runner(Path(folder), jobs, args.timeout, start + args.seconds, args.gpu)
            for result in run(waiting, runner, jobs):
                add(result)
    print()
    for result in results:
        if result.outcome in (MISSED, ERROR, EQUIVALENT):
            print(f"{result.outcome}: {result.name}", *filter(None, [result.detail]), sep="\n    ")
    print(f"{summary()}; {time.monotonic() - start:.0f} s")
    counts = Counter(result.outcome for result in results)
    noticed = sum(counts[outcome] for outcome in NOTICED)
    return int(counts[ERROR] > 0 or noticed < LEAST * (noticed + counts[MISSED]))


if __name__ == "__main__":
    sys.exit(main())
