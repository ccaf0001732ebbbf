"""What a device without a tuned table takes: the kernels with the heuristic's configurations beside the tuned ones.

At the shapes that benchmarks/tune.py knows, where the two differ, as "jaxft" and "jaxft, heuristic". Where two kernels
work together, as in attention's gradient, one of them changes and the time is that of both.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax

import timing
import tune
from jaxft import dispatch

DTYPES = ("bfloat16", "float32")


def lowered(case: tune.Case, config: Any) -> jax.stages.Lowered:
    """The kernel with that configuration."""
    shapes = jax.eval_shape(lambda: case.inputs(0))
    return jax.jit(functools.partial(case.run, config=config)).lower(*shapes)


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__)
    parser.add_argument("--only", nargs="+", help="some ops")
    args = parser.parse_args(argv)
    found = (  # without the choice between kernels, which is no configuration of one
        (case, (case.present, default))
        for case, default in tune.cases(DTYPES, dispatch.device_kind())
        if case.op != "dense_implementation" and default != case.present and (args.only is None or case.op in args.only)
    )
    differing = list(itertools.islice(found, 4 if args.quick else None))
    if not differing:
        raise SystemExit(f"no case in which the table of {dispatch.device_kind()!r} and the heuristics differ")
    both = timing.compile_all((lowered(case, config), None) for case, configs in differing for config in configs)
    results = []
    for (case, _), tuned, heuristic in zip(differing, both[::2], both[1::2], strict=True):
        sets, plain = case.input_sets(), jax.jit(case.plain)
        name = f"{case.op}, {case.variant}" if case.variant else case.op
        for f in (tuned, heuristic):
            timing.check_all(f"{name} {case.sizes}", f, plain, sets[0])
        moved = sum(x.nbytes for x in jax.tree.leaves((sets[0], tuned(*sets[0]))))
        results += timing.measure(
            {"jaxft": (tuned, sets), "jaxft, heuristic": (heuristic, sets)},
            work=moved, unit="TB/s", args=args, op=f"configuration of {name}", direction="forward",
            shape=[size for name, size in case.sizes.items() if name != "itemsize"], dtype=case.dtype,
        )  # fmt: skip
    timing.print_tables(results)


if __name__ == "__main__":
    main()
