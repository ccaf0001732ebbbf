"""Every op under every transformation of JAX, compared with plain jnp under the same transformation.

A transformation here maps a function of named float arrays to another such function. It applies to an op, to
`jaxft.reference`, and to the reference in float64.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxft
from calls import CALLS
from cases import INTERPRET, for_h200, in_float64, jit, lower, normal, pytest_on, slow, slow_cases
from compare import assert_matches_oracle
from jaxft import dispatch, reference
from jaxft.tuning import rows as tuning_rows
from jaxft.tuning import table as tuning_table

BATCH, LENGTH, HEADS, SIZE = 2, 5, 2, 8
WIDTH = HEADS * SIZE
TRITON = {"implementation": "triton"}
MASK = np.arange(LENGTH) < np.array([5, 3])[:, None]  # [B, S]


@dataclasses.dataclass(frozen=True)
class Op:
    call: Callable  # arguments: functions, keyword arguments of all functions, **floats
    shapes: dict[str, tuple[int, ...]]  # the first axis of the first argument and of the result is the batch
    kernel: bool = True
    split: tuple[str, ...] = ()  # other arguments whose first axis is the batch


def in_chunks(call):
    """Makes the backward pass of softmax process a part of each row at a time."""

    def run(functions, options, **floats):
        with mock.patch.object(tuning_rows, "softmax_backward", lambda *sizes: tuning_table.RowConfig(2, 2, 1)):
            return call(functions, options, **floats)

    return run


ROWS = {"x": (BATCH, LENGTH, WIDTH), "bias": (WIDTH,)}
NORM = {"gamma": (WIDTH,), "beta": (WIDTH,)}
QKV = (BATCH, LENGTH, HEADS, SIZE)
IDS = {"input_ids": np.array([5, 2, 5, 0, 5], np.int32), "token_type_ids": np.array([0, 0, 2, 2, 2], np.int32)}
LABELS = np.array([3, -100, 0, 6, -100], np.int32)
OPS = {
    "layer_norm": Op(lambda m, o, **f: m.layer_norm(**f, **o), {"x": ROWS["x"], **NORM}),
    "bias_residual_layer_norm": Op(
        lambda m, o, **f: m.bias_residual_layer_norm(**f, **o, return_sum=True),
        {**ROWS, "residual": ROWS["x"], **NORM}, split=("residual",),
    ),
    "rms_norm": Op(
        lambda m, o, **f: m.rms_norm(**f, **o, return_sum=True),
        {"x": ROWS["x"], "residual": ROWS["x"], "gamma": (WIDTH,)}, split=("residual",),
    ),
    # A table for each sequence, so that the first argument has the batch in front.
    "embeddings_layer_norm": Op(
        lambda m, o, word, **f: jnp.stack([m.embeddings_layer_norm(**IDS, word=w, **f, **o) for w in word]),
        {"word": (BATCH, 6, WIDTH), "position": (LENGTH, WIDTH), "token_type": (3, WIDTH), **NORM},
    ),
    # JAX 0.12.0 cannot differentiate the erf of GELU within shard_map, so the activation is GELU with tanh.
    "bias_activation": Op(lambda m, o, **f: m.bias_activation(**f, **o, activation="gelu_tanh"), ROWS),
    "gated_activation": Op(lambda m, o, **f: m.gated_activation(**f, **o, activation="silu"), ROWS),
    "dense": Op(
        lambda m, o, **f: m.dense(**f, **o, activation="gelu_tanh"),
        {"x": ROWS["x"], "kernel": (WIDTH, WIDTH), "bias": (WIDTH,), "residual": ROWS["x"]}, split=("residual",),
    ),
    "dense_residual_layer_norm": Op(
        lambda m, o, **f: m.dense_residual_layer_norm(**f, **o),
        {"x": (BATCH, LENGTH, 512), "kernel": (512, WIDTH), "bias": (WIDTH,), "residual": ROWS["x"], **NORM},
        split=("residual",),
    ),
    "feed_forward_residual_layer_norm": Op(
        lambda m, o, **f: m.feed_forward_residual_layer_norm(**f, **o, activation="gelu_tanh"),
        {"x": ROWS["x"], "in_kernel": (WIDTH, 520), "in_bias": (520,), "out_kernel": (520, WIDTH),
         "out_bias": (WIDTH,), **NORM},
    ),
    "dot_product_attention": Op(
        lambda m, o, **f: m.dot_product_attention(**f, **o, return_residual=True),
        dict.fromkeys(("query", "key", "value"), QKV), split=("key", "value"),
    ),
    "qkv_attention": Op(
        lambda m, o, qkv: m.qkv_attention(qkv, mask=MASK[:1, None, None], **o),
        {"qkv": (BATCH, LENGTH, 3, HEADS, SIZE)},
    ),
    "qkv_attention with relative_bias": Op(
        lambda m, o, **f: m.qkv_attention(**f, **o),
        {"qkv": (BATCH, LENGTH, 3, HEADS, SIZE), "relative_bias": (HEADS, 5)},
    ),
    "softmax": Op(lambda m, o, **f: m.softmax(**f, **o), {"x": (BATCH, LENGTH), "bias": (LENGTH,)}),
    "log_softmax": Op(lambda m, o, x: m.log_softmax(x, mask=MASK[1], **o), {"x": (BATCH, LENGTH)}),
    "log_softmax of long rows": Op(
        in_chunks(lambda m, o, x, bias: m.log_softmax(x, scale=-0.7, bias=bias, mask=MASK[1], **o)),
        # With ten elements, the largest error would be a matter of chance.
        {"x": (BATCH, 16, LENGTH), "bias": (LENGTH,)},
    ),
    "qkv_bias_split_heads": Op(
        lambda m, o, qkv, bias: m.qkv_bias_split_heads(qkv, bias, HEADS, **o),
        {"qkv": (BATCH, LENGTH, 3 * WIDTH), "bias": (3 * WIDTH,)},
    ),
    "merge_heads": Op(lambda m, o, x: m.merge_heads(x, **o), {"x": QKV}),
    "permute": Op(lambda m, o, x: m.permute(x, (0, 2, 1), **o), {"x": ROWS["x"]}),
    "rotary": Op(
        lambda m, o, qkv: m.rotary(qkv, np.arange(LENGTH, dtype=np.int32), **o),
        {"qkv": (BATCH, LENGTH, 3, HEADS, SIZE)},
    ),
    "dense_rotary": Op(
        lambda m, o, **f: m.dense_rotary(**f, positions=np.arange(LENGTH, dtype=np.int32), num_heads=HEADS, **o),
        {**ROWS, "kernel": (WIDTH, 3 * WIDTH), "bias": (3 * WIDTH,)},
    ),
    "varlen_qkv_attention": Op(
        # Sequences of one row, so that each device has whole ones.
        lambda m, o, qkv: m.varlen_qkv_attention(qkv, np.arange(len(qkv) + 1, dtype=np.int32), max_seqlen=2, **o),
        {"qkv": (BATCH, 3, HEADS, SIZE)},
    ),
    # A loss for each sequence, so that the result has the batch in front.
    "linear_cross_entropy": Op(
        lambda m, o, x, **f: jnp.stack([m.linear_cross_entropy(rows, labels=LABELS, **f, **o)[0] for rows in x]),
        {"x": ROWS["x"], "embedding": (7, WIDTH), "bias": (7,)}, kernel=False,
    ),
    "remove_padding": Op(
        lambda m, o, x: m.remove_padding(x, np.broadcast_to(MASK[1], x.shape[:2]), capacity=4 * x.shape[0])[0],
        {"x": ROWS["x"]}, kernel=False,
    ),
    "restore_padding": Op(
        lambda m, o, x: m.restore_padding(x, np.arange(len(x), dtype=np.int32) * 2 + 1, batch=len(x), length=2),
        {"x": (BATCH, WIDTH)}, kernel=False,
    ),
}  # fmt: skip


# These ops share the code for transformations with others, so `make test` leaves them out where it can.
RELATED = ("layer_norm", "rms_norm", "embeddings_layer_norm", "dense_residual_layer_norm",
           "feed_forward_residual_layer_norm", "gated_activation", "qkv_attention", "qkv_attention with relative_bias",
           "log_softmax of long rows")  # fmt: skip
KERNELS = [name for name, op in OPS.items() if op.kernel]
SOME_KERNELS = [*(n for n in KERNELS if n not in RELATED), *slow(*(n for n in KERNELS if n in RELATED))]


class Plain:
    """`jaxft.reference` with the signatures of the public ops."""

    @staticmethod
    def qkv_attention(qkv, **options):
        return reference.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], **options)

    @staticmethod
    def varlen_qkv_attention(qkv, cu_seqlens, **options):
        return reference.varlen_qkv_attention(qkv, jnp.asarray(cu_seqlens), **options)

    def __getattr__(self, name):
        return getattr(reference, name)


# --- Transformations -----------------------------------------------------------------------------------------------


def total(out):
    """Returns a scalar in which every element has another weight."""
    sums = []
    for x in jax.tree.leaves(out):
        weights = np.random.default_rng(0).standard_normal(x.shape).astype(np.float32).astype(x.dtype)
        sums.append(jnp.sum(x * weights, dtype=jnp.float64 if x.dtype == jnp.float64 else jnp.float32))
    return sum(sums)


def grad(function, op):
    return lambda **f: jax.grad(lambda f: total(function(**f)))(f)


def grad_of_remat(function, op):
    return grad(jax.checkpoint(function), op)


def third_grad(function, op):
    """Third gradient of a function that is linear neither in the result nor in its gradients."""

    def of(function):
        return jax.grad(lambda f: total(jax.tree.map(jnp.sin, function(f))))

    return lambda **f: of(of(of(lambda f: jax.tree.map(finite, function(**f)))))(f)


def finite(x):
    return jnp.where(jnp.isfinite(x), x, 0.0)


def vmap(function, op):
    """Maps every argument."""
    return lambda **f: jax.vmap(lambda f: function(**f))(jax.tree.map(lambda x: jnp.stack([x, x * 0.5, -x]), f))


def vmap_over_the_first(function, op):
    first = next(iter(op.shapes))

    def mapped(**f):
        axes = {name: 1 if name == first else None for name in f}
        return jax.vmap(lambda f: function(**f), in_axes=(axes,), out_axes=2)(
            f | {first: jnp.stack([f[first], f[first] * 0.5], axis=1)}
        )

    return mapped


def vmap_of_grad(function, op):
    return vmap(grad(function, op), op)


def grad_of_vmap(function, op):
    return grad(vmap(function, op), op)


def grad_of_scan(function, op):
    """Gradient of a scan over layers that are recomputed in the backward pass."""
    first = next(iter(op.shapes))

    def layers(**f):
        def layer(x, scale):
            return x * 0.5, function(**(f | {first: x * scale}))

        return jax.lax.scan(jax.checkpoint(layer), f[first], jnp.array([1.0, 0.5, 2.0], f[first].dtype))[1]

    return grad(layers, op)


def shard(function, op, check_vma=True):
    """Shards over the devices that there are, at most two."""
    mesh = jax.make_mesh((min(jax.device_count(), BATCH),), ("data",), axis_types=(AxisType.Auto,))
    return lambda **f: jax.shard_map(
        lambda f: function(**f), mesh=mesh, in_specs=(specs(op),), out_specs=P("data"), check_vma=check_vma
    )(f)


def specs(op):
    return {name: P("data") if name in (next(iter(op.shapes)), *op.split) else P() for name in op.shapes}


def grad_of_shard(function, op, check_vma=True):
    return grad(shard(function, op, check_vma), op)


TRANSFORMS = [grad_of_remat, vmap, vmap_over_the_first, vmap_of_grad, grad_of_vmap, grad_of_scan]
SHARDED = [shard, grad_of_shard]
ENOUGH = [grad_of_vmap, shard]  # the other transformations repeat parts of these


def is_slow(transform, name, implementation):
    """Returns whether `make test` leaves the case out. It has all transformations of two ops, and few of the others."""
    if jax.device_count() > 1:
        return name not in ("bias_residual_layer_norm", "dense", "linear_cross_entropy")
    if name in ("bias_residual_layer_norm", "linear_cross_entropy"):
        return OPS[name].kernel and implementation == "xla"
    if not OPS[name].kernel:
        return transform != vmap_of_grad
    return name in RELATED or transform not in ENOUGH


def every(transforms):
    cases = [
        (transform, name, implementation)
        for name, op in OPS.items() for implementation in ("triton", "xla")[not op.kernel :] for transform in transforms
        if (transform != vmap_of_grad if implementation == "triton"  # grad_of_vmap tests as much
            else transform in (vmap_of_grad, grad_of_scan, grad_of_shard))
    ]  # fmt: skip
    return [
        pytest.param(*case, id=f"{case[0].__name__}-{case[1]}-{case[2]}", marks=[pytest.mark.slow] * is_slow(*case))
        for case in cases
    ]


def assert_composes(transform, name, implementation):
    op = OPS[name]
    floats = normal(np.random.default_rng(0), jnp.float32, **op.shapes)
    plain = transform(lambda **f: op.call(Plain(), {}, **f), op)
    run = jit(lambda f: plain(**f))
    transformed = transform(lambda **f: op.call(jaxft, {"implementation": implementation}, **f), op)
    got = jit(lambda f: transformed(**f))(floats)
    assert_matches_oracle(got, run(floats), in_float64(run, floats))


@pytest.mark.parametrize(("transform", "name", "implementation"), every(TRANSFORMS))
def test_op_composes_with_transformation(transform, name, implementation):
    assert_composes(transform, name, implementation)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", "log_softmax of long rows", "layer_norm", "dense"])
def test_third_derivatives(name):
    """The other ops define their gradients in the same ways."""
    assert_composes(third_grad, name, "triton")


@pytest.mark.parametrize(("transform", "name", "implementation"), every(SHARDED))
def test_op_runs_under_shard_map(transform, name, implementation):
    """JAX's checks of varying axes are on, except for interpreted kernels: Pallas' interpreter fails them."""
    check_vma = not (INTERPRET and implementation == "triton")
    assert_composes(functools.partial(transform, check_vma=check_vma), name, implementation)


@pytest.mark.parametrize("name", SOME_KERNELS)
def test_shards_for_a_gpu(name):
    """The checks are on: kernels declare the axes that their results vary over, in the gradient too."""
    op = OPS[name]
    floats = {n: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for n, shape in op.shapes.items()}

    def sharded(f):
        return jax.shard_map(lambda f: op.call(jaxft, TRITON, **f), in_specs=(specs(op),), out_specs=P("data"))(f)

    assert "@__gpu$xla.gpu.triton" in lower(sharded, floats, axis="data")
    gradient = jax.grad(lambda f: total(sharded(f)))
    lower(gradient, floats, axis="data")
    lower(jax.grad(lambda f: total(gradient(f))), floats, axis="data")


@pytest.mark.skipif(jax.device_count() > 1, reason="the other tests have two devices already")
@pytest.mark.parametrize("selected", ["not slow", *slow("slow")])
def test_shards_over_two_devices(selected):
    files = __file__, str(Path(__file__).with_name("test_training.py"))
    told = pytest_on(2, "-m", selected, "-k", "grad_of_shard or labels_count_equally", *files)
    assert all(name in told for name in ("grad_of_shard", "labels_count_equally", "passed"))


@pytest.mark.parametrize("derivative", ["value", *slow("gradient")])
@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_vmap_over_masks(implementation, derivative):
    """Lengths, masks, segment ids and a bias can be mapped like other arguments."""
    qkv = normal(np.random.default_rng(1), jnp.float32, qkv=(BATCH, LENGTH, 3, HEADS, SIZE))["qkv"]
    lengths = jnp.array([[5, 3], [0, 1], [2, 5]], jnp.int32)
    rng = np.random.default_rng(2)
    mask = jnp.asarray(rng.random((3, BATCH, 1, LENGTH, LENGTH)) < 0.7)
    ids = jnp.asarray(rng.integers(0, 2, (3, BATCH, LENGTH)), jnp.int32)
    bias = normal(rng, jnp.float32, bias=(3, HEADS, LENGTH, LENGTH))["bias"]

    def run(lengths, mask, ids, bias):
        def attend(qkv, bias):
            return jaxft.qkv_attention(
                qkv, bias, mask, key_value_seq_lengths=lengths, query_segment_ids=ids, key_value_segment_ids=ids,
                implementation=implementation,
            )  # fmt: skip

        if derivative == "value":
            return attend(qkv, bias)
        return jax.grad(lambda *floats: total(attend(*floats)), (0, 1))(qkv, bias)

    one = jit(run)
    with jax.default_matmul_precision("highest"):
        got = jit(jax.vmap(run))(lengths, mask, ids, bias)
        each = [one(*masks) for masks in zip(lengths, mask, ids, bias, strict=True)]
    jax.tree.map(lambda got, *each: np.testing.assert_allclose(got, jnp.stack(each), atol=1e-6), got, *each)


@pytest.mark.parametrize(
    ("implementation", "name"),
    [
        *(("triton", name) for name in KERNELS if name not in RELATED),
        *(("xla", name) for name, op in OPS.items() if not op.kernel),
        *slow_cases(*(("triton", name) for name in RELATED), *(("xla", name) for name in KERNELS)),
    ],
)
def test_jit_and_eager_agree(implementation, name):
    op = OPS[name]
    floats = normal(np.random.default_rng(3), jnp.float32, **op.shapes)
    plain = jit(lambda f: op.call(Plain(), {}, **f))

    def call(f):
        return op.call(jaxft, {"implementation": implementation}, **f)

    for out in (call(floats), jax.jit(call)(floats)):
        assert_matches_oracle(out, plain(floats), in_float64(plain, floats))


VMAPS = {
    "vmap": (lambda f: jax.vmap(f), P("d")),
    "grad of vmap": (lambda f: jax.grad(lambda x: jnp.sum(jax.vmap(f)(x))), P("d")),
    "vmap of grad": (lambda f: jax.vmap(jax.grad(lambda x: jnp.sum(f(x)))), P("d")),
    "vmap of jit": (lambda f: jax.vmap(jax.jit(f)), P("d")),
    "vmap of remat": (lambda f: jax.vmap(jax.checkpoint(f)), P("d")),
    "nested": (lambda f: jax.vmap(jax.vmap(f)), P("d", "e")),
    "inner of nested": (lambda f: jax.vmap(jax.vmap(f)), P(None, "d")),
    "two axes": (lambda f: jax.vmap(f), P(("d", "e"))),
    "spmd_axis_name": (lambda f: jax.vmap(f, spmd_axis_name="d"), P("d")),
    "another axis": (lambda f: jax.vmap(f), P(None, None, "d")),
}


@pytest.mark.parametrize("name", VMAPS)
def test_vmap_over_explicit_axes_runs_kernels(name):
    transform, spec = VMAPS[name]
    mesh = AbstractMesh((4, 2), ("d", "e"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.ShapeDtypeStruct((8, 4, 4, 8), jnp.float32, sharding=NamedSharding(mesh, spec))
    with dispatch.target(), jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(transform(jaxft.layer_norm)).trace(x)
    assert "pallas_call" in str(traced.jaxpr)
    assert traced.out_info.sharding.is_equivalent_to(x.sharding, x.ndim)


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.kernel])
def test_arrays_made_before_a_mesh_have_the_same_plan(name):
    """In the context of a mesh with Explicit axes, an activation or a new axis would add the mesh to their types."""
    arrays = {n: jnp.asarray(x) for n, x in CALLS[name].arrays().items()}
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))

    def plans():
        call = functools.partial(CALLS[name].function, **arrays, implementation="triton")
        return [record.plan for record in jaxft.explain(call)]

    alone = plans()
    with jax.set_mesh(mesh):
        assert plans() == alone


# `bundle` takes a tree of arrays, and its call concatenates them outside of the op.
@pytest.mark.parametrize(
    "name", ["layer_norm", "dense", *slow(*sorted(CALLS.keys() - {"layer_norm", "dense", "bundle"}))]
)
def test_numpy_parameters_have_gradients_over_explicit_axes(name):
    """The type of a NumPy array that is differentiated has no mesh."""
    call, mesh = CALLS[name], AbstractMesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    mapped, *others = call.arrays().items()
    floats = {n: x for n, x in others if jnp.issubdtype(x.dtype, jnp.floating)}
    fixed = {n: x for n, x in others if n not in floats}

    def gradients(x):
        return jax.grad(lambda floats: total(call.function(**{mapped[0]: x}, **floats, **fixed, implementation=None)))(
            floats
        )

    shape, dtype = (4, *mapped[1].shape), mapped[1].dtype
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("d")))
    with dispatch.target(), jax.sharding.use_abstract_mesh(mesh):
        found = jax.eval_shape(jax.vmap(gradients), x)
    assert {n: d.shape for n, d in found.items()} == {n: (4, *d.shape) for n, d in floats.items()}


# Arguments that kernels cannot run with where their first axis is sharded, besides gamma and beta.
REFUSED = {
    "layer_norm (a row)": "x",
    "bias_residual_layer_norm": "bias",
    "embeddings_layer_norm": "word position token_type",
    "embeddings_layer_norm (ids)": "word position token_type",
    "gated_activation": "bias",
    "log_softmax": "bias",
    "qkv_bias_split_heads": "bias",
    "dense_rotary": "kernel bias",
    "dot_product_attention (no batch)": "query key value bias mask",
    "qkv_attention (mask)": "bias",
    "varlen_qkv_attention": "qkv cu_seqlens",
    "varlen_qkv_attention (relative_bias)": "qkv cu_seqlens",
    "dense (gate)": "bias",
    "dense_residual_layer_norm": "bias",
    "feed_forward_residual_layer_norm": "in_kernel out_bias",
    "feed_forward_residual_layer_norm (pre-norm)": "in_kernel out_kernel",
    "remove_padding": "x mask",
    "restore_padding": "x indices",
}


@pytest.mark.parametrize(
    "name", [name for name, call in CALLS.items() if call.kernel and not name.startswith("bundle")]
)
def test_explicit_axes_are_mapped_or_refused_by_name(name):
    """A call that is refused by name runs by XLA if no implementation is named."""
    call = CALLS[name]
    arrays = call.arrays()
    refused = {"gamma", "beta", *REFUSED.get(name, "").split()}
    with for_h200("data", AxisType.Explicit) as mesh:
        for sharded in arrays:
            shapes = {
                n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(*["data"] * (n == sharded))))
                for n, x in arrays.items()
            }
            named = jax.jit(functools.partial(call.function, **TRITON))
            if sharded not in refused:
                assert "pallas_call" in str(named.trace(**shapes).jaxpr)
                continue
            with pytest.raises(NotImplementedError, match=f": {sharded} is sharded over Explicit axes.*reshard it"):
                named.trace(**shapes)
            assert "pallas_call" not in str(jax.jit(call.function).trace(**shapes).jaxpr)


def test_explicit_axes_beside_manual_ones_are_refused():
    mesh = AbstractMesh((2, 2), ("d", "e"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.ShapeDtypeStruct((4, 4, 8), jnp.float32, sharding=NamedSharding(mesh, P("d", "e")))

    def run(implementation):
        call = functools.partial(jaxft.layer_norm, implementation=implementation)
        return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P("d"), out_specs=P("d"), axis_names={"d"})).trace(x)

    with dispatch.target(), jax.sharding.use_abstract_mesh(mesh):
        with pytest.raises(NotImplementedError, match="x is in a mesh with Explicit axes, .* over all axes"):
            run("triton")
        assert "pallas_call" not in str(run(None).jaxpr)


# --- Export and NNX ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOME_KERNELS)
def test_export_for_a_gpu(name):
    """Export works with the disabled checks that the constant names, and only with them."""
    op = OPS[name]
    floats = {n: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for n, shape in op.shapes.items()}

    def function():  # jax.jit returns earlier traces of the same function
        return jax.jit(lambda f: op.call(jaxft, TRITON, **f))

    with for_h200():
        exported = jax.export.export(function(), platforms=["cuda"], disabled_checks=jaxft.EXPORT_DISABLED_CHECKS)(
            floats
        )
        with pytest.raises(ValueError, match="__gpu\\$xla.gpu.triton"):
            jax.export.export(function(), platforms=["cuda"])(floats)
    assert "@__gpu$xla.gpu.triton" in exported.mlir_module()
    assert exported.platforms == ("cuda",)


def symbolic(call, names):
    """Returns arrays of the call's shapes with symbolic sizes, each replaced by `names` where it has one there."""
    replace = functools.partial(re.sub, r"\b[a-z]\b", lambda size: names.get(size[0], size[0]))
    structs = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in call.arrays().items()}
    return jax.export.symbolic_args_specs(structs, {name: replace(shape) for name, shape in call.shapes.items()})


@pytest.mark.parametrize("names", [{}, *slow({"b": "2*b", "m": "3*m"}, {"t": "5", "s": "6"}, {"s": "t"})], ids=str)
@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("bundle", "layer_norm (a row)")])
def test_export_of_symbolic_sizes(name, names):
    """XLA runs ops with symbolic sizes, also on a GPU: forward and gradient. Kernels have fixed sizes."""
    with dispatch.target():
        function = jax.jit(functools.partial(CALLS[name].run, None))
        exported = jax.export.export(function, platforms=["cuda"])(symbolic(CALLS[name], names))
    assert any(not isinstance(size, int) for aval in exported.out_avals for size in aval.shape)


@pytest.mark.parametrize("name", [
    "embeddings_layer_norm", "varlen_qkv_attention",
    *slow(*(name for name in CALLS if name not in ("bundle", "layer_norm (a row)", "embeddings_layer_norm",
                                                   "varlen_qkv_attention"))),
])  # fmt: skip
def test_exported_op_runs_with_any_size(name):
    call = CALLS[name]
    run = jax.jit(functools.partial(call.run, "xla"))
    exported = jax.export.export(run)(symbolic(call, {}))
    sizes = {"b": 3, "t": 5} if name == "restore_padding" else {"b": 2, "t": 3, "s": 4, "m": 7}
    arrays = call.arrays(**sizes)
    got, expected = exported.call(arrays), run(arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)


MAPPED = ("bias_residual_layer_norm", "dense", "dense_residual_layer_norm", "qkv_bias_split_heads", "remove_padding")


@pytest.mark.parametrize("name", [*MAPPED, *slow(*(name for name, call in CALLS.items() if name not in MAPPED))])
def test_vmap_over_a_symbolic_axis(name):
    """XLA runs the op, also on a GPU: forward and gradient. A named kernel is refused."""
    call = CALLS[name]
    arrays = {n: jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for n, x in call.arrays().items()}
    shapes = {n: f"v, {', '.join(map(str, x.shape[1:]))}" for n, x in arrays.items()}
    symbols = jax.export.symbolic_args_specs(arrays, shapes)

    def run(floats, others, implementation):
        out = call.function(**floats, **others, implementation=implementation)
        return sum(jnp.sum(x * x) for x in jax.tree.leaves(out)), out

    def export(implementation):
        def both(arrays):
            floats = {n: x for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
            others = {n: x for n, x in arrays.items() if n not in floats}
            return jax.grad(functools.partial(run, implementation=implementation), has_aux=True)(floats, others)

        return jax.export.export(jax.jit(jax.vmap(jax.jit(both))), platforms=["cuda"])

    with dispatch.target():
        assert "triton" not in export(None)(symbols).mlir_module()
        if call.kernel and name != "bundle":
            with pytest.raises(NotImplementedError, match="'triton' cannot be used: a vmap has a symbolic size, v"):
                export("triton")(symbols)


def test_static_arguments_may_be_symbolic():
    """Capacity, batch, length and max_seqlen may be sizes of other arrays, in programs of several scopes."""

    def attend(x, mask):
        packed = jaxft.remove_padding(x, mask, capacity=mask.size)
        key = jax.random.key(0)
        options = {"max_seqlen": mask.shape[1], "dropout_rate": 0.1, "dropout_rng": key}
        out = jaxft.varlen_qkv_attention(packed.x, packed.cu_seqlens, **options)
        return jaxft.restore_padding(out, packed.indices, batch=mask.shape[0], length=mask.shape[1])

    for _ in range(2):
        structs = [jax.ShapeDtypeStruct((2, 3, 3, 2, 8), jnp.float32), jax.ShapeDtypeStruct((2, 3), jnp.bool_)]
        shapes = jax.export.symbolic_args_specs(structs, ["b, t, 3, 2, 8", "b, t"])
        (out,) = jax.export.export(jax.jit(attend))(*shapes).out_avals
        assert str(out.shape) == "(b, t, 2, 8)"


def test_symbolic_tokens_beyond_the_positions_give_nan():
    call = functools.partial(jaxft.embeddings_layer_norm, word=jnp.ones((4, 8)), position=jnp.ones((3, 8)))
    shapes = jax.export.symbolic_args_specs(jax.ShapeDtypeStruct((1, 2), jnp.int32), "b, t")
    exported = jax.export.export(jax.jit(lambda ids: call(ids)))(shapes)
    got = exported.call(jnp.zeros((2, 5), jnp.int32))
    np.testing.assert_array_equal(jnp.isnan(got).any(axis=-1), np.arange(5) >= [[3], [3]])


def test_symbolic_head_size_needs_a_scale():
    shapes = jax.export.symbolic_args_specs(jax.ShapeDtypeStruct((2, 3, 2, 8), jnp.float32), "b, t, 2, h")
    with pytest.raises(ValueError, match="scale must be a number where the head size is symbolic, h, got None"):
        jax.export.export(jax.jit(lambda x: jaxft.dot_product_attention(x, x, x)))(shapes)


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_nnx(implementation):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.kernel = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)))
            self.bias, self.gamma = nnx.Param(jnp.ones(WIDTH)), nnx.Param(jnp.ones(WIDTH))

        def __call__(self, x, m, **options):
            h = m.dense(x, self.kernel[...])
            return m.bias_residual_layer_norm(h, self.bias[...], x, self.gamma[...], None, **options)

    x = normal(np.random.default_rng(4), jnp.float32, x=(LENGTH, WIDTH))["x"]
    block = Block(nnx.Rngs(0))
    got = nnx.jit(nnx.grad(lambda block, x: total(block(x, jaxft, implementation=implementation))))(block, x)
    graph, params = nnx.split(block)
    plain = jit(jax.grad(lambda params, x: total(nnx.merge(graph, params)(x, reference))))
    expected, exact = plain(params, x), in_float64(plain, params, x)
    assert_matches_oracle(*(nnx.to_pure_dict(state) for state in (got, expected, exact)))


def test_gelu_is_differentiable_twice_inside_shard_map():
    """JAX 0.12's own derivative of erfc raises there."""
    x, mesh = jnp.linspace(-3.0, 3.0, 16), jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))

    def derivatives(x):
        def gelu(x):
            return jaxft.bias_activation(x[None], None, implementation="xla")[0]

        return [jax.vmap(f)(x) for f in (gelu, jax.grad(gelu), jax.grad(jax.grad(gelu)), jax.jacfwd(jax.grad(gelu)))]

    spec = P("data")
    got = jax.jit(jax.shard_map(derivatives, mesh=mesh, in_specs=spec, out_specs=spec))(x)
    density = jnp.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    cdf = jax.scipy.stats.norm.cdf(x)
    for found, exact in zip(got, (x * cdf, cdf + x * density, *[density * (2 - x**2)] * 2), strict=True):
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6)
