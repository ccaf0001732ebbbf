"""Finds the fastest launch configurations on this device, for jaxft/tuned/<device kind>.json.

Every candidate is checked against plain jnp before it is timed; a kernel's time is the GPU's, with inputs rotated past
the L2 cache. Entries of other shapes in the file stay.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import bench_dense
import jaxft
import timing
from jaxft import dispatch, reference, tuning
from jaxft.kernels.mosaic_gpu import dense as mosaic_dense
from jaxft.kernels.mosaic_gpu import dense_backward
from jaxft.kernels.triton import attention, attention_backward, bias_activation, dense, layer_norm, permute, softmax
from jaxft.kernels.triton.attention_problem import Options, Rules
from jaxft.tuning import attention as tuning_attention
from jaxft.tuning import dense as tuning_dense
from jaxft.tuning import layouts as tuning_layouts
from jaxft.tuning import rows as tuning_rows
from jaxft.tuning import search as tuning_search
from jaxft.tuning import table as tuning_table

TUNED = Path(tuning.__file__).parent / "tuned"
ROWS = [(128, 768), (1024, 768), (4096, 768), (16384, 1024), (65536, 1024), (4096, 384)]  # rows, width
FEED_FORWARD = [(128, 3072), (1024, 3072), (4096, 3072), (16384, 4096), (4096, 1536)]
SOFTMAX_WIDTHS = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]
SOFTMAX = [(128, 1024), (4096, 128), (4096, 1024), (256, 250_000)]  # rows, width, beside those of 64 Mi elements
# batch, heads, length, head size
ATTENTION = [(1, 12, 128, 64), (8, 12, 128, 64), (32, 12, 128, 64), (128, 12, 128, 64), (256, 16, 128, 64),
             (32, 12, 512, 64), (64, 16, 512, 64), (8, 16, 2048, 64), (2, 16, 8192, 64), (32, 12, 128, 32),
             (128, 12, 64, 64)]  # fmt: skip
# shape and axes, in which no axis is 1 and none can be merged
PERMUTE = [((32, 512, 12, 64), (0, 2, 1, 3)), ((32, 128, 12, 64), (0, 2, 1, 3)), ((8, 128, 12, 64), (0, 2, 1, 3)),
           ((8192, 8192), (1, 0)), ((8191, 8193), (1, 0)), ((256, 512, 1024), (2, 1, 0)),
           ((1024, 1024), (1, 0))]  # fmt: skip
HEADS = [(8, 128, 12, 64), (32, 128, 12, 64), (32, 512, 12, 64)]  # batch, length, heads, head size
# rows, depth, width and activation
DENSE = [(rows, depth, width, "gelu" if width == 4 * depth else None)
         for rows in (128, 256, 512, 1024, 4096, 16384)
         for depth, width in bench_dense.SIZES + bench_dense.SIZES_LARGE]  # fmt: skip
# The part of a candidate's time that a change must save to replace the present choice.
MARGIN = 0.02
ROUGHLY = 1.15  # what takes longer than so many times the fastest is timed once


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel at one shape, and its present configuration."""

    op: str
    sizes: dict[str, int]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    run: Callable[..., Any]
    plain: Callable[..., Any]
    present: Any
    derive: Callable[..., tuple[jax.Array, ...]] = lambda *arrays: ()  # further inputs, from those of random numbers
    variant: str = ""  # as in `tuning_table.lookup`

    @property
    def key(self) -> str:
        return tuning_table.key(self.variant, **self.sizes)

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(seed), len(self.shapes))
        arrays = [jax.random.normal(k, shape, self.dtype) for k, shape in zip(keys, self.shapes, strict=True)]
        return *arrays, *self.derive(*arrays)

    def input_sets(self) -> list[tuple[jax.Array, ...]]:
        """As many as it takes for none to be in the L2 cache when its turn comes."""
        first = self.inputs(0)
        return [first, *(self.inputs(seed) for seed in range(1, timing.rotation(sum(x.nbytes for x in first))))]


def row_cases(dtype: str, itemsize: int, kind: str) -> Iterable[Case]:
    def run(
        x: jax.Array,
        bias: jax.Array,
        residual: jax.Array,
        gamma: jax.Array,
        beta: jax.Array,
        config: tuning_table.RowConfig,
    ) -> jax.Array:
        return layer_norm.forward(
            x, bias, residual, gamma, beta, None, epsilon=1e-6, dropout_rate=0.0, return_sum=False, save=False,
            in_place=False, config=config, interpret=False,
        )[0]  # fmt: skip

    for rows, width in ROWS:
        sizes = {"rows": rows, "width": width, "itemsize": itemsize}
        shapes = ((rows, width), (width,), (rows, width), (width,), (width,))
        present = tuning_rows.layer_norm(rows, width, itemsize, kind)
        yield Case("layer_norm", sizes, shapes, dtype, run, reference.bias_residual_layer_norm, present)


def sums_cases(dtype: str, itemsize: int, kind: str) -> Iterable[Case]:
    """The LayerNorm that adds up the parts of a split product of 16 bits, which are float32."""

    def run(
        _: jax.Array, bias: jax.Array, residual: jax.Array, gamma: jax.Array, beta: jax.Array, parts: jax.Array,
        config: tuning_table.RowConfig,
    ) -> jax.Array:  # fmt: skip
        return layer_norm.forward(
            parts, bias, residual, gamma, beta, None, epsilon=1e-6, dropout_rate=0.0, return_sum=False, save=False,
            in_place=False, config=config, interpret=False,
        )[0]  # fmt: skip

    def plain(parts: jax.Array, bias: jax.Array, residual: jax.Array, gamma: jax.Array, beta: jax.Array, _: Any) -> Any:
        return reference.bias_residual_layer_norm(jnp.sum(parts, axis=0), bias, residual, gamma, beta)

    if itemsize == 2:
        rows, width, variant = 128, 768, "sums"
        present = tuning_rows.layer_norm(rows, width, 4, kind, variant)
        shapes = ((3, rows, width), (width,), (rows, width), (width,), (width,))
        yield Case(
            "layer_norm", {"rows": rows, "width": width, "itemsize": 4}, shapes, dtype, run, plain, present,
            derive=lambda parts, *_: (parts.astype(jnp.float32),), variant=variant,
        )  # fmt: skip


def row_gradient_cases(dtype: str, itemsize: int, kind: str) -> Iterable[Case]:
    def saved(dy: jax.Array, x: jax.Array, bias: jax.Array, residual: jax.Array, _: jax.Array) -> tuple[jax.Array]:
        """Of the forward pass: mean and 1 / sqrt(variance + epsilon) of each row."""
        total = x.astype(jnp.float32) + bias.astype(jnp.float32) + residual.astype(jnp.float32)
        return (jnp.stack([jnp.mean(total, -1), jax.lax.rsqrt(jnp.var(total, -1) + 1e-6)]),)

    def run(
        dy: jax.Array, x: jax.Array, bias: jax.Array, residual: jax.Array, gamma: jax.Array, saved: jax.Array,
        config: tuning_table.GradientConfig,
    ) -> Any:  # fmt: skip
        dx, _, sums = layer_norm.backward(
            dy, None, x, bias, residual, gamma, None, saved, dropout_rate=0.0,
            vectors=dict.fromkeys(("bias", "gamma", "beta"), bias.dtype), config=config, interpret=False,
        )  # fmt: skip
        return dx, jnp.stack([*sums.values()])

    def plain(
        dy: jax.Array, x: jax.Array, bias: jax.Array, residual: jax.Array, gamma: jax.Array, saved: jax.Array
    ) -> Any:
        def op(x: jax.Array, bias: jax.Array, gamma: jax.Array, beta: jax.Array) -> Any:
            return reference.bias_residual_layer_norm(x, bias, residual, gamma, beta)

        dx, *sums = jax.vjp(op, x, bias, gamma, jnp.zeros_like(bias))[1](dy)
        return dx, jnp.stack(sums)

    for rows, width in ROWS:
        sizes = {"rows": rows, "width": width, "itemsize": itemsize}
        shapes = ((rows, width), (rows, width), (width,), (rows, width), (width,))
        present = tuning_rows.layer_norm_backward(rows, width, itemsize, kind)
        yield Case("layer_norm_backward", sizes, shapes, dtype, run, plain, present, derive=saved)


def softmax_cases(dtype: str, itemsize: int, kind: str) -> Iterable[Case]:
    def forward(x: jax.Array, config: tuning_table.RowConfig) -> jax.Array:
        return softmax.forward(x, None, None, log=False, scale=None, in_place=False, config=config, interpret=False)[0]

    def backward(x: jax.Array, dy: jax.Array, config: tuning_table.RowConfig) -> jax.Array:
        return softmax.backward(dy, x, None, None, log=False, scale=None, config=config, interpret=False)[0]

    def plain_backward(x: jax.Array, dy: jax.Array) -> jax.Array:
        return jax.vjp(reference.softmax, x)[1](dy)[0]

    # 64 Mi elements; in float32 attention scores, [32, 64, width, width].
    large = [(2048 * w if itemsize == 4 and w <= 512 else 2**26 // w, w) for w in SOFTMAX_WIDTHS]
    for rows, width in (*large, *SOFTMAX):
        sizes = {"rows": rows, "width": width, "itemsize": itemsize}
        for op, arrays, run, plain, choose in (
            ("softmax", 1, forward, reference.softmax, tuning_rows.softmax),
            ("softmax_backward", 2, backward, plain_backward, tuning_rows.softmax_backward),
        ):
            present = choose(rows, width, itemsize, kind)
            shapes = ((rows, width),) * arrays
            yield Case(op, sizes, shapes, dtype, run, plain, present)


def elementwise_cases(dtype: str, itemsize: int, kind: str) -> Iterable[Case]:
    def run(*arrays: jax.Array, config: tuning_table.ElementwiseConfig) -> jax.Array:
        return bias_activation.forward(*arrays, activation="gelu", in_place=False, config=config, interpret=False)

    for rows, width in FEED_FORWARD:
        sizes = {"rows": rows, "width": width, "itemsize": itemsize}
        present = tuning_rows.bias_activation(rows, width, itemsize, kind)
        shapes = ((rows, width), (width,))
        yield Case("bias_activation", sizes, shapes, dtype, run, reference.bias_activation, present)


def elementwise_gradient_cases(dtype: str, itemsize: int, kind: str) -> Iterable[Case]:
    def run(dy: jax.Array, x: jax.Array, bias: jax.Array, config: tuning_table.GradientConfig) -> Any:
        return bias_activation.backward(dy, x, bias, activation="gelu", config=config, interpret=False)

    def plain(dy: jax.Array, x: jax.Array, bias: jax.Array) -> Any:
        return jax.vjp(reference.bias_activation, x, bias)[1](dy)

    for rows, width in FEED_FORWARD:
        sizes = {"rows": rows, "width": width, "itemsize": itemsize}
        present = tuning_rows.bias_activation_backward(rows, width, itemsize, kind)
        shapes = ((rows, width), (rows, width), (width,))
        yield Case("bias_activation_backward", sizes, shapes, dtype, run, plain, present)


def permute_cases(dtype: str, itemsize: int, kind: str) -> Iterable[Case]:
    for shape, axes in PERMUTE:
        last = shape[axes[-1]]
        kept = last if axes[-1] == len(axes) - 1 else 1
        aligned = math.gcd(shape[-1], last, 16 // itemsize)
        sizes = {"size": math.prod(shape), "kept": kept, "aligned": aligned, "itemsize": itemsize}
        present = tuning_layouts.permute(device_kind=kind, **sizes)
        run = functools.partial(permute.forward, axes=axes, interpret=False)
        plain = functools.partial(reference.permute, axes=axes)
        yield Case("permute", sizes, (shape,), dtype, run, plain, present)


def split_cases(dtype: str, itemsize: int, kind: str) -> Iterable[Case]:
    def split(qkv: jax.Array, bias: jax.Array, heads: int, config: tuning_table.ElementwiseConfig) -> Any:
        return tuple(permute.split_heads(qkv, bias, heads, config=config, interpret=False))

    def join(*parts: jax.Array, config: tuning_table.GradientConfig) -> Any:
        qkv, sums = permute.join_heads(parts, with_sums=True, config=config, interpret=False)
        return qkv, jnp.sum(sums, axis=0)

    def plain_join(*parts: jax.Array) -> Any:
        qkv = jnp.concatenate([reference.merge_heads(part) for part in parts], axis=-1)
        return qkv, jnp.sum(qkv, axis=(0, 1), dtype=jnp.promote_types(qkv.dtype, jnp.float32))

    for batch, length, heads, size in HEADS:
        width, part = 3 * heads * size, (batch, heads, length, size)
        sizes = {"batch_heads": batch * heads, "length": length, "head_size": size, "itemsize": itemsize}
        present = tuning_layouts.qkv_bias_split_heads(device_kind=kind, **sizes)
        run = functools.partial(split, heads=heads)
        plain = functools.partial(reference.qkv_bias_split_heads, num_heads=heads)
        shapes = ((batch, length, width), (width,))
        yield Case("qkv_bias_split_heads", sizes, shapes, dtype, run, plain, present)

        sizes = {"batch": batch, "length": length, "heads": heads, "head_size": size, "itemsize": itemsize}
        back = tuning_layouts.qkv_bias_split_heads_backward(device_kind=kind, **sizes)
        parts = (part, part, part)
        yield Case("qkv_bias_split_heads_backward", sizes, parts, dtype, join, plain_join, back)


def attention_cases(dtype: str, itemsize: int, kind: str) -> Iterable[Case]:
    def run(qkv: jax.Array, config: tuning_table.AttentionConfig) -> jax.Array:
        options = Options(scale=qkv.shape[-1] ** -0.5)
        return attention.forward(
            qkv, None, None, Rules(), options, return_residual=False, config=config, interpret=False
        )[0]

    def plain(qkv: jax.Array) -> Any:
        return reference.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])

    for batch, heads, length, size in ATTENTION:
        sizes = {"batch_heads": batch * heads, "query": length, "key": length, "head_size": size, "itemsize": itemsize}
        present = tuning_attention.attention(batch * heads, length, length, size, itemsize, kind)
        yield Case("attention", sizes, ((batch, length, 3, heads, size),), dtype, run, plain, present)


def attention_gradient_cases(dtype: str, itemsize: int, kind: str) -> Iterable[Case]:
    """Of the two kernels of the backward pass one changes, and both are timed."""

    def options(qkv: jax.Array) -> Options:
        return Options(scale=qkv.shape[-1] ** -0.5)

    def saved(qkv: jax.Array, dout: jax.Array) -> tuple[jax.Array, ...]:
        batch, length, _, heads, size = qkv.shape
        config = tuning_attention.attention(batch * heads, length, length, size, itemsize, kind)
        forward = functools.partial(
            attention.forward, key=None, value=None, rules=Rules(), options=options(qkv), return_residual=True,
            config=config, interpret=False,
        )  # fmt: skip
        return tuple(jax.jit(forward)(qkv))

    def run(
        qkv: jax.Array, dout: jax.Array, out: jax.Array, top: jax.Array, *total: jax.Array,
        config: tuning_table.AttentionConfig, other: tuning_table.AttentionConfig, keys: bool,
    ) -> jax.Array:  # fmt: skip
        query_config, key_config = (other, config) if keys else (config, other)
        return attention_backward.backward(
            dout, None, qkv, None, None, Rules(), options(qkv), out, top, *total,
            query_config=query_config, key_config=key_config, interpret=False,
        )[0]  # fmt: skip

    def plain(qkv: jax.Array, dout: jax.Array, *_: jax.Array) -> Any:
        def attend(qkv: jax.Array) -> Any:
            return reference.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])

        return jax.vjp(attend, qkv)[1](dout)[0]

    for batch, heads, length, size in ATTENTION:
        if length > 2048:  # plain jnp's gradient in float64 does not fit into the memory of a card
            continue
        key = batch * heads, length, length, size, itemsize, kind
        present = {
            "attention_dq": tuning_attention.attention_dq(*key),
            "attention_dkv": tuning_attention.attention_dkv(*key),
        }
        sizes = {"batch_heads": batch * heads, "query": length, "key": length, "head_size": size, "itemsize": itemsize}
        shapes = ((batch, length, 3, heads, size), (batch, length, heads, size))
        for op, other in (
            ("attention_dkv", present["attention_dq"]),
            ("attention_dq", present["attention_dkv"]),
        ):
            if op == "attention_dq" and length <= other.block_k:  # the kernel for keys does it all
                continue
            step = functools.partial(run, other=other, keys=op == "attention_dkv")
            yield Case(op, sizes, shapes, dtype, step, plain, present[op], derive=saved)


def dense_cases(dtype: str, itemsize: int, kind: str) -> Iterable[Case]:
    def run(x: jax.Array, kernel: jax.Array, config: tuning_dense.DenseConfig) -> jax.Array:
        options: dict[str, Any] = {"activation": None, "precision": "tf32", "config": config, "interpret": False}
        return dense.forward(x, kernel, None, None, **options)[0]

    for rows, depth, width, _ in DENSE:
        if rows > 1024:
            continue
        sizes = {"rows": rows, "depth": depth, "width": width, "itemsize": itemsize}
        present = tuning_dense.dense(rows, depth, width, itemsize, kind)
        yield Case("dense", sizes, ((rows, depth), (depth, width)), dtype, run, reference.dense, present)


def split_k_cases(dtype: str, itemsize: int, kind: str) -> Iterable[Case]:
    for rows, depth, width, _ in DENSE:
        if itemsize > 2 or rows > 256 or width > depth:
            continue
        present = tuning_dense.dense_split(rows, depth, width, itemsize, kind)
        rows_config = tuning_rows.layer_norm(rows, width, 4, kind, "sums")

        def run(
            x: jax.Array, kernel: jax.Array, residual: jax.Array, config: tuning_dense.SplitConfig,
            rows_config: tuning_table.RowConfig = rows_config,
        ) -> jax.Array:  # fmt: skip
            (y,) = dense.forward(
                x, kernel, None, None, activation=None, precision="tf32", config=config, interpret=False,
                splits=config.splits,
            )  # fmt: skip
            return layer_norm.forward(
                y, None, residual, None, None, None, epsilon=1e-6, dropout_rate=0.0, return_sum=False, save=False,
                in_place=False, config=rows_config, interpret=False,
            )[0]  # fmt: skip

        def plain(x: jax.Array, kernel: jax.Array, residual: jax.Array) -> Any:
            return reference.dense_residual_layer_norm(x, kernel, None, residual, None, None)

        sizes = {"rows": rows, "depth": depth, "width": width, "itemsize": itemsize}
        yield Case("dense_split", sizes, ((rows, depth), (depth, width), (rows, width)), dtype, run, plain, present)


def implementation_cases(dtype: str, itemsize: int, kind: str) -> Iterable[Case]:
    """Which product a dense layer takes, each with the configs that it has then."""
    for rows, depth, width, activation in DENSE:
        sizes = {"rows": rows, "depth": depth, "width": width, "activation": 1 + (activation is not None)}
        entry = "dense_implementation", tuning_table.key(**sizes, itemsize=itemsize)

        def run(*arrays: jax.Array, config: Any, activation: str | None = activation, entry: Any = entry) -> Any:
            with tuning_table.trial(tuning_table.Trial({entry: config})):
                return jaxft.dense(*arrays, activation=activation)

        present = tuning_dense.DenseChoice(
            tuning_dense.dense_implementation(rows, depth, width, activation, itemsize, kind)
        )
        yield Case(
            "dense_implementation", sizes | {"itemsize": itemsize}, ((rows, depth), (depth, width), (width,)), dtype,
            run, functools.partial(reference.dense, activation=activation), present,
        )  # fmt: skip


def mosaic_cases(dtype: str, itemsize: int, kind: str) -> Iterable[Case]:
    if not dispatch.device().is_hopper:
        return

    def scaled(dy: jax.Array, kernel: jax.Array, slope: jax.Array) -> tuple[jax.Array, jax.Array]:
        dx = reference.dense(dy, kernel.T) * slope
        return dx, jnp.sum(dx, axis=0, dtype=jnp.promote_types(dx.dtype, jnp.float32))

    for rows, depth, width, activation in DENSE:
        # Up to 256 rows it is not a choice (see `tuning_dense.is_short`; more may be named); for many rows what counts
        # is how the last round is filled, which the key of a table does not say. (That of float32 has no entries yet.)
        if itemsize > 2 or not 256 < rows <= 1024:
            continue

        def run(*arrays: jax.Array, config: tuning_dense.MosaicDenseConfig, activation: str | None = activation) -> Any:
            return mosaic_dense.forward(*arrays, activation=activation, config=config)[0]

        present = tuning_dense.dense_mosaic(rows, depth, width, activation, itemsize, kind)
        sizes = {"rows": rows, "depth": depth, "width": width, "activation": 1 + (activation is not None)}
        yield Case(
            "dense_mosaic", sizes | {"itemsize": itemsize}, ((rows, depth), (depth, width), (width,)), dtype, run,
            functools.partial(reference.dense, activation=activation), present,
        )  # fmt: skip
        if activation is not None:  # then its gradient is of a product with the activation's derivatives
            gradient = tuning_dense.dense_mosaic_gradient(rows, depth, width, itemsize, kind)
            sizes = {"rows": rows, "depth": depth, "width": width, "itemsize": itemsize}
            shapes = ((rows, depth), (width, depth), (rows, width))
            yield Case("dense_mosaic_gradient", sizes, shapes, dtype, dense_backward.backward, scaled, gradient)


def cases(dtypes: Sequence[str], kind: str) -> Iterable[tuple[Case, Any]]:
    """Each case, and the configuration that a device without a table would take."""
    groups = (row_cases, sums_cases, row_gradient_cases, softmax_cases, elementwise_cases, elementwise_gradient_cases,
              permute_cases, split_cases, attention_cases, attention_gradient_cases, dense_cases, split_k_cases,
              mosaic_cases, implementation_cases)  # fmt: skip
    for dtype, group in itertools.product(dtypes, groups):
        itemsize = jnp.dtype(dtype).itemsize
        # Which of attention's kernels runs depends on a config, too.
        untuned = {(case.op, case.key): case.present for case in group(dtype, itemsize, f"{kind} without a table")}
        for case in group(dtype, itemsize, kind):
            yield case, untuned.get((case.op, case.key), case.present)


def best(case: Case, default: Any) -> Any:
    """Checks and times the candidates; prints the fastest few, and what a device without a table would take."""
    sets = case.input_sets()
    first = sets[0]
    plain = jax.jit(case.plain)
    wanted = plain(*first)
    with jax.default_matmul_precision("highest"):
        exact = timing.float64(plain, *first)

    def microseconds(f: Any) -> float:
        return timing.device_us((f, sets), max(3, len(sets)))

    def compiled(config: Any) -> Any:
        """None where it needs more shared memory or registers than the device has."""
        try:
            return jax.jit(functools.partial(case.run, config=config)).lower(*first).compile()
        except Exception as error:
            print(f"  {config}: {str(error).splitlines()[0][:100]}")
            return None

    name = f"{case.op} {case.key}"
    tried = tuning_search.candidates(case.op, case.present, **case.sizes)
    candidates = list(dict.fromkeys((case.present, *tried, default)))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = dict(zip(candidates, pool.map(compiled, candidates), strict=True))
    times: dict[Any, float] = {}
    for config, f in programs.items():
        if f is None:
            continue
        for leaves in zip(*(jax.tree.leaves(tree) for tree in (f(*first), wanted, exact)), strict=True):
            timing.check(f"{name} {config}", *leaves)
        times[config] = microseconds(f)
    close = [config for config, us in times.items() if us <= ROUGHLY * min(times.values())]
    for config in close * 2:
        times[config] = min(times[config], microseconds(programs[config]))
    present, fastest = case.present, min(times, key=times.__getitem__)
    was, without = (times.get(config, float("nan")) for config in (present, default))
    chosen = present if was <= times[fastest] * (1 + MARGIN) else fastest
    print(
        f"{name}: was {was:.2f} us, without a table {without / times[chosen]:.2f}x, XLA takes {microseconds(plain):.2f}"
    )
    for config in sorted(times, key=times.__getitem__)[:5]:
        print(f"  {times[config]:9.2f} us  {config}{'  <-' if config == chosen else ''}", flush=True)
    return chosen


def save(table: dict[str, dict[str, Any]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    os.replace(temporary, path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TUNED, metavar="FOLDER", help="where the JSON is (%(default)s)")
    parser.add_argument("--only", nargs="+", help="some ops")
    parser.add_argument("--sizes", default="", metavar="REGEX", help="some keys, as 'rows=(128|256),depth=768,'")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    args = parser.parse_args(argv)
    kind = dispatch.device_kind()
    path = args.out / f"{kind.replace(' ', '_')}.json"
    table = json.loads(path.read_text()) if path.is_file() else {}
    found = tuning_table._table(
        kind
    )  # by later cases of this process, in which a dense layer runs with what was chosen
    for case, default in cases(args.dtypes, kind):
        key = case.key
        if (args.only is None or case.op in args.only) and re.search(args.sizes, key):
            chosen = dataclasses.asdict(best(case, default))
            for entries in (table, found):
                entries.setdefault(case.op, {})[key] = chosen
            save(table, path)


if __name__ == "__main__":
    main()
