"""Attention at random shapes, values and gradients, with every array in memory of its own; test_memcheck.py runs it.

    compute-sanitizer --tool memcheck python tests/memcheck_attention.py <first seed> <how many> [<planted fault>]

What lies between the arguments and the results of an XLA program shares one allocation, in which no access is out of
bounds. Here every kernel is a program of its own, so that all that it reads and writes are arguments and results.
"""

import functools
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jaxft
from cases import normal, some
from jaxft.kernels.triton import attention_spans, common
from jaxft.ops import attention_vjp, transforms
from jaxft.tuning import attention as tuning_attention
from jaxft.tuning.table import AttentionConfig
from test_attention_gradients import attention_case, random_blocks

DTYPES = ("float32", "float16", "bfloat16")
KERNELS = ("attention", "attention_dq", "attention_dkv")


def small_case(rng):
    _, floats, options = attention_case(rng)
    return jaxft.qkv_attention if "qkv" in floats else jaxft.dot_product_attention, floats, options


def large_case(rng):
    """Random case with several tiles of any size and with wide heads."""
    t, s = (int(n) for n in rng.integers(129, 400, 2))
    b, k, group, h = 2, 1, int(rng.integers(1, 3)), int(rng.choice([33, 80, 100, 128, 160, 256]))
    full = b, k * group, t, s
    floats = normal(
        rng, str(rng.choice(DTYPES)), query=(b, t, k * group, h), key=(b, s, k, h), value=(b, s, k, h),
        bias=some(rng, tuple(size if rng.random() < 0.7 else 1 for size in full)),
    )  # fmt: skip
    mask = some(rng, tuple(size if rng.random() < 0.7 else 1 for size in full))
    ids = some(rng, [np.sort(rng.integers(0, 4, (b, n), np.int32), axis=1) for n in (t, s)], 0.3) or (None, None)
    return jaxft.dot_product_attention, floats, {
        "mask": mask if mask is None else rng.random(mask) < 0.8,
        "is_causal": bool(rng.random() < 0.3),
        "key_value_seq_lengths": some(rng, rng.integers(0, s + 1, b, np.int32)),
        "query_segment_ids": ids[0],
        "key_value_segment_ids": ids[1],
        "local_window_size": some(rng, tuple(int(w) for w in rng.integers(0, 200, 2)), 0.3),
    }  # fmt: skip


def varlen_case(rng):
    longest = int(rng.choice([1, 7, 33, 150]))
    boundaries = np.append(0, np.cumsum(rng.integers(0, longest + 1, int(rng.integers(1, 6))))).astype(np.int32)
    rows = max(1, int(boundaries[-1]) + int(rng.choice([0, 1, 40])))
    n, h = int(rng.integers(1, 4)), int(rng.integers(1, 130))
    op = functools.partial(jaxft.varlen_qkv_attention, cu_seqlens=boundaries, max_seqlen=longest)
    return op, normal(rng, str(rng.choice(DTYPES)), qkv=(rows, 3, n, h)), {
        "is_causal": bool(rng.random() < 0.3),
        "local_window_size": some(rng, tuple(int(w) for w in rng.integers(0, 40, 2)), 0.3),
        "return_residual": bool(rng.random() < 0.5),
    }  # fmt: skip


def fault_case(rng):
    """Case for planted faults. A row is 512 bytes, so that no rounding of an allocation hides one more row."""
    shape = (1, 37, 4, 64)
    return jaxft.dot_product_attention, normal(rng, "bfloat16", query=shape, key=shape, value=shape), {}


# Planted faults: replacements for functions of `common`.
FAULTS = {
    "load": {"load": lambda where, **_: common.plgpu.load(where)},
    "store": {"store": lambda where, value, **_: common.plgpu.store(where, value)},
    "row": {"positions": lambda start, size: start - 1 + jnp.arange(size, dtype=jnp.int32)},
}


def run(case, seed):
    rng = np.random.default_rng(seed)
    op, floats, options = case(rng)
    if rng.random() < 0.3:
        options |= {"dropout_rate": 0.3, "dropout_rng": jax.random.key(seed)}
    blocks = {name: getattr(tuning_attention, name) for name in KERNELS}
    if seed % 2 and next(iter(floats.values())).shape[-1] <= 64:  # wider ones do not fit into shared memory
        configs = [AttentionConfig(q, k, 4, 2, *programs) for q, k, *programs in random_blocks(rng)]
        blocks = {name: lambda *_, c=config: c for name, config in zip(KERNELS, configs, strict=True)}
    precision = str(rng.choice(["tensorfloat32", "highest"]))
    shapes = {name: x.shape for name, x in floats.items()}
    given = [name for name, x in options.items() if x is not None and x is not False]
    print(f"seed {seed}: {shapes}, {given}", flush=True)
    with mock.patch.multiple(tuning_attention, **blocks), jax.default_matmul_precision(precision):
        out, pull_back = jax.vjp(lambda floats: op(**floats, **options, implementation="triton"), floats)
        jax.block_until_ready(pull_back(out))


def alone(launch, names):
    """Wraps `launch`. The wrapper fails if a kernel is a part of a larger program."""

    @functools.wraps(launch)
    def wrapped(kernel, grid, operands, outputs, **options):
        assert not any(isinstance(x, jax.core.Tracer) for x in operands), "a kernel is a part of a larger program"
        names.append(options["name"])
        return launch(kernel, grid, operands, outputs, **options)

    return wrapped


def at_once(function):
    """Runs a function without kernels and with many operations as one program that holds its arrays."""
    return lambda *arguments, **static: jax.jit(lambda: function(*arguments, **static))()


def whole(kernel, *_, **__):
    """Stands for `transforms.mappable`, which traces `kernel` to map it and to divide it among devices."""
    return lambda *arrays: kernel((False,) * len(arrays), *arrays)


def main(first, count, fault=None):
    launched = []
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    spans = {n: at_once(getattr(attention_spans, n)) for n in ("spans_of_queries", "spans_of_keys")}
    with (
        mock.patch.multiple(attention_spans, **spans),
        mock.patch.object(attention_vjp, "_kernels", attention_vjp._kernels.__wrapped__),
        mock.patch.object(transforms, "mappable", whole),
        mock.patch.multiple(common, launch=alone(common.launch, launched), **(FAULTS[fault] if fault else {})),
    ):
        cases = [small_case, small_case, small_case, large_case, varlen_case] if fault is None else [fault_case]
        for seed in range(int(first), int(first) + int(count)):
            run(cases[seed % len(cases)], seed)
    print(f"{count} cases ran in {len(launched)} kernels of {len(set(launched))} kinds")


if __name__ == "__main__":
    main(*sys.argv[1:])
