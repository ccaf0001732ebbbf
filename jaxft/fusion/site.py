"""Sites: the places of a graph where one op of jaxft computes what many equations compute."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxft.fusion.algebra import strip
from jaxft.fusion.graph import Graph, Node, Var

MASKED_ROWS = ("exact", "mask", "zero")


class Refused(Exception):
    """A near miss. The message is the reason. Without a message, the node is not near to anything that jaxft fuses."""


def need(condition: Any, reason: str = "") -> None:
    """Raises `Refused` unless the condition holds."""
    if not condition:
        raise Refused(reason)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `fuse` that matchers and sites need."""

    only: tuple[str, ...]
    implementation: str | None = None
    masked_rows: str = "exact"
    force: bool = False


@dataclasses.dataclass(eq=False)
class Site:
    """One op in the place of a region of the graph.

    Attributes:
      op: the name of the public function.
      family: what `only` selects.
      anchor: the node by which the site was found.
      outs: the values that the op computes.
      inputs: the values that it takes.
      call: computes the values `outs` from the values `inputs`. It gets the keyword `in_place` if `saves` is not 0.
      static: settings of the op, for people. Ops with equal settings and arrays have the same kernels.
      region: the nodes that the op replaces.
      parts: what an op that absorbs this one needs.
      operands: values whose memory the op can write its results into, in the order of `outs`.
      always: whether the replacement needs no kernel to be worth it.
      backends: how the op runs on this device, for people.
      saves: bytes that the op saves by writing into `operands`.
      in_gradients_only: whether the equations run as they were where no gradient is taken, because they are faster.
    """

    op: str
    family: str
    anchor: Node
    outs: list[Var]
    inputs: list[Var]
    call: Callable[..., Any]
    static: dict[str, Any]
    region: set[Node]
    parts: Any = None
    operands: list[Var] = dataclasses.field(default_factory=list)
    always: bool = False
    backends: str = ""
    saves: int = 0
    in_gradients_only: bool = False

    def run(self, *arrays: Any) -> list[Any]:
        """Computes the values `outs` in their dtypes."""
        options = {"in_place": True} if self.saves else {}
        result = self.call(*arrays, **options)
        results = result if isinstance(result, tuple) else (result,)
        return [as_dtype(x, v.dtype) for x, v in zip(results, self.outs, strict=True)]


def as_dtype(x: Any, dtype: Any) -> Any:
    """Casts an array."""
    return x if x.dtype == dtype else x.astype(dtype)


def as_vector(x: Any) -> Any:
    """Drops the axes of size 1 of a parameter."""
    return None if x is None else jnp.reshape(x, -1)


def present(*values: Var | None) -> list[Var]:
    """Returns the values that are not None."""
    return [v for v in values if v is not None]


def fill(values: Sequence[Var | None], arrays: Sequence[Any]) -> list[Any]:
    """Puts arrays in the places of the values that are not None."""
    left = iter(arrays)
    return [None if v is None else next(left) for v in values]


def region(g: Graph, roots: Collection[Var], leaves: Collection[Var]) -> set[Node]:
    """Returns the nodes between leaves and roots."""
    found, seen, stack = set[Node](), set[Var](), [g.find(v) for v in roots]
    while stack:
        v = stack.pop()
        node = g.defs.get(v)
        if v in seen or v in leaves or node is None:
            continue
        seen.add(v)
        found.add(node)
        stack += [g.find(x) for x in node.ins]
    return found


def is_used_outside(g: Graph, v: Var, inside: Collection[Node]) -> bool:
    """Returns whether a node outside of a region, or the result of the graph, reads `v`."""
    return any(user is None or user not in inside for user in g.uses(v))


def check_kept_inside(
    g: Graph, inside: set[Node], roots: Collection[Var], leaves: Collection[Var], size: int, what: str
) -> None:  # fmt: skip
    """Raises `Refused` if a value inside of a region that has at least `size` elements is read outside of it.

    Smaller values, and views of the leaves, are cheap to compute again.
    """
    roots = {g.find(v) for v in roots}
    for node in sorted(inside, key=lambda node: node.index):
        for v in map(g.find, node.outs):
            if v in roots or v.size < size or not jnp.issubdtype(v.dtype, jnp.floating) or g.constant(v) is not None:
                continue
            if is_used_outside(g, v, inside) and strip(g, v, casts="exact", stop=leaves)[0] not in leaves:
                raise Refused(f"{what} is also used elsewhere")


def outward(g: Graph, v: Var, names: Collection[str], steps: int) -> list[Var]:
    """Returns `v` and what the nodes of these names compute from it in a number of steps, the last one first."""
    found, frontier = [g.find(v)], [g.find(v)]
    for _ in range(steps):
        users = [user for x in frontier for user in g.uses(x) if user is not None and user.name in names]
        frontier = [x for x in dict.fromkeys(g.find(user.out) for user in users) if x not in found]
        found += frontier
    return sorted((x for x in found if x in g.defs), key=lambda x: -g.defs[x].index)


def only_cast(g: Graph, v: Var) -> Var:
    """Returns the cast of `v` to another float type if nothing else reads `v`, else `v`."""
    users = g.uses(v)
    if len(users) == 1 and users[0] is not None and users[0].name == "convert_element_type":
        out = g.find(users[0].out)
        if jnp.issubdtype(out.dtype, jnp.floating):
            return out
    return v


def precision_name(precision: Any, other: Any = None) -> str | None:
    """Returns the name of the higher one of two precisions of matmuls. Raises `Refused` for a dot algorithm."""
    levels = {"DEFAULT": 0, "HIGH": 1, "HIGHEST": 2}
    usual = (jax.lax.DotAlgorithmPreset.BF16_BF16_F32, jax.lax.DotAlgorithmPreset.F16_F16_F32)
    parts = [
        p
        for each in (precision, other)
        for p in (each if isinstance(each, tuple) else (each,))
        if p is not None and p not in usual
    ]
    need(all(isinstance(p, jax.lax.Precision) for p in parts), "a matmul names its algorithm")
    return max((p.name for p in parts), key=levels.__getitem__).lower() if parts else None
