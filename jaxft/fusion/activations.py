"""Activations, recognised by what they compute: a scalar function is evaluated and compared with the known ones."""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxft.fusion.algebra import FLOATS, is_like, is_vector, source, terms, widens
from jaxft.fusion.graph import ELEMENTWISE, Graph, Node, Var, erfc, numpy_value
from jaxft.fusion.site import (
    Options,
    Refused,
    Site,
    as_vector,
    check_kept_inside,
    is_used_outside,
    need,
    outward,
    present,
    region,
)
from jaxft.ops.bias_activation import bias_activation
from jaxft.reference import ACTIVATIONS

ANCHORS = ("custom_jvp_call", "erf", "erfc", "exp", "exp2", "expm1", "log1p", "logistic", "max", "select_n", "tanh")

_FAR = [30.0, 50.0, 100.0, 300.0, 1e3, 6e4]
_GRID = np.concatenate([np.linspace(-9, 9, 181) + 1e-3, [1e-3], _FAR, np.negative(_FAR)])
_CUTS = 40  # nodes of an activation, at most
_THREE = int(np.argmin(np.abs(_GRID - 3)))  # where activations are neither 0 nor the identity


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


@functools.cache
def _known() -> Mapping[str, np.ndarray]:
    x = _GRID
    return {
        "gelu": 0.5 * x * erfc(-x / math.sqrt(2)),
        "gelu_tanh": 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "relu": np.maximum(x, 0),
        "silu": x * _sigmoid(x),
        "tanh": np.tanh(x),
        "quick_gelu": x * _sigmoid(1.702 * x),
        "sigmoid": _sigmoid(x),
        "softplus": np.logaddexp(0, x),
        "mish": x * np.tanh(np.logaddexp(0, x)),
        "relu6": np.clip(x, 0, 6),
        "squared relu": np.maximum(x, 0) ** 2,
        "hard_swish": x * np.clip(x / 6 + 0.5, 0, 1),
        "elu": np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
        "leaky_relu": np.where(x > 0, x, 0.01 * x),
    }


@dataclasses.dataclass(frozen=True)
class Activation:
    """y = activation(x)."""

    y: Var
    x: Var
    name: str


def _is_of_jax(node: Node, name: str) -> bool:
    """Returns whether a `custom_jvp` function is JAX's own and its name matches the pattern `name`."""
    info = getattr(getattr(node.params["call_jaxpr"], "jaxpr", None), "debug_info", None)
    where = str(getattr(info, "func_src_info", ""))
    return re.match(rf"{name} at .*[/\\]jax[/\\]_src[/\\]", where) is not None


def _evaluate(g: Graph, y: Var, known: dict[Var, Any]) -> tuple[np.ndarray, bool]:
    """Returns y, computed from known values, and whether a part of y has no gradient.

    Raises `Refused` where y depends on more than these values and numbers.
    """
    is_detached = False

    def value(v: Var) -> Any:
        nonlocal is_detached
        v = g.find(v)
        if v not in known:
            node = g.defs.get(v)
            if v in g.uniform:
                known[v] = g.uniform[v]
            elif node is None:
                raise Refused("")
            elif node.name == "custom_jvp_call" and _is_of_jax(node, ".*"):
                inner = Graph(node.params["call_jaxpr"])
                operands = dict(zip(inner.invars, map(value, node.ins), strict=True))
                known[v] = _evaluate(inner, inner.outvars[0], operands)[0]
            elif node.name in ("broadcast_in_dim", "reshape") and node.ins[0].shape == v.shape:
                known[v] = value(node.ins[0])
            elif node.name in ELEMENTWISE:
                is_detached |= node.name == "stop_gradient"
                with np.errstate(all="ignore"):
                    known[v] = numpy_value(node, [value(operand) for operand in node.ins])
            else:
                raise Refused("")
        return known[v]

    return np.asarray(value(y), dtype=float), is_detached


def _name_of(values: np.ndarray, is_16_bit: bool) -> tuple[str, float]:
    """Returns the activation that has these values on the grid, times a factor, or no name.

    In 16 bits, constants such as sqrt(2 / pi) have a relative error of 2^-9.
    """
    if values.shape == _GRID.shape:
        for name, expected in _known().items():
            tolerance = 2e-3 * (0.25 + np.abs(expected)) if is_16_bit else 3e-7 * (0.1 + np.abs(expected))
            for factor in (1.0, float(values[_THREE] / expected[_THREE])):
                with np.errstate(all="ignore"):
                    is_close = np.abs(values - factor * expected) <= tolerance
                if is_close.all():
                    return name, factor
    return "", 1.0


def read_activation(g: Graph, anchor: Node) -> Activation:
    """Reads the largest element-wise region around `anchor` that computes a known activation of one array."""
    shape, unknown = anchor.out.shape, ""
    names = ("add", "convert_element_type", "div", "integer_pow", "mul", "neg", "select_n", "stop_gradient", "sub")
    for y in outward(g, anchor.out, names, 6):
        if y.shape != shape or str(y.dtype) not in FLOATS or y in g.uniform:
            continue
        root = g.defs[y]
        is_wider = root.name == "convert_element_type" and widens(root.ins[0].dtype, y.dtype)
        # A LayerNorm of 16-bit rows reads the activation, and its cast to float32 for the statistics. The cast is then
        # not part of the activation.
        if is_wider and len(g.uses(root.ins[0])) > 1:
            continue
        front = {y}
        for _ in range(_CUTS):
            last = max((v for v in front if v in g.defs), key=lambda v: g.defs[v].index, default=None)
            node = g.defs.get(last) if last is not None else None
            is_step = node is not None and (node.name in ELEMENTWISE or node.name == "custom_jvp_call")
            if last is None or node is None or not is_step or len(node.outs) != 1 or node.is_differentiated:
                break
            front.remove(last)
            front |= {v for v in map(g.find, node.ins) if v not in g.uniform}
            if len(front) != 1:
                continue
            (x,) = front
            above = g.defs.get(x)
            is_cast = above is not None and above.name == "convert_element_type" and widens(above.ins[0].dtype, x.dtype)
            if x.shape != shape or str(x.dtype) not in FLOATS or is_cast:
                continue
            if above is not None and above.index >= anchor.index:
                continue
            try:
                values, is_detached = _evaluate(g, y, {x: _GRID})
            except Refused:
                continue
            name, factor = _name_of(values, x.dtype.itemsize == 2)
            if name and is_detached:
                unknown = unknown or f"stop_gradient inside of {name}"
            elif name and factor != 1:
                unknown = unknown or f"{factor:.4g} times {name}"
            elif name == "relu" and not (anchor.name == "custom_jvp_call" and _is_of_jax(anchor, "relu")):
                if above is not None and above.name in ("add", "dot_general"):
                    unknown = (
                        "only jax.nn.relu is relu: other spellings have other gradients at 0, as a maximum has 0.5"
                    )
            elif name in ACTIVATIONS:
                return Activation(y, x, name)
            elif name:
                unknown = unknown or f"jaxft has no kernel for {name}"
    raise Refused(unknown)


def split_bias(g: Graph, x: Var, inside: set[Node]) -> tuple[Var, Var | None]:
    """Returns (base, bias) where x = base + bias and only the region reads x; else (x, None)."""
    found = terms(g, x)
    vectors = [v for c, v, where in found if v is not None and where and c == 1 and is_vector(v, where, x)]
    arrays = [v for c, v, where in found if v is not None and where and c == 1 and is_like(v, where, x)]
    arrays = [v for v in arrays if v not in vectors]
    if len(found) != 2 or len(vectors) != 1 or len(arrays) != 1 or arrays[0].dtype != x.dtype:
        return x, None
    bias, base = vectors[0], arrays[0]
    both = inside | region(g, [x], {base, bias})
    return (x, None) if is_used_outside(g, x, both) else (base, bias)


def activation_site(g: Graph, anchor: Node, options: Options) -> Site:
    """Recognises an activation with the bias before it."""
    need(g.number(anchor.out) is None and anchor.out.shape)
    found = read_activation(g, anchor)
    y, x = found.y, found.x
    inside = region(g, [y], {x})
    check_kept_inside(g, inside, [y], {x, source(g, x)}, x.size, "an intermediate result of the activation")
    base, bias = split_bias(g, x, inside)
    need(widens(y.dtype, base.dtype), f"{base.dtype} becomes {y.dtype} in the activation")
    # XLA fuses an activation alone with what is before and after it.
    above = g.node_of(base)
    is_layer = above is not None and above.name == "dot_general"
    need(bias is not None or is_layer or found.name not in ("relu", "tanh"))
    leaves = present(base, bias)

    def call(x: Any, *bias: Any, **in_place: Any) -> Any:
        vector = as_vector(bias[0]) if bias else None
        return bias_activation(
            x, vector, activation=found.name, implementation=options.implementation, **in_place
        )  # fmt: skip

    static = {"activation": found.name, "bias": bias is not None}
    inside = region(g, [y], leaves)
    return Site("bias_activation", "activation", anchor, [y], leaves, call, static, inside, (found, base, bias),
                operands=[base])  # fmt: skip
