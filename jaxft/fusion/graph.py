"""A flat view of a jaxpr. No other module of the folder knows how JAX stores programs.

Calls of `jax.jit` without settings of their own are inlined. Scalars are folded, equations that change nothing are
aliased to their operand, and equal equations are numbered once. Whatever holds another program (scan, cond, shard_map,
custom_vjp) stays one node.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.extend.source_info_util
import numpy as np

Closed = Any  # a ClosedJaxpr, whose class has another home in each version of JAX

_LARGEST_CONSTANT = 2**27  # elements of a constant that is evaluated, to recognise a causal mask


@dataclasses.dataclass(eq=False)
class Var:
    """A value of the graph."""

    aval: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self.aval.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the value."""
        return self.aval.dtype

    @property
    def size(self) -> int:
        """The number of elements of the value."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the value."""
        return self.size * self.dtype.itemsize


@dataclasses.dataclass(eq=False)
class Node:
    """An equation of the graph. `scopes` is its name stack, with the names of inlined calls."""

    name: str
    ins: list[Var]
    outs: list[Var]
    params: dict[str, Any]
    eqn: Any
    scopes: str
    index: int = -1

    @property
    def out(self) -> Var:
        """The first result."""
        return self.outs[0]

    @property
    def line(self) -> str:
        """The line of the user's source that made this node."""
        return jax.extend.source_info_util.summarize(self.eqn.source_info)

    @property
    def is_differentiated(self) -> bool:
        """Returns whether JAX's differentiation made this node."""
        return "jvp(" in self.scopes or "transpose(" in self.scopes


def open_jaxpr(jaxpr: Any) -> tuple[Any, list[Any]]:
    """Returns an open jaxpr and its constants. Since JAX 0.12 open jaxprs have both attributes, too."""
    if type(jaxpr).__name__ == "ClosedJaxpr":
        return jaxpr.jaxpr, list(jaxpr.consts)
    return jaxpr, list(getattr(jaxpr, "consts", None) or [])


def _is_plain_jit(params: dict[str, Any]) -> bool:
    """Returns whether a call of `jax.jit` sets no shardings, layouts or donation. JAX refuses other options inside."""
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    layouts = (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
    return (
        all(type(sharding).__name__ == "UnspecifiedValue" for sharding in shardings)
        and all(layout is None for layout in layouts)
        and not any(params.get("donated_invars", ()))
    )


def _vectorized(function: Any) -> Any:
    return np.vectorize(function, otypes=[float])


erfc = _vectorized(math.erfc)
# Element-wise primitives in NumPy.
_NUMPY: dict[str, Any] = {
    "abs": np.abs, "add": np.add, "add_any": np.add, "and": np.logical_and, "cbrt": np.cbrt, "ceil": np.ceil,
    "copy": np.positive, "cos": np.cos, "div": np.divide, "eq": np.equal, "erf": _vectorized(math.erf), "erfc": erfc,
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "floor": np.floor, "ge": np.greater_equal, "gt": np.greater,
    "is_finite": np.isfinite, "le": np.less_equal, "log": np.log, "log1p": np.log1p, "lt": np.less,
    "logistic": lambda x: 0.5 * (1 + np.tanh(0.5 * x)), "max": np.maximum, "min": np.minimum, "mul": np.multiply,
    "ne": np.not_equal, "neg": np.negative, "not": np.logical_not, "or": np.logical_or, "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x), "sign": np.sign, "sin": np.sin, "sqrt": np.sqrt, "square": np.square,
    "sub": np.subtract, "tanh": np.tanh, "xor": np.logical_xor,
}  # fmt: skip
_LOGIC = ("and", "not", "or", "xor")
IDENTITIES = ("copy", "pcast", "pvary", "stop_gradient")
ELEMENTWISE = {*_NUMPY, *IDENTITIES, "clamp", "convert_element_type", "integer_pow", "select_n"}
_RESHAPES = ("broadcast_in_dim", "expand_dims", "reshape", "squeeze")
_ADDITIONS = ("add", "add_any")


def is_float(dtype: Any) -> bool:
    """Returns whether a dtype of JAX is floating."""
    return bool(jax.dtypes.issubdtype(dtype, np.floating))


def numpy_value(node: Node, values: list[Any]) -> Any:
    """Evaluates an element-wise node in NumPy, in float64 where it has floats."""
    name, out = node.name, node.out
    if name == "integer_pow":
        return np.power(values[0], float(node.params["y"]))
    if name == "select_n":
        return np.where(np.asarray(values[0]).astype(bool), values[2], values[1])
    if name == "clamp":
        return np.clip(values[1], values[0], values[2])
    if name == "convert_element_type":
        narrow = np.asarray(values[0]).astype(out.dtype if out.dtype.itemsize < 2 or not is_float(out.dtype) else float)
        return narrow.astype(float) if is_float(out.dtype) else narrow
    return values[0] if name in IDENTITIES else _NUMPY[name](*values)


def scalar(value: Any, dtype: Any) -> Any:
    """Rounds one number to a dtype and returns it as a Python number."""
    rounded = np.asarray(value).astype(dtype).reshape(())
    return bool(rounded) if rounded.dtype == bool else float(rounded) if is_float(dtype) else int(rounded)


class Graph:
    """A closed jaxpr as nodes.

    Attributes:
      nodes: the equations in order.
      invars: the arguments.
      outvars: the results.
      defs: the node that computes a value.
      uniform: the number that every element of a value is.
      consts: arrays that the jaxpr holds.
    """

    def __init__(self, closed: Closed, scopes: str = "") -> None:
        jaxpr, consts = open_jaxpr(closed)
        self.nodes: list[Node] = []
        self.defs: dict[Var, Node] = {}
        self.uniform: dict[Var, Any] = {}
        self.consts: dict[Var, Any] = {}
        self._same: dict[Var, Var] = {}
        self._numbers: dict[Any, Var] = {}
        self._constants: dict[Var, Any] = {}
        env: dict[Any, Var] = {}
        self._bind_constants(jaxpr, consts, env)
        self.invars = [env.setdefault(v, Var(v.aval)) for v in jaxpr.invars]
        self._inline(jaxpr, env, scopes)
        self.outvars = [self._atom(v, env) for v in jaxpr.outvars]
        self.nodes = self._live_nodes()
        self._uses: dict[Var, list[Node | None]] = {}
        for index, node in enumerate(self.nodes):
            node.index = index
            if len(node.outs) == 1 and (node.out in self._same or node.out in self.uniform):
                continue  # it is never evaluated
            for v in node.ins:
                self._uses.setdefault(self.find(v), []).append(node)
        for v in self.outvars:
            self._uses.setdefault(self.find(v), []).append(None)

    def find(self, v: Var) -> Var:
        """Returns the value that stands for all that are the same as `v`."""
        while v in self._same:
            v = self._same[v]
        return v

    def node_of(self, v: Var) -> Node | None:
        """Returns the node that computes `v`, or None."""
        return self.defs.get(self.find(v))

    def uses(self, v: Var) -> list[Node | None]:
        """Returns the nodes that read `v`, one for each operand. None stands for a result of the graph."""
        return self._uses.get(self.find(v), [])

    def number(self, v: Var) -> Any:
        """Returns the number that every element of `v` is, or None."""
        return self.uniform.get(self.find(v))

    # --- Construction ------------------------------------------------------------------------------------------------

    def _bind_constants(self, jaxpr: Any, consts: Iterable[Any], env: dict[Any, Var]) -> None:
        for v, value in zip(jaxpr.constvars, consts, strict=True):
            env[v] = Var(v.aval)
            self.consts[env[v]] = value
            if getattr(value, "size", 0) == 1 and not isinstance(value, jax.core.Tracer) and _is_number(v.aval):
                self.uniform[env[v]] = scalar(np.asarray(value), v.aval.dtype)

    def _atom(self, atom: Any, env: dict[Any, Var]) -> Var:
        if type(atom).__name__ != "Literal":
            return env[atom]
        key = ("literal", str(atom.aval), np.asarray(atom.val).tobytes())
        if key not in self._numbers:
            v = self._numbers[key] = Var(atom.aval)
            self.consts[v] = atom.val
            if _is_number(atom.aval):
                self.uniform[v] = scalar(atom.val, atom.aval.dtype)
        return self._numbers[key]

    def _inline(self, jaxpr: Any, env: dict[Any, Var], scopes: str) -> None:
        for eqn in jaxpr.eqns:
            ins = [self._atom(atom, env) for atom in eqn.invars]
            name, params = eqn.primitive.name, eqn.params
            own = str(eqn.source_info.name_stack)
            inner_scopes = f"{scopes}/{own}" if scopes and own else scopes or own
            body = None
            if name in ("jit", "pjit") and _is_plain_jit(params):
                body = params["jaxpr"]
            elif name in ("closed_call", "core_call"):
                body = params["call_jaxpr"]
            if body is not None:
                inner, consts = open_jaxpr(body)
                inner_env = dict(zip(inner.invars, ins, strict=True))
                self._bind_constants(inner, consts, inner_env)
                self._inline(inner, inner_env, inner_scopes)
                for v, out in zip(eqn.outvars, inner.outvars, strict=True):
                    env[v] = self._atom(out, inner_env)
                continue
            node = Node(name, ins, [Var(v.aval) for v in eqn.outvars], params, eqn, inner_scopes)
            env.update(zip(eqn.outvars, node.outs, strict=True))
            self.nodes.append(node)
            self.defs.update((v, node) for v in node.outs)
            if len(node.outs) == 1 and not eqn.effects:
                self._simplify(node)

    def _live_nodes(self) -> list[Node]:
        """Returns the nodes that results or effects depend on."""
        needed, live = set(self.outvars), list[Node]()
        for node in reversed(self.nodes):
            if node.eqn.effects or not needed.isdisjoint(node.outs):
                needed.update(node.ins)
                live.append(node)
        return live[::-1]

    def _simplify(self, node: Node) -> None:
        out, ins = node.out, [self.find(v) for v in node.ins]
        numbers = [self.uniform.get(v) for v in ins]
        if ins and None not in numbers and self._fold(node, numbers):
            return
        if node.name in (*_RESHAPES, "transpose", "slice", "rev", *IDENTITIES) and numbers[0] is not None:
            self.uniform[out] = numbers[0]
            return
        same = self._operand_that_stays(node, ins, numbers)
        if same is None:
            try:
                operands = (id(v) if n is None else f"{n!r} {v.aval}" for v, n in zip(ins, numbers, strict=True))
                key = node.name, tuple(operands), tuple(sorted(node.params.items()))
                same = self._numbers.setdefault(key, out)
            except TypeError:  # a parameter cannot be hashed
                same = out
        if same is not out:
            self._same[out] = same

    def _fold(self, node: Node, numbers: list[Any]) -> bool:
        """Computes a node all of whose operands are uniform. Integers that might wrap around are left alone."""
        if node.name not in ELEMENTWISE or not _is_number(node.out.aval):
            return False
        if node.name in _LOGIC and node.out.dtype != bool:
            return False
        with np.errstate(all="ignore"):
            value = numpy_value(node, [x if isinstance(x, bool) else np.float64(x) for x in numbers])
        lowest = 0 if jax.dtypes.issubdtype(node.out.dtype, np.unsignedinteger) else -(2**31)
        if node.out.dtype != bool and not is_float(node.out.dtype) and not lowest <= value < 2**31:
            return False
        self.uniform[node.out] = scalar(value, node.out.dtype)
        return True

    def _operand_that_stays(self, node: Node, ins: list[Var], numbers: list[Any]) -> Var | None:
        """Returns the operand that the result of a node is equal to, or None."""
        out, name = node.out, node.name

        def is_like(v: Var) -> bool:
            return v.aval == out.aval or (
                v.shape == out.shape and v.dtype == out.dtype and varying(v.aval) == varying(out.aval)
            )

        if name == "select_n" and isinstance(numbers[0], bool) and len(ins) == 3:
            chosen = ins[2 if numbers[0] else 1]
            return chosen if is_like(chosen) else None
        if name in ("convert_element_type", *_RESHAPES, "copy") and is_like(ins[0]):
            return ins[0]
        if name == "transpose" and node.params["permutation"] == tuple(range(len(out.shape))):
            return ins[0]
        if len(ins) != 2:
            return None
        for kept, other in ((0, 1), (1, 0)):
            number = numbers[other]
            if number is None or not is_like(ins[kept]):
                continue
            neutral = (
                (name in _ADDITIONS and number == 0)
                or (name == "mul" and number == 1)
                or (name == "max" and number == -math.inf)
                or (name == "min" and number == math.inf)
                or (name == "and" and number is True)
                or (name == "or" and number is False)
                or (other == 1 and ((name == "sub" and number == 0) or (name == "div" and number == 1)))
            )
            if neutral:
                return ins[kept]
        return None

    # --- Constants ---------------------------------------------------------------------------------------------------

    def constant(self, v: Var) -> np.ndarray | None:
        """Returns an array that broadcasts to `v` if `v` depends on constants only (a causal mask), else None.

        The array has the rank of `v`. An axis along which it does not vary may have size 1.
        """
        v = self.find(v)
        if v not in self._constants:
            self._constants[v] = None
            self._constants[v] = self._constant(v)
        return self._constants[v]

    def _constant(self, v: Var) -> np.ndarray | None:
        if v in self.uniform:
            return np.full((1,) * len(v.shape), self.uniform[v])
        if v in self.consts:
            value = self.consts[v]
            is_known = not isinstance(value, jax.core.Tracer) and v.size <= _LARGEST_CONSTANT and _is_number(v.aval)
            return np.asarray(value) if is_known else None
        node = self.defs.get(v)
        if node is None or len(node.outs) != 1 or v.size > _LARGEST_CONSTANT:
            return None
        name, params = node.name, node.params
        if name == "iota":
            axis = params["dimension"]
            return np.arange(v.shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(v.shape))])
        if name not in ELEMENTWISE and name not in (*_RESHAPES, "transpose") or not _is_number(v.aval):
            return None
        if name in _LOGIC and v.dtype != bool:
            return None
        ins = [self.constant(x) for x in node.ins]
        arrays = [x for x in ins if x is not None]
        if len(arrays) != len(ins):
            return None
        if name == "broadcast_in_dim":
            shape = [1] * len(v.shape)
            for axis, target in enumerate(params["broadcast_dimensions"]):
                shape[target] = arrays[0].shape[axis]
            return arrays[0].reshape(shape)
        if name == "transpose":
            return arrays[0].transpose(params["permutation"])
        if name in _RESHAPES:
            return np.broadcast_to(arrays[0], node.ins[0].shape).reshape(v.shape)
        with np.errstate(all="ignore"):
            return np.asarray(numpy_value(node, arrays))


def varying(aval: Any) -> frozenset[Any]:
    """Returns the mesh axes that a value of this type varies over, inside a shard_map."""
    return frozenset(getattr(getattr(aval, "manual_axis_type", None), "varying", ()))


def _is_number(aval: Any) -> bool:
    """Returns whether a type is boolean, integer or real."""
    dtype = getattr(aval, "dtype", None)
    kinds = (np.bool_, np.integer, np.floating)
    return dtype is not None and any(jax.dtypes.issubdtype(dtype, kind) for kind in kinds)
