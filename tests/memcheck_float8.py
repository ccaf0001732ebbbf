"""Kernels that read or write float8, each a program of its own; test_memcheck.py runs it.

    compute-sanitizer --tool memcheck python tests/memcheck_float8.py
    compute-sanitizer --tool racecheck python tests/memcheck_float8.py

All that a kernel reads and writes are arguments and results of its program, which have memory of their own.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxft
from cases import normal
from test_float8 import dense_arrays

DENSE = (  # implementation, (rows, depth, width), options
    ("mosaic_gpu", (512, 768, 768), {}),
    ("mosaic_gpu", (1000, 768, 2304), {}),  # the last tile is not full
    ("mosaic_gpu", (328, 1024, 4096), {"activation": "gelu", "float8_scale": 1.0}),
    ("mosaic_gpu", (264, 384, 576), {"activation": "gelu_tanh", "dtype": jnp.float16}),
    ("mosaic_gpu", (520, 3072, 768), {"residual": True}),
    ("triton", (1, 768, 768), {}),
    ("triton", (77, 768, 3072), {"activation": "gelu", "float8_scale": 1.0}),
    ("triton", (130, 3072, 760), {"dtype": jnp.float16}),
    ("triton", (33, 40, 24), {"float8_scale": 0.5}),
)
# (rows, depth, width) of a split-K matmul and a LayerNorm. The partial sums between them lie in a larger buffer.
SPLIT = ((1, 768, 768), (77, 1000, 760), (200, 3072, 1024))
ATTENTION = ((2, 77, 3, 64), (1, 130, 2, 32), (3, 64, 1, 80))  # batch, length, heads, size of a head
NORM = ((5, 768), (77, 1024), (130, 100))


def programs():
    """Yields the name of each program, its function, and its arguments."""
    rng = np.random.default_rng(0)
    for implementation, shape, options in DENSE:
        arrays = dense_arrays(*shape)
        kernel = arrays.pop("kernel").T  # as it is stored
        if options.get("residual"):
            arrays |= normal(rng, jnp.bfloat16, residual=(shape[0], shape[2]))
        options = {name: value for name, value in options.items() if name != "residual"}

        def run(kernel, arrays, options=options, implementation=implementation):
            return jaxft.dense(kernel=kernel.T, **arrays, **options, implementation=implementation)

        yield f"dense {shape} {options}, {implementation}", run, (kernel, arrays)
    of_triton = {"float8_scale": 1.0, "implementation": "triton"}
    for shape in SPLIT:
        arrays = dense_arrays(*shape)
        kernel = arrays.pop("kernel").T
        arrays |= normal(rng, jnp.bfloat16, residual=(shape[0], shape[2]), gamma=shape[2:], beta=shape[2:])

        def half(kernel, arrays):
            return jaxft.dense_residual_layer_norm(kernel=kernel.T, **arrays, **of_triton)

        (record,) = jaxft.explain(half, kernel, arrays)
        assert record.forward.backend == "triton"  # otherwise the depth is not split
        yield f"dense and LayerNorm {shape}", half, (kernel, arrays)
    for b, t, n, h in ATTENTION:
        qkv = normal(rng, jnp.bfloat16, qkv=(b, t, 3, n, h))["qkv"]
        yield f"attention {qkv.shape}", functools.partial(jaxft.qkv_attention, **of_triton), (qkv,)
    for rows, width in NORM:
        x, residual = normal(rng, jnp.bfloat16, x=(rows, width), residual=(rows, width)).values()
        vectors = normal(rng, jnp.bfloat16, bias=(width,), gamma=(width,), beta=(width,))

        def norm(x, residual, vectors):
            return jaxft.bias_residual_layer_norm(x, residual=residual, **vectors, **of_triton)

        yield f"LayerNorm {x.shape}", norm, (x, residual, vectors)


def main():
    """Runs the programs."""
    count = 0
    for name, function, arguments in programs():
        print(name, flush=True)
        jax.block_until_ready(jax.jit(function)(*arguments))
        count += 1
    print(f"{count} programs ran")


if __name__ == "__main__":
    main()
