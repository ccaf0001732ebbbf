"""dense with a bias, GELU and a residual or without, forward and backward, and dense_residual_layer_norm, forward.

Of few rows in float32 (TF32) as well; of many, dense's implementations by name beside the one it takes by itself.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import timing
from jaxft import reference
from jaxft.ops.dense import dense
from jaxft.ops.dense_layer_norm import dense_residual_layer_norm

SIZES = [(768, 2304), (768, 768), (768, 3072), (3072, 768)]  # depth, width; of BERT-base
SIZES_LARGE = [(1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024)]  # of BERT-large
SHAPES = [(rows, *sizes) for rows in (16, 32, 64, 128, 256, 512, 1024) for sizes in SIZES]
LARGE = [(rows, *sizes) for rows in (4096, 16384) for sizes in SIZES]
LARGE += [(16384, *sizes) for sizes in SIZES_LARGE]
LARGE += [(rows, 768, 3072) for rows in (2047, 16383)]  # of no multiple of 8, which Mosaic GPU is not for
# (op, shape) to be timed by these implementations' names too. What "xla" does is what the peer does.
NAMED = [("dense", (rows, 3072, 768)) for rows in (4096, 16384)]
NAMED += [(f"dense with {gelu} GELU", (rows, 768, 3072)) for rows in (4096, 16384) for gelu in ("erf", "tanh")]
IMPLEMENTATIONS = ("triton", "mosaic_gpu")
Functions = dict[str, Callable[..., Any]]  # jaxft's, plain jnp's, and perhaps jaxft's by implementation


def flops(direction: str, rows: int, depth: int, width: int) -> int:
    """The products only: one, and two more for the gradients of x and kernel."""
    return 2 * rows * depth * width * (1 if direction == "forward" else 3)


def inputs(rows: int, depth: int, width: int, dtype: str, seed: int) -> tuple[jax.Array, ...]:
    """x, kernel, bias, residual (or the gradient of the result), gamma and beta."""
    keys = jax.random.split(jax.random.key(seed), 6)
    shapes = [(rows, depth), (depth, width), (width,), (rows, width), (width,), (width,)]
    return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))


def usable(f: Callable[..., Any], arrays: Sequence[jax.Array]) -> bool:
    """Whether the implementation that `f` names is there on this device."""
    try:
        jax.eval_shape(f, *arrays)
    except NotImplementedError:
        return False
    return True


def cases(rows: int, depth: int, width: int) -> Iterator[tuple[str, str, Functions]]:
    """(op, direction, functions of `inputs`) that have a use at this shape in a BERT."""

    def forward(f: Callable[..., Any], activation: str | None) -> Callable[..., Any]:
        return lambda x, kernel, bias, *_: f(x, kernel, bias, activation=activation)

    def backward(f: Callable[..., Any], activation: str) -> Callable[..., Any]:
        def run(x: jax.Array, kernel: jax.Array, bias: jax.Array, dy: jax.Array, *_: jax.Array) -> Any:
            y, pull_back = jax.vjp(functools.partial(f, activation=activation), x, kernel, bias)
            return y, *pull_back(dy)

        return run

    activations = {"dense": None, "dense with erf GELU": "gelu"}
    activations |= {"dense with tanh GELU": "gelu_tanh"} if width == 4 * depth else {}
    for op, activation in activations.items():
        ops: Functions = {"jaxft": dense, "xla": reference.dense}
        if (op, (rows, depth, width)) in NAMED:
            ops |= {f"jaxft, {name}": functools.partial(dense, implementation=name) for name in IMPLEMENTATIONS}
        yield op, "forward", {name: forward(f, activation) for name, f in ops.items()}
        if activation and width == 4 * depth:
            yield op, "forward+backward", {name: backward(ops[name], activation) for name in ("jaxft", "xla")}
    if width <= depth or width == 4 * depth:

        def with_residual(f: Callable[..., Any]) -> Callable[..., Any]:
            activation = "gelu" if width > depth else None
            return lambda x, kernel, bias, residual, *_: f(x, kernel, bias, activation=activation, residual=residual)

        op = "dense with erf GELU and residual" if width > depth else "dense with residual"
        yield op, "forward", {"jaxft": with_residual(dense), "xla": with_residual(reference.dense)}
    if width <= depth:
        ops = {"jaxft": dense_residual_layer_norm, "xla": reference.dense_residual_layer_norm}
        yield "dense_residual_layer_norm", "forward", ops


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="cases with TEXT in their name, as 'GELU forward 4096x768x3072'"
    )
    args = parser.parse_args(argv)
    results: list[timing.Row] = []
    shapes = SHAPES[:4] if args.quick else SHAPES
    measured = [(shape, dtype) for dtype in ("bfloat16", "float32") for shape in shapes]
    for shape, dtype in measured + [(shape, "bfloat16") for shape in LARGE if not args.quick]:
        size = "x".join(map(str, shape))
        chosen = [case for case in cases(*shape) if args.only in f"{case[0]} {case[1]} {size} {dtype}"]
        if not chosen:
            continue
        nbytes = sum(x.nbytes for x in inputs(*shape, dtype, 0))
        sets = [inputs(*shape, dtype, seed) for seed in range(timing.rotation(nbytes))]
        for op, direction, ops in chosen:
            jitted = {name: jax.jit(f) for name, f in ops.items() if usable(f, sets[0])}
            for name, f in jitted.items():
                if name != "xla":
                    timing.check_all(f"{op} {direction} {shape} {dtype}, {name}", f, jitted["xla"], sets[0])
            results += timing.measure(
                {name: (f, sets) for name, f in jitted.items()}, work=flops(direction, *shape), unit="TFLOP/s",
                args=args, op=op, direction=direction, shape=shape, dtype=dtype,
            )  # fmt: skip
    timing.print_tables(results)


if __name__ == "__main__":
    main()
