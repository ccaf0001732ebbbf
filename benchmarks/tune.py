"""Finds the fastest launch configurations on this device for jaxft/tuned/<device kind>.json, with `autotune`.

Each case is a public operation at a shape of `shapes.py`: forward, and with its gradients if a backward kernel has a
configuration. Its results are checked against plain jnp first. Entries of other shapes in the file stay.

`--compare` leaves that file alone. It times the cases in which the table and the heuristics, which devices without a
table use, give different programs: "jaxft" beside "jaxft, heuristic".
"""

import argparse
import dataclasses
import functools
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

import jaxft
import shapes
import timing
from jaxft import dispatch, reference
from jaxft.tuning import cache, search
from jaxft.tuning import table as tuning_table

TUNED = Path(jaxft.__file__).parent / "tuned"
FORWARD = (shapes.FORWARD,)
BOTH = (shapes.BOTH, shapes.FORWARD)  # forward last, because it is the most sensitive call


class Case(NamedTuple):
    """An operation of jaxft, the same operation in plain jnp, and the shapes of their arguments."""

    op: str
    sizes: dict[str, int]
    dtype: str
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    arguments: tuple[tuple[int, ...], ...]
    directions: tuple[str, ...] = BOTH

    def name(self) -> str:
        """Returns the name, which `--sizes` searches."""
        return f"{self.op} {','.join(f'{name}={size}' for name, size in self.sizes.items())},{self.dtype}"

    def inputs(self, direction: str, seed: int) -> tuple[Any, ...]:
        """Makes the inputs of `directed(op, direction)`."""
        keys = jax.random.split(jax.random.key(seed), len(self.arguments) + 1)
        arrays = [jax.random.normal(k, shape, self.dtype) for k, shape in zip(keys[1:], self.arguments, strict=True)]
        if direction == shapes.FORWARD:
            return tuple(arrays)
        result = jax.eval_shape(self.plain, *arrays)
        return jax.tree.map(lambda y: jax.random.normal(keys[0], y.shape, y.dtype), result), *arrays


def directed(op: Callable[..., Any], direction: str) -> Callable[..., Any]:
    """Returns `op`, or a function (gradient of the result, *arrays) -> (result, gradients of the arrays)."""

    def with_gradients(dy: Any, *arrays: jax.Array) -> Any:
        y, pull_back = jax.vjp(op, *arrays)
        return y, pull_back(dy)

    return op if direction == shapes.FORWARD else with_gradients


def cases(dtypes: Sequence[str]) -> Iterator[Case]:
    """Yields all cases. Softmax has dtypes of its own and is left out if none of `dtypes` has the same size."""

    def make(op: str, sizes: dict[str, int], dtype: str, *arguments: tuple[int, ...], **options: Any) -> Case:
        directions = options.pop("directions", BOTH)
        ours, plain = (functools.partial(getattr(module, op), **options) for module in (jaxft, reference))
        return Case(op, sizes, dtype, ours, plain, arguments, directions)

    def plain_attention(qkv: jax.Array) -> Any:
        return reference.dot_product_attention(*(qkv[:, :, i] for i in range(3)))

    for dtype in dtypes:
        for rows, width in shapes.LAYER_NORM:
            x, vector = (rows, width), (width,)
            yield make("bias_residual_layer_norm", {"rows": rows, "width": width}, dtype, x, vector, x, vector, vector)
        for rows, width in shapes.BIAS_ACTIVATION:
            yield make("bias_activation", {"rows": rows, "width": width}, dtype, (rows, width), (width,))
        for rows, width in shapes.GATED_ACTIVATION:
            yield make("gated_activation", {"rows": rows, "width": width}, dtype, (rows, 2 * width), (2 * width,))
        for shape, axes in shapes.PERMUTE:
            sizes = {f"axis{axis}": shape[axis] for axis in axes}
            yield make("permute", sizes, dtype, shape, axes=axes, directions=FORWARD)
        for batch, length, heads, size in shapes.SPLIT_HEADS:
            sizes = {"batch": batch, "length": length, "heads": heads, "head_size": size}
            width = 3 * heads * size
            yield make("qkv_bias_split_heads", sizes, dtype, (batch, length, width), (width,), num_heads=heads)
        for batch, length, heads, size in shapes.ROTARY:
            sizes = {"batch": batch, "length": length, "heads": heads, "head_size": size}
            options = {"positions": jnp.arange(length), "directions": FORWARD}
            yield make("rotary", sizes, dtype, (batch, length, 3, heads, size), **options)
        for batch, length, heads, size in shapes.ATTENTION:
            sizes = {"batch": batch, "length": length, "heads": heads, "head_size": size}
            directions = BOTH if length <= shapes.ATTENTION_LONGEST_GRADIENT else FORWARD
            qkv = ((batch, length, 3, heads, size),)
            yield Case("qkv_attention", sizes, dtype, jaxft.qkv_attention, plain_attention, qkv, directions)
        for rows, depth, width in shapes.DENSE:
            sizes = {"rows": rows, "depth": depth, "width": width}
            x, kernel, vector = (rows, depth), (depth, width), (width,)
            activation, directions = ("gelu", BOTH) if shapes.is_ffn_input(depth, width) else (None, FORWARD)
            yield make("dense", sizes, dtype, x, kernel, vector, activation=activation, directions=directions)
            if rows <= 256 and width <= depth:  # where the matmul may be split
                arrays = x, kernel, vector, (rows, width), vector, vector
                yield make("dense_residual_layer_norm", sizes, dtype, *arrays, directions=FORWARD)
    itemsizes = {jnp.dtype(dtype).itemsize for dtype in dtypes}
    for softmax in shapes.SOFTMAX:
        if "," not in softmax.op and jnp.dtype(softmax.dtype).itemsize in itemsizes:
            sizes = {"rows": math.prod(softmax.shape[:-1]), "width": softmax.shape[-1]}
            yield make(softmax.op, sizes, softmax.dtype, softmax.shape)


def tune(case: Case, direction: str, path: Path) -> None:
    """Checks one direction of a case, tunes it, and prints what was found."""
    ours, plain = (jax.jit(directed(op, direction)) for op in (case.ours, case.plain))
    inputs, name = case.inputs(direction, 0), f"{case.name()} {direction}"
    timing.check_all(name, ours, plain, inputs)
    copies = timing.rotation(sum(x.nbytes for x in jax.tree.leaves(inputs)))
    try:
        found = search.autotune(ours, *inputs, table=path, copies=copies)
    except ValueError as error:
        if "runs no kernel" not in str(error):
            raise
        print(f"{name}: XLA runs it")
        return
    table = tuning_table._table(dispatch.device().kind)  # later cases of this process run with what was taken
    for tuned in found:
        if tuned.after != tuned.before:
            table.setdefault(tuned.op, {})[tuned.key] = dataclasses.asdict(tuned.after)
        print(f"{name}: {tuned.op} {tuned.key}: {tuned.us_before:.2f} us, now {tuned.us_after:.2f}, {tuned.after}")


def without_table() -> AbstractContextManager[None]:
    """Returns a context in which ops are traced for this device as if it had no table."""
    device = dispatch.device()
    capability = device.compute_capability or (0, 0)
    return dispatch.target(f"{device.kind} without a table", capability, device.multiprocessors, device.shared_memory)


def compare(case: Case, direction: str, args: argparse.Namespace) -> list[timing.Row]:
    """Times one direction of a case with the table and with the heuristics. Returns no rows if they do not differ."""
    inputs, f = case.inputs(direction, 0), directed(case.ours, direction)
    tuned = jax.jit(lambda *inputs: f(*inputs)).trace(*inputs)
    with without_table():
        heuristic = jax.jit(lambda *inputs: f(*inputs)).trace(*inputs)
        if search.text(tuned) == search.text(heuristic):
            return []
        programs = [heuristic.lower().compile()]
    programs.insert(0, tuned.lower().compile())
    nbytes, plain = sum(x.nbytes for x in jax.tree.leaves(inputs)), jax.jit(directed(case.plain, direction))
    sets = [inputs, *(case.inputs(direction, seed) for seed in range(1, timing.rotation(nbytes)))]
    variants: dict[str, timing.Variant] = {}
    for name, program in zip(("jaxft", "jaxft, heuristic"), programs, strict=True):
        timing.check_all(f"{case.name()} {direction}, {name}", program, plain, inputs)
        variants[name] = program, sets
    moved = nbytes + sum(x.nbytes for x in jax.tree.leaves(programs[0](*inputs)))
    return timing.measure(
        variants, work=moved, unit="TB/s", args=args, op=f"configuration of {case.op}", direction=direction,
        shape=[*case.sizes.values()], dtype=case.dtype,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the JSON file is, or with --compare the CSV")
    parser.add_argument("--only", nargs="+", metavar="OP", help="some operations, as softmax or dense")
    parser.add_argument("--sizes", default="", metavar="REGEX", help="some names, as 'rows=(128|256),depth=768,'")
    parser.add_argument("--dtypes", nargs="+", default=list(shapes.DTYPES))
    parser.add_argument("--compare", action="store_true", help="time the table beside the heuristics")
    parser.add_argument("--quick", action="store_true", help="with --compare: the first four cases that differ")
    args = parser.parse_args(argv)
    chosen = (case for case in cases(args.dtypes) if args.only is None or case.op in args.only)
    directed_cases = [(case, each) for case in chosen if re.search(args.sizes, case.name()) for each in case.directions]
    if not directed_cases:
        parser.error("no case has what --only, --sizes and --dtypes say")
    if args.compare:
        args.out = args.out or timing.RESULTS
        rows: list[list[timing.Row]] = []
        for case, direction in directed_cases:
            rows += [found] if (found := compare(case, direction, args)) else []
            if args.quick and len(rows) == 4:
                break
        if not rows:
            raise SystemExit(f"no case in which the table of {dispatch.device().kind!r} and the heuristics differ")
        timing.print_tables([row for found in rows for row in found])
        return
    path = (args.out or TUNED) / f"{dispatch.device().kind.replace(' ', '_')}.json"
    with tempfile.TemporaryDirectory() as empty, mock.patch.dict(os.environ, XDG_CACHE_HOME=empty):
        cache.load.cache_clear()  # what the user has tuned takes no part
        for case, direction in directed_cases:
            tune(case, direction, path)
    cache.load.cache_clear()


if __name__ == "__main__":
    main()
