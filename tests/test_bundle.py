"""bundle: the same tree, of fewer arrays."""

import functools
import gc
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxft
import tiny
from cases import ONE_DTYPE, lower, seeds
from jaxft import dispatch
from jaxft.kernels.triton import split
from jaxft.models import bundled
from jaxft.text import devices, programs
from lowered import TRITON, of, operations

FORCED = {"implementation": "triton"}
DTYPES = [jnp.float32, jnp.float16, jnp.bfloat16]


def vectors_of(rng, count, dtypes=DTYPES):
    """Returns vectors of one element to more elements than a program copies."""
    return [jnp.asarray(rng.standard_normal(rng.integers(1, 2500)), dtypes[i % len(dtypes)]) for i in range(count)]


@pytest.mark.parametrize("seed", seeds(3))
def test_random(seed):
    rng = np.random.default_rng(seed)
    others = {"matrix": jnp.ones((2, 3)), "ids": jnp.arange(3), "none": None, "empty": jnp.ones(0), "one": jnp.ones(())}
    count = int(rng.integers(25))
    tree = {"vectors": vectors_of(rng, count), **others}
    arrays, rebuild = jaxft.bundle(tree, **FORCED)
    assert len(arrays) == 4 + min(count, 3)
    chex.assert_trees_all_equal(jax.jit(rebuild)(arrays), tree)


def test_many_parts_take_several_kernels(monkeypatch):
    monkeypatch.setattr(split, "_MOST", 11)
    tree = vectors_of(np.random.default_rng(0), 27, DTYPES[:1])
    arrays, rebuild = jaxft.bundle(tree, **FORCED)
    assert str(jax.make_jaxpr(rebuild)(arrays)).count("pallas_call") == 3
    chex.assert_trees_all_equal(rebuild(arrays), tree)


def test_long_parts_take_several_programs():
    """Parts end in the middle of a program, at its end and one element later. The last program is full."""
    tree = [jnp.arange(size, dtype=jnp.float32) + i for i, size in enumerate((5, 1019, 1024, 1025, 2047, 3072))]
    assert sum(x.size for x in tree) == 8 * split._ELEMENTS
    arrays, rebuild = jaxft.bundle(tree, **FORCED)
    chex.assert_trees_all_equal(rebuild(arrays), tree)


def test_a_module():
    """A bundled module has the same result and gradients. The joined gradient has the order of its parts."""
    model = jaxft.BertModel(tiny.config(), rngs=nnx.Rngs(0))
    arrays, rebuild = jaxft.bundle(model, **FORCED)
    leaves = jax.tree.leaves(model)
    vectors = [x for x in leaves if x.ndim == 1]
    assert len(arrays) == len(leaves) - len(vectors) + 1
    np.testing.assert_array_equal(arrays[-1], np.concatenate(vectors))

    def loss(make, arrays):
        return jnp.sum(make(arrays)(jnp.array([[3, 5, 2]])).last_hidden_state ** 3)

    unflatten = functools.partial(jax.tree.unflatten, jax.tree.structure(model))
    value, gradient = jax.jit(jax.value_and_grad(functools.partial(loss, rebuild)))(arrays)
    expected, each = jax.jit(jax.value_and_grad(functools.partial(loss, unflatten)))(leaves)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    flat = [g for g in each if g.ndim > 1] + [jnp.concatenate([g for g in each if g.ndim == 1])]
    chex.assert_trees_all_close(gradient, flat, rtol=1e-3, atol=1e-4)


def test_xla_joins_nothing():
    tree = {"b": jnp.ones(3), "a": jnp.zeros(2)}
    arrays, rebuild = jaxft.bundle(tree, implementation="xla")
    assert [x.size for x in arrays] == [2, 3]
    chex.assert_trees_all_equal(rebuild(arrays), tree)


def second_grad(f):
    return jax.grad(lambda x: jnp.sum(jax.grad(f)(x)[0] ** 2))


@pytest.mark.parametrize(
    ("transform", "mapped"),
    [(jax.grad, False), (second_grad, False), (lambda f: jax.grad(jax.checkpoint(f)), False), (jax.vmap, True),
     (lambda f: jax.vmap(jax.grad(f)), True)],
)  # fmt: skip
def test_transformations(transform, mapped):
    arrays, rebuild = jaxft.bundle([jnp.arange(3.0), jnp.arange(4.0)], **FORCED)

    def loss(arrays):
        a, b = rebuild(arrays)
        return jnp.sum(a**3) * jnp.sum(b**2)

    def plainly(arrays):
        a, b = arrays[0][:3], arrays[0][3:]
        return jnp.sum(a**3) * jnp.sum(b**2)

    given = [jnp.stack([arrays[0], -arrays[0]])] if mapped else arrays
    chex.assert_trees_all_close(transform(loss)(given), transform(plainly)(given), rtol=1e-6)


def test_bundle_is_static_under_jit():
    tree = [jnp.arange(3.0), jnp.arange(4.0)]
    traced = []

    @functools.partial(jax.jit, static_argnums=1)
    def run(arrays, rebuild):
        traced.append(rebuild)
        return rebuild(arrays)

    for factor in (1.0, 2.0):
        run(*jaxft.bundle(jax.tree.map(lambda x: x * factor, tree), **FORCED))  # noqa: B023
    run(*jaxft.bundle(tree[::-1], **FORCED))
    assert len(traced) == 2


def test_rebuild_accepts_another_dtype():
    arrays, rebuild = jaxft.bundle([jnp.arange(3.0), jnp.arange(4.0)], **FORCED)
    first, _ = rebuild([x.astype(jnp.bfloat16) for x in arrays])
    assert first.dtype == jnp.bfloat16


def test_only_small_float_vectors_are_joined():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    divided = [jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P("x")))] * 2
    numbers = [
        np.arange(3.0, dtype=np.float32),
        np.zeros(2, jax.dtypes.float0),
        jnp.arange(3),
        jnp.ones(2**16 + 1),
        2.0,
    ]
    tree = [*divided, *numbers, jax.random.key(0), jnp.ones(2), jnp.ones(3)]
    arrays, rebuild = jaxft.bundle(tree, **FORCED)
    assert len(arrays) == len(tree) - 1 and arrays[-1].shape == (5,)
    assert all(x is y for x, y in zip(arrays, tree[:-2], strict=False))
    leaves = rebuild(arrays)
    assert all(x is y for x, y in zip(leaves, tree[:-2], strict=False))
    chex.assert_trees_all_equal(leaves[-2:], tree[-2:])


def test_traced_arrays_are_not_joined():
    """In a shard_map, one array may vary over the devices where another one does not."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))

    def there_and_back(*tree):
        arrays, rebuild = jaxft.bundle(tree, **FORCED)
        assert len(arrays) == 2
        return rebuild(arrays)

    specs = P("x"), P()
    run = jax.jit(jax.shard_map(there_and_back, mesh=mesh, in_specs=specs, out_specs=specs))
    chex.assert_trees_all_equal(run(jnp.arange(3.0), jnp.arange(4.0)), (jnp.arange(3.0), jnp.arange(4.0)))


def test_unsupported_arrays_are_split_by_xla():
    """The automatic choice splits arrays by XLA that the kernel does not support."""
    with dispatch.target():
        arrays, rebuild = jaxft.bundle([jnp.arange(3.0), jnp.arange(4.0)])
    assert len(arrays) == 1
    for x in (jnp.arange(7), jax.random.split(jax.random.key(0), 7)):
        first, second = rebuild([x])
        assert (first == x[:3]).all() and (second == x[3:]).all()


@pytest.mark.parametrize("dtype", ONE_DTYPE)
def test_lowering(dtype):
    tree = [jnp.ones(n, dtype) for n in (1, 768, 3072, 5) * 30]
    with dispatch.target():
        arrays, rebuild = jaxft.bundle(tree)
    found = operations(lower(rebuild, [of(x.shape, dtype) for x in arrays]))
    assert len(arrays) == 1 and found[TRITON] == 1 and not found["slice"]


def test_errors():
    arrays, rebuild = jaxft.bundle([jnp.arange(3.0), jnp.arange(4.0), jnp.ones((2, 2))], **FORCED)
    with pytest.raises(ValueError, match=r"bundle: arrays must be the list of 2 that bundle gave, got 1"):
        rebuild(arrays[:1])
    with pytest.raises(ValueError, match=r"bundle: arrays must be the list of 2 that bundle gave, got NoneType"):
        rebuild(None)
    with pytest.raises(ValueError, match=r"bundle: arrays\[1\] must have shape \(7,\), got \(8,\)"):
        rebuild([arrays[0], jnp.ones(8)])
    with pytest.raises(TypeError, match=r"bundle: arrays\[1\] must be an array, got list"):
        rebuild([arrays[0], [0.0] * 7])
    with pytest.raises(NotImplementedError, match=r"bundle: there is no 'cudnn' implementation"):
        jaxft.bundle([jnp.ones(2)], implementation="cudnn")


# --- Of a model that changes ---------------------------------------------------------------------------------------


@pytest.fixture
def forced(monkeypatch):
    run = bundled.bundle_with
    monkeypatch.setattr(bundled, "bundle_with", lambda model, _, *how: run(model, FORCED["implementation"], *how))


@pytest.mark.usefixtures("forced")
def test_arrays_are_joined_once():
    model, of_model = jaxft.BertModel(tiny.config(), rngs=nnx.Rngs(0)), bundled.Bundled(None)
    arrays, rebuild = of_model(model)
    again, same = of_model(model)
    assert same is rebuild and all(x is y for x, y in zip(again, arrays, strict=True))
    changes = [
        lambda: model.layers[0].out_bias.set_value(jnp.ones(tiny.WIDTH)),
        lambda: setattr(model.layers[0], "ffn_norm_beta", nnx.Param(jnp.ones(tiny.WIDTH))),
        lambda: setattr(model, "embeddings", jaxft.BertModel(tiny.config(), rngs=nnx.Rngs(1)).embeddings),
    ]
    for change in changes:
        change()
        arrays, same = of_model(model)
        assert same is rebuild
        chex.assert_trees_all_equal(jax.tree.leaves(rebuild(arrays)), jax.tree.leaves(model))
    model.train()  # the mode is static
    arrays, other = of_model(model)
    assert other != rebuild and not other(arrays).deterministic
    model.pooler = None
    arrays, other = of_model(model)
    assert len(jax.tree.leaves(other(arrays))) == len(jax.tree.leaves(model))


class Shelves(nnx.Module):
    """Has arrays in places of all kinds."""

    def __init__(self, box=None):
        self.own = nnx.Param(jnp.arange(3.0))
        self.nothing = None
        self.empty = nnx.List([])
        self.parts = nnx.List([nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(2, 3, rngs=nnx.Rngs(1))])
        self.again = self.parts[0]
        self.fixed = "ab"
        if box is not None:
            self.box = nnx.data(box)


def flattened(monkeypatch):
    """Returns a list that gets each model that is flattened."""
    found, flatten = [], jax.tree.flatten
    monkeypatch.setattr(bundled.jax.tree, "flatten", lambda tree: found.append(tree) or flatten(tree))
    return found


def change_in_place(model):
    model.box[0] = jnp.ones(3)


def replace_first(model):
    """The new variable may have the identity of the old one."""
    del model.own
    model.own = nnx.Param(jnp.ones(3))


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize(("change", "box"), [
    (lambda model: None, None),
    (lambda model: model.own.set_value(jnp.ones(3)), None),
    (lambda model: model.again.bias.set_value(jnp.ones(3)), None),
    (replace_first, None),
    (lambda model: model.parts.append(nnx.Linear(2, 3, rngs=nnx.Rngs(2))), None),
    (lambda model: setattr(model, "fixed", "b"), None),
    (lambda model: setattr(model, "more", nnx.Param(jnp.ones(3))), None),
    (lambda model: setattr(model, "nothing", nnx.data(nnx.Param(jnp.ones(3)))), None),
    (lambda model: setattr(model, "fixed", "".join(["a", "b"])), None),
    (lambda model: vars(model).update(other=vars(model).pop("fixed")), None),
    (change_in_place, [jnp.arange(3.0)]),
    (lambda model: model.box.set_value((jnp.ones(3),)), nnx.Param((jnp.arange(3.0),))),
])  # fmt: skip
def test_any_change_of_a_module_is_noticed(change, box, monkeypatch):
    model, of_model = Shelves(box), bundled.Bundled(None)
    of_model(model)
    change(model)
    seen = flattened(monkeypatch)
    arrays, rebuild = of_model(model)
    expected, rebuilt = jax.tree.leaves(model), rebuild(arrays)
    assert jax.tree.structure(rebuilt) == jax.tree.structure(model)
    chex.assert_trees_all_equal(jax.tree.leaves(rebuilt), expected)
    seen.clear()
    of_model(model)
    assert len(seen) == (box is not None)  # an unchanged model is not flattened again


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("when", ["_parts", "flatten"])
def test_a_change_in_another_thread_is_noticed(when, monkeypatch):
    model, of_model = Shelves(), bundled.Bundled(None)
    module = bundled if when == "_parts" else bundled.jax.tree
    original, seven = getattr(module, when), jnp.full(3, 7.0)

    def changed_after(tree):
        found = original(tree)
        if model.own.get_raw_value() is not seven:  # the first call alone changes something
            model.own.set_value(seven)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(module, when, changed_after)
        of_model(model)
    for _ in range(2):
        arrays, rebuild = of_model(model)
        np.testing.assert_array_equal(rebuild(arrays).own[...], 7.0)


@pytest.mark.usefixtures("forced")
def test_a_change_that_another_thread_takes_back_is_noticed(monkeypatch):
    model, of_model, flatten = Shelves(), bundled.Bundled(None), jax.tree.flatten
    average, trained = jnp.full(3, 7.0), model.own.get_raw_value()

    def changed_before(tree):
        model.own.set_value(trained)
        monkeypatch.setattr(bundled.jax.tree, "flatten", flatten)
        return flatten(tree)

    model.own.set_value(average)
    monkeypatch.setattr(bundled.jax.tree, "flatten", changed_before)
    of_model(model)
    model.own.set_value(average)
    arrays, rebuild = of_model(model)
    np.testing.assert_array_equal(rebuild(arrays).own[...], 7.0)


@pytest.mark.usefixtures("forced")
def test_other_models_are_noticed():
    of_model, models = bundled.Bundled(None), []
    for seed in range(3):
        models.append(Shelves())
        models[-1].own.set_value(jnp.full(3, 1.0 + seed))
        arrays, rebuild = of_model(models[-1])
        np.testing.assert_array_equal(rebuild(arrays).own[...], models[-1].own[...])
        if seed:  # one that lives on, and one that is freed
            models.clear()


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("is_committed", [False, True])
def test_models_are_bundled_without_a_compilation(is_committed, compiled):
    model = jaxft.BertModel(tiny.config(), rngs=nnx.Rngs(0))
    if is_committed:
        place = NamedSharding(jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,)), P())
        model = jax.tree.map(lambda x: jax.device_put(x, place), model)
    compiled.clear()
    arrays, rebuild = bundled.Bundled(None)(model)
    assert not compiled
    expected, same = jaxft.bundle(model, **FORCED)
    assert rebuild == same
    chex.assert_trees_all_equal(arrays, expected)
    for x, y in zip(arrays, expected, strict=True):
        assert (x.sharding, x.committed) == (y.sharding, y.committed)


def test_xla_models_are_not_bundled():
    """XLA would launch a kernel for each part on a GPU."""
    model = jaxft.BertModel(tiny.config(), rngs=nnx.Rngs(0))
    with dispatch.target():
        counts = [len(bundled.Bundled(implementation)(model)[0]) for implementation in ("xla", "triton", None)]
    assert counts[0] == len(jax.tree.leaves(model)) > counts[1] == counts[2]


@pytest.mark.usefixtures("forced")
def test_replaced_arrays_that_live_on_are_noticed():
    model, of_model = jaxft.BertModel(tiny.config(), rngs=nnx.Rngs(0)), bundled.Bundled(None)
    of_model(model)
    before = jax.tree.leaves(model)  # as of a copy that is kept for an average
    nnx.update(model, jax.tree.map(lambda x: x * 0.5 + 1.0, nnx.state(model, nnx.Param)))
    arrays, rebuild = of_model(model)
    chex.assert_trees_all_equal(jax.tree.leaves(rebuild(arrays)), [x * 0.5 + 1.0 for x in before])


@pytest.mark.usefixtures("forced")
def test_replaced_arrays_are_released():
    model, of_model = jaxft.BertModel(tiny.config(), rngs=nnx.Rngs(0)), bundled.Bundled(None)
    of_model(model)
    before = [weakref.ref(x) for x in jax.tree.leaves(model)]
    nnx.update(model, jax.tree.map(lambda x: x * 0.5, nnx.state(model, nnx.Param)))
    gc.collect()
    assert not any(ref() is not None for ref in before)


def test_numpy_parameters_changed_in_place_are_noticed(tmp_path):
    encoder = jaxft.SentenceEncoder.from_pretrained(tiny.write_sentence_model(tmp_path))
    bias = encoder.model.layers[0].out_bias
    bias.set_value(np.zeros(tiny.WIDTH, np.float32))
    before = encoder.encode("rain")
    bias[...] = np.arange(tiny.WIDTH, dtype=np.float32)
    assert np.abs(encoder.encode("rain") - before).max() > 0.01


def test_encoding_during_training_drops_nothing(tmp_path):
    encoder = jaxft.SentenceEncoder.from_pretrained(tiny.write_sentence_model(tmp_path))
    before = encoder.encode("rain")
    encoder.model.train()
    np.testing.assert_array_equal(encoder.encode("rain"), before)


def replace_layer(model, factor):
    model.layers[0] = nnx.clone(model.layers[0])
    tiny.scale(model.layers[0], factor)


@pytest.fixture
def assumed(tmp_path):
    """Returns an encoder that computes the next text with the arrays of the last call."""
    encoder = jaxft.SentenceEncoder.from_pretrained(tiny.write_sentence_model(tmp_path))
    for _ in range(2):
        encoder.encode("rain")
    assert encoder._bundled.assumed(encoder.embedder) is not None
    return encoder


def expected(encoder, text):
    ids = jnp.array(encoder.tokenize(text))
    return encoder.model(ids, deterministic=True).last_hidden_state[0].mean(0)


@pytest.mark.parametrize("change", [tiny.scale, tiny.scale_and_delete, replace_layer])
@pytest.mark.parametrize("options", [{}, {"show_progress_bar": True}, {"devices": [0]}])
def test_one_text_gets_the_models_present_arrays(change, options, assumed):
    for width, factor in ((32, 1.5), (32, 0.5), (8, 0.5)):  # the last text needs a new program
        kept = change(assumed.model, factor)  # deleted arrays are assumed only while somebody has them
        for _ in range(3):
            found = assumed.encode("rain", truncate_dim=width, **options)
            np.testing.assert_allclose(found, expected(assumed, "rain")[:width], rtol=0, atol=1e-5)
        del kept


def test_text_after_the_repair_of_a_model_is_computed(assumed):
    layer = assumed.model.layers[0]
    right = layer.out_bias.get_raw_value()
    layer.out_bias.set_value(right[:3])
    with pytest.raises(ValueError):
        assumed.encode("rain", truncate_dim=8)
    layer.out_bias.set_value(right)
    for options in ({}, {"show_progress_bar": True}):
        found = assumed.encode("rain", truncate_dim=8, **options)
        np.testing.assert_allclose(found, expected(assumed, "rain")[:8], rtol=0, atol=1e-5)


def test_arrays_that_are_deleted_are_an_error(assumed):
    # A GPU's programs get copies of vectors.
    next(x for x in jax.tree.leaves(assumed.model) if x.ndim == 2).delete()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="deleted"):
            assumed.encode("rain")


def test_the_model_is_compared_while_the_device_computes(assumed, monkeypatch):
    order, compute, is_current = [], devices._Worker.compute, bundled._Last.is_current
    monkeypatch.setattr(
        devices._Worker, "compute", lambda worker, batch: order.append("launched") or compute(worker, batch)
    )
    monkeypatch.setattr(bundled._Last, "is_current", lambda last: order.append("compared") or is_current(last))

    def steps(text, **options):
        order.clear()
        assumed.encode(text, **options)
        return order

    assert steps("rain", truncate_dim=4)[0] == "compared"  # a program is compiled for present arrays
    assert steps("rain") == ["launched", "compared"]
    assert steps(["rain", "snow"]) == ["compared", "launched"]
    kept = jax.tree.leaves(assumed.model)  # replaced arrays are assumed only while somebody has them
    tiny.scale(assumed.model)
    # A new program is not launched with the arrays of before.
    assert steps("rain", truncate_dim=8).count("launched") == 1
    del kept


def test_a_model_in_training_is_compared_first(assumed, monkeypatch):
    calls, embed = [], assumed._embed
    monkeypatch.setattr(assumed, "_embed", lambda *call: calls.append(0) or embed(*call))
    assumed.encode("rain")
    calls.clear()
    kept = []  # if nobody has the replaced arrays, they cannot be assumed
    for _ in range(5):
        kept += jax.tree.leaves(assumed.model)
        tiny.scale(assumed.model, 0.9)
        assumed.encode("rain")
    assert len(calls) <= 6  # the first text may be computed again


@pytest.mark.parametrize("fails", [False, True])
def test_arrays_are_freed_without_the_garbage_collector(fails, assumed, monkeypatch):
    def compile_program(*arguments):
        raise ValueError("no program")

    if fails:
        monkeypatch.setattr(programs, "compile", compile_program)
    gc.collect()
    gc.disable()
    try:
        for options in ({}, {"truncate_dim": 8}):  # the second text needs a new program
            assumed.encode("rain", **options)
        before = [weakref.ref(x) for x in jax.tree.leaves(assumed.model)]
        tiny.scale(assumed.model, 0.9)
        assumed.encode("rain")
        assert not any(ref() is not None for ref in before)
    finally:
        gc.enable()


@pytest.mark.usefixtures("forced")
def test_sentence_encoder_passes_few_arrays(tmp_path):
    encoder = jaxft.SentenceEncoder.from_pretrained(tiny.write_sentence_model(tmp_path))
    texts = ["a bird sings", "rain"]
    for factor in (1.0, 0.5):
        nnx.update(encoder.model, jax.tree.map(lambda x: x * factor, nnx.state(encoder.model, nnx.Param)))  # noqa: B023
        arrays, _ = encoder._bundled(encoder.embedder)
        assert len(arrays) < 15
        found, ids = encoder.encode(texts[0]), jnp.array(encoder.tokenize(texts[:1]))
        np.testing.assert_allclose(found, encoder.model(ids).last_hidden_state[0].mean(0), atol=1e-5)
