"""Normalises views, sums and products of a graph, so that equal computations look equal however they are written.

A map (`Map`) describes an array as a view of a source. It has one entry for each axis of the array: the axis of the
source, or None if the array is constant along this axis. Axes of size 1 always have None.
"""

import functools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxft.fusion.graph import ELEMENTWISE, IDENTITIES, Graph, Node, Var

Map = tuple[int | None, ...]
Term = tuple[float, Var | None, Map | None]  # coefficient, value, map; see `terms`
Factor = tuple[Var, Map, float]  # value, map, power; see `factors`

FLOATS = ("float32", "bfloat16", "float16")


def widens(narrow: Any, wide: Any) -> bool:
    """Returns whether a cast from `narrow` to `wide` keeps every value."""
    bits = {"bfloat16": 1, "float16": 1, "float32": 2, "float64": 3}
    return narrow == wide or bits.get(str(narrow), 9) < bits.get(str(wide), 0)


def widest(*dtypes: Any) -> Any:
    """Returns the narrowest dtype that keeps every value of these dtypes, under any setting of dtype promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)


def identity(shape: tuple[int, ...]) -> Map:
    """Returns the map of an array of this shape to itself."""
    return tuple(None if size == 1 else axis for axis, size in enumerate(shape))


def is_like(v: Var, where: Map, root: Var) -> bool:
    """Returns whether `v` has the shape of `root` and `where` maps each axis of `root` to the same axis of `v`."""
    return v.shape == root.shape and where == identity(root.shape)


def is_vector(v: Var, where: Map, root: Var) -> bool:
    """Returns whether `v` varies only along the last axis of `root`, with one element for each column of `root`."""
    return where[-1] is not None and not any(a is not None for a in where[:-1]) and v.size == root.shape[-1]


def is_per_row(v: Var, where: Map, root: Var, axis: int = -1) -> bool:
    """Returns whether `v` has one element for each row of `root`, in the order of the rows. Rows run along `axis`."""
    axis %= len(root.shape)
    dropped = len(v.shape) < len(root.shape)
    places = (a - (dropped and a > axis) for a in range(len(root.shape)))
    return where == tuple(None if a == axis or root.shape[a] == 1 else place for a, place in enumerate(places))


def _keeps_numbers(old: Any, new: Any) -> bool:
    """Returns whether a cast changes values by rounding at most.

    This holds for a cast of a boolean, and for a cast of a float or an integer to a float of at least 16 bits.
    """
    floats = *FLOATS, "float64"
    return old.kind == "b" or (str(new) in floats and (str(old) in floats or jnp.issubdtype(old, np.integer)))


def view(g: Graph, v: Var) -> tuple[Var, Map] | None:
    """Returns the operand of which `v` is a view or a cast, and the map from `v` to the operand. None if there is none.

    Follows a single node. `strip` follows all of them.
    """
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
        return (source, left) if len(left) == rank else None  # x[..., 0] of an x with one column
    if name == "dot_general":  # an outer product with ones, such as multiplication by a head mask of ones
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
    """Follows views and casts from `v` to their source.

    Args:
      g: the graph.
      v: the value to start at.
      where: the map of some array to `v`. None is the map of `v` to itself.
      stop: values at which to stop.
      casts: the casts to follow: "all", "floats" (casts of floats), "exact" (casts that keep every value) or "none".
      stop_gradient: whether to follow `lax.stop_gradient`.

    Returns:
      The source, and the map of that array to the source.
    """
    v = g.find(v)
    where = identity(v.shape) if where is None else where
    if not v.shape:  # element-wise primitives also accept scalars, which are constant along each axis
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
    # Element-wise primitives broadcast axes of size 1, so the value is constant along them.
    return v, tuple(None if a is None or v.shape[a] == 1 else a for a in where)


def source(g: Graph, v: Var) -> Var:
    """Returns the value of which `v` is only a cast to a wider dtype, or `v` itself."""
    v = g.find(v)
    s, where = strip(g, v, casts="exact")
    return s if is_like(s, where, v) else v


def terms(
    g: Graph, v: Var, where: Map | None = None, scale: float = 1.0, *, stop: Collection[Var] = ()
) -> list[Term]:  # fmt: skip
    """Returns `v` as a sum of (coefficient, value, map). A constant term has None as value and as map.

    Args:
      g: the graph.
      v: the value to expand.
      where: the map of some array to `v`. None is the map of `v` to itself.
      scale: a factor of all coefficients.
      stop: values that are not expanded.
    """
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
    g: Graph, v: Var, where: Map | None = None, *, stop: Collection[Var] = ()
) -> tuple[float, list[Factor]]:  # fmt: skip
    """Returns `v` as a coefficient and a product of (value, map, power). Roots and reciprocals are powers.

    Args:
      g: the graph.
      v: the value to expand.
      where: the map of some array to `v`. None is the map of `v` to itself.
      stop: values that are not expanded.
    """
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
        # Only integer powers distribute over a product. A root does not if a factor is negative: sqrt(x * x) != x.
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

    collect(v, where, 1)
    return coefficient, [(v, where, power) for (v, where), power in found.items()]


def makers(g: Graph, v: Var, name: str) -> list[Node]:
    """Returns the nodes called `name` from whose results `v` is computed, element by element and of the same size."""
    size, stack, seen, found = v.size, [g.find(v)], set[Var](), list[Node]()
    while stack:
        v = stack.pop()
        node = g.defs.get(v)
        if v in seen or node is None or v.size != size:
            continue
        seen.add(v)
        step = view(g, v)
        if step is not None:
            stack.append(step[0])
        elif node.name == name:
            found.append(node)
        elif node.name in ELEMENTWISE:
            stack += map(g.find, node.ins)
    return found


def has_product(g: Graph, v: Var) -> bool:
    """Returns whether `v` is computed, element by element, from a matmul of the same size."""
    return bool(makers(g, v, "dot_general"))
