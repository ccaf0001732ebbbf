"""Inline assembly of the kernels, which no interpreter runs: NumPy runs its text here."""

import contextlib
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest

from cases import INTERPRET
from jaxft import reference
from jaxft.kernels.triton import activations, common

pytestmark = pytest.mark.skipif(not INTERPRET, reason="here every test of a kernel runs the assembly")

INSTRUCTIONS = {
    "ex2.approx.ftz.f32": lambda x: np.exp2(x) * (1.0 + 2.0**-22),
    "rcp.approx.ftz.f32": lambda x: (1.0 + 2.0**-22) / x,
    "rcp.rn.f32": np.reciprocal,
    "fma.rn.f32": lambda x, y, z: x * y + z,
    "mov.b32": np.copy,
}


def run_assembly(asm, *, args, constraints, pack, result_shape_dtypes):
    """Replaces `plgpu.elementwise_inline_asm`. A register has `pack` elements of 4 / `pack` bytes."""
    name, operands = re.fullmatch(r"(\S+) \$0, (.*);", asm).groups()
    kind = "r" if name.endswith("b32") else "f"
    assert constraints == ",".join([f"={kind}", *[kind] * len(args)])
    (result,) = result_shape_dtypes
    assert {x.shape for x in args} == {result.shape}
    assert {x.dtype.itemsize * pack for x in (*args, result)} == {4}
    values = []
    for operand in operands.split(", "):
        if operand[0] == "$":
            x = np.asarray(args[int(operand[1:]) - 1])
        else:
            x = np.uint32(int(re.fullmatch("0f([0-9A-F]{8})", operand)[1], 16)).view(np.float32)
        values.append(x.astype(np.float64) if kind == "f" else x)
    return [jnp.asarray(INSTRUCTIONS[name](*values), result.dtype)]


@contextlib.contextmanager
def interpreted():
    token = common.interpreting.set(True)
    yield
    common.interpreting.reset(token)


@pytest.fixture
def assert_same(monkeypatch):
    """Returns a check that the compiled `function(*args)` equals the interpreted one."""
    monkeypatch.setattr(common.plgpu, "elementwise_inline_asm", run_assembly)

    def check(function, *args, rtol=1e-5, atol=0.0):
        with interpreted():
            expected = function(*args)
        np.testing.assert_allclose(function(*args), expected, rtol=rtol, atol=atol)

    return check


ROWS = jnp.asarray(np.random.default_rng(0).standard_normal((5, 7)), jnp.float32)


@pytest.mark.parametrize("function", [common.exp2, common.exp, common.reciprocal])
def test_functions_match_their_assembly(function, assert_same):
    assert_same(function, 20.0 * ROWS)


def test_rounded_reciprocal(assert_same):
    assert_same(common.rounded_reciprocal, ROWS, rtol=0.0)


OPERANDS = {"column": ROWS[:, :1] + 3.0, "row": 2.0 - ROWS[:1], "array": ROWS[::-1] * 3.0, "number": -math.log2(math.e)}


@pytest.mark.parametrize("z", OPERANDS)
@pytest.mark.parametrize("y", OPERANDS)
def test_fma(y, z, assert_same):
    """Operands are numbers, which are written into the instruction, and arrays, which broadcast."""
    assert_same(common.fma, ROWS, OPERANDS[y], OPERANDS[z], atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_opaque(dtype, assert_same):
    assert_same(common.opaque, ROWS.astype(dtype), rtol=0.0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", reference.ACTIVATIONS)
def test_activations(name, dtype, assert_same):
    x = jnp.linspace(-6.0, 6.0, 301)
    assert_same(lambda x: activations.activation(name, x, dtype), x, atol=1e-30)
    assert_same(lambda x: activations.activation_gradient(name, x, jnp.ones_like(x), dtype), x, atol=1e-6)
