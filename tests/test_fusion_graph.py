"""The graph of `jaxft.fuse`: numbers, constants and equal equations. Also the helpers that all sites share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import jaxft
from fusion_cases import normal
from jaxft.fusion import graph
from jaxft.fusion.graph import Graph
from jaxft.fusion.site import Refused, check_kept_inside, precision_name, region

I32, U32 = jnp.int32, jnp.uint32
Algorithm = jax.lax.DotAlgorithmPreset
DEFAULT, HIGH, HIGHEST = jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST


def graph_of(fn, *args):
    return Graph(jax.make_jaxpr(fn)(*args))


def iota(*shape, axis=0, dtype=I32):
    return jax.lax.broadcasted_iota(dtype, shape, axis)


CONSTANTS = {
    "an iota along the last axis": lambda: iota(3, 5, axis=1),
    "a clamp": lambda: jax.lax.clamp(I32(2), iota(9), I32(5)),
    "a selection": lambda: jnp.where(iota(9) > 3, iota(9), 7),
    "a cast to integers": lambda: (iota(9).astype(jnp.float32) * 0.7).astype(I32),
    "a cast to 8 bits": lambda: (iota(9).astype(jnp.float32) * 3.3).astype(jnp.float8_e4m3fn),
    "a reshaped broadcast": lambda: jnp.broadcast_to(iota(4)[:, None], (4, 3)).reshape(12),
    "a transposed broadcast": lambda: jnp.broadcast_to(iota(4)[:, None], (4, 3)).T,
    "a logical operation": lambda: (iota(9) > 3) & (iota(9) < 7),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_have_the_values_of_jax(name):
    g, expected = graph_of(CONSTANTS[name]), CONSTANTS[name]()
    found = g.constant(g.outvars[0])
    np.testing.assert_array_equal(np.broadcast_to(found, expected.shape), np.asarray(expected, found.dtype))


def test_large_constants_are_not_evaluated(monkeypatch):
    table = jnp.arange(9)
    for largest, is_known in ((9, True), (8, False)):
        monkeypatch.setattr(graph, "_LARGEST_CONSTANT", largest)
        g = graph_of(lambda: (iota(9) + 1, table))
        assert [g.constant(v) is not None for v in g.outvars] == [is_known] * 2


def test_bits_of_integers_are_no_constants():
    g = graph_of(lambda: iota(9) & 6)
    assert g.constant(g.outvars[0]) is None


@pytest.mark.parametrize(
    ("fn", "number"),
    [
        (lambda: U32(3) - U32(1), 2),
        (lambda: U32(0) - U32(1), None),
        (lambda: I32(0) - I32(1), -1),
        (lambda: I32(2**30) * I32(2), None),
        (lambda: I32(2**30) + I32(2**30 - 1), 2**31 - 1),
        (lambda: I32(6) & I32(3), None),
    ],
)
def test_numbers_are_folded_unless_they_wrap_around(fn, number):
    g = graph_of(lambda: jax.lax.optimization_barrier(fn()))
    (v,) = g.nodes[-1].ins
    assert g.number(v) == number


@pytest.mark.parametrize(
    ("fn", "stays"),
    [
        (lambda x, y: jax.lax.select(jnp.full(x.shape, True), x, y), 0),
        (lambda x, y: jax.lax.select(jnp.full(x.shape, False), x, y), 1),
        (lambda x, y: x - 0, 0),
        (lambda x, y: 0 - x, None),
        (lambda x, y: x / 1, 0),
        (lambda x, y: 1 / x, None),
        (lambda x, y: jnp.minimum(x, jnp.inf), 0),
        (lambda x, y: jnp.minimum(x, -jnp.inf), None),
        (lambda x, y: jnp.maximum(x, -jnp.inf), 0),
        (lambda x, y: jnp.maximum(x, jnp.inf), None),
    ],
)
def test_equation_is_its_operand_where_it_changes_nothing(fn, stays):
    g = graph_of(fn, normal(0, 3, 8), normal(1, 3, 8))
    found = [g.find(g.outvars[0]) is v for v in g.invars]
    assert found == [i == stays for i in range(2)]


@pytest.mark.parametrize(
    ("fn", "is_same"),
    [
        (lambda x: (x.sum(0), x.sum(0)), True),
        (lambda x: (x.sum(0), x.sum(1)), False),
        (lambda x: (x @ jnp.ones((8, 3)), x @ jnp.ones((8, 5))), False),
    ],
)
def test_equal_equations_are_one_value(fn, is_same):
    g = graph_of(fn, normal(0, 8, 8))
    assert (g.find(g.outvars[0]) is g.find(g.outvars[1])) == is_same


def test_equal_effects_are_two_values():
    count = iter(range(2))

    def number():
        return np.float32(next(count))

    def fn(x):
        a, b = (io_callback(number, jax.ShapeDtypeStruct((), jnp.float32), ordered=True) for _ in range(2))
        return jax.nn.softmax(x), a, b

    assert [float(x) for x in jax.jit(jaxft.fuse(fn, force=True))(normal(0, 3, 8))[1:]] == [0, 1]


def test_traced_number_of_a_closure_is_no_constant():
    x = normal(0, 3, 8)

    @jax.jit
    def fn(scale):
        return jaxft.fuse(lambda x: jax.nn.softmax(x * scale), force=True)(x)

    np.testing.assert_allclose(fn(jnp.float32(2)), jax.nn.softmax(2 * x), rtol=1e-5)


def test_key_of_a_closure_is_no_number():
    x, key = normal(0, 3, 8), jax.random.key(0)

    def fn(x):
        return jax.nn.softmax(x + jax.random.normal(key, x.shape))

    np.testing.assert_allclose(jaxft.fuse(fn, force=True)(x), fn(x), rtol=1e-5)


@pytest.mark.parametrize(("options", "is_inlined"), [
    ({}, True), ({"donate_argnums": 0}, False),
])  # fmt: skip
def test_calls_with_options_are_not_inlined(options, is_inlined):
    g = graph_of(lambda x: jax.jit(jnp.sin, **options)(x), normal(0, 3, 8))
    assert [node.name == "sin" for node in g.nodes] == [is_inlined]


@pytest.mark.parametrize(
    ("precision", "other", "name"),
    [
        (None, None, None),
        (HIGH, None, "high"),
        (None, (HIGH, DEFAULT), "high"),
        (DEFAULT, HIGHEST, "highest"),
        (HIGHEST, HIGH, "highest"),
        (Algorithm.BF16_BF16_F32, Algorithm.F16_F16_F32, None),
    ],
)
def test_precision_is_the_higher_one(precision, other, name):
    assert precision_name(precision, other) == name


def test_dot_algorithm_is_refused():
    with pytest.raises(Refused, match="names its algorithm"):
        precision_name(HIGH, Algorithm.TF32_TF32_F32)


def test_values_that_are_read_elsewhere_are_kept():
    def fn(x):
        y = jnp.tanh(x)
        return x * y, y, y > 0, y.sum(-1)

    g = graph_of(fn, normal(0, 3, 8))
    product, y, is_positive, total = g.outvars
    inside = region(g, [product, is_positive, total], [])
    with pytest.raises(Refused, match="the tangent is also used elsewhere"):
        check_kept_inside(g, inside, [product], g.invars, y.size, "the tangent")
    check_kept_inside(g, inside, [product, y], g.invars, y.size, "a comparison or a sum")
