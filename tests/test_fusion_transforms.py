"""`jaxft.fuse` with JAX's transformations, its options, its guards, and its choice of what is worth it."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fusion_cases as cases
import jaxft
from cases import in_float64, pytest_on, slow, slow_cases
from fusion_cases import ATT, BA, CASES, DRLN, EMPTY, FF, LN, PAD, normal
from jaxft import cli, dispatch
from jaxft.fusion import plan, transform

LAYER = {ATT: 1, DRLN: 1, FF: 1}


@pytest.fixture(autouse=True)
def standard_promotion():
    """Turns strict dtype promotion off: Flax does not run under it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def layer():
    with jax.numpy_dtype_promotion("standard"):
        fn, (params, x) = CASES["a BERT layer"].make(jnp.float32)
    return fn, params, x


def fuse(fn, **options):
    return jaxft.fuse(fn, force=True, **options)


def assert_same(actual, expected, tolerance=3e-5):
    top = max(float(np.max(np.abs(x))) for x in jax.tree.leaves(expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance * top, rtol=0), actual, expected)


def loss_of(fn):
    return lambda *args: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(fn(*args)))


# --- Transformations ---------------------------------------------------------------------------------------------


def test_jit_composes_in_both_orders(layer):
    fn, *args = layer
    expected = fn(*args)
    for fused in (fuse(fn), jax.jit(fuse(fn)), fuse(jax.jit(fn))):
        assert_same(fused(*args), expected)
    assert fuse(jax.jit(fn)).report(*args).counts == LAYER


def test_gradient_of_fused_is_the_gradient(layer):
    fn, *args = layer
    assert_same(jax.jit(jax.grad(loss_of(fuse(fn))))(*args), jax.jit(jax.grad(loss_of(fn)))(*args))


def test_fused_gradient_is_left_alone(layer):
    fn, *args = layer
    gradient = jax.value_and_grad(loss_of(fn))
    report = fuse(gradient).report(*args)
    assert report.counts == {} and any("fuse first" in record.reason for record in report)
    assert str(jax.make_jaxpr(fuse(gradient))(*args)) == str(jax.make_jaxpr(gradient)(*args))


def test_fuse_is_idempotent(layer):
    fn, *args = layer
    once = fuse(fn)
    assert fuse(once).report(*args) == once.report(*args)
    assert str(jax.make_jaxpr(fuse(once))(*args)) == str(jax.make_jaxpr(once)(*args))
    assert fuse(jax.jit(once)).report(*args).counts == {}


def test_fuse_of_fuse_keeps_strict_and_static_arguments():
    def scaled(x, n, how):
        return jax.nn.softmax(x * int(n), -1) if how == "softmax" else x

    once = fuse(scaled, static_argnums=1, strict=True)
    twice = fuse(once, static_argnames="how")
    x = jax.random.normal(jax.random.key(0), (4, 8))
    np.testing.assert_allclose(twice(x, 2, "softmax"), jax.nn.softmax(2 * x, -1), rtol=1e-6)
    with pytest.raises(ValueError, match="nothing was replaced"):
        twice(x, 2, "nothing")
    other = fuse(once, only="softmax")
    np.testing.assert_allclose(other(x, np.float32(2), "softmax"), jax.nn.softmax(2 * x, -1), rtol=1e-6)
    strict = fuse(fuse(scaled, static_argnums=(1, 2)), static_argnums=(1, 2), strict=True)
    with pytest.raises(ValueError, match="nothing was replaced"):
        strict(x, 2, "nothing")


CONTROL = {
    "vmap": lambda fn: lambda p, x: jax.vmap(fn, (None, 0))(p, jnp.stack([x, 2 * x])),
    "scan": lambda fn: lambda p, x: jax.lax.scan(lambda c, _: (fn(p, c), jnp.mean(c)), x, None, length=3)[0],
    "while": lambda fn: lambda p, x: jax.lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, fn(p, c[1])), (0, x))[1],
    "cond": lambda fn: lambda p, x: jax.lax.cond(x[0, 0, 0] < 9, lambda: fn(p, x), lambda: x),
    "remat": lambda fn: jax.checkpoint(fn, policy=jax.checkpoint_policies.nothing_saveable),
    "jit with options": lambda fn: jax.jit(fn, donate_argnums=1),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTROL)
def test_control_flow_is_fused_inside(name, layer):
    fn, params, x = layer
    whole = CONTROL[name](fn)
    assert fuse(whole).report(params, x).counts == LAYER
    assert_same(jax.jit(fuse(whole))(params, x + 0), jax.jit(whole)(params, x + 0))


@pytest.mark.parametrize("name", ["scan", *slow("remat")])
def test_control_flow_is_differentiated(name, layer):
    fn, *args = layer
    whole = CONTROL[name](fn)
    assert_same(jax.jit(jax.grad(loss_of(fuse(whole))))(*args), jax.jit(jax.grad(loss_of(whole)))(*args))


def test_policy_of_checkpoint_stays(layer):
    fn, *args = layer
    policy = jax.checkpoint_policies.dots_saveable
    program = jax.make_jaxpr(fuse(jax.checkpoint(fn, policy=policy, prevent_cse=False)))(*args)
    (again,) = (eqn.params for eqn in program.eqns if "policy" in eqn.params)
    assert again["policy"] is policy and again["prevent_cse"] is False


def mesh_of(axis_type):
    """Returns a mesh of the devices that there are, at most two."""
    return jax.make_mesh((min(2, jax.device_count()),), ("d",), axis_types=(axis_type,))


def test_shard_map_composes_in_both_orders():
    fn, args = CASES["a ViT block"].make(jnp.float32)

    def sharded(fn):
        return jax.shard_map(fn, mesh=mesh_of(AxisType.Auto), in_specs=(P(), P("d")), out_specs=P("d"))

    assert sum(fuse(sharded(fn)).report(*args).counts.values()) == 4
    expected = jax.jit(jax.value_and_grad(loss_of(fn)))(*args)
    assert_same(jax.jit(jax.value_and_grad(loss_of(fuse(sharded(fn)))))(*args), expected)
    assert_same(jax.jit(jax.value_and_grad(loss_of(sharded(fuse(fn)))))(*args), expected)


def test_unchecked_shard_map_stays_unchecked():
    def layer(x, b):  # the result is the same on all devices, which JAX cannot know
        return jax.lax.all_gather(jax.nn.gelu(x + b), "d", tiled=True)

    whole = jax.shard_map(layer, mesh=mesh_of(AxisType.Auto), in_specs=(P("d"), P()), out_specs=P(), check_vma=False)
    args = normal(0, 4, 8), normal(1, 8)
    assert fuse(whole).report(*args).counts == {BA: 1}
    assert_same(jax.jit(fuse(whole))(*args), jax.jit(whole)(*args))


def test_partially_manual_shard_map_stays_so():
    mesh = jax.make_mesh((1, 1), ("d", "e"), axis_types=(AxisType.Auto,) * 2)
    whole = jax.shard_map(lambda x: jax.nn.softmax(x), mesh=mesh, in_specs=P("d"), out_specs=P("d"), axis_names={"d"})
    (node,) = jax.make_jaxpr(fuse(whole))(normal(0, 4, 8)).eqns
    assert node.params.get("newly_manual_axes", node.params.get("manual_axes")) == {"d"}


def test_constants_vary_over_axes_that_jax_chose(monkeypatch):
    monkeypatch.setattr(plan, "_gains_in_gradients_only", lambda *_: True)
    fn = CASES["a LayerNorm of one row"].make(jnp.float32)[0]
    whole = jax.shard_map(fn, mesh=mesh_of(AxisType.Auto), in_specs=(P("d"), P(), P()), out_specs=P("d"))
    args = normal(0, 2, 8), normal(1, 8), normal(2, 8)
    assert_same(jax.jit(fuse(whole))(*args), jax.jit(whole)(*args))


def test_metadata_of_equations_stay():
    def fn(x):
        y = jax.nn.softmax(x)
        with set_xla_metadata(kept="yes"):
            return jnp.sin(y)

    assert 'kept = "yes"' in jax.jit(fuse(fn)).lower(normal(0, 4, 8)).as_text()


def test_matmuls_of_two_precisions_have_own_kernels():
    def fn(x, w, b):
        y = jax.nn.gelu(jnp.dot(x, w, precision="default") + b, approximate=False)
        return y, jax.nn.gelu(jnp.dot(x, w, precision="highest") + b, approximate=False)

    with dispatch.target("NVIDIA H200", (9, 0)):
        first, second = fuse(fn).report(normal(0, 4096, 1024), normal(1, 1024, 1024), normal(2, 1024))
    assert first.op == second.op == "dense" and first.implementation != second.implementation


def test_passes_with_some_kernels_are_not_plain():
    """On this card the matmul runs in XLA, and LayerNorm in a kernel where a gradient is taken."""

    def fn(x, w, b, g, beta):
        y = x + jnp.dot(x, w) + b
        centred = y - y.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * g + beta

    vectors = [normal(i, 64) for i in range(3)]
    with dispatch.target("NVIDIA A100-SXM4-80GB", (8, 0)):
        (record,) = jaxft.fuse(fn).report(normal(3, 128, 64), normal(4, 64, 64), *vectors)
    assert record.op == DRLN and "plain XLA" not in record.reason


def test_collectives_of_shard_map_stay():
    def layer(x, g, w1, w2):  # a feed-forward half whose kernels are cut over the devices
        return jax.lax.psum(jax.nn.gelu(CASES["RMSNorm by hand"].make(x.dtype)[0](x, g) @ w1) @ w2, "d")

    specs = P(), P(), P(None, "d"), P("d")
    whole = jax.shard_map(layer, mesh=mesh_of(AxisType.Auto), in_specs=specs, out_specs=P())
    args = normal(0, 2, 5, 16), normal(1, 16), normal(2, 16, 32), normal(3, 32, 16)
    assert fuse(whole).report(*args).counts == {"rms_norm": 1, "dense": 1}
    assert_same(jax.jit(fuse(whole))(*args), jax.jit(whole)(*args))
    over_all = (0, 1, 2, 3)
    assert_same(jax.jit(jax.grad(loss_of(fuse(whole)), over_all))(*args),
                jax.jit(jax.grad(loss_of(whole), over_all))(*args))  # fmt: skip


@pytest.mark.parametrize("spec", [P(None, None, "d"), *slow(P("d"))])
def test_explicitly_sharded_arrays_stay_so(spec):
    def fn(q, k, v, g):
        y = CASES["matmul, scaled query"].make(q.dtype)[0](*(x.transpose(0, 2, 1, 3) for x in (q, k, v)))
        return jax.nn.gelu(CASES["RMSNorm by hand"].make(q.dtype)[0](y, g), approximate=False)

    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        args = [jax.device_put(normal(i, 2, 12, 4, 8), spec) for i in range(3)] + [jnp.ones(8)]
        assert sum(fuse(fn).report(*args).counts.values()) == 3
        found, expected = jax.jit(fuse(fn))(*args), jax.jit(fn)(*args)
        assert jax.typeof(found) == jax.typeof(expected)
        assert_same(found, expected)
        assert_same(jax.jit(jax.grad(loss_of(fuse(fn))))(*args), jax.jit(jax.grad(loss_of(fn)))(*args))
        with dispatch.target():  # XLA is as fast for an activation alone
            assert jaxft.fuse(fn).report(*args).counts == {"dot_product_attention": 1, "rms_norm": 1}


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() > 1, reason="the other tests have two devices already")
def test_fuse_works_over_two_devices():
    told = pytest_on(2, "-k", "shard", __file__)
    assert "collectives_of_shard_map" in told and "6 passed" in told


def test_fused_function_is_exported():
    fn, x = CASES["jax.nn.gelu, erf"].make(jnp.float32)
    exported = jax.export.export(jax.jit(fuse(fn)))(*x)
    assert_same(exported.call(*x), fn(*x))
    rows = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b, t"), x[1].size), jnp.float32)
    (record,) = fuse(fn).report(rows, x[1])
    assert "sizes are symbolic" in record.reason
    assert_same(jax.export.export(jax.jit(fuse(fn)))(rows, x[1]).call(*x), fn(*x))


def test_custom_rules_are_left_alone():
    @jax.custom_vjp
    def seven(x):
        return jax.nn.gelu(x + 1.0, approximate=False)

    seven.defvjp(lambda x: (seven(x), x), lambda _, g: (g * 7.0,))

    @jax.custom_jvp
    def relu(x):
        return jnp.maximum(x, 0)

    relu.defjvp(lambda p, t: (relu(p[0]), t[0] * 7.0))

    @jax.custom_jvp
    def silu(x):
        return x / (1 + jnp.exp(-x))

    silu.defjvp(lambda p, t: (silu(p[0]), t[0] * 7.0))
    x, b = normal(0, 3, 8), normal(1, 8)
    for fn in (seven, relu, silu):
        assert fuse(lambda x, b, fn=fn: fn(x + b)).report(x, b).counts == {}
        np.testing.assert_array_equal(jax.grad(lambda x, fn=fn: fuse(fn)(x).sum())(x), np.full(x.shape, 7.0))


def test_effects_stay_once_and_in_order():
    seen = []

    def fn(x):
        for i in range(3):
            jax.debug.callback(lambda _, i=i: seen.append(i), x.sum(), ordered=True)
            x = jax.nn.gelu(x, approximate=False)
        return x

    x = normal(0, 4, 8)
    expected = jax.jit(fn)(x)
    jax.effects_barrier()
    seen.clear()
    assert fuse(fn).report(x).counts == {BA: 3}
    assert_same(jax.jit(fuse(fn))(x), expected)
    jax.effects_barrier()
    assert seen == [0, 1, 2]


def test_names_of_scopes_stay():
    def fn(x):
        with jax.named_scope("tail"):
            return jnp.sin(jax.nn.softmax(x))

    program = jax.make_jaxpr(fuse(fn))(normal(0, 3, 8))
    assert [str(eqn.source_info.name_stack) for eqn in program.eqns if eqn.primitive.name == "sin"] == ["tail"]


def test_what_is_not_an_array_passes_through():
    def fn(x, tree, activation, *, shift):
        assert isinstance(shift, int) and tree["name"] == "a"
        return {"y": activation(x + tree["b"]) if shift else x, "name": tree["name"]}

    x, b = normal(0, 3, 8), normal(1, 8)
    result = fuse(fn)(x, {"b": b, "name": "a"}, jax.nn.silu, shift=1)
    assert_same(result.pop("y"), jax.nn.silu(x + b))
    assert result == {"name": "a"}


def test_static_arguments_stay_concrete():
    def fn(x, width, axes):
        return jax.nn.silu(x + jnp.ones(int(width))), np.asarray(axes).tolist()

    x, axes = normal(0, 3, 8), np.arange(2)
    fused = fuse(fn, static_argnums=1, static_argnames="axes")
    assert fused(x, np.int32(8), axes=axes)[1] == [0, 1]
    assert fused.report(x, np.int32(8), axes=axes).counts == {BA: 1}
    assert fuse(fn, static_argnums=(1, -1))(x, np.int32(8), axes)[1] == [0, 1]


def test_modules_are_arguments_and_keep_their_state():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.calls = nnx.LayerNorm(8, rngs=rngs), nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            self.calls[...] += 1
            return self.norm(x)

    model, x = Model(nnx.Rngs(0)), normal(0, 3, 8)
    fused = fuse(lambda model, x: model(x))
    assert fused.report(model, x).counts == {LN: 1} and int(model.calls[...]) == 0
    expected = model.norm(x)
    assert_same(fused(model, x), expected)
    assert_same(nnx.jit(fused)(model, x), expected)
    assert int(model.calls[...]) == 2
    gradient = nnx.grad(lambda model, x: fused(model, x)[0, 0])(model, x)
    assert float(jnp.abs(gradient["norm"]["scale"][...]).sum()) > 0


def test_generators_are_arguments_and_move_on():
    def fn(rngs, x):
        return jax.nn.softmax(x + jax.random.normal(rngs(), x.shape))

    x, rngs, expected = normal(0, 3, 8), nnx.Rngs(0), nnx.Rngs(0)
    for _ in range(2):
        assert_same(fuse(fn)(rngs, x), fn(expected, x))


def test_module_must_keep_its_variables():
    def fn(model, x):
        model.last = nnx.Variable(x)
        return jax.nn.softmax(model(x))

    model = nnx.LayerNorm(8, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="changed which variables an NNX module has"):
        fuse(fn)(model, normal(0, 3, 8))


def test_fused_function_keeps_its_name_and_binds():
    class Layer:
        @fuse
        def probabilities(self, x):
            """Computes probabilities."""
            return jax.nn.softmax(x)

    x = normal(0, 3, 8)
    assert_same(Layer().probabilities(x), jax.nn.softmax(x))
    assert (Layer.probabilities.__name__, Layer.probabilities.__doc__) == ("probabilities", "Computes probabilities.")


def test_numpy_numbers_are_traced():
    def fn(x, scale):
        assert isinstance(scale, jax.core.Tracer)
        return jax.nn.softmax(x * scale)

    x = normal(0, 3, 8)
    assert_same(fuse(fn)(x, np.float32(2)), jax.nn.softmax(2 * x))


def test_call_without_jit_warns_once(caplog):
    transform._warn_once.cache_clear()
    x, fused = normal(0, 3, 8), fuse(jax.nn.softmax)
    jax.jit(fused)(x)
    assert "without jax.jit" not in caplog.text
    fused(x), fused(x)
    assert caplog.text.count("without jax.jit") == 1


# --- Options -----------------------------------------------------------------------------------------------------


def test_only_limits_the_families(layer):
    fn, *args = layer
    assert fuse(fn, only="attention").report(*args).counts == {ATT: 1}
    assert set(fuse(fn, only=("layer_norm", "activation")).report(*args).counts) == {"bias_residual_layer_norm", BA}


def test_implementation_reaches_the_ops():
    x = normal(0, 4, 16)
    fused = fuse(jax.nn.softmax, implementation="triton")
    (record,) = fused.report(x)
    assert "triton" in record.implementation
    assert_same(fused(x), jax.nn.softmax(x))
    with pytest.raises(NotImplementedError, match="mosaic_gpu"):
        fuse(jax.nn.softmax, implementation="mosaic_gpu")(x)


def test_strict_raises_where_nothing_is_replaced():
    with pytest.raises(ValueError, match="nothing was replaced"):
        fuse(jnp.sin, strict=True)(normal(0, 4))
    with pytest.raises(ValueError, match="force=True"):
        jaxft.fuse(jax.nn.softmax, strict=True)(normal(0, 4))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fn": 3}, TypeError, "fn must be a function, got int"),
        ({"only": "norms"}, ValueError, "only must be"),
        ({"only": ()}, ValueError, "only must be"),
        ({"masked_rows": "none"}, ValueError, "masked_rows must be one of"),
        ({"implementation": "cuda"}, ValueError, "implementation must be"),
        ({"strict": 1}, TypeError, "strict must be True or False"),
        ({"force": None}, TypeError, "force must be True or False"),
    ],
)
def test_wrong_options_raise(options, error, message):
    with pytest.raises(error, match=message):
        jaxft.fuse(**{"fn": jnp.sin, **options})


def test_without_force_a_cpu_runs_the_original(layer):
    fn, *args = layer
    fused = jaxft.fuse(fn)
    report = fused.report(*args)
    assert report.counts == {} and any("no kernels on cpu" in record.reason for record in report)
    assert str(jax.make_jaxpr(fused)(*args)) == str(jax.make_jaxpr(fn)(*args))


def test_implementation_without_force_changes_nothing_on_cpus():
    (record,) = jaxft.fuse(jax.nn.softmax, implementation="triton").report(normal(0, 4, 8))
    assert record.reason.startswith("no kernels on cpu")


def test_on_a_gpu_a_site_is_replaced_where_the_op_has_a_kernel():
    fn, (params, x) = CASES["a BERT layer"].make(jnp.bfloat16)
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), (params, x))
    with dispatch.target():
        report = jaxft.fuse(fn).report(*shapes)
        assert report.counts == LAYER and all("triton" in r.implementation for r in report if r.is_replaced)
        text = str(jax.make_jaxpr(jaxft.fuse(fn))(*shapes))
        assert "pallas_call" in text or "triton" in text
    with dispatch.target("NVIDIA V100", (7, 0)):
        (record,) = jaxft.fuse(jax.nn.softmax).report(normal(0, 4, 8))
        assert record.reason.startswith("the op is plain XLA here, too: triton: it needs compute capability")


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("jax.nn.gelu, tanh", jnp.bfloat16, "an element-wise chain"),
        ("0.5 x (1 + erf)", jnp.bfloat16, "an element-wise chain"),
        ("jax.nn.gelu, erf", jnp.bfloat16, ""),
        ("jax.nn.gelu, erf", jnp.float32, ""),
        ("jax.nn.relu", jnp.bfloat16, "an element-wise chain"),
        ("a straight-through GELU", jnp.bfloat16, "an element-wise chain"),
        ("linen MLP", jnp.float32, ""),
        ("a LayerNorm of one row", jnp.bfloat16, "one row"),
        ("transposes that compose", jnp.bfloat16, "a transpose that XLA fuses"),
        ("transposes that cancel", jnp.bfloat16, ""),
        ("a matmul of a transposed array", jnp.bfloat16, "the op is plain XLA here"),
    ],
)
def test_on_a_gpu_xla_keeps_what_it_does_as_fast(name, dtype, reason):
    fn, args = CASES[name].make(dtype)
    with dispatch.target():
        (record,) = jaxft.fuse(fn).report(*args)
    assert record.reason.startswith(reason) and record.is_replaced == (not reason)


def loss_of_first_label(x, w):
    return -jnp.sum(jax.nn.log_softmax(x @ w)[jnp.arange(x.shape[0]), 0])


def norms(x, *scales):
    return [(x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6) * g for g in scales]


def rms(x, g):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * g


def rms_of_flax(x, g):
    return x * (jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * g)


ROWS, HEADS_FIRST = (200, 1000), CASES["matmul, scaled query"].make(jnp.bfloat16)[0]
NORMED, WIDE = [ROWS, (1000,)], (1000, 1000)
IN_GRADIENTS = "as it was; in gradients "


@pytest.mark.parametrize(
    ("fn", "shapes", "reason", "implementation"),
    [
        pytest.param(lambda x: jax.nn.gelu(x, approximate=False), [ROWS], "an element-wise chain", "", id="GELU alone"),
        pytest.param(jax.nn.softmax, [(100, 1000)], "a small array", "", id="small softmax"),
        pytest.param(jax.nn.softmax, [ROWS], "", "triton", id="softmax"),
        pytest.param(lambda x: jax.nn.softmax(jnp.sin(x)), [ROWS], "", IN_GRADIENTS + "triton", id="softmax of a sine"),
        pytest.param(lambda x: jax.nn.softmax(jnp.sin(x).astype("float32")), [ROWS], "", IN_GRADIENTS + "triton",
                     id="softmax of a cast"),
        pytest.param(lambda x: 2 * jax.nn.softmax(x), [ROWS], "", IN_GRADIENTS + "triton", id="twice a softmax"),
        pytest.param(lambda x: jnp.sin(jax.nn.log_softmax(x)), [ROWS], "XLA fuses the log", "", id="after log-softmax"),
        pytest.param(jax.nn.log_softmax, [ROWS], "", "triton", id="log-softmax"),
        pytest.param(loss_of_first_label, [(2499, 64), (64, 9)], "fewer than 2,500 rows", "", id="few losses"),
        pytest.param(loss_of_first_label, [(2500, 64), (64, 9)], "", IN_GRADIENTS + "xla", id="losses"),
        pytest.param(loss_of_first_label, [(2**15, 64), (64, 2**14)], "", IN_GRADIENTS + "xla", id="1 GiB of logits"),
        pytest.param(loss_of_first_label, [(2**15, 64), (64, 2**14 + 1)], "", "xla", id="more logits"),
        pytest.param(norms, [ROWS, (1000,), (1000,)], "", IN_GRADIENTS + "triton", id="two norms of one array"),
        pytest.param(lambda *a: norms(*a)[0], [ROWS, (1000,), (1000,)], "", "triton", id="one norm"),
        pytest.param(lambda x, g: norms(x, 1 + g), [ROWS, (1000,)], "", IN_GRADIENTS + "triton", id="scale 1 + g"),
        pytest.param(rms, NORMED, "", IN_GRADIENTS, id="an RMSNorm"),
        pytest.param(lambda x, g: rms(x.astype("float32"), g), NORMED, "", IN_GRADIENTS, id="an RMSNorm of a cast"),
        pytest.param(rms_of_flax, NORMED, "", "triton", id="an RMSNorm of Flax"),
        pytest.param(lambda x, g: norms(jnp.sin(x), g)[0], NORMED, "", IN_GRADIENTS, id="before a norm"),
        pytest.param(lambda x, g: norms(jnp.sin(x).astype("float32"), g)[0], NORMED, "", IN_GRADIENTS, id="cast"),
        pytest.param(lambda x, y, g: norms(x + jnp.sin(y), g)[0], [ROWS, *NORMED], "", IN_GRADIENTS, id="residual"),
        pytest.param(lambda x, g, w: norms(x @ w + g, g)[0], [*NORMED, WIDE], "", "triton", id="bias of a matmul"),
        pytest.param(lambda x, g, w: norms(2 * (x @ w), g)[0], [*NORMED, WIDE], "", "triton", id="a scaled matmul"),
        pytest.param(lambda x, w, m, r, g: norms(x @ (w * m) + r, g)[0], [(1024, 1024)] * 4 + [(1024,)], "",
                     "mosaic_gpu + triton", id="a computed kernel"),
        pytest.param(lambda x, w, r, g: norms(x @ w + jnp.sin(r), g)[0], [(1024, 1024)] * 3 + [(1024,)], "",
                     IN_GRADIENTS, id="an element-wise residual of a matmul"),
        pytest.param(lambda x, g, w: (norms(y := jnp.sin(x), g), y @ w), [*NORMED, WIDE], "", "triton", id="also read"),
        pytest.param(lambda x: jax.nn.log_softmax(jnp.sin(x)), [ROWS], "", IN_GRADIENTS, id="before a log-softmax"),
        pytest.param(jax.nn.dot_product_attention, [(2, 128, 4, 64)] * 3, "", "triton", id="attention"),
        pytest.param(HEADS_FIRST, [(2, 4, 128, 64)] * 3, "up to 128", "", id="heads first"),
        pytest.param(HEADS_FIRST, [(2, 4, 129, 64)] * 3, "", "triton", id="heads first, more queries"),
        pytest.param(HEADS_FIRST, [(2, 4, 9, 64), *[(2, 4, 129, 64)] * 2], "", "triton", id="heads first, more keys"),
    ],
)  # fmt: skip
def test_on_a_gpu_xla_keeps_what_was_measured_as_slower(fn, shapes, reason, implementation):
    with dispatch.target():
        report = jaxft.fuse(fn).report(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    assert report
    for record in report:
        assert record.reason.startswith(reason) and record.is_replaced == (not reason), record
        assert record.implementation.startswith(implementation) and (implementation or not record.implementation)


@pytest.mark.parametrize(
    "name",
    [
        "two norms of one array, in Flax",
        "the loss of labels",
        "dropout",
        "a BERT layer",
        "a scan of ViT blocks",
    ],
)
def test_sites_that_gain_in_gradients_only_stay_as_they_were_otherwise(name, monkeypatch):
    """The forward pass is the original one, bit by bit. The results and gradients of a training step are the ops'."""
    fn, args = CASES[name].make(jnp.float32)
    expected, everywhere = jax.jit(fn)(*args), jax.jit(jax.value_and_grad(loss_of(fuse(fn))))(*args)
    monkeypatch.setattr(plan, "_gains_in_gradients_only", lambda *_: True)
    fused = fuse(fn)
    assert all(r.implementation.startswith(IN_GRADIENTS) for r in fused.report(*args) if r.is_replaced)
    assert fused.report(*args).saves == 0
    jax.tree.map(np.testing.assert_array_equal, jax.jit(fused)(*args), expected)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(jax.value_and_grad(loss_of(fused)))(*args), everywhere)
    by_closure = jax.jit(jax.grad(lambda x: loss_of(fuse(lambda *rest: fn(x, *rest)))(*args[1:])))(args[0])
    assert_same(by_closure, everywhere[1])


def test_norm_of_the_result_of_ops_is_replaced():
    def fn(x, w, b, g):
        return norms(jax.nn.gelu(x @ w + b, approximate=False), g)[0]

    shapes = (4096, 1024), (1024, 1024), (1024,), (1024,)
    with dispatch.target():
        report = jaxft.fuse(fn).report(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    assert report.counts == {"dense": 1, "layer_norm": 1}
    assert not any(record.implementation.startswith(IN_GRADIENTS) for record in report)


def test_sites_that_gain_in_gradients_only_read_what_the_op_does_not(monkeypatch):
    """A softmax may subtract any number from a row. The op subtracts the maximum, and does not read that number."""

    def softmax(x, keep, top):
        top_of_all = jax.lax.stop_gradient(jnp.max(x, -1, keepdims=True))
        before = jnp.exp(jnp.where(keep, x, -1e9) - top_of_all)
        given = jnp.exp(x - top)
        return before / jnp.sum(before, -1, keepdims=True), 2 * (given / jnp.sum(given, -1, keepdims=True))

    args = normal(0, 200, 1000), normal(1, 200, 1000) > 0, normal(2, 200, 1)
    with dispatch.target():
        assert jaxft.fuse(softmax).report(*args).counts == {"softmax": 2}
        jax.make_jaxpr(jaxft.fuse(softmax))(*args)
    monkeypatch.setattr(plan, "_gains_in_gradients_only", lambda *_: True)
    assert_same(jax.jit(fuse(softmax))(*args), jax.jit(softmax)(*args), tolerance=0)
    gradients = [jax.jit(jax.grad(loss_of(f)))(*args) for f in (fuse(softmax), softmax)]
    assert_same(*gradients)


def test_dying_operands_are_written_in_place():
    def fn(x, w, g):
        y = x @ w
        mean = y.mean(-1, keepdims=True)
        return (y - mean) * jax.lax.rsqrt(jnp.mean((y - mean) ** 2, -1, keepdims=True) + 1e-6) * g

    args = normal(0, 8, 16), normal(1, 16, 16), normal(2, 16)
    report = fuse(fn).report(*args)
    assert report.saves == 8 * 16 * 4 and "save 512 bytes" in str(report)
    (record,) = jaxft.explain(fuse(fn, implementation="triton"), *args)
    assert record.plan.in_place
    norm = CASES["a division by sqrt"].make(jnp.float32)
    assert fuse(norm[0]).report(*norm[1]).saves == 0  # x is an argument


def test_both_results_of_norms_are_written_in_place():
    def fn(x, w, v):
        y = x @ w + x @ v
        centred = y - y.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-3), y

    (record,) = fuse(fn, only="layer_norm").report(normal(0, 8, 16), normal(1, 16, 16), normal(2, 16, 16))
    assert record.op == "bias_residual_layer_norm" and record.saves == 2 * 8 * 16 * 4


def test_operand_that_lives_on_is_not_overwritten():
    def fn(x, w):
        y = x @ w
        return jax.nn.softmax(y), y

    args = normal(0, 8, 16), normal(1, 16, 16)
    report = fuse(fn).report(*args)
    assert report.counts == {"softmax": 1} and report.saves == 0


def test_operand_of_another_dtype_is_not_overwritten():
    def fn(x, w):
        y = x @ w
        centred = y - y.mean(-1, keepdims=True)
        return (centred * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-3)).astype(jnp.bfloat16)

    report = fuse(fn).report(normal(0, 8, 16), normal(1, 16, 16))
    assert report.counts == {LN: 1} and report.saves == 0


def test_other_scale_of_the_mean_is_no_norm():
    def fn(x, g, h):  # x and the mean are scaled by different vectors
        mean, inv = x.mean(-1, keepdims=True), jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-3)
        return x * (inv * g) - mean * (inv * h)

    args = normal(0, 8, 16) + 3, normal(1, 16), normal(2, 16)
    assert fuse(fn).report(*args).counts == {}
    assert_same(fuse(fn)(*args), fn(*args))


@pytest.mark.parametrize("stopped", ["mean", "variance"])
def test_gradient_stops_where_the_function_stops_it(stopped):
    def fn(x, w):
        mean = x.mean(-1, keepdims=True)
        mean = jax.lax.stop_gradient(mean) if stopped == "mean" else mean
        variance = jnp.square(x - mean).mean(-1, keepdims=True)
        variance = jax.lax.stop_gradient(variance) if stopped == "variance" else variance
        return jnp.sum((x - mean) * jax.lax.rsqrt(variance + 1e-3) * w)

    args = normal(0, 8, 16) + 1, normal(1, 8, 16)
    assert LN not in fuse(fn).report(*args).counts
    assert_same(jax.grad(fuse(fn))(*args), jax.grad(fn)(*args))


def test_gradient_stops_after_the_probabilities():
    def fn(q, k, v):
        return jnp.sum(jnp.sin(jax.lax.stop_gradient(jax.nn.softmax(q @ k.T)) @ v))

    args = [normal(i, 12, 8) for i in range(3)]
    assert ATT not in fuse(fn).report(*args).counts
    for found, expected in zip(*(jax.grad(f, (0, 1, 2))(*args) for f in (fuse(fn), fn)), strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize(("given", "wanted"), [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float16)])
def test_norm_may_return_another_dtype(given, wanted):
    def fn(x):
        wide = x.astype(jnp.float32)
        mean, inv = wide.mean(-1, keepdims=True), jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-3)
        return ((wide - mean) * inv).astype(wanted)

    x = normal(0, 4, 16).astype(given)
    assert fuse(fn).report(x).counts == {LN: 1}
    assert fuse(fn)(x).dtype == wanted


@pytest.mark.parametrize(
    "name", ["jnp.mean and jnp.var", "a power of -0.5", "RMSNorm by hand", "jax.nn.softmax", "jax.nn.log_softmax"]
)
def test_wide_result_of_narrow_array_is_not_rounded(name):
    """The op reads x in bfloat16 and writes float32: its result is as exact as the function's."""
    fn, (x, *vectors) = CASES[name].make(jnp.float32)

    def wide(x):
        return fn(x.astype(jnp.float32), *vectors)

    narrow = x.astype(jnp.bfloat16)
    assert fuse(wide).report(narrow).counts == CASES[name].wanted
    np.testing.assert_allclose(fuse(wide)(narrow), wide(narrow), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", [jax.nn.softmax, jax.nn.log_softmax])
@pytest.mark.parametrize("cast", [jnp.float32, jnp.bfloat16])
def test_softmax_takes_numbers_that_its_result_cannot_hold(op, cast):
    """Logits in bfloat16 can be beyond the range of a result in float16."""

    def fn(x):
        return op(x.astype(cast)).astype(jnp.float16)

    x = (normal(0, 4, 16) * 1e5).astype(jnp.bfloat16)
    assert sum(fuse(fn).report(x).counts.values()) == 1
    np.testing.assert_allclose(fuse(fn)(x), fn(x), rtol=1e-2)


# --- Masked rows -------------------------------------------------------------------------------------------------


def where_mask(value):
    def fn(q, k, v, m):
        s = jnp.where(cases.keys(m), jnp.einsum("btnh,bsnh->bnts", q, k), jnp.asarray(value, q.dtype))
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)

    return fn


def additive(make):
    def fn(q, k, v, m):
        s = jnp.einsum("btnh,bsnh->bnts", q, k) + make(cases.keys(m), q.dtype)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)

    return fn


MASKS = {
    "where, the lowest number": where_mask(jnp.finfo(jnp.float32).min),
    "where, -1e9": where_mask(-1e9),
    "where= of a softmax": lambda q, k, v, m: CASES["a softmax with where="].make(q.dtype)[0](q, k, v, m),
    "causal attention": lambda q, k, v, m: jax.nn.dot_product_attention(q, k, v, mask=cases.keys(m), is_causal=True),
    "an added where": additive(lambda m, dtype: jnp.where(m, 0, jnp.finfo(dtype).min).astype(dtype)),
    "(1 - m) * -1e9": additive(lambda m, dtype: (1.0 - m.astype(dtype)) * -1e9),
    "(m - 1) * 1e9": additive(lambda m, dtype: (m.astype(dtype) - 1.0) * 1e9),
    "integers": additive(lambda m, dtype: (1 - m.astype(jnp.int32)).astype(dtype) * -1e9),
}


SOME_MASKS = ("where, -1e9", "causal attention", "an added where")


@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((name, "xla") for name in MASKS), *((name, "triton") for name in SOME_MASKS),
     *slow_cases(*((name, "triton") for name in MASKS if name not in SOME_MASKS))],
)  # fmt: skip
def test_masked_rows_are_as_in_the_original(name, implementation):
    fn, args = MASKS[name], [normal(i, 2, 12, 4, 8) for i in range(3)]
    fused = fuse(fn, implementation=implementation)
    both = [jax.jit(jax.value_and_grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a))), (0, 1, 2))) for f in (fused, fn)]
    for mask in (PAD, EMPTY):
        assert fused.report(*args, mask).counts == {ATT: 1}
        assert_same(both[0](*args, mask), both[1](*args, mask))


INFINITE = {
    "where": (cases.minus_infinity, ATT),
    "an added where": (additive(lambda m, dtype: jnp.where(m, 0, -jnp.inf).astype(dtype)), ATT),
    "a negated where": (additive(lambda m, dtype: jnp.where(m, 0, jnp.inf).astype(dtype) * -1), ATT),
    "a negated where of what is masked": (
        additive(lambda m, dtype: jnp.where(~m, jnp.inf, 0).astype(dtype) * -1), ATT),
    "an added logarithm": (additive(lambda m, dtype: jnp.log(m.astype(dtype))), ATT),
    "a softmax": (lambda q, k, v, m: jax.nn.softmax(jnp.where(cases.keys(m), q[:, :, 0, :1] * v[0, :, 0, 0], -jnp.inf)),
                  "softmax"),
    "a log-softmax": (lambda q, k, v, m: jax.nn.log_softmax(jnp.where(
        ~cases.keys(m), -jnp.inf, q[:, :, 0, :1] * v[0, :, 0, 0])), "log_softmax"),
}  # fmt: skip


@pytest.mark.parametrize("name", INFINITE)
def test_rows_masked_by_minus_infinity_stay_nan(name):
    (fn, op), args = INFINITE[name], [normal(i, 2, 12, 4, 8) for i in range(3)]
    assert fuse(fn).report(*args, EMPTY).counts == {op: 1}
    found, expected = fuse(fn)(*args, EMPTY), fn(*args, EMPTY)
    assert np.isnan(expected).any()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(fuse(fn, masked_rows="mask")(*args, EMPTY), expected, atol=1e-5)
    assert not np.isnan(fuse(fn, masked_rows="zero")(*args, EMPTY)).any()


def test_rows_of_an_added_infinity_are_a_near_miss():
    def fn(x, m):
        return jax.nn.softmax(x + jnp.where(m, 0, -jnp.inf))

    args = normal(0, 3, 8), jnp.arange(3)[:, None] < jnp.arange(8)
    (record,) = fuse(fn).report(*args)
    assert "a row of -inf alone" in record.reason
    assert fuse(fn, masked_rows="zero").report(*args).counts == {"softmax": 1}
    causal = jnp.tri(8, dtype=bool)  # no row is empty
    assert fuse(lambda x: jax.nn.softmax(jnp.where(causal, x, -jnp.inf))).report(normal(0, 8, 8)).counts == {
        "softmax": 1
    }


def test_bias_of_masked_logits_decides_in_masked_rows():
    def fn(q, k, v, m):
        s = jnp.where(cases.keys(m), jnp.einsum("btnh,bsnh->bnts", q, k), -1e9)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s + jnp.where(jnp.tri(12, dtype=bool), 0, -1e9)), v)

    args = [normal(i, 2, 12, 4, 8) for i in range(3)]
    report = fuse(fn).report(*args, EMPTY)
    assert any("a bias is added to masked logits" in record.reason for record in report)
    assert_same(fuse(fn)(*args, EMPTY), fn(*args, EMPTY))


@pytest.mark.parametrize(("masked_rows", "masks"), [("exact", 0), ("mask", 1), ("zero", 1)])
def test_masked_rows_chooses_what_an_additive_mask_is(masked_rows, masks):
    fn, args = MASKS["an added where"], [normal(i, 2, 12, 4, 8) for i in range(3)]
    fused = fuse(fn, masked_rows=masked_rows)
    (record,) = fused.report(*args, EMPTY)
    assert ("masks=1" in record.sizes) == bool(masks)
    assert_same(fused(*args, PAD), fn(*args, PAD))
    empty = fused(*args, EMPTY)[1]
    assert_same(empty, np.zeros_like(empty) if masked_rows == "zero" else fn(*args, EMPTY)[1])


@pytest.mark.parametrize(("low", "masked_rows", "dtype", "replaced"), [
    (-9e3, "mask", jnp.float32, False), (-65504.0, "exact", jnp.float32, True), (-1e5, "exact", jnp.float32, False),
    (-1e5, "mask", jnp.float32, True), (-1e9, "exact", jnp.float32, True), (-1e9, "exact", jnp.bfloat16, True),
])  # fmt: skip
def test_masked_rows_exact_needs_logits_that_are_surely_low(low, masked_rows, dtype, replaced):
    def fn(q, k, v, mask):
        s = jnp.where(mask[:, None, None], jnp.einsum("btnh,bsnh->bnts", q, k), low)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)

    args = [normal(i, 2, 12, 4, 8).astype(dtype) for i in range(3)]
    report = fuse(fn, masked_rows=masked_rows).report(*args, PAD)
    assert (report.counts.get(ATT) == 1) == replaced
    assert replaced or any(f"masked logits are {low:.6g}" in record.reason for record in report)


def test_gradient_of_a_traced_scale_is_as_exact():
    def fn(q, k, v, scale, bias):
        s = jnp.einsum("btnh,bsnh->bnts", q, k) * scale + bias
        return jnp.sum(jnp.sin(jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)))

    assert fuse(fn).report(*[normal(0, 2, 12, 4, 8)] * 3, normal(1), normal(2, 4, 12, 12)).counts == {ATT: 1}
    gradients = [jax.jit(jax.grad(f, 3)) for f in (fuse(fn), fn)]
    errors = []
    for seed in range(12):  # the sum of one seed may cancel, so that its error says nothing
        args = [normal(9 * seed + i, 2, 12, 4, 8) for i in range(3)] + [normal(seed), normal(9 * seed + 5, 4, 12, 12)]
        exact = in_float64(jax.grad(fn, 3), *args)
        errors.append([float(gradient(*args)) - float(exact) for gradient in gradients])
    fused, original = np.sqrt(np.mean(np.square(errors), axis=0))
    assert fused <= 2 * original


def test_doubtful_mask_needs_the_option():
    fn, args = where_mask(-2e4), [*(normal(i, 2, 12, 4, 8) for i in range(3)), PAD]
    assert any('masked_rows="mask" takes them' in record.reason for record in fuse(fn).report(*args))
    assert fuse(fn, masked_rows="mask").report(*args).counts == {ATT: 1}


def test_relu_keeps_its_gradient_at_zero():
    x, b = jnp.array([[-1.0, 0.0, 1.0, 2.0]]), jnp.zeros(4)
    for fn in (jax.nn.relu, lambda x: jnp.maximum(x, 0)):
        expected = jax.grad(lambda x, fn=fn: fn(x + b).sum())(x)
        np.testing.assert_array_equal(jax.grad(lambda x, fn=fn: fuse(lambda x: fn(x + b))(x).sum())(x), expected)


@pytest.mark.parametrize("clip", [5.0, 80.0, 2000.0])
def test_clipped_activation_is_no_activation(clip):
    x = normal(0, 4, 8)
    report = fuse(lambda x: jax.nn.silu(jnp.clip(x, -clip, clip))).report(x)
    assert report.counts == {BA: 1} and "silu" in str(report)  # the SiLU alone
    np.testing.assert_allclose(fuse(lambda x: jax.nn.silu(jnp.clip(x, -clip, clip)))(x * 1e4),
                               jax.nn.silu(jnp.clip(x * 1e4, -clip, clip)), rtol=1e-6)  # fmt: skip


def test_other_terms_beside_a_bias_are_kept():
    def fn(x, b, y):
        return jax.nn.gelu(x + b + 2 * y, approximate=False)

    args = normal(0, 4, 8), normal(1, 8), normal(2, 4, 8)
    assert fuse(fn).report(*args).counts == {BA: 1}
    assert_same(fuse(fn)(*args), fn(*args))


def test_sum_used_twice_stays_outside_the_activation():
    def fn(x, b):
        return jax.nn.gelu(x + b), x + b

    (record,) = fuse(fn).report(normal(0, 4, 8), normal(1, 8))
    assert record.is_replaced and "bias=False" in record.sizes


def test_part_of_an_activation_used_twice_is_reported():
    def fn(x):
        part = jax.lax.erf(x * 0.5**0.5)
        return 0.5 * x * (1 + part), part

    (record,) = fuse(fn).report(normal(0, 4, 8))
    assert record.reason == "an intermediate result of the activation is also used elsewhere"


@pytest.mark.parametrize(("factor", "counts"), [(0.7979, {BA: 1}), (0.78, {})])
def test_gelu_in_16_bits_needs_its_constants(factor, counts):
    def fn(x):
        return 0.5 * x * (1 + jnp.tanh(factor * (x + 0.044715 * x**3)))

    assert fuse(fn).report(normal(0, 4, 8).astype(jnp.bfloat16)).counts == counts


def test_activation_is_read_unchanged_and_in_float32():
    def fn(x, b):
        y = jax.nn.gelu(x + b)
        return y, y.astype(jnp.float32).sum(-1)

    args = [normal(i, *shape).astype(jnp.bfloat16) for i, shape in enumerate([(4, 32), (32,)])]
    assert fuse(fn).report(*args).counts == {"bias_activation": 1}


def test_root_of_a_square_is_no_identity():
    def fn(x):  # the variance is a mean of |x - mean| ** 2, the centre is its absolute value
        centred = jnp.sqrt((x - x.mean(-1, keepdims=True)) ** 2)
        return centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6)

    x = normal(0, 4, 16)
    np.testing.assert_allclose(fuse(fn)(x), fn(x), rtol=1e-5)


# --- Command line ------------------------------------------------------------------------------------------------

MODULE = """
import jax, jax.numpy as jnp
def model(x): return jax.nn.softmax(x * 2)
example = (jnp.ones((3, 8)),)
def arguments(): return example
wrong = 3
def fails(x): raise KeyError("a line of mine")
def leaves(x): raise SystemExit(3)
no_arguments = ()
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "some_model.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("args", ["example", "arguments"])
def test_command_prints_the_report(args, module, capsys):
    assert cli.main(["fuse", "some_model:model", "--args", f"some_model:{args}", "--force"]) == 0
    forced = capsys.readouterr().out
    assert cli.main(["fuse", "some_model:model", "--args", f"some_model:{args}"]) == 0
    assert "softmax" in forced and capsys.readouterr().out != forced


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere_to_be_found:model"], "nowhere_to_be_found"),
        (["some_model:missing"], "missing"),
        (["some_model"], "MODULE:FUNCTION: expected a name such as package.module:function"),
        (["some_model:wrong"], "must be a function"),
    ],
)
def test_command_names_what_is_wrong(words, message, module, capsys):
    assert cli.main(["fuse", *words, "--args", "some_model:example"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["some_model:fails", "--args", "some_model:example"],
            r"KeyError: 'a line of mine' \(.*some_model.py, line 7\)",
        ),
        (["some_model:leaves", "--args", "some_model:example"], r"SystemExit: 3 \(.*some_model.py, line 8\)"),
        (["math:sqrt", "--args", "some_model:example"], "TypeError: .*"),
        (["some_model:model", "--args", "some_model:no_arguments"], r"TypeError: model\(\) missing 1 .*"),
        (["some_model:model", "--args", "some_leaver:example"], r"SystemExit: 4 \(.*some_leaver.py, line 1\)"),
        (["some_model:model", "--args", "broken_model:example"], r"SyntaxError: .* \(broken_model.py, line 1\)"),
    ],
)
def test_command_reports_errors_of_code_in_one_line(words, message, module, capsys):
    Path("some_leaver.py").write_text("raise SystemExit(4)")
    Path("broken_model.py").write_text("example = (")
    assert cli.main(["fuse", *words]) == 2
    assert re.fullmatch(f"jaxft: error: .* raised {message}\n", capsys.readouterr().err)


def test_command_needs_arguments_of_the_function(module, capsys):
    assert cli.main(["fuse", "some_model:model", "--args", "some_model:wrong"]) == 2
    assert "tuple" in capsys.readouterr().err


# --- Indices outside of an array ---------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [3, 50, 60, -1, -51, -60])
@pytest.mark.parametrize("mode", [None, "clip", "fill"])
def test_ids_outside_of_the_table(word, mode):
    def embed(words, positions, ids, places):
        x = words.at[ids].get(mode=mode) + positions.at[places].get(mode=mode)
        return layer_norm_by_hand(x)

    words, positions = (jax.random.normal(jax.random.key(n), (n, 16)) for n in (50, 8))
    args = words, positions, jnp.full((2, 3), word), jnp.array([[0, 1, 8], [2, 7, 3]])
    fused = fuse(embed)
    assert fused.report(*args).counts == {"embeddings_layer_norm": 1}
    np.testing.assert_allclose(fused(*args), embed(*args), atol=1e-5)


def layer_norm_by_hand(x):
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-6)


LOOK_UPS = {
    "x[arange, labels]": lambda log_p, labels: log_p[jnp.arange(8), labels],
    "take_along_axis": lambda log_p, labels: jnp.take_along_axis(log_p, labels[:, None], 1)[:, 0],
    "clip": lambda log_p, labels: jnp.take_along_axis(log_p, labels[:, None], 1, mode="clip")[:, 0],
    "fill with 0": lambda log_p, labels: jnp.take_along_axis(log_p, labels[:, None], 1, mode="fill", fill_value=0)[
        :, 0
    ],
    "one-hot": lambda log_p, labels: jnp.sum(log_p * jax.nn.one_hot(labels, 50), -1),
}
ROWS = {
    "all": lambda picked, labels: picked,
    "where": lambda picked, labels: jnp.where(labels != -100, picked, 0.0),
    "times a mask": lambda picked, labels: picked * (labels != -100),
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("look_up", LOOK_UPS)
@pytest.mark.parametrize("label", [50, -100, 3])
def test_labels_outside_of_the_classes(look_up, rows, label):
    def loss(h, kernel, labels):
        return -jnp.sum(ROWS[rows](LOOK_UPS[look_up](jax.nn.log_softmax(h @ kernel), labels), labels))

    h, kernel = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate([(8, 16), (16, 50)]))
    labels = jnp.array([0, 1, 2, 3, 4, 49, -1, 6]).at[1].set(label)
    fused = fuse(loss)
    assert fused.report(h, kernel, labels).counts == {"linear_cross_entropy": 1}
    np.testing.assert_allclose(fused(h, kernel, labels), loss(h, kernel, labels), rtol=1e-5)
    is_inside = ((labels >= -50) & (labels < 50))[:, None]  # JAX drops the gradients of rows that it promised
    found, wanted = (jnp.where(is_inside, jax.grad(f)(h, kernel, labels), 0) for f in (fused, loss))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_shifted_logits_of_a_language_model():
    def loss(h, kernel, bias, labels):
        log_p = jax.nn.log_softmax((h @ kernel + bias)[:, :-1])
        return -jnp.take_along_axis(log_p, labels[:, 1:, None], -1).mean()

    shapes = (2, 6, 16), (16, 50), (50,)
    args = (
        *(jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(shapes)),
        jnp.arange(12).reshape(2, 6),
    )
    fused = fuse(loss)
    assert fused.report(*args).counts == {"linear_cross_entropy": 1}
    for found, wanted in zip(*(jax.value_and_grad(f, (0, 1, 2))(*args) for f in (fused, loss)), strict=True):
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), found, wanted)


# --- Arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("only", 3, TypeError), ("only", ["softmax", 3], TypeError), ("only", "nothing", ValueError),
        ("only", (), ValueError), ("static_argnums", "a", TypeError), ("static_argnums", 1.0, TypeError),
        ("static_argnums", True, TypeError), ("static_argnums", (0, "x"), TypeError), ("static_argnums", 7, ValueError),
        ("static_argnums", -4, ValueError), ("static_argnames", 3, TypeError), ("static_argnames", (1,), TypeError),
        ("static_argnames", "nosuch", ValueError), ("strict", 1, TypeError), ("force", None, TypeError),
    ],
)  # fmt: skip
def test_wrong_options_are_named(option, value, error):
    with pytest.raises(error, match=f"fuse: {option} "):
        jaxft.fuse(lambda x, axis, where: x, **{option: value})


@pytest.mark.parametrize("static", [{"static_argnums": 1}, {"static_argnums": -1}, {"static_argnames": "sizes"}])
def test_static_arguments_by_position_and_by_name(static):
    def f(x, sizes):
        return jax.nn.softmax(x, -1) if sizes.sum() > 0 else x

    x, fused = jnp.ones((2, 3)), fuse(f, **static)
    np.testing.assert_allclose(fused(x, np.ones(2)), fused(x, sizes=np.ones(2)))


def test_last_of_several_arguments_has_no_name():
    fused = fuse(lambda x, *sizes: jax.nn.softmax(x, -1), static_argnums=-1)
    assert fused.report(x=jax.ShapeDtypeStruct((2, 8), jnp.float32)).counts == {"softmax": 1}


def test_negative_static_position_counts_all_parameters():
    seen = []

    def f(x, sizes, last=1.0):
        seen.append(sizes)
        return jax.nn.softmax(x * last, -1)

    fuse(f, static_argnums=-1)(jnp.ones((2, 3)), np.ones(2))
    assert isinstance(seen[0], jax.core.Tracer)


def test_only_report_takes_shapes():
    fused, x = fuse(lambda x: jax.nn.softmax(x, -1)), jax.ShapeDtypeStruct((2, 8), jnp.float32)
    assert fused.report(x).counts == {"softmax": 1}
    for function in (fused, fused.check):
        with pytest.raises(TypeError, match="needs arrays with values"):
            function(x)
    with pytest.raises(TypeError, match="check needs arrays with values"):
        jax.jit(lambda x: fused.check(x) and x)(jnp.ones((2, 8)))
