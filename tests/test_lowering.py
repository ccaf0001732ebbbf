"""Every kernel lowers for an H200, on any machine, and is what the ops choose there."""

import functools
import re
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxft
from cases import ONE_DTYPE, SOME_DTYPES, for_h200, lower, slow, slow_cases
from jaxft import dispatch, reference
from jaxft.kernels.triton import (
    attention,
    attention_backward,
    bias_activation,
    dense,
    embeddings,
    layer_norm,
    permute,
    softmax,
)
from jaxft.kernels.triton.attention_problem import Options, Rules
from jaxft.tuning.dense import DenseConfig
from jaxft.tuning.table import AttentionConfig, ElementwiseConfig, GradientConfig, PermuteConfig, RowConfig
from lowered import COPIES, TRITON, assert_one_kernel, of, operations

pytestmark = pytest.mark.usefixtures("quiet")

# --- The choice of the ops -----------------------------------------------------------------------------------------

SHAPES = [(1, 1), (7, 80), (4, 32, 768), (3, 20000)]


@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize("shape", [*SHAPES[1::2], *slow(*SHAPES[::2])], ids=str)
def test_layer_norm(shape, dtype, caplog):
    x, vector = of(shape, dtype), of(shape[-1:])
    assert_one_kernel(jaxft.layer_norm, x)
    assert_one_kernel(jaxft.layer_norm, x, vector, vector)
    assert_one_kernel(jaxft.bias_residual_layer_norm, x, of(shape[-1:], dtype), x, vector, vector, epsilon=1e-12)
    for present in ((True, False, False), (False, True, False), (False, False, True), (False, False, False)):

        def fused(x, vector, present=present):
            bias, gamma, beta = (vector if there else None for there in present)
            return jaxft.bias_residual_layer_norm(x, bias, x, gamma, beta, return_sum=True)

        assert_one_kernel(fused, x, vector)
    assert caplog.messages == []


@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize("shape", [SHAPES[1], *slow(*SHAPES[::2], SHAPES[3])], ids=str)
def test_layer_norm_backward(shape, dtype, key, caplog):
    """The op has one kernel forward, one backward, and one that adds up the partial sums of vectors."""
    x, vector = of(shape, dtype), of(shape[-1:])
    for dropout in ({}, {"dropout_rate": 0.1, "dropout_rng": key}):

        def gradients(x, bias, residual, gamma, beta, dropout=dropout):
            run = functools.partial(jaxft.bias_residual_layer_norm, return_sum=True, **dropout)
            out, pull_back = jax.vjp(run, x, bias, residual, gamma, beta)
            return out, pull_back(out)

        for vectors in ((vector, vector, vector), (None, vector, None), (None, None, None)):
            found = operations(lower(gradients, x, vectors[0], x, *vectors[1:]))
            assert found[TRITON] == 2 + any(v is not None for v in vectors)
    plain = jax.grad(lambda x, g, b: jaxft.layer_norm(x, g, b).astype(jnp.float32).sum(), (0, 1, 2))
    assert operations(lower(plain, x, vector, vector))[TRITON] == 3
    assert caplog.messages == []


def test_in_place():
    """A kernel takes the memory of its operands if it is asked to, and only then."""
    x, v = of((7, 80), jnp.bfloat16), of((80,))
    for in_place in (False, True):
        text = lower(lambda x, v: jaxft.layer_norm(x, v, in_place=in_place), x, v)  # noqa: B023
        assert ("output_operand_alias" in text) == in_place
        options = {"in_place": in_place, "return_sum": True}
        both = lower(lambda x, v: jaxft.bias_residual_layer_norm(x, v, 2 * x, v, v, **options), x, v)  # noqa: B023
        assert both.count("output_operand_alias<") == 2 * in_place
        text = lower(lambda x, v: jaxft.bias_activation(x, v, in_place=in_place), x, v)  # noqa: B023
        assert text.count("output_operand_alias<") == in_place
    # The backward pass reads x, so it stays as it is.
    grad = jax.grad(lambda x, v: jaxft.layer_norm(x, v, in_place=True).astype(jnp.float32).sum())
    assert "output_operand_alias" not in lower(grad, x, v)
    grad = jax.grad(lambda x, v: jaxft.bias_activation(x, v, in_place=True).astype(jnp.float32).sum())
    assert "output_operand_alias" not in lower(grad, x, v)


@pytest.mark.parametrize("dtype", [jnp.float32, *slow(jnp.bfloat16, jnp.float16)])
@pytest.mark.parametrize("width", [80, *slow(1, 768, 20000)])
def test_embeddings(width, dtype, caplog, key):
    """The op has one kernel forward. Backward it has two for the LayerNorm, two per table and no scatter."""
    dropout = {"dropout_rate": 0.1, "dropout_rng": key}
    tables, vector = [of((rows, width), dtype) for rows in (300, 40, 2)], of((width,))
    floats, ids = (*tables, vector, vector), of((4, 33), jnp.int32)
    assert_one_kernel(jaxft.embeddings_layer_norm, ids, *tables[:2])
    assert_one_kernel(jaxft.embeddings_layer_norm, ids, *floats, dtype=jnp.bfloat16)
    assert_one_kernel(jaxft.embeddings_layer_norm, ids, *floats, **dropout)
    for kernels, given in ((5, ()), (7, ("token_type_ids",)), (9, ("token_type_ids", "position_ids"))):

        def gradients(ids, *floats, given=given):
            run = functools.partial(jaxft.embeddings_layer_norm, ids, **dict.fromkeys(given, ids), **dropout)
            out, pull_back = jax.vjp(run, *floats)
            return out, pull_back(out)

        found = operations(lower(gradients, ids, *floats))
        assert (found[TRITON], found["scatter"]) == (kernels, 0)
    assert caplog.messages == []


@pytest.mark.parametrize(("dtype", "kernels"), [(jnp.float32, 2), (jnp.bfloat16, 2), (jnp.int32, 0)])
def test_padding(dtype, kernels, caplog):
    """Hidden states have one kernel each way. Ids move by XLA's gathers, which is not logged as a fallback."""

    def there_and_back(x, mask):
        packed = jaxft.remove_padding(x, mask, capacity=40)
        return jaxft.restore_padding(packed.x, packed.indices, batch=4, length=33)

    x = of((4, 33, 80), dtype)
    assert operations(lower(there_and_back, x, of((4, 33), jnp.bool_)))[TRITON] == kernels
    assert caplog.messages == []


@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize("activation", ["gelu", *slow(*(name for name in reference.ACTIVATIONS if name != "gelu"))])
def test_bias_activation(activation, dtype, caplog):
    for shape in SHAPES:
        assert_one_kernel(jaxft.bias_activation, of(shape, dtype), of(shape[-1:]), activation=activation)
    assert_one_kernel(lambda x: jaxft.bias_activation(x, None, activation=activation), of((7, 80), dtype))

    def gradients(x, bias):
        out, pull_back = jax.vjp(lambda x, b: jaxft.bias_activation(x, b, activation=activation), x, bias)
        return out, pull_back(out)

    # One kernel forward and one backward; XLA adds up the partial sums.
    for shape in SHAPES[1::2]:
        for bias in (of(shape[-1:]), of(shape[-1:], dtype), None):
            assert operations(lower(gradients, of(shape, dtype), bias))[TRITON] == 2
    assert caplog.messages == []


@pytest.mark.parametrize(("rows", "sums"), [(128, 0), (129, 1), *slow_cases((1, 0), (16, 0), (100, 0), (256, 1))])
@pytest.mark.parametrize("dtype", ONE_DTYPE)
def test_bias_gradient_of_few_rows_is_one_kernel(dtype, rows, sums):
    """One program has all rows of its columns and writes the sum in its final dtype."""
    x, kernel = of((rows, 80), dtype), of((80, 300), dtype)
    for bias in (of((300,)), of((300,), jnp.bfloat16)):
        functions = {
            "bias_activation": (lambda x, b: jax.vjp(jaxft.bias_activation, x, b)[1](x), of((rows, 300), dtype), bias),
            "dense": (lambda x, k, b, dy: jax.vjp(functools.partial(jaxft.dense, activation="gelu"), x, k, b)[1](dy),
                      x, kernel, bias, of((rows, 300), dtype)),
        }  # fmt: skip
        for name, (function, *arguments) in functions.items():
            found = operations(lower(function, *arguments))
            assert (found["reduce"], found["convert"]) == (sums, sums and bias.dtype != jnp.float32), name


@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize(
    ("op", "width"),
    [(jaxft.softmax, 16), (jaxft.log_softmax, 16),
     *slow_cases(*((op, width) for op in (jaxft.softmax, jaxft.log_softmax) for width in (1, 1000, 32768, 250000)))],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_softmax(op, width, dtype, caplog):
    """The op has one kernel forward and one backward, whatever axes bias and mask broadcast along."""
    shape = (2, 3, 5, width)
    for bias, mask in ((None, None), ((2, 1, 5, width), (2, 1, 1, width)), (shape, (3, 5, 1)), ((width,), shape),
                       ((2, 1, 1, 1), ()), ((), (5, width))):  # fmt: skip

        def run(x, bias, mask):
            y, pull_back = jax.vjp(lambda x, bias: op(x, scale=0.3, bias=bias, mask=mask), x, bias)
            return pull_back(y * y)

        text = lower(run, of(shape, dtype), bias if bias is None else of(bias),
                     mask if mask is None else of(mask, jnp.bool_))  # fmt: skip
        assert operations(text)[TRITON] == 2
    assert caplog.messages == []


@pytest.mark.parametrize("op", [jaxft.softmax, jaxft.log_softmax], ids=lambda op: op.__name__)
def test_softmax_in_place(op):
    """The result takes the memory of x unless x is kept for the backward pass."""
    alias, x = "#stablehlo.output_operand_alias<output_tuple_indices = [], operand_index = 0", of((5, 80))
    assert alias in lower(lambda x: op(x, in_place=True), x)
    assert alias not in lower(op, x)
    assert "output_operand_alias<" not in lower(jax.grad(lambda x: jnp.sum(op(x, in_place=True) ** 2)), x)


@pytest.mark.parametrize("dtype", ONE_DTYPE)
def test_dense(dtype, caplog):
    """A named kernel has the matmul. The automatic choice has one kernel for the matmul or for the activation."""
    x, kernel, bias = of((5, 33), dtype), of((33, 17), dtype), of((17,))
    residual = of((5, 17), dtype)
    for activation in (None, *reference.ACTIVATIONS):
        text = lower(
            lambda *a, activation=activation: jaxft.dense(*a[:3], activation=activation, residual=a[3],
                                                         implementation="triton"),
            x, kernel, bias, residual,
        )  # fmt: skip
        found = operations(text)
        assert (found[TRITON], found["dot_general"]) == (1, 0)
        if activation is not None:
            assert_one_kernel(jaxft.dense, x, kernel, bias, activation=activation)
            assert_one_kernel(jaxft.dense, of((2000, 33), dtype), kernel, bias, activation=activation)
    assert_one_kernel(lambda x, k: jaxft.dense(x, k, implementation="triton"), x, kernel)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((32, 512, 12, 64), (0, 2, 1, 3)), ((8192, 8192), (1, 0)), ((8191, 8193), (1, 0)), ((256, 512, 1024), (2, 1, 0)),
     ((2**15, 2**16), (1, 0)), ((2, 3), (1, 0)), ((5, 1, 3, 7), (3, 1, 0, 2)), ((9, 3, 5), (0, 2, 1)),
     ((2, 3) * 4, (7, 0, 6, 1, 5, 2, 4, 3))],
    ids=str,
)  # fmt: skip
def test_permute(shape, axes, caplog):
    for dtype in ("float16", "float32", "int8"):
        found = operations(lower(lambda x: jaxft.permute(x, axes), of(shape, dtype)))
        assert (found[TRITON], found["transpose"]) == (1, 0)
    assert caplog.messages == []


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "bfloat16", "uint32", "int64", "float64",
                                   "float8_e4m3fn", "float8_e8m0fnu", "complex64"])  # fmt: skip
def test_permute_of_any_dtype(dtype):
    """A complex array moves as two arrays."""
    with jax.enable_x64(dtype.endswith("64")):
        for shape, axes in (((127, 131), (1, 0)), ((7, 5, 3, 2), (0, 2, 1, 3)), ((100, 3, 5), (0, 2, 1))):
            text = lower(lambda x, axes=axes: jaxft.permute(x, axes), of(shape, dtype))
            assert text.count(TRITON) == (2 if dtype == "complex64" else 1)


@pytest.mark.parametrize("dtype", SOME_DTYPES)
@pytest.mark.parametrize("shape", [(2, 5, 3, 7), *slow((32, 128, 12, 64), (1, 1, 1, 1), (1, 3, 2, 1500))], ids=str)
def test_split_and_merge_heads(shape, dtype, caplog):
    b, t, n, h = shape
    qkv, bias = of((b, t, 3 * n * h), dtype), of((3 * n * h,))

    def split(qkv, bias=None):
        return jaxft.qkv_bias_split_heads(qkv, bias, n)

    def split_and_back(*arguments):
        out, pull_back = jax.vjp(split, *arguments)
        return pull_back(out)

    for x64 in (False, True):
        for arguments in ((qkv, bias), (qkv,)):
            for function, kernels in ((split, 1), (split_and_back, 2)):
                with jax.enable_x64(x64):
                    found = operations(lower(function, *arguments))
                assert (found[TRITON], found["transpose"]) == (kernels, 0)
    assert operations(lower(jaxft.merge_heads, of((b, n, t, h), dtype)))[TRITON] == (t > 1 and n > 1)
    assert caplog.messages == []


@pytest.mark.parametrize(
    "op", ["layer_norm", "embeddings", "bias_activation", "attention", "dense", "permute", "split_heads"]
)
def test_gradients_lower_with_a_forward_kernel(op, caplog):
    """The forward pass has a kernel, and the backward pass lowers."""
    x, vector, qkv = of((7, 80), jnp.bfloat16), of((80,)), of((2, 37, 3, 4, 64), jnp.bfloat16)
    function, *arguments = {
        "layer_norm": (lambda x, v: jaxft.bias_residual_layer_norm(x, v, x, v, v), x, vector),
        "embeddings": (lambda x, v: jaxft.embeddings_layer_norm(jnp.zeros((2, 7), jnp.int32), x, x, x, v), x, vector),
        "bias_activation": (jaxft.bias_activation, x, vector),
        "attention": (lambda qkv: jaxft.qkv_attention(qkv), qkv),
        "dense": (lambda x, v, k: jaxft.dense(x, k, v, activation="gelu"), x, vector, of((80, 80), jnp.bfloat16)),
        "permute": (lambda x: jaxft.permute(x, (1, 0)), x),
        "split_heads": (lambda x, v: jaxft.qkv_bias_split_heads(x[None], jnp.tile(v, 3)[:72], 4), of((7, 72)), vector),
    }[op]

    def value_and_gradients(*arguments):
        out, pull_back = jax.vjp(function, *arguments)
        return out, pull_back(out)

    assert operations(lower(value_and_gradients, *arguments))[TRITON] >= 1
    assert caplog.messages == []


def test_grids_hold_very_large_sizes():
    """CUDA grids have at most 65,535 programs in their second and third axis. Larger grids are folded."""
    rows = 2**19
    assert_one_kernel(jaxft.bias_activation, of((rows, 3), jnp.bfloat16), of((3,)))
    assert_one_kernel(jaxft.bias_activation, of((rows, 4096), jnp.bfloat16), of((4096,)))
    assert_one_kernel(jaxft.layer_norm, of((rows, 4096), jnp.bfloat16))
    assert_one_kernel(jaxft.softmax, of((rows, 8192), jnp.bfloat16))
    assert_one_kernel(jaxft.softmax, of((2**30, 1), jnp.bfloat16))
    grad = jax.grad(lambda x, v: jaxft.bias_activation(x, v).astype(jnp.float32).sum(), (0, 1))
    for width in (3, 4096, 8200):  # the last has 2^32 elements and more
        assert operations(lower(grad, of((rows, width), jnp.bfloat16), of((width,))))[TRITON] == 1
    assert_one_kernel(jaxft.qkv_attention, of((2**17, 2, 3, 1, 8), jnp.bfloat16))


# --- Kernels with any config ---------------------------------------------------------------------------------------


def assert_lowers(function, *arguments, kernels=1):
    assert operations(lower(function, *arguments))[TRITON] == kernels


@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize("sizes", [(16, 128, 4), *slow((1, 16, 1), (1, 128, 1), (4, 1, 2))], ids=str)
def test_configs_of_rows(sizes, dtype):
    x, vector = of((21, 101), dtype), of((101,))

    for seed in (None, of((2,), jnp.uint32)):
        row = {"dropout_rate": 0.1, "interpret": False}
        forward = row | {"epsilon": 1e-6, "return_sum": True, "in_place": False, "config": RowConfig(*sizes)}
        backward = row | {
            "vectors": dict.fromkeys(("bias", "gamma", "beta"), jnp.float32),
            "config": GradientConfig(*sizes[:2], programs=3, num_warps=sizes[2]),
        }
        for save in (False, True):
            forward["save"] = save
            assert_lowers(lambda x, v, s, o=forward: layer_norm.forward(x, v, x, v, v, s, **o), x, vector, seed)

        def back(x, v, seed, saved, options=backward):
            return layer_norm.backward(x, x, x, v, x, v, seed, saved, **options)

        assert_lowers(back, x, vector, seed, of((2, 21)), kernels=2)
    ids, options = of((35,), jnp.int32), {"config": RowConfig(*sizes), "interpret": False}

    def look_up(x, v, ids, seed, options=options):
        options = {"length": 7, "epsilon": 1e-6, "dropout_rate": 0.1, "dtype": jnp.float16, "save": True, **options}
        return embeddings.forward(x, x, x, v, v, ids, None, ids, seed, **options)

    for seed in (None, of((2,), jnp.uint32)):
        assert_lowers(look_up, x, vector, ids, seed)
    by_id = functools.partial(embeddings.sum_by_id, **options)
    assert operations(lower(by_id, of((35, 101)), ids, x))[TRITON] == 2
    options = {"config": RowConfig(*sizes), "interpret": False, "log": sizes[0] > 1, "scale": 0.5}
    for save in (False, True):
        assert_lowers(
            lambda x, v, o=options, s=save: softmax.forward(x, v, v > 0, in_place=True, save=s, **o), x, vector
        )
    for saved in [of((2, 35)), *([] if options["log"] and sizes[1] < 101 else [None])]:
        assert_lowers(lambda x, v, s, o=options: softmax.backward(x, x, v, v > 0, s, **o), x, vector, saved)
    options = {"config": ElementwiseConfig(*sizes), "interpret": False}
    assert_lowers(
        lambda x, v, o=options: bias_activation.forward(x, v, activation="gelu", in_place=False, **o), x, vector
    )
    options["config"] = GradientConfig(*sizes[:2], programs=3, num_warps=sizes[2])
    assert_lowers(lambda x, v, o=options: bias_activation.backward(x, x, v, activation="gelu", **o), x, vector)
    options["config"] = ElementwiseConfig(*sizes)
    assert_lowers(lambda x, o=options: permute.split_heads(x, None, 5, **o), of((2, 9, 180), dtype))
    options["config"] = GradientConfig(*sizes[:2], programs=3, num_warps=sizes[2])
    part = of((2, 5, 9, 12), dtype)
    assert_lowers(lambda *parts, o=options: permute.join_heads(parts, with_sums=True, **o), part, part, part)


@pytest.mark.parametrize("dtype", ONE_DTYPE)
def test_configs_of_tiles(dtype):
    x, kernel = of((21, 101), dtype), of((101, 67), dtype)
    for sizes in ((2, 4, 1), (8, 64, 2), (64, 4096, 8), (128, 16384, 8)):
        options = {"config": PermuteConfig(*sizes), "interpret": False}
        assert_lowers(lambda x, o=options: permute.forward(x, (1, 0), **o), x)
        assert_lowers(lambda x, o=options: permute.forward(x, (0, 2, 1, 3), **o), of((4, 30, 5, 24), dtype))
    qkv, lengths, mask = of((2, 200, 3, 4, 40), dtype), of((2,), jnp.int32), of((2, 1, 1, 200), jnp.bool_)
    for q, k, warps, stages in ((16, 16, 1, 1), (128, 64, 8, 4)):
        config = AttentionConfig(q, k, warps, stages)

        def attend(qkv, lengths, mask, config=config):
            arguments = qkv, None, None, Rules(key_lengths=lengths, mask=mask), Options(0.3)
            found = attention.forward(*arguments, return_residual=True, config=config, interpret=False)
            configs = {"query_config": config, "key_config": config}
            return attention_backward.backward(found[0], None, *arguments, *found, **configs, interpret=False)

        assert operations(lower(attend, qkv, lengths, mask))[TRITON] == 3
    for q, k, warps, stages in ((16, 16, 1, 1), (32, 16, 4, 3), (64, 128, 4, 2), (128, 64, 8, 4)):
        options = {"config": DenseConfig(q, k, k, warps, stages), "interpret": False, "precision": "float32"}
        assert_lowers(lambda x, k, o=options: dense.forward(x, k, None, None, activation="gelu", **o), x, kernel)


# --- What the kernels do not do ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [("mask", "mask has 4294967296 elements, the kernel takes at most 2^31"),
     ("head_size", "the head size is 264, the kernel takes at most 256"),
     ("float64", "x is float64"), ("rows", "x has 2147483648 rows, the kernels take at most 2^30"),
     ("product", "x has 2147483648 rows, the kernels take at most 2^30")],
)  # fmt: skip
def test_unsupported_cases_log_one_fallback(name, reason, caplog):
    function, argument = {
        "mask": (lambda mask: jaxft.qkv_attention(jnp.zeros((1, 2**15, 3, 4, 8)), mask=mask),
                 of((4, 2**15, 2**15), jnp.bool_)),
        "head_size": (jaxft.qkv_attention, of((2, 37, 3, 1, 264))),
        "float64": (jaxft.layer_norm, of((7, 80), jnp.float64)),
        "rows": (lambda x: jaxft.bias_activation(x, None), of((2**31, 1))),
        "product": (lambda x: jaxft.dense(x, jnp.ones((1, 8)), activation="gelu"), of((2**31, 1))),
    }[name]  # fmt: skip
    with jax.enable_x64(name == "float64"):
        for _ in range(2):
            assert "triton" not in lower(lambda a: function(a), argument)
    (message,) = caplog.messages
    assert "falls back to XLA" in message and reason in message


def test_empty_arrays_launch_nothing():
    assert "triton" not in lower(jaxft.layer_norm, of((0, 80)))
    assert "triton" not in lower(jaxft.embeddings_layer_norm, of((0, 7), jnp.int32), of((7, 80)), of((7, 80)))
    assert "triton" not in lower(lambda x: jaxft.bias_activation(x, None), of((3, 0)))
    assert "triton" not in lower(jaxft.qkv_attention, of((2, 0, 3, 4, 64)))
    assert "triton" not in lower(lambda x: jaxft.permute(x, (1, 0)), of((0, 80)))
    assert "triton" not in lower(lambda x: jaxft.qkv_bias_split_heads(x, None, 2), of((3, 0, 24)))


def test_cards_without_support_get_xla(caplog):
    with dispatch.target("Tesla T4", (7, 5)):
        text = jax.jit(lambda x: jaxft.layer_norm(x)).trace(of((7, 80))).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" not in text
    (message,) = caplog.messages
    assert "it needs compute capability 8.0, Tesla T4 has 7.5" in message


# --- A whole layer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, *slow(True)], ids=["padded", "packed"])
@pytest.mark.parametrize(
    ("width", "batch", "kernels", "mosaic", "products"),
    [(128, 2, 7, 0, 0), (128, 64, 4, 0, 3), (768, 64, 3, 4, 0)],
    ids=["few_rows", "many_rows", "many_rows_on_hopper"],
)
def test_layer_has_seven_kernels(width, batch, kernels, mosaic, products, packed, caplog):
    """The kernels are attention, two LayerNorms and the activation, or the matmuls with the activation."""
    from flax import nnx

    from jaxft import BertConfig, BertModel

    length = 32

    def count(layers):
        config = BertConfig(vocab_size=50, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64,
                            intermediate_size=2 * width, max_position_embeddings=length)  # fmt: skip
        model = nnx.eval_shape(
            lambda: BertModel(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        )
        graph, params = nnx.split(model)
        ids, cu_seqlens = of((batch, length), jnp.int32), of((batch + 1,), jnp.int32)

        def padded(p, ids, mask):
            return nnx.merge(graph, p)(ids, mask).last_hidden_state

        def of_packed(p, ids, cu_seqlens):
            out = nnx.merge(graph, p)(ids.reshape(-1), cu_seqlens=cu_seqlens, max_seqlen=length)
            return out.last_hidden_state

        text = lower(of_packed, params, ids, cu_seqlens) if packed else lower(padded, params, ids, ids)
        compiled = len(re.findall(r"custom_call @(?:__gpu\$xla\.gpu\.triton|mosaic_gpu_v2)", text))
        # Leaves out operations on the B sequence offsets. They are the same in every layer, so XLA keeps one.
        lines = (line for line in text.splitlines() if "xi32>" not in line or "xbf16>" in line)
        return operations("\n".join(lines)), compiled

    (one, compiled_of_one), (three, compiled_of_three) = count(1), count(3)
    assert compiled_of_one == compiled_of_three > 0  # layers share them
    layer = {name: (three[name] - one[name]) / 2 for name in three}
    assert layer.get(TRITON) == kernels
    assert layer.get("custom_call @mosaic_gpu_v2", 0) == mosaic
    assert layer.get("dot_general", 0) == products
    for copies in COPIES:
        assert layer.get(copies, 0) == 0, copies
    assert caplog.messages == []


def test_kernels_lower_in_64_bit_mode():
    """Positions and loops stay 32-bit if JAX's default integers and floats are 64-bit."""
    with jax.enable_x64(True):
        x, v = of((3, 40), jnp.float32), of((40,), jnp.float32)
        qkv, lengths = of((2, 100, 3, 4, 8), jnp.bfloat16), of((2,), jnp.int32)
        packed = jax.grad(lambda x, n: jaxft.varlen_qkv_attention(x, n, max_seqlen=100).sum())
        assert operations(lower(packed, of((200, 3, 4, 8)), of((3,), jnp.int64)))[TRITON] > 1
        assert_one_kernel(jaxft.bias_residual_layer_norm, x, v, x, v, v)
        assert_one_kernel(jaxft.layer_norm, of((3, 20000), jnp.float32))
        assert_one_kernel(jaxft.bias_activation, x, v)
        for ids in (of((2, 3), jnp.int32), of((2, 3), jnp.int64)):
            assert_one_kernel(jaxft.embeddings_layer_norm, ids, x, x)
            grad = jax.grad(lambda x, i: jaxft.embeddings_layer_norm(i, x, x, x, token_type_ids=i).sum())
            assert operations(lower(grad, x, ids))[TRITON] == 6
        for width in (40, 20000):
            logits, mask = of((2, 3, 5, width)), of((2, 1, 5, width), jnp.bool_)
            assert_one_kernel(lambda x, m: jaxft.softmax(x, bias=x[:, :1], mask=m, scale=0.5), logits, mask)
            text = lower(jax.grad(lambda x: jnp.sum(jaxft.softmax(x, bias=x[:, :1], scale=0.5) ** 2)), logits)
            assert operations(text)[TRITON] == 2
        for activation in reference.ACTIVATIONS:
            grad = jax.grad(lambda x, v, a=activation: jaxft.bias_activation(x, v, activation=a).sum(), (0, 1))
            assert operations(lower(grad, x, v))[TRITON] == 1
        assert_one_kernel(jaxft.dense, of((3, 300), jnp.bfloat16), of((300, 40), jnp.bfloat16), v)
        assert_one_kernel(jaxft.qkv_attention, qkv)
        assert_one_kernel(lambda qkv, n: jaxft.qkv_attention(qkv, key_value_seq_lengths=n), qkv, lengths)
        assert_one_kernel(lambda qkv, m: jaxft.qkv_attention(qkv, mask=m), qkv, of((2, 1, 1, 100), jnp.bool_))
        assert_one_kernel(lambda x: jaxft.permute(x, (1, 0)), x)


def test_operations_are_counted_through_calls():
    """Functions count once per call, which other tests rely on."""

    @jax.jit
    def inner(x):
        return jnp.sin(x) * jnp.sin(2 * x)

    with for_h200():
        text = jax.jit(lambda x: inner(inner(x)).T + inner(x)).trace(of((3, 3))).lower(lowering_platforms=("cuda",))
    found = operations(text.as_text())
    assert (found["sine"], found["transpose"], found["add"]) == (6, 1, 1)


def test_mlir_searches_no_module_for_each_operation(monkeypatch):
    """Triton's dialect has a module, so MLIR's bindings look for it once."""
    searched = []

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            searched.append(name)

    lower(jaxft.layer_norm, of((7, 80)))
    monkeypatch.setattr("sys.meta_path", [Finder, *sys.meta_path])
    lower(jaxft.layer_norm, of((7, 96)))
    assert not [name for name in searched if name.rpartition(".")[2] == "tt"]
