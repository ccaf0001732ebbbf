"""linear_cross_entropy, the mean loss and the gradients of all arrays, beside plain XLA with all logits in memory.

The peers use optax, as a good JAX user would. One has the logits in float32, as they come from the matmul. The other
has them in the dtype of the arrays and converts them to float32 for the loss.
"""

import argparse
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxft
import shapes
import timing
from bench_train import temporary_mib
from jaxft.training import COMPILER_OPTIONS

DTYPE = "bfloat16"
IGNORED = -100


def flops(labelled: int, width: int, classes: int) -> int:
    """Returns the FLOP of the matmul and of two more for the gradients. Only rows with a label count."""
    return 3 * 2 * labelled * width * classes


def inputs(rows: int, width: int, classes: int) -> list[jax.Array]:
    """Makes hidden, embedding and bias."""
    keys, shapes = jax.random.split(jax.random.key(0), 3), [(rows, width), (classes, width), (classes,)]
    hidden, *others = (jax.random.normal(key, shape, DTYPE) for key, shape in zip(keys, shapes, strict=True))
    return [hidden, *(0.03 * x for x in others)]


def random_labels(rows: int, classes: int, labelled: int) -> jax.Array:
    """Makes labels for `labelled` of the rows."""
    labels = jax.random.randint(jax.random.key(1), (rows,), 0, classes)
    return jnp.where(jax.random.permutation(jax.random.key(2), rows) < labelled, labels, IGNORED)


def ours(hidden: jax.Array, embedding: jax.Array, bias: jax.Array, labels: jax.Array) -> jax.Array:
    """Computes jaxft's loss."""
    return jaxft.linear_cross_entropy(hidden, embedding, labels, bias, ignore_index=IGNORED).mean


def plain(hidden: jax.Array, embedding: jax.Array, bias: jax.Array, labels: jax.Array, *, dtype: str) -> jax.Array:
    """Computes optax' loss with logits of that dtype."""
    logits = jnp.einsum("nd,vd->nv", hidden, embedding, preferred_element_type=dtype) + bias.astype(dtype)
    labelled = labels != IGNORED
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), jnp.where(labelled, labels, 0))
    return jnp.mean(losses, where=labelled)


def run(shape: tuple[int, int, int], args: argparse.Namespace) -> list[timing.Row]:
    """Checks and times one shape."""
    rows, width, classes = shape
    arrays = inputs(*shape)
    wide = [x.astype(jnp.float32) for x in arrays]
    functions: dict[str, Any] = {"jaxft": ours}
    functions |= {f"xla, {dtype} logits": functools.partial(plain, dtype=dtype) for dtype in ("float32", DTYPE)}
    steps = {name: jax.jit(jax.value_and_grad(f, (0, 1, 2))) for name, f in functions.items()}
    in_float32, labels = steps["xla, float32 logits"], random_labels(rows, classes, rows)

    def lowered() -> Iterator[tuple[jax.stages.Lowered, dict[str, Any] | None]]:
        for step in steps.values():
            yield step.lower(*arrays, labels), None
        with jax.default_matmul_precision("highest"):
            program = in_float32.lower(*wide, labels)
        yield program, COMPILER_OPTIONS  # not timed, so XLA need not search its matmuls

    *programs, exact = timing.compile_all(lowered())
    results = []
    for share in shapes.CROSS_ENTROPY_LABELLED:
        labelled = round(share * rows)
        labels = random_labels(rows, classes, labelled)
        variants: dict[str, timing.Variant] = {
            name: (program, [(*arrays, labels)]) for name, program in zip(steps, programs, strict=True)
        }
        op = "linear_cross_entropy" + (f", {share:.0%} labelled".replace("%", " %") if share < 1.0 else "")
        found = [jax.tree.leaves(program(*arrays, labels)) for program in programs[:2]]
        found.append(jax.tree.leaves(exact(*wide, labels)))
        for name, got, *others in zip(("loss", "hidden", "embedding", "bias"), *found, strict=True):
            # The loss is compared in the dtype of the arrays: of two float32 sums, one may be closer by chance.
            timing.check(f"{op} {shape}, {name}", got.astype(DTYPE), *others)
        key: dict[str, Any] = {"op": op, "direction": "value and gradient", "shape": shape, "dtype": DTYPE}
        mib = {name: round(temporary_mib(variant)) for name, variant in variants.items()}
        print(f"{op} {shape}: MiB of temporary memory: {mib}")
        if jax.default_backend() == "gpu":
            samples = {(name, "temporary_mib"): [float(size)] for name, size in mib.items()}
            results += timing.as_rows(samples, 0.0, "", args, **key)
        work = flops(labelled, width, classes)
        results += timing.measure(variants, work=work, unit="TFLOP/s", args=args, **key)
    return results


def main(argv: Sequence[str] | None = None) -> None:
    args = timing.arguments(__doc__).parse_args(argv)
    results: list[timing.Row] = []
    for shape in shapes.CROSS_ENTROPY[:1] if args.quick else shapes.CROSS_ENTROPY:
        results += run(shape, args)
    timing.print_tables(results)


if __name__ == "__main__":
    main()
