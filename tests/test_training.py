"""Gradients over micro-batches equal the gradients of the whole batch, and float16 trains with a loss scale."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxft
import tiny
from cases import slow, slow_cases
from jaxft.models.masked_lm import BertForMaskedLM
from jaxft.training import COMPILER_OPTIONS, LossScale, accumulate_gradients, update_if_finite


def classifier_loss(params, batch):
    x, labels = batch
    return jaxft.linear_cross_entropy(x, params["embedding"], labels, params["bias"])


def classifier_data(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"embedding": jax.random.normal(keys[0], (11, 8), dtype), "bias": jnp.zeros(11, dtype)}
    x, labels = jax.random.normal(keys[1], (4, 6, 8)), np.array(jax.random.randint(keys[2], (4, 6), 0, 11))
    labels[0, 1:] = labels[2] = -100  # one label in the first micro-batch, none in the third
    return params, (x, jnp.asarray(labels))


@pytest.mark.parametrize(
    ("micro_batches", "loss_scale"), [(4, None), (2, LossScale.create(2.0**10)), *slow_cases((1, None))]
)
def test_accumulation_equals_the_whole_batch(micro_batches, loss_scale):
    params, (x, labels) = classifier_data()
    whole = (x.reshape(-1, 8), labels.reshape(-1))
    expected, gradients = jax.value_and_grad(lambda params: classifier_loss(params, whole).mean)(params)
    batches = x.reshape(micro_batches, -1, 8), labels.reshape(micro_batches, -1)
    loss, found = jax.jit(functools.partial(accumulate_gradients, classifier_loss))(
        params, batches, loss_scale=loss_scale
    )
    assert loss.labelled == 13 and loss.labelled.dtype == jnp.int32
    np.testing.assert_allclose(loss.mean, expected, rtol=1e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-5, atol=1e-6 * np.abs(gradient).max())


def test_batch_without_labels_has_the_gradient_0():
    params, (x, _) = classifier_data()
    loss, found = accumulate_gradients(classifier_loss, params, (x, jnp.full(x.shape[:2], -100)))
    assert (loss.total, loss.labelled, loss.mean) == (0, 0, 0)
    assert not any(x.any() for x in jax.tree.leaves(found))


@pytest.mark.parametrize("loss_scale", [LossScale.create(2.0**10), *slow(None)], ids=["scaled", "unscaled"])
def test_labels_count_equally_on_all_devices(loss_scale):
    """With two devices, one has 7 labels and the other 6. The result is the same on both."""
    params, (x, labels) = classifier_data()
    expected, gradients = accumulate_gradients(classifier_loss, params, (x, labels))
    mesh = jax.make_mesh((min(2, jax.device_count()),), ("data",), (jax.sharding.AxisType.Auto,))
    each = jax.shard_map(
        lambda params, *batches: accumulate_gradients(classifier_loss, params, batches, loss_scale=loss_scale),
        mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(),
    )  # fmt: skip
    loss, found = jax.jit(each)(params, x, labels)
    assert loss.labelled == expected.labelled == 13
    np.testing.assert_allclose(loss.total, expected.total, rtol=1e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-5, atol=1e-6 * np.abs(gradient).max())


@pytest.mark.parametrize("batches_vary", [False, True])
def test_parameters_of_each_device_have_own_gradients(batches_vary):
    params, (x, labels) = classifier_data()
    expected, gradients = accumulate_gradients(classifier_loss, params, (x, labels))
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
    of_batches = P("data") if batches_vary else P()

    def each(params, *batches):
        loss, found = accumulate_gradients(classifier_loss, params, batches)
        return loss.total[None], found

    each = jax.shard_map(each, mesh=mesh, in_specs=(P("data"), of_batches, of_batches), out_specs=P("data"))
    total, found = jax.jit(each)(params, x, labels)
    np.testing.assert_allclose(total, [expected.total], rtol=1e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-5, atol=1e-6 * np.abs(gradient).max())


@pytest.mark.parametrize("dtype", ["nope", None, jnp.int32, jnp.float16])
def test_other_dtypes_of_sums_are_refused(dtype):
    params, batches = classifier_data()
    with pytest.raises(TypeError, match="sum_dtype must be float32 or bfloat16, got "):
        accumulate_gradients(classifier_loss, params, batches, sum_dtype=dtype)


@pytest.mark.cpu  # of a single GPU: XLA leaves out the sum, and with it the rounding
def test_devices_add_up_matrices_in_another_dtype():
    params, (x, labels) = classifier_data()
    _, gradients = accumulate_gradients(classifier_loss, params, (x, labels))
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
    each = jax.shard_map(
        lambda params, *batches: accumulate_gradients(classifier_loss, params, batches, sum_dtype=jnp.bfloat16),
        mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(),
    )  # fmt: skip
    _, found = jax.jit(each)(params, x, labels)
    assert {name: gradient.dtype for name, gradient in found.items()} == dict.fromkeys(params, jnp.float32)
    np.testing.assert_allclose(found["bias"], gradients["bias"], rtol=1e-5, atol=1e-7)
    rounded = (13 * gradients["embedding"]).astype(jnp.bfloat16).astype(jnp.float32) / 13  # of 13 labels
    assert np.abs(rounded - gradients["embedding"]).max() > 1e-4
    np.testing.assert_allclose(found["embedding"], rounded, rtol=2**-8, atol=1e-6)
    assert np.mean(np.isclose(found["embedding"], rounded, rtol=1e-5)) > 0.9


def test_loss_with_its_own_psum_is_refused():
    params, (x, labels) = classifier_data()
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))

    def loss_fn(params, batch):
        return jax.lax.psum(classifier_loss(params, batch), "data")

    each = jax.shard_map(
        lambda params, *batches: accumulate_gradients(loss_fn, params, batches),
        mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"got a total that is the same over \['data'\]; leave out its psum"):
        each(params, x, labels)


@pytest.mark.parametrize("finite", [jnp.float32(1), np.array([True]), 1])
def test_finite_must_be_a_boolean(finite):
    with pytest.raises(TypeError, match="LossScale: finite must be a boolean scalar, got "):
        LossScale.create().update(finite)


def test_each_micro_batch_has_its_own_key():
    keys = jax.random.split(jax.random.key(1), 3)
    noise = np.stack([jax.random.normal(key, (2, 5)) for key in keys])

    def loss_fn(params, batch):
        x, key = batch
        return (params * (x + jax.random.normal(key, (2, 5)))).sum(), jnp.int32(2)

    loss, gradient = accumulate_gradients(loss_fn, jnp.ones(5), (jnp.ones((3, 2, 5)), keys))
    np.testing.assert_allclose(gradient, (1 + noise).sum((0, 1)) / 6, rtol=1e-5)
    np.testing.assert_allclose(loss.total, (1 + noise).sum(), rtol=1e-5)


def test_gradients_have_the_dtype_of_the_parameters():
    params, batches = classifier_data(jnp.bfloat16)
    _, gradients = accumulate_gradients(classifier_loss, params, batches)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("batches", [(), (jnp.zeros((2, 3)), jnp.zeros(3)), jnp.zeros((0, 3)), jnp.float32(1)], ids=str)
def test_batches_need_a_micro_batch_axis(batches):
    with pytest.raises(ValueError, match=r"accumulate_gradients: batches must be arrays of the same first axis"):
        accumulate_gradients(classifier_loss, {}, batches)


@pytest.mark.parametrize("loss", [(1.0, 1.0), (jnp.zeros(2), 2), (1.0,), 1.0], ids=str)
def test_loss_must_be_total_and_count(loss):
    with pytest.raises(ValueError, match="accumulate_gradients: loss_fn must return two scalars, total and an integer"):
        accumulate_gradients(lambda params, batch: loss, {"w": jnp.ones(2)}, jnp.zeros((1, 2)))


def scaled_by(factor):
    """Returns a loss whose gradient is `factor` in float16."""
    return lambda params, x: ((params.astype(jnp.float16) * x).astype(jnp.float32).sum() * jnp.float32(factor), 1)


def test_the_scale_saves_small_gradients():
    params, batch = jnp.ones(3), jnp.ones((1, 3), jnp.float16)
    for scale, expected in ((None, 0.0), (LossScale.create(), 1e-8)):
        _, gradient = accumulate_gradients(scaled_by(1e-8), params, batch, loss_scale=scale)
        np.testing.assert_allclose(gradient, expected, rtol=1e-2)


def test_float16_parameters_have_no_loss_scale():
    arguments = scaled_by(1.0), jnp.ones(3, jnp.float16), jnp.ones((1, 3), jnp.float16)
    accumulate_gradients(*arguments)
    with pytest.raises(ValueError, match="params must not be float16 with a loss_scale, got a float16 array; keep"):
        accumulate_gradients(*arguments, loss_scale=LossScale.create())


def test_integers_are_no_parameters():
    params = {"weight": jnp.ones(3), "count": jnp.zeros((), jnp.int32)}
    with pytest.raises(TypeError, match="accumulate_gradients: params must be arrays of floats, got one of int32"):
        accumulate_gradients(lambda params, batch: (jnp.float32(0), jnp.int32(1)), params, jnp.ones((1, 3)))


@pytest.mark.parametrize(
    ("update", "message"),
    [(lambda _, state: {"a": state["a"][:1]}, r"must give what state has, float32\[2\], got float32\[1\]"),
     (lambda _, state: {"a": state["a"].astype(jnp.bfloat16)}, r"float32\[2\], got bfloat16\[2\]"),
     (lambda _, state: state | {"b": 0}, r"PyTreeDef\({'a': \*}\), got PyTreeDef\({'a': \*, 'b': \*}\)")],
)  # fmt: skip
def test_update_must_keep_the_state_type(update, message):
    state = {"a": jnp.ones(2)}
    with pytest.raises(ValueError, match=f"update_if_finite: update .*{message}"):
        update_if_finite(update, jnp.ones(2), state, LossScale.create())


def test_loss_scale_must_be_a_loss_scale():
    with pytest.raises(TypeError, match="accumulate_gradients: loss_scale must be a LossScale or None, got 1024.0"):
        accumulate_gradients(scaled_by(1.0), jnp.ones(3), jnp.ones((1, 3), jnp.float16), loss_scale=1024.0)
    with pytest.raises(TypeError, match="update_if_finite: loss_scale must be a LossScale or None, got 1024.0"):
        update_if_finite(lambda gradients, state: state, jnp.ones(3), jnp.ones(3), 1024.0)


@pytest.fixture
def standard_promotion():
    """Turns strict dtype promotion off: optax does not run under it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("standard_promotion")
def test_overflow_skips_and_halves_and_recovers():
    optimizer = optax.adam(0.1)
    params = jnp.ones(3)

    @jax.jit
    def step(state, loss_scale, factor):
        batch = jnp.full((1, 3), factor, jnp.float16)
        _, gradients = accumulate_gradients(scaled_by(1.0), state[0], batch, loss_scale=loss_scale)

        def update(gradients, state):
            updates, opt_state = optimizer.update(gradients, state[1])
            return optax.apply_updates(state[0], updates), opt_state

        return update_if_finite(update, gradients, state, loss_scale)

    state, loss_scale = (params, optimizer.init(params)), LossScale.create(2.0**15)
    for expected in (2.0**14, 2.0**13, 2.0**12):  # 10 * 2^13 is beyond float16, 10 * 2^12 is not
        before = state
        state, loss_scale = step(state, loss_scale, jnp.float16(10))
        assert (loss_scale.scale, loss_scale.good_steps) == (expected, 0)
        for new, old in zip(jax.tree.leaves(state), jax.tree.leaves(before), strict=True):
            np.testing.assert_array_equal(new, old)
    for good_steps in (1, 2):
        state, loss_scale = step(state, loss_scale, jnp.float16(10))
        assert (loss_scale.scale, loss_scale.good_steps) == (2.0**12, good_steps)
    np.testing.assert_allclose(
        state[0], 0.8, rtol=1e-3
    )  # Adam's first step has the size of its rate, and the skipped step did not count
    assert state[1][0].count == 2
    state, loss_scale = step(state, loss_scale, jnp.float16(jnp.nan))
    assert loss_scale.scale == 2.0**11 and np.isfinite(state[0]).all()


def test_the_scale_grows_within_limits():
    good, bad = jnp.bool(True), jnp.bool(False)
    scale = LossScale.create(8)
    seen = []
    for _ in range(6):
        scale = scale.update(good, growth_interval=3)
        seen.append((float(scale.scale), int(scale.good_steps)))
    assert seen == [(8, 1), (8, 2), (16, 0), (16, 1), (16, 2), (32, 0)]
    assert LossScale.create(1).update(bad).scale == 1
    ended = LossScale.create(8).update(good).update(good).update(bad)  # which ends the row of good steps
    assert (ended.scale, ended.good_steps) == (4, 0)
    skipped = [int((scale := scale.update(finite)).skipped) for finite in (bad, bad, good, bad)]
    assert skipped == [1, 2, 0, 1]
    assert LossScale.create(2.0**24).update(good, growth_interval=1).scale == 2.0**24
    assert LossScale.create().update(good, growth_interval=2**40).good_steps == 1
    assert [leaf.dtype for leaf in scale] == [jnp.float32, jnp.int32, jnp.int32]


@pytest.mark.parametrize("interval", [0, -5, "2", 2.5])
def test_wrong_growth_interval_is_refused(interval):
    with pytest.raises(ValueError, match=f"LossScale: growth_interval must be an integer above 0, got {interval!r}"):
        LossScale.create().update(jnp.bool(True), growth_interval=interval)


@pytest.mark.parametrize("scale", [0.5, 2.0**25, float("nan"), "8", True])
def test_wrong_scale_is_refused(scale):
    with pytest.raises(ValueError, match=r"LossScale: scale must be a number from 1 to 2\*\*24, got"):
        LossScale.create(scale)


@pytest.mark.parametrize("kind", [int, np.int32, np.float16])
def test_scale_may_be_a_numpy_number(kind):
    assert LossScale.create(kind(1024)).scale == 1024.0


def test_updates_without_a_scale_always_apply():
    state, scale = update_if_finite(lambda gradients, state: state - gradients, jnp.float32(jnp.nan), jnp.ones(2), None)
    assert scale is None and np.isnan(state).all()


def test_empty_gradients_are_finite():
    state, scale = jax.jit(
        lambda: update_if_finite(lambda gradients, state: state + 1, (), jnp.ones(2), LossScale.create())
    )()
    assert (state == 2).all() and scale.good_steps == 1


def test_float16_trains():
    """The loss scale starts far too large, adapts, and the loss falls."""
    ids = jax.random.randint(jax.random.key(1), (1, 4, 8), 5, 17)
    graph, params = nnx.split(BertForMaskedLM(tiny.config(), dtype="float16", rngs=nnx.Rngs(0)))

    @jax.jit
    def step(params, loss_scale):
        loss, gradients = accumulate_gradients(
            lambda params, ids: nnx.merge(graph, params).loss(ids, ids), params, ids, loss_scale=loss_scale
        )

        def update(gradients, params):
            return jax.tree.map(lambda param, gradient: param - 0.02 * gradient, params, gradients)

        return *update_if_finite(update, gradients, params, loss_scale), loss.mean

    losses, scales = [], [LossScale.create(2.0**24)]
    for _ in range(40):
        params, scale, loss = step(params, scales[-1])
        losses.append(float(loss))
        scales.append(scale)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params)) and np.isfinite(losses).all()
    assert 2.0**4 < scales[-1].scale < 2.0**22 and scales[-1].good_steps > 20
    assert losses[-1] < 0.7 * losses[0]


def test_compiler_options():
    """Every supported JAX knows these options."""
    params, (x, labels) = classifier_data()

    def loss(params, batch):
        return classifier_loss(params, batch).mean

    plain, with_options = (jax.jit(jax.grad(loss), compiler_options=options) for options in (None, COMPILER_OPTIONS))
    jax.tree.map(np.testing.assert_array_equal, plain(params, (x, labels)), with_options(params, (x, labels)))
