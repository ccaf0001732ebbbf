"""Views, sums and products of a graph, read without regard to how they are spelled.

A map gives, for each axis of an array at hand, the axis of a source that it is, or None where the source is constant
along it. Axes of size 1 are always None.
"""

from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxft.fusion.graph import IDENTITIES, Graph, Var

Map = tuple[int | None, ...]
Term = tuple[float, Var | None, Map | None]
Factor = tuple[Var, Map, float]

FLOATS = ("float32", "bfloat16", "float16")


def widens(narrow: Any, wide: Any) -> bool:
    """Returns whether a cast between two dtypes keeps every value."""
    bits = {"bfloat16": 1, "float16": 1, "float32": 2, "float64": 3}
    return narrow == wide or bits.get(str(narrow), 9) < bits.get(str(wide), 0)


def identity(shape: tuple[int, ...]) -> Map:
    """Returns the map of an array to itself."""
    return tuple(None if size == 1 else axis for axis, size in enumerate(shape))


def is_like(v: Var, where: Map, root: Var) -> bool:
    """Returns whether `v` is an array of the shape of `root`, axis by axis."""
    return v.shape == root.shape and where == identity(root.shape)


def is_vector(v: Var, where: Map, root: Var) -> bool:
    """Returns whether `v` varies along the last axis of `root` only, and has an element for each of its columns."""
    return where[-1] is not None and not any(a is not None for a in where[:-1]) and v.size == root.shape[-1]


def is_per_row(v: Var, where: Map, root: Var, axis: int = -1) -> bool:
    """Returns whether `v` has one element for each row of `root` along `axis`, in the order of the rows."""
    axis %= len(root.shape)
    dropped = len(v.shape) < len(root.shape)
    places = (a - (dropped and a > axis) for a in range(len(root.shape)))
    return where == tuple(None if a == axis or root.shape[a] == 1 else place for a, place in enumerate(places))


def _keeps_numbers(old: Any, new: Any) -> bool:
    """Returns whether a cast at most rounds: a cast of a boolean, or one to a float of at least 16 bits."""
    floats = *FLOATS, "float64"
    return old.kind == "b" or (str(new) in floats and (str(old) in floats or jnp.issubdtype(old, np.integer)))


def view(g: Graph, v: Var) -> tuple[Var, Map] | None:
    """Returns the operand that `v` is only a view or a cast of, and the map from `v` to it."""
    node = g.defs.get(v)
    if node is None:
        return None
    name, rank = node.name, len(v.shape)
    source = g.find(node.ins[0]) if node.ins else v
    if name == "convert_element_type":
        return (source, tuple(range(rank))) if _keeps_numbers(source.dtype, v.dtype) else None
    if name in IDENTITIES and len(node.ins) == 1:
        return source, tuple(range(rank))
    if name == "transpose":
        return source, tuple(node.params["permutation"])
    if name == "broadcast_in_dim":
        axes: list[int | None] = [None] * rank
        for axis, target in enumerate(node.params["broadcast_dimensions"]):
            if source.shape[axis] == v.shape[target]:
                axes[target] = axis
        return source, tuple(axes)
    if name in ("reshape", "squeeze", "expand_dims"):
        ours = [axis for axis, size in enumerate(v.shape) if size != 1]
        theirs = [axis for axis, size in enumerate(source.shape) if size != 1]
        if [v.shape[axis] for axis in ours] != [source.shape[axis] for axis in theirs]:
            return None
        pairs = dict(zip(ours, theirs, strict=True))
        return source, tuple(pairs.get(axis) for axis in range(rank))
    if name == "gather" and g.number(node.ins[1]) == 0 and tuple(node.params["slice_sizes"]) == source.shape:
        collapsed = node.params["dimension_numbers"].collapsed_slice_dims
        left = tuple(a for a in range(len(source.shape)) if a not in collapsed)
        return (source, left) if len(left) == rank else None  # x[..., 0] of one column
    if name == "dot_general":  # an outer product with ones, such as a head mask that masks nothing
        (contracted, _), batch = node.params["dimension_numbers"]
        sides = [g.find(x) for x in node.ins]
        free = [[a for a in range(len(x.shape)) if a not in b] for x, b in zip(sides, batch, strict=True)]
        for kept, other in ((0, 1), (1, 0)):
            if not contracted and g.uniform.get(sides[other]) == 1:
                own: list[list[int | None]] = [[None] * len(free[0]), [None] * len(free[1])]
                own[kept] = list(free[kept])
                return sides[kept], (*batch[kept], *own[0], *own[1])
    return None


def strip(
    g: Graph, v: Var, where: Map | None = None, *, stop: Collection[Var] = (), casts: str = "all",
    stop_gradient: bool = False,
) -> tuple[Var, Map]:  # fmt: skip
    """Follows views down. Returns the source and the map of the array at hand to it.

    `casts` says which casts are views: "all", "floats" (those of floats), "exact" (those that keep every value) or
    "none". With `stop_gradient`, `lax.stop_gradient` is a view too.
    """
    v = g.find(v)
    where = identity(v.shape) if where is None else where
    if not v.shape:  # element-wise primitives take scalars
        where = (None,) * len(where)
    while v not in stop and v not in g.uniform:
        node = g.defs.get(v)
        if node is not None and node.name == "convert_element_type":
            exact = widens(g.find(node.ins[0]).dtype, v.dtype)
            is_of_float = jnp.issubdtype(node.ins[0].dtype, jnp.floating)
            if casts == "none" or (casts == "exact" and not exact) or (casts == "floats" and not is_of_float):
                break
        if node is not None and node.name == "stop_gradient" and not stop_gradient:
            break
        step = view(g, v)
        if step is None:
            break
        v, axes = step
        where = tuple(None if a is None else axes[a] for a in where)
        where = tuple(None if a is None or v.shape[a] == 1 else a for a in where)
    # Element-wise primitives broadcast axes of size 1 by themselves.
    return v, tuple(None if a is None or v.shape[a] == 1 else a for a in where)


def source(g: Graph, v: Var) -> Var:
    """Returns what `v` was before it was widened."""
    v = g.find(v)
    s, where = strip(g, v, casts="exact")
    return s if is_like(s, where, v) else v


def terms(
    g: Graph, v: Var, where: Map | None = None, scale: float = 1.0, *, stop: Collection[Var] = ()
) -> list[Term]:  # fmt: skip
    """Returns `v` as a sum of (coefficient, value, map). A constant has the value None."""
    v, where = strip(g, v, where, stop=stop, casts="floats")
    if v in g.uniform:
        return [(scale * float(g.uniform[v]), None, None)]
    node = g.defs.get(v) if v not in stop else None

    def term(x: Var, factor: float) -> list[Term]:
        return terms(g, x, where, factor, stop=stop)

    if node is not None and node.ins:
        a, b = node.ins[0], node.ins[-1]
        if node.name in ("add", "add_any"):
            return term(a, scale) + term(b, scale)
        if node.name == "sub":
            return term(a, scale) + term(b, -scale)
        if node.name == "neg":
            return term(a, -scale)
        if node.name in ("mul", "div"):
            if number := g.number(b):
                return term(a, scale * number if node.name == "mul" else scale / number)
            if node.name == "mul" and (number := g.number(a)):
                return term(b, scale * number)
    return [(scale, v, where)]


def factors(
    g: Graph, v: Var, where: Map | None = None, power: float = 1, *, stop: Collection[Var] = ()
) -> tuple[float, list[Factor]]:  # fmt: skip
    """Returns `v` as a coefficient and a product of (value, map, power). Roots and reciprocals are powers."""
    coefficient, found = 1.0, dict[tuple[Var, Map], float]()

    def collect(v: Var, where: Map | None, power: float) -> None:
        nonlocal coefficient
        v, where = strip(g, v, where, stop=stop, casts="floats")
        if v in g.uniform:
            with np.errstate(all="ignore"):
                coefficient *= float(np.power(float(g.uniform[v]), power))
            return
        node = g.defs.get(v) if v not in stop else None
        name = node.name if node is not None else ""
        exponents = {"square": 2, "rsqrt": -0.5, "sqrt": 0.5}
        # A root of a product or a square is not the product of roots where a factor is negative.
        if node is not None and float(power).is_integer():
            if name in ("mul", "div"):
                collect(node.ins[0], where, power)
                return collect(node.ins[1], where, power if name == "mul" else -power)
            if name == "neg":
                coefficient *= (-1) ** int(power)
                return collect(node.ins[0], where, power)
            if name in exponents:
                return collect(node.ins[0], where, power * exponents[name])
            if name == "integer_pow":
                return collect(node.ins[0], where, power * node.params["y"])
            if name == "pow" and (exponent := g.number(node.ins[1])) is not None:
                return collect(node.ins[0], where, power * exponent)
        found[v, where] = found.get((v, where), 0) + power

    collect(v, where, power)
    return coefficient, [(v, where, power) for (v, where), power in found.items() if power]
