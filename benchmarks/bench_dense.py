"""dense with a bias, with and without GELU and a residual, forward and backward; dense_residual_layer_norm, forward.

Few rows are timed in float32 (TF32) too. For many rows, implementations by name are timed beside the default.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import shapes
import timing
from jaxft import reference
from jaxft.ops.dense import dense
from jaxft.ops.dense_layer_norm import dense_residual_layer_norm

IMPLEMENTATIONS = ("triton", "mosaic_gpu")  # "xla" does what the peer does
Functions = dict[str, Callable[..., Any]]  # jaxft's, plain jnp's, and for some shapes jaxft's by implementation


def flops(direction: str, rows: int, depth: int, width: int) -> int:
    """Returns the FLOP of the matmuls: one forward, and two more for the gradients of x and kernel."""
    return 2 * rows * depth * width * (1 if direction == "forward" else 3)


def inputs(rows: int, depth: int, width: int, dtype: str, seed: int) -> tuple[jax.Array, ...]:
    """Makes x, kernel, bias, residual (or the gradient of the result), gamma and beta."""
    keys = jax.random.split(jax.random.key(seed), 6)
    sizes = [(rows, depth), (depth, width), (width,), (rows, width), (width,), (width,)]
    return tuple(jax.random.normal(key, size, dtype) for key, size in zip(keys, sizes, strict=True))


def usable(f: Callable[..., Any], arrays: Sequence[jax.Array]) -> bool:
    """Returns whether this device has the implementation that `f` names."""
    try:
        jax.eval_shape(f, *arrays)
    except NotImplementedError:
        return False
    return True


def cases(rows: int, depth: int, width: int) -> Iterator[tuple[str, str, Functions]]:
    """Yields (op, direction, functions of `inputs`) for what a BERT may do with this shape."""

    def forward(f: Callable[..., Any], activation: str | None) -> Callable[..., Any]:
        return lambda x, kernel, bias, *_: f(x, kernel, bias, activation=activation)

    def backward(f: Callable[..., Any], activation: str) -> Callable[..., Any]:
        def run(x: jax.Array, kernel: jax.Array, bias: jax.Array, dy: jax.Array, *_: jax.Array) -> Any:
            y, pull_back = jax.vjp(functools.partial(f, activation=activation), x, kernel, bias)
            return y, *pull_back(dy)

        return run

    activations = {"dense": None, "dense with erf GELU": "gelu"}
    activations |= {"dense with tanh GELU": "gelu_tanh"} if shapes.is_ffn_input(depth, width) else {}
    for op, activation in activations.items():
        ops: Functions = {"jaxft": dense, "xla": reference.dense}
        if (op, (rows, depth, width)) in shapes.DENSE_NAMED:
            ops |= {f"jaxft, {name}": functools.partial(dense, implementation=name) for name in IMPLEMENTATIONS}
        yield op, "forward", {name: forward(f, activation) for name, f in ops.items()}
        if activation and shapes.is_ffn_input(depth, width):
            yield op, "forward+backward", {name: backward(ops[name], activation) for name in ("jaxft", "xla")}
    if width <= depth or shapes.is_ffn_input(depth, width):

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
    chosen_shapes = shapes.DENSE[:4] if args.quick else shapes.DENSE
    for shape, dtype in [(sizes, dtype) for sizes in chosen_shapes for dtype in shapes.dense_dtypes(*sizes)]:
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
