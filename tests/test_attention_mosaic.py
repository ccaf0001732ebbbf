"""The Mosaic GPU kernel of the gradient of attention.

It runs compiled on a Hopper GPU, and on a CPU in Mosaic's interpreter, which knows of copies, barriers and races. There
products are done at once and see what was written without `commit_smem`: a wait or a fence too few shows on a GPU only.
"""

import contextlib
import functools
import itertools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jaxft
from cases import INTERPRET, in_float64, lower, normal, slow, slow_cases
from compare import assert_matches_oracle
from jaxft import dispatch, reference
from jaxft.dropout import keep_bits, mix
from jaxft.kernels.mosaic_gpu import attention_backward, support
from jaxft.kernels.triton import attention, attention_delta
from test_compiled_cards import CARDS, compiler_for
from test_dense_mosaic import DTYPES, assert_no_races, finds_races, hopper, of, runs

pytestmark = pytest.mark.usefixtures("quiet")


def products_of_arrays(wgmma):
    """Extends the interpreter's matmul: its first operand may be an array, as on a GPU, and not only memory."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks

    @callbacks.fail_on_exception
    def product(*, a_allocation_key_as_array, a_transforms, **others):
        if a_allocation_key_as_array.ndim == 1:
            return wgmma(a_allocation_key_as_array=a_allocation_key_as_array, a_transforms=a_transforms, **others)
        shared, thread = callbacks._get_shared_memory(), others["thread"]
        info = callbacks.memory.GPULoggingInfo(others["mesh_location"], thread, others["source_info"])

        def place(name):
            key = callbacks.HostAllocationKey.from_array(others[f"{name}_allocation_key_as_array"])
            transforms = callbacks._remove_noop_transforms(others[f"{name}_transforms"])
            return key, shared.access(key, jax.tree.map(int, transforms))

        acc, b = (shared.get_buffer_content(*place(name), thread, logging_info=info)[0] for name in ("acc", "b"))
        acc = acc + np.matmul(np.asarray(a_allocation_key_as_array), b, dtype=acc.dtype)
        shared.store_buffer_content(*place("acc"), acc, thread, logging_info=info)
        return others["token"]

    return product


@contextlib.contextmanager
def with_products_of_arrays():
    """Context with `products_of_arrays`, if there is an interpreter."""
    if not INTERPRET:
        yield
        return
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    with mock.patch.object(gpu_callbacks, "wgmma", products_of_arrays(gpu_callbacks.wgmma)):
        yield


@contextlib.contextmanager
def interpreted(multiprocessors):
    """Makes a CPU pass for a Hopper GPU. The kernels run in Mosaic's interpreter, Triton kernels in Pallas'."""

    def in_triton(module, name):
        kernel = getattr(module, name)

        def interpret(*arrays, **options):
            with plgpu.force_gpu_interpret_mode(None):
                return kernel(*arrays, **options | {"interpret": True})

        return mock.patch.object(module, name, interpret)

    with contextlib.ExitStack() as stack:
        stack.enter_context(dispatch.target(multiprocessors=multiprocessors))
        if INTERPRET:
            stack.enter_context(plgpu.force_gpu_interpret_mode())
            stack.enter_context(with_products_of_arrays())
            stack.enter_context(in_triton(attention, "forward"))
            stack.enter_context(in_triton(attention_delta, "row_statistics"))
        yield


def packed(rng, dtype, length, batch=1, heads=1):
    return normal(rng, dtype, qkv=(batch, length, 3, heads, 64), dout=(batch, length, heads, 64))


def plain_gradient(qkv, dout, mask=None, **options):
    """Returns the gradient of the reference."""

    def attend(qkv):
        q, k, v = (qkv[:, :, i] for i in range(3))
        return reference.dot_product_attention(q, k, v, mask=mask, **options)

    return jax.vjp(attend, qkv)[1](dout)[0]


def op_gradient(qkv, dout, mask=None, **options):
    return jax.vjp(lambda qkv: jaxft.qkv_attention(qkv, mask=mask, **options), qkv)[1](dout)[0]


def run(qkv, dout, multiprocessors=None, **options):
    """Returns the gradient of the op, by default with one multiprocessor per head."""
    with interpreted(multiprocessors or qkv.shape[0] * qkv.shape[3]):
        assert kernels(functools.partial(op_gradient, **options), qkv, dout) == MOSAIC
        return jax.jit(functools.partial(op_gradient, **options))(qkv, dout)


def check(qkv, dout, multiprocessors=None, **options):
    got = run(qkv, dout, multiprocessors, **options)
    gradient = jax.jit(functools.partial(plain_gradient, **options))
    assert_matches_oracle(got, gradient(qkv, dout), in_float64(gradient, qkv, dout))
    return got


def key_mask(rng, name, batch, length):
    """Returns a mask [B|1, 1, 1, T] of sequences with all, 70, no, 129 and 128 keys, or one with holes."""
    lengths = np.array([length, 70, 0, 129, 128])[:batch, None]
    mask = np.arange(length) < lengths
    if name == "holes":
        mask = rng.random((batch, length)) < 0.7
        mask[1, : length - 50] = False
    mask = mask[-1:] if name == "one row" else mask
    return mask[:, None, None]


TRITON = ["attention_dkv", "attention_dq", "attention_fwd"]
MOSAIC = ["attention_delta", "attention_fwd", "mosaic"]


def kernels(function, *arrays):
    """Returns the names of the Triton kernels in a traced program, and "mosaic" if it has Mosaic GPU matmuls."""
    # A new function, or JAX has traced it for another card.
    text = str(jax.make_jaxpr(lambda *a: function(*a))(*arrays))
    return sorted({*re.findall(r"\bname=(attention_\w+)", text), *["mosaic"] * ("wgmma_ref" in text)})


# --- Numbers -----------------------------------------------------------------------------------------------------


@runs
@pytest.mark.parametrize(
    ("length", "heads", "multiprocessors", "dtype"),
    [(256, 1, 1, jnp.float16), (256, 3, 1, jnp.bfloat16),
     *slow_cases((384, 1, 1, jnp.bfloat16), (512, 3, 4, jnp.bfloat16), (512, 2, 1, jnp.float16))],
)  # fmt: skip
def test_gradient(length, heads, multiprocessors, dtype):
    """The cases have one head per program, and several."""
    check(**packed(np.random.default_rng(0), dtype, length, heads=heads), multiprocessors=multiprocessors)


@runs
@pytest.mark.parametrize("scale", [1e-3, *slow(1.0)])
def test_scale(scale):
    check(**packed(np.random.default_rng(5), jnp.bfloat16, 256), scale=scale)


@runs
@pytest.mark.parametrize(
    ("name", "length", "batch", "heads"),
    [("one row", 256, 2, 1), ("padding", 256, 3, 2),
     *slow_cases(("one row", 256, 5, 1), ("padding", 256, 5, 1), ("holes", 256, 5, 1), ("padding", 384, 4, 1))],
)  # fmt: skip
def test_mask(name, length, batch, heads):
    """Masked keys reach nothing, and their gradients are 0. If no key is left, all gradients are 0."""
    rng = np.random.default_rng(1)
    floats, mask = packed(rng, jnp.bfloat16, length, batch, heads), key_mask(rng, name, batch, length)
    clean = check(**floats, mask=mask, multiprocessors=2)
    unused = np.broadcast_to(~mask[:, 0, 0], (batch, length))
    idle = ~mask.any(axis=3)[:, 0, 0]
    assert (clean[unused][:, 1:] == 0.0).all()
    qkv, dout = (np.array(floats[n]) for n in ("qkv", "dout"))
    qkv[unused] = np.where(np.arange(3)[:, None, None] > 0, np.nan, qkv[unused])
    if len(mask) > 1:
        assert (clean[idle] == 0.0).all()
        qkv[idle], dout[idle] = np.nan, np.nan
    got = run(jnp.asarray(qkv), jnp.asarray(dout), mask=mask, multiprocessors=2)
    np.testing.assert_array_equal(got, clean)


@runs
@pytest.mark.parametrize("dtype", [DTYPES[1], *slow(DTYPES[0])])
@pytest.mark.parametrize("masked", [False, *slow(True)])
def test_dropout(masked, dtype, key):
    """The kernel drops the pairs that the reference drops, for each head and sequence."""
    rng = np.random.default_rng(2)
    mask = key_mask(rng, "padding", 2, 256) if masked else None
    floats = packed(rng, dtype, 256, batch=2, heads=2)
    check(**floats, mask=mask, dropout_rate=0.3, dropout_rng=key, multiprocessors=2)


@pytest.mark.slow
@runs
@pytest.mark.parametrize("masked", [False, True])
def test_vmap(masked):
    """vmap of two calls, also with a mask for each, gives the same numbers as separate calls."""
    rng = np.random.default_rng(3)
    arrays = list(normal(rng, jnp.bfloat16, qkv=(2, 1, 256, 3, 2, 64), dout=(2, 1, 256, 2, 64)).values())
    arrays += [jnp.asarray(rng.random((2, 1, 1, 1, 256)) < 0.6)] * masked
    with interpreted(multiprocessors=2):
        got = jax.jit(jax.vmap(op_gradient))(*arrays)
        expected = jax.jit(op_gradient)(*(x.reshape(2, *x.shape[2:]) for x in arrays))
    np.testing.assert_array_equal(got, expected[:, None])


@hopper
@pytest.mark.parametrize(("length", "masked", "dropout_rate"), [
    (256, True, 0.0), (384, False, 0.1), (512, False, 0.0), (512, True, 0.1),
    *slow_cases((256, False, 0.0), (256, False, 0.1), (256, True, 0.1), (384, False, 0.0), (384, True, 0.0),
                (384, True, 0.1), (512, False, 0.1), (512, True, 0.0)),
])  # fmt: skip
def test_large(length, masked, dropout_rate, key):
    rng = np.random.default_rng(4)
    floats = packed(rng, jnp.bfloat16, length, batch=32, heads=12)
    lengths = rng.integers(0, length + 1, (32, 1, 1, 1))
    mask = jnp.asarray(np.arange(length) < lengths) if masked else None
    options = {"mask": mask, "dropout_rate": dropout_rate, "dropout_rng": key}
    check(**{n: x[:4] for n, x in floats.items()}, **options | {"mask": mask[:4] if masked else None})
    gradient = jax.jit(functools.partial(op_gradient, **options))
    again = [gradient(**floats) for _ in range(10)]
    assert all((x == again[0]).all() for x in again)


@finds_races
@pytest.mark.parametrize("masked", [False, *slow(True)])
def test_kernel_has_no_races(masked):
    """Programs have several heads, and some passes are skipped."""
    rng = np.random.default_rng(6)
    floats = packed(rng, jnp.bfloat16, 256, batch=3, heads=1)
    rows = jnp.asarray(rng.standard_normal((3, 1, 4, 2, 64)), jnp.float32)
    mask = jnp.asarray(key_mask(rng, "padding", 3, 256)) if masked else None
    with with_products_of_arrays():
        assert_no_races(lambda: attention_backward.backward(**floats, rows=rows, mask=mask, scale=0.125, programs=2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seeded", [True, *slow(False)])
def test_row_statistics(seeded, dtype):
    """The statistics of a row without keys are inf and 0. A program computes 64 rows at a time."""
    rng = np.random.default_rng(7)
    floats = normal(rng, dtype, dout=(2, 128, 3, 64), out=(2, 128, 3, 64))
    lse = rng.standard_normal((2, 3, 128)).astype(np.float32)
    lse[1, 2, 70] = -np.inf
    seed = jnp.array([5, 2**31 + 7], jnp.uint32) if seeded else None
    rows = attention_delta.row_statistics(**floats, lse=jnp.asarray(lse), seed=seed, interpret=INTERPRET)
    assert rows.shape == (2, 3, 2, 4 if seeded else 2, 64)
    rows = np.array(rows).swapaxes(2, 3).reshape(2, 3, -1, 128)
    delta = np.einsum("btnh,btnh->bnt", *(np.float64(x) for x in floats.values()))
    delta[1, 2, 70], lse[1, 2, 70] = 0.0, np.inf
    np.testing.assert_array_equal(rows[:, :, 0], lse)
    np.testing.assert_allclose(rows[:, :, 1], delta, rtol=1e-5, atol=1e-4)
    if seeded:
        first, second = rows[:, :, 2:].view(np.uint32).reshape(6, 2, 128).swapaxes(0, 1).reshape(2, -1, 1)
        index, column = jnp.arange(6 * 128, dtype=jnp.uint32)[:, None], jnp.arange(9, dtype=jnp.uint32)
        bits = mix(column + first, second)
        np.testing.assert_array_equal(bits, keep_bits(seed[0], seed[1], index, column))


# --- Where it is taken -------------------------------------------------------------------------------------------


KEYS, LENGTHS = of((2, 1, 1, 256), jnp.bool_), of((2,), jnp.int32)
SELECTED = (
    ((2, 256, 3, 2, 64), {}, {}, MOSAIC),
    ((2, 384, 3, 12, 64), {}, {"scale": 0.5}, MOSAIC),
    ((2, 512, 3, 2, 64), {}, {"dropout_rate": 0.1}, MOSAIC),
    ((256, 3, 2, 64), {}, {}, MOSAIC),
    ((2, 256, 3, 2, 64), {"mask": KEYS}, {}, MOSAIC),
    ((2, 256, 3, 2, 64), {"mask": of((256,), jnp.bool_)}, {"dropout_rate": 0.1}, MOSAIC),
    ((2, 256, 3, 2, 64), {"mask": of((2, 1, 256, 256), jnp.bool_)}, {}, TRITON),
    ((2, 256, 3, 2, 64), {"mask": of((2, 2, 1, 256), jnp.bool_)}, {}, TRITON),
    ((2, 256, 3, 2, 64), {"mask": of((2, 1, 1, 1), jnp.bool_)}, {}, TRITON),
    ((2, 256, 3, 2, 64), {"bias": of((2, 1, 1, 256))}, {}, TRITON),
    ((2, 256, 3, 2, 64), {"key_value_seq_lengths": LENGTHS}, {}, TRITON),
    ((2, 256, 3, 2, 64), {"query_seq_lengths": LENGTHS}, {}, TRITON),
    ((2, 256, 3, 2, 64), {}, {"is_causal": True}, TRITON),
    ((2, 256, 3, 2, 64), {}, {"local_window_size": 9}, TRITON),
    ((2, 256, 3, 2, 64), {}, {"scale": -1.0}, TRITON),
    ((2, 256, 3, 2, 64), {}, {"implementation": "triton"}, TRITON),
    ((2, 128, 3, 2, 64), {}, {}, ["attention_dqkv", "attention_fwd"]),
    ((2, 320, 3, 2, 64), {}, {}, TRITON),
    ((2, 640, 3, 2, 64), {}, {}, TRITON),
    ((2, 256, 3, 2, 32), {}, {}, TRITON),
    ((2, 256, 3, 2, 128), {}, {}, TRITON),
)  # fmt: skip
DEVICES = (  # dtype, device, and whether the kernel of Mosaic GPU exists for them
    (jnp.bfloat16, {}, True),
    (jnp.float16, {"kind": "NVIDIA H100 80GB HBM3"}, True),
    (jnp.float32, {}, False),
    (jnp.bfloat16, {"kind": "NVIDIA A100-SXM4-80GB", "compute_capability": (8, 0)}, False),
    (jnp.bfloat16, {"kind": "NVIDIA B200", "compute_capability": (10, 0)}, False),
)


def selections():
    """Returns each case with each device. Cases that never take Mosaic GPU are slow, except with the first device."""
    found = []
    for case, device in itertools.product(SELECTED, DEVICES):
        quick = case[-1] is MOSAIC or device is DEVICES[0]
        found += [(*case, *device)] if quick else slow_cases((*case, *device))
    return found


@pytest.mark.parametrize(("shape", "arrays", "options", "expected", "dtype", "card", "supported"), selections())
def test_selection_follows_shape_and_options(shape, arrays, options, expected, dtype, card, supported, key, caplog):
    if "dropout_rate" in options:
        options = options | {"dropout_rng": key}

    def gradient(dout, qkv, arrays):
        return jax.vjp(lambda qkv: jaxft.qkv_attention(qkv, **arrays, **options), qkv)[1](dout)

    with dispatch.target(**card, multiprocessors=2):
        got = kernels(gradient, of((*shape[:-3], *shape[-2:]), dtype), of(shape, dtype), arrays)
    assert got == expected if supported else "mosaic" not in got
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"qkv": of((2, 256, 3, 4, 64)), "mask": of((2, 1, 1, 256), bool)}, None),
        ({"qkv": of((2, 512, 3, 4, 64), jnp.float16), "mask": of((1, 1, 1, 512), bool)}, None),
        ({"bias": of((4, 512, 512))}, "it takes no bias"),
        ({"limited": True}, "no causal mask and no window"),
        ({"return_residual": True}, "no gradient of the log-sum-exp"),
        ({"scale": 0.0}, "positive scales only"),
        ({"qkv": of((2, 512, 3, 4, 64), jnp.float32)}, "qkv is float32"),
        ({"qkv": of((2, 512, 3, 4, 128))}, "the head size is 128"),
        ({"qkv": of((2, 640, 3, 4, 64))}, "640 positions"),
        ({"qkv": of((2, 128, 3, 4, 64))}, "128 positions"),
        ({"qkv": of((2, 320, 3, 4, 64))}, "320 positions"),
        ({"mask": of((2, 1, 512, 512), bool)}, "the mask has shape"),
        ({"mask": of((2, 4, 1, 512), bool)}, "the mask has shape"),
        ({"qkv": of((2**14, 512, 3, 2, 64))}, "fewer than 2^31"),
    ],
)
def test_gradient_is_refused_where_the_kernel_lacks_it(changes, reason):
    plain = {"qkv": of((2, 512, 3, 4, 64)), "mask": None, "scale": 0.125, "return_residual": False, "limited": False}
    refused = support.attention_backward_unsupported(**{**plain, **changes})
    assert refused is None if reason is None else reason in refused


def test_other_cases_take_triton():
    """The cases are separate queries, keys and values, a log-sum-exp, and packed sequences."""

    def apart(x):
        return jaxft.dot_product_attention(x, x, x)

    def residual(x):
        return jaxft.qkv_attention(x, return_residual=True)

    def back_to_back(x):
        return jaxft.varlen_qkv_attention(x, jnp.array([0, 256]), max_seqlen=256)

    with dispatch.target(multiprocessors=1):
        for function, shape in (
            (apart, (1, 256, 2, 64)),
            (residual, (1, 256, 3, 2, 64)),
            (back_to_back, (256, 3, 2, 64)),
        ):

            def gradient(x, function=function):
                out, pull_back = jax.vjp(function, x)
                return pull_back(out)

            assert kernels(gradient, of(shape)) == TRITON


@pytest.mark.parametrize(
    ("heads", "taken"), [(12, False), (95, False), (96, True), (132, True), (144, False), (192, True), (384, True)]
)
def test_selection_follows_the_number_of_heads(heads, taken):
    with dispatch.target(multiprocessors=132):
        got = kernels(op_gradient, of((1, 256, 3, heads, 64)), of((1, 256, heads, 64)))
    assert got == (MOSAIC if taken else TRITON)


def test_jax_without_mosaic_takes_triton(monkeypatch):
    monkeypatch.setattr(support, "missing", lambda: "this JAX has none")
    with dispatch.target(multiprocessors=1):
        assert kernels(op_gradient, of((1, 256, 3, 2, 64)), of((1, 256, 2, 64))) == TRITON


def loss(qkv):
    return jnp.sum(jaxft.qkv_attention(qkv).astype(jnp.float32))


def test_lowers_in_64_bit_mode():
    def with_all(qkv, mask, key):
        out = jaxft.qkv_attention(qkv, mask=mask, dropout_rate=0.1, dropout_rng=key)
        return jnp.sum(out.astype(jnp.float32))

    qkv, mask, key = of((33, 256, 3, 4, 64)), of((33, 1, 1, 256), bool), jax.eval_shape(lambda: jax.random.key(0))
    with jax.enable_x64(True):
        assert "@mosaic_gpu_v2" in lower(jax.grad(loss), qkv)
        assert "@mosaic_gpu_v2" in lower(jax.grad(with_all), qkv, mask, key)


@pytest.mark.parametrize("masked", [True, *slow(False)])
def test_second_derivatives(masked, monkeypatch):
    """They are those of the reference, whatever the kernel does. A plain function takes its place here."""

    def backward(dout, qkv, rows, mask=None, *, scale, dropout_rate, programs):
        seen.append(rows.shape)
        return jax.lax.stop_gradient(plain_gradient(qkv, dout, mask=mask, scale=scale))

    for module, name in ((attention, "forward"), (attention_delta, "row_statistics")):
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *x, kernel=kernel, **more: kernel(*x, **more | {"interpret": True}))
    monkeypatch.setattr(attention_backward, "backward", backward)
    rng, seen = np.random.default_rng(8), []
    qkv = normal(rng, jnp.float32, qkv=(1, 256, 3, 1, 64))["qkv"]
    mask = jnp.asarray(rng.random((1, 1, 1, 256)) < 0.6) if masked else None

    def twice(attend):
        def loss(qkv):
            return jnp.sum(jnp.sin(attend(qkv.astype(jnp.bfloat16)).astype(jnp.float32)))

        return jax.jit(jax.grad(lambda qkv: jnp.sum(jax.grad(loss)(qkv) ** 2)))(qkv)

    with dispatch.target(multiprocessors=1):
        got = twice(lambda qkv: jaxft.qkv_attention(qkv, mask=mask))
    expected = twice(lambda qkv: jaxft.qkv_attention(qkv, mask=mask, implementation="xla"))
    assert seen
    assert jnp.linalg.norm(got - expected) < 0.02 * jnp.linalg.norm(expected)


def test_second_derivatives_lower():
    text = lower(jax.grad(lambda x: jnp.sum(jax.grad(loss)(x).astype(jnp.float32) ** 2)), of((33, 256, 3, 4, 64)))
    assert text.count("custom_call @mosaic_gpu") == 1


def test_shards():
    """The gradient varies over the axes that the packed array varies over."""
    spec = jax.sharding.PartitionSpec("x")
    text = lower(lambda x: jax.shard_map(jax.grad(loss), in_specs=spec, out_specs=spec)(x), of((33, 256, 3, 4, 64)))
    assert text.count("custom_call @mosaic_gpu") == 1
    with pytest.raises(ValueError, match="out_specs"):
        lower(
            lambda x: jax.shard_map(jax.grad(loss), in_specs=spec, out_specs=jax.sharding.PartitionSpec())(x),
            of((33, 256, 3, 4, 64)),
        )


# --- Compiled ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout_rate", [0.0, 0.1])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [256, 384, 512])
def test_kernel_spills_no_registers(length, masked, dropout_rate, monkeypatch, capfd):
    """The kernel fits into shared memory, too, with 12 and 16 heads."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")

    def gradient(dout, qkv, rows, mask):
        return attention_backward.backward(dout, qkv, rows, mask, scale=0.125, dropout_rate=dropout_rate, programs=132)

    with compiler_for(CARDS[-1]) as compiled:
        for heads in (12, 16):
            numbers = 4 if dropout_rate else 2
            compiled(
                gradient, of((32, length, heads, 64)), of((32, length, 3, heads, 64)),
                of((32, heads, length // 64, numbers, 64), jnp.float32),
                of((32, 1, 1, length), jnp.bool_) if masked else None,
            )  # fmt: skip
    text = "".join(capfd.readouterr())
    assert (
        re.findall(r"\d+ bytes spill \w+", re.sub("ptxas warning.*", "", text))
        == ["0 bytes spill stores", "0 bytes spill loads"] * 2
    )
