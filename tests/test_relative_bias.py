"""Attention with `relative_bias`: a table of biases by key minus query, padded and packed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jaxft
import oracle
from cases import DTYPES, INTERPRET, ONE_DTYPE, check, in_float64, jit, lower, normal, slow, value_and_gradients
from compare import assert_matches_oracle
from jaxft import reference
from jaxft.dropout import dropout_mask
from jaxft.kernels.triton import attention_problem
from jaxft.models import attention_fn
from jaxft.models.positions import alibi_table, bucket_table
from jaxft.tuning import attention as tuning
from jaxft.tuning.table import AttentionConfig
from lowered import TRITON, of, operations, sizes


def lengths(*values):
    return np.array(values, np.int32)


def floats_of(seed, b, t, s, n, k, h, reach, heads, dtype=jnp.float32, table=jnp.float32):
    """Returns separate arrays, or a packed one where s is 0, and a table of `heads` rows."""
    rng = np.random.default_rng(seed)
    arrays = {"query": (b, t, n, h), "key": (b, s, k, h), "value": (b, s, k, h)} if s else {"qkv": (b, t, 3, n, h)}
    return normal(rng, dtype, **arrays) | normal(rng, table, relative_bias=(heads, 2 * reach + 1))


def check_op(floats, implementations=("triton", "xla"), keep=None, **options):
    """Checks an op against plain jnp and the oracle."""
    op = jaxft.qkv_attention if "qkv" in floats else jaxft.dot_product_attention
    exact = oracle.qkv_attention if "qkv" in floats else oracle.dot_product_attention
    of_oracle = {name: x for name, x in options.items() if not name.startswith("dropout")}
    of_oracle |= {} if keep is None else {"keep": keep, "rate": options["dropout_rate"]}

    def plain(qkv=None, relative_bias=None, **f):
        f = f if qkv is None else dict(zip(("query", "key", "value"), jnp.moveaxis(qkv, 2, 0), strict=True)) | f
        q, k = f["query"].shape[1], f["key"].shape[1]
        reach = relative_bias.shape[1] // 2
        place = np.clip(np.arange(k)[None] - np.arange(q)[:, None], -reach, reach) + reach
        bias = f.pop("bias", 0.0) + reference.wide(relative_bias)[:, place][None]  # no table
        return reference.dot_product_attention(**f, bias=bias, **options)

    check(lambda implementation, **f: op(**f, **options, implementation=implementation), plain,
          lambda **f: exact(**f, **of_oracle), floats, implementations=implementations)  # fmt: skip


# Shapes (B, T, S, N, K, H, R, rows of the table): R of 0, within a block, of several blocks, and beyond the sequence.
SHAPES = [(2, 70, 70, 2, 2, 8, 5, 2), (1, 150, 90, 2, 1, 16, 64, 1), (2, 1, 37, 2, 2, 8, 40, 2)]
MORE = [
    (1, 1, 1, 1, 1, 8, 0, 1),
    (2, 67, 33, 4, 2, 40, 0, 4),
    (2, 33, 131, 2, 2, 33, 200, 2),
    (3, 64, 64, 2, 1, 8, 1, 1),
]


@pytest.mark.parametrize("shape", [*SHAPES[:2], *slow(SHAPES[2], *MORE)], ids=str)
def test_shapes(shape):
    """The bias is the table's element at key minus query, limited to the table, forward and backward."""
    check_op(floats_of(0, *shape), return_residual=True)


def test_reach_of_zero():
    """A table of one element has the sum of all gradients, which the log-sum-exp alone makes other than 0."""
    floats = floats_of(13, 2, 19, 35, 2, 2, 8, 0, 2)

    def gradient(implementation):
        def lse(table):
            arrays = floats | {"relative_bias": table}
            return jnp.sum(
                jaxft.dot_product_attention(**arrays, return_residual=True, implementation=implementation)[1]
            )

        return jit(jax.grad(lse))(floats["relative_bias"])

    for implementation in ("triton", "xla"):
        np.testing.assert_allclose(gradient(implementation), np.full((2, 1), 2 * 19), rtol=1e-5)


@pytest.mark.parametrize("dtype", [DTYPES[2], *slow(DTYPES[1])])
@pytest.mark.parametrize("table", [jnp.float32, *slow(jnp.bfloat16)])
def test_dtypes(dtype, table):
    check_op(floats_of(1, 2, 150, 0, 2, 2, 16, 20, 2, dtype, table), ("triton",))


@pytest.mark.parametrize("shape", [(2, 1, 150), *slow((2, 150, 150))], ids=["columns", "matrix"])
def test_float32_bias_of_16_bit_queries(shape):
    """The gradient of another float32 bias does not show the rounding of the 16-bit output either."""
    floats = floats_of(15, 2, 150, 0, 2, 2, 16, 0, 2, jnp.bfloat16)
    floats = {"qkv": floats["qkv"]} | normal(np.random.default_rng(16), jnp.float32, bias=shape)

    def plain(qkv, bias):
        return reference.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), bias[None])

    def op(implementation, **f):
        return jaxft.qkv_attention(**f, implementation=implementation)

    check(op, plain, lambda **f: oracle.qkv_attention(**f), floats)


IDS = np.repeat(np.arange(4, dtype=np.int32), 20)[None, :70] // np.array([[1], [2]], np.int32)
RULES = {
    "causal": {"is_causal": True},
    "window": {"local_window_size": (3, 30), "key_value_seq_lengths": lengths(70, 7)},
    "segments": {"query_segment_ids": IDS, "key_value_segment_ids": IDS},
    "key_mask": {"mask": np.random.default_rng(0).random((2, 1, 1, 70)) < 0.7, "scale": -0.3},
    "mask": {"mask": np.random.default_rng(0).random((1, 2, 70, 70)) < 0.3},
    "lengths": {"query_seq_lengths": lengths(70, 0), "key_value_seq_lengths": lengths(33, 70)},
}


@pytest.mark.parametrize("name", ["window", "segments", *slow(*(n for n in RULES if n not in ("window", "segments")))])
def test_rules(name):
    """A pair that does not attend adds nothing to the gradient of the table."""
    check_op(floats_of(2, 2, 70, 0, 2, 2, 8, 9, 2), **RULES[name], return_residual=True)


def test_blocks_of_queries_without_keys(monkeypatch):
    """One kernel computes all three gradients and delta. It skips blocks of padding queries, also parts of a tile."""
    monkeypatch.setattr(tuning, "attention_dkv", lambda *_: AttentionConfig(16, 64, 4, 1))
    check_op(floats_of(14, 2, 150, 40, 2, 1, 8, 9, 2), ("triton",), query_seq_lengths=lengths(30, 0))


def test_dropout():
    key = jax.random.key(3)
    keep = np.asarray(dropout_mask(key, 0.3, (2, 2, 40, 40)))
    check_op(floats_of(3, 2, 40, 0, 2, 2, 8, 6, 2), keep=keep, dropout_rate=0.3, dropout_rng=key)


def test_other_bias_is_added_too():
    """The kernels refuse both at once, so None takes plain jnp."""
    floats = floats_of(4, 1, 9, 0, 2, 2, 8, 3, 2) | normal(np.random.default_rng(5), jnp.float32, bias=(1, 2, 9, 9))
    check_op(floats, implementations=("xla",))
    np.testing.assert_array_equal(jaxft.qkv_attention(**floats), jaxft.qkv_attention(**floats, implementation="xla"))
    with pytest.raises(NotImplementedError, match="the kernel takes bias or relative_bias, not both"):
        jaxft.qkv_attention(**floats, implementation="triton")


ENDS = lengths(0, 3, 3, 90, 131)  # an empty sequence, and rows of no sequence after the last


def padded_by_sequence(qkv, table, ends, options):
    """Computes packed attention sequence by sequence."""
    parts = [
        jaxft.qkv_attention(qkv[None, a:b], relative_bias=table, implementation="xla", **options)[0]
        for a, b in zip(ends[:-1], ends[1:], strict=True)
    ]
    return jnp.concatenate([*parts, jnp.zeros((qkv.shape[0] - ends[-1], *qkv.shape[2:]), qkv.dtype)])


@pytest.mark.parametrize(
    ("reach", "dtype", "options"),
    [(5, jnp.bfloat16, {"local_window_size": (40, 9)}),
     *cases.slow_cases((70, jnp.float32, {}), (0, jnp.float32, {"is_causal": True}), (100, jnp.float16, {}))],
)  # fmt: skip
def test_packed(reach, dtype, options):
    """Positions count within each sequence."""
    rng = np.random.default_rng(6)
    floats = normal(rng, dtype, qkv=(140, 3, 2, 8)) | normal(rng, jnp.float32, relative_bias=(2, 2 * reach + 1))

    def op(implementation, qkv, relative_bias):
        return jaxft.varlen_qkv_attention(qkv, ENDS, max_seqlen=87, relative_bias=relative_bias,
                                          implementation=implementation, **options)  # fmt: skip

    check(op, lambda qkv, relative_bias: padded_by_sequence(qkv, relative_bias, ENDS, options),
          lambda **f: oracle.varlen_qkv_attention(f.pop("qkv"), ENDS, **f, **options), floats,
          implementations=("triton", "xla"))  # fmt: skip


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_padding_reaches_nothing(implementation):
    """Neither does a sequence without keys, whose rows are 0."""
    clean = floats_of(7, 3, 37, 37, 2, 2, 8, 4, 2)
    used = np.arange(37) < lengths(20, 0, 37)[:, None]
    valid = dict.fromkeys(("query", "key", "value"), used[:, :, None, None]) | {"relative_bias": np.ones((2, 9), bool)}
    options = {"query_seq_lengths": lengths(20, 0, 37), "key_value_seq_lengths": lengths(20, 0, 37)}
    cases.check_padding(
        lambda **f: jaxft.dot_product_attention(**f, **options, implementation=implementation), clean, valid
    )


@pytest.mark.parametrize(("rows", "keys"), [(0, 3), (3, 0)])
@pytest.mark.parametrize("implementation", ["triton", "xla", None])
def test_empty(rows, keys, implementation):
    floats = normal(np.random.default_rng(0), jnp.bfloat16, query=(2, rows, 2, 8), key=(2, keys, 2, 8),
                    value=(2, keys, 2, 8), relative_bias=(2, 5))  # fmt: skip
    run = value_and_gradients(lambda **f: jaxft.dot_product_attention(**f, implementation=implementation))
    out, gradients = run(floats, jnp.ones((2, rows, 2, 8), jnp.bfloat16))
    assert (out == 0.0).all() and (gradients["relative_bias"] == 0.0).all()


@pytest.mark.parametrize("sizes", [(16, 64), *slow((32, 16), (64, 64))], ids=str)
@pytest.mark.parametrize("reach", [3, *slow(0, 16, 500)])
def test_any_blocks(sizes, reach, monkeypatch):
    """Many blocks, more programs than one for a diagonal, and distances on both sides of every edge."""
    config = AttentionConfig(*sizes, 4, 1)
    for name in ("attention", "attention_dq", "attention_dkv"):
        monkeypatch.setattr(tuning, name, lambda *_: config)
    check_op(floats_of(8, 3, 75, 90, 2, 2, 8, reach, 2), implementations=("triton",))


FAR = {
    "all": {},
    "window": {"local_window_size": (60, 45)},
    "narrow": {"local_window_size": (5, 70)},
    "segments": {"query_segment_ids": IDS, "key_value_segment_ids": IDS},
    "key_mask": {"mask": np.arange(70)[None, None, None] < lengths(70, 55)[:, None, None, None]},
    "lengths": {"query_seq_lengths": lengths(70, 41), "key_value_seq_lengths": lengths(52, 70)},
}


@pytest.mark.parametrize("name", ["window", "lengths", *slow("all", "narrow", "segments", "key_mask")])
@pytest.mark.parametrize("heads", [2, *slow(1)])
def test_blocks_beyond_the_table_have_one_bias(name, heads, monkeypatch):
    """A tile has blocks beyond both ends of the table, near ones, and blocks that need masks."""
    seen = []

    def near_blocks(*args):
        seen.append(real(*args))
        return seen[-1]

    real = attention_problem.near_blocks
    monkeypatch.setattr(attention_problem, "near_blocks", near_blocks)
    for kernel in ("attention", "attention_dq", "attention_dkv"):
        monkeypatch.setattr(tuning, kernel, lambda *_: AttentionConfig(16, 16, 4, 1))
    check_op(floats_of(15, 2, 70, 0, 2, 2, 8, 3, heads), ("triton",), return_residual=True, **FAR[name])
    assert seen and None not in seen


def test_no_block_is_beyond_a_long_table(monkeypatch):
    """The kernels then have no loop for such blocks."""
    found = []
    real = attention_problem.near_blocks
    monkeypatch.setattr(attention_problem, "near_blocks", lambda *args: found.append(real(*args)) or found[-1])
    for reach, block in ((7, 64), (6, 64)):
        lower(lambda f: jaxft.qkv_attention(**f, implementation="triton"), floats_of(0, 1, 70, 0, 1, 1, 64, reach, 1))
        is_none = reach + block > 70
        assert found and all((near is None) == is_none for near in found)
        found.clear()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, *slow(jnp.float32)])
@pytest.mark.parametrize("ends", [
    (-np.inf, 2.0), (np.finfo(np.float32).min, 0.0), (np.finfo(np.float32).min, np.finfo(np.float32).min), (3e38, 0.0),
    (3e38, -3e38), (-np.inf, 3e38),
])  # fmt: skip
def test_largest_biases(ends, dtype):
    """Numbers that would overflow to base 2 exclude keys, or take all of the weight, as in plain jnp."""
    floats = floats_of(16, 1, 70, 0, 2, 2, 16, 3, 2, dtype)
    table = np.array(floats["relative_bias"])
    table[:, :2], table[:, 5:] = ends
    floats["relative_bias"] = jnp.asarray(table)
    dout = normal(np.random.default_rng(1), dtype, dout=(1, 70, 2, 16))["dout"]

    def results(name):
        run = value_and_gradients(lambda **f: jaxft.qkv_attention(**f, implementation=name))
        return jax.tree.leaves(run(floats, dout))

    found, plain = results("triton"), results("xla")
    for x, y in zip(found, plain, strict=True):
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), atol=0.06 if dtype == jnp.bfloat16 else 2e-3
        )


def test_reruns_are_bitwise_equal():
    batch, length = (2, 70) if INTERPRET else (16, 512)
    floats = floats_of(9, batch, length, 0, 2, 2, 8, 30, 1, jnp.bfloat16)
    run = value_and_gradients(lambda **f: jaxft.qkv_attention(**f, implementation="triton"))
    cotangents = cases.random_cotangents(jaxft.qkv_attention, floats)
    first = run(floats, cotangents)
    for _ in range(1 if INTERPRET else 50):
        jax.tree.map(np.testing.assert_array_equal, run(floats, cotangents), first)


@pytest.mark.parametrize("shared", [True, *slow(False)])
@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_vmap(implementation, shared):
    """The gradient of a table in 16 bits that examples share is summed in float32."""
    floats = floats_of(10, 6, 20, 0, 2, 2, 8, 3, 2, table=jnp.bfloat16)
    one = {"qkv": floats["qkv"].reshape(3, 2, 20, 3, 2, 8), "relative_bias": floats["relative_bias"]}
    if not shared:
        one["relative_bias"] = jnp.stack([one["relative_bias"] * i for i in range(3)])

    def mapped(implementation, qkv, relative_bias):
        def attend(qkv, relative_bias):
            return jaxft.qkv_attention(qkv, relative_bias=relative_bias, implementation=implementation)

        return jax.vmap(attend, (0, None if shared else 0))(qkv, relative_bias)

    def each(qkv, relative_bias):
        tables = reference.wide(relative_bias) if shared else relative_bias
        return jnp.stack([
            reference.dot_product_attention(*jnp.moveaxis(x, 2, 0), relative_bias=tables if shared else tables[i])
            for i, x in enumerate(qkv)
        ])  # fmt: skip

    run = value_and_gradients(each)
    cotangents = cases.random_cotangents(each, one)
    got = value_and_gradients(lambda **f: mapped(implementation, **f))(one, cotangents)
    assert_matches_oracle(got, run(one, cotangents), in_float64(run, one, cotangents))


def test_second_derivatives():
    floats = floats_of(11, 1, 9, 0, 1, 1, 8, 2, 1)

    def norm(implementation):
        def loss(f):
            out = jaxft.qkv_attention(f["qkv"], relative_bias=f["relative_bias"], implementation=implementation)
            return jnp.sum(jnp.sin(out))

        return jit(jax.grad(lambda f: sum(jnp.sum(x * x) for x in jax.tree.leaves(jax.grad(loss)(f)))))

    got, expected = norm("triton")(floats), norm("xla")(floats)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), got, expected)


def test_export_of_symbolic_sizes():
    """Batch and length are symbolic; the table is not."""
    b, t = jax.export.symbolic_shape("b, t")
    x = jax.ShapeDtypeStruct((b, t, 3, 2, 8), jnp.float32)
    table = jnp.asarray(np.random.default_rng(0).standard_normal((2, 7)), jnp.float32)

    def run(qkv, table):
        return jax.grad(lambda q, t: jnp.sum(jaxft.qkv_attention(q, relative_bias=t) ** 2), (0, 1))(qkv, table)

    exported = jax.export.export(jax.jit(run))(x, jax.ShapeDtypeStruct((2, 7), jnp.float32))
    for length in (1, 9):
        qkv = normal(np.random.default_rng(1), jnp.float32, qkv=(2, length, 3, 2, 8))["qkv"]
        for got, expected in zip(exported.call(qkv, table), run(qkv, table), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [(np.ones((2, 4), np.float32), ValueError, r"shape \[N, 2R\+1\] .* N=2 heads .*, got \(2, 4\)"),
     (np.ones((3, 5), np.float32), ValueError, r"got \(3, 5\)"), (np.ones(5, np.float32), ValueError, r"got \(5,\)"),
     (np.ones((2, 0), np.float32), ValueError, r"got \(2, 0\)"),
     (np.ones((2, 5), np.int32), TypeError, "must be an array of floats, got int32"),
     ([[1.0]], TypeError, "must be an array, got list")],
)  # fmt: skip
def test_errors(table, error, message):
    qkv = jnp.ones((2, 3, 3, 2, 8))
    calls = {
        "qkv_attention": lambda: jaxft.qkv_attention(qkv, relative_bias=table),
        "dot_product_attention": lambda: jaxft.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), relative_bias=table),
        "varlen_qkv_attention": lambda: jaxft.varlen_qkv_attention(
            qkv[0], lengths(0, 3), max_seqlen=3, relative_bias=table
        ),
    }
    for name, call in calls.items():
        with pytest.raises(error, match=f"{name}: relative_bias {message if error is TypeError else ''}"):
            call()
        with pytest.raises(error, match=message):
            call()


def test_plan_goes_on_to_triton_for_a_gpu():
    """cuDNN and Mosaic GPU refuse the table by name, so None takes Triton in both directions."""

    def attend(qkv, table):
        return jaxft.qkv_attention(qkv, relative_bias=table)

    with jaxft.dispatch.target("NVIDIA H200"):
        (plan,) = jaxft.explain(attend, of((32, 512, 3, 12, 64), jnp.bfloat16), of((12, 257)))
        with pytest.raises(NotImplementedError, match="it has no table of biases by relative position"):
            jax.eval_shape(lambda q, t: jaxft.qkv_attention(q, relative_bias=t, implementation="cudnn"),
                           of((2, 64, 3, 2, 64), jnp.bfloat16), of((2, 5)))  # fmt: skip
    assert "triton" in str(plan.forward) and "triton" in str(plan.backward)
    assert "it takes no relative_bias" in plan.why


@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize("length", [300, *slow(37, 2048)])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.usefixtures("quiet")
def test_lowers_without_square_matrices(length, packed, dtype, caplog):
    """One kernel forward, two or three backward. XLA removes the last if nothing reads its result."""
    qkv = of((length * 2, 3, 4, 64) if packed else (2, length, 3, 4, 64), dtype)
    table, ends = of((4, 257)), of((3,), jnp.int32)

    def attend(qkv, table, ends):
        if packed:
            return jaxft.varlen_qkv_attention(qkv, ends, max_seqlen=length, relative_bias=table)
        return jaxft.qkv_attention(qkv, relative_bias=table)

    def gradients(*arguments):
        return jax.grad(lambda *a: jnp.sum(attend(*a).astype(jnp.float32)), (0, 1))(*arguments)

    assert operations(lower(attend, qkv, table, ends))[TRITON] == 1
    text = lower(gradients, qkv, table, ends)
    assert operations(text)[TRITON] == (3 if length == 37 else 4) and "has_side_effect = true" not in text
    if length == 2048:  # nothing of the size [N, T, T]
        assert max(sizes(text)) < 4 * 2048 * 2048 / 2
    assert caplog.messages == []


def test_flax_attention_function_passes_the_table_on():
    floats = floats_of(12, 2, 9, 9, 2, 2, 8, 3, 2)
    np.testing.assert_array_equal(attention_fn(**floats), jaxft.dot_product_attention(**floats))


def test_bucket_table_has_one_element_a_bucket():
    """T5's rule: exact up to 7, logarithmic up to 127, keys after the query from 16 on; 128 and more in one bucket."""
    weights = jnp.tile(jnp.arange(40.0)[:, None], (1, 3))
    table = np.asarray(bucket_table(weights))
    assert table.shape == (3, 257) and (table == table[0]).all()
    right = table[0, 128:]
    assert right[0] == 0
    np.testing.assert_array_equal(right[1:9], 16 + np.arange(1, 9))
    np.testing.assert_array_equal(right[[8, 11, 12, 15, 16, 22, 23, 127, 128]], [24, 24, 25, 25, 26, 26, 27, 31, 31])
    np.testing.assert_array_equal(table[0, 127::-1], right[1:] - 16)
    gradient = jax.grad(lambda w: jnp.sum(bucket_table(w)))(weights)[:, 0]
    assert gradient.sum() == 257 and (gradient[32:] == 0.0).all()


def test_alibi_table():
    table = np.asarray(alibi_table(8, 5))
    np.testing.assert_array_equal(table[:2], -np.array([[0.5], [0.25]], np.float32) * np.abs(np.arange(-5, 6)))
