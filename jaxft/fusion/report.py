"""Reports of `fuse`: records that print as tables, and the check of each site on real inputs."""

import dataclasses
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxft.fusion.evaluate import Program
from jaxft.fusion.graph import Graph, Node, Var, is_float
from jaxft.fusion.plan import Miss
from jaxft.fusion.site import Site
from jaxft.ops.plans import table_lines


@dataclasses.dataclass(frozen=True)
class Record:
    """A site, or a near miss.

    Attributes:
      op: the public op, or for a near miss the family of ops that it is nearly one of.
      sizes: the settings and sizes of the op.
      implementation: how the op runs on this device, forward / backward. "as it was; in gradients" stands before it if
        the op runs only where a gradient is taken.
      saves: bytes that the op saves by working in place.
      reason: why the site is not replaced; empty for one that is.
      line: the line of the source, with the function.
      scopes: the name stack.
    """

    op: str
    sizes: str
    implementation: str
    saves: int
    reason: str
    line: str
    scopes: str

    @property
    def is_replaced(self) -> bool:
        """Tells whether the op replaces the equations, always or where a gradient is taken."""
        return not self.reason


class Report(list[Record]):
    """The records of `fuse(fn).report(*args)`. Printed, they are tables with equal records in one row."""

    @property
    def counts(self) -> dict[str, int]:
        """The number of replaced sites of each op."""
        return dict(Counter(record.op for record in self if record.is_replaced))

    @property
    def saves(self) -> int:
        """The bytes that ops save by working in place."""
        return sum(record.saves for record in self)

    def __str__(self) -> str:
        replaced = Counter((r.op, r.sizes, r.implementation, r.line) for r in self if r.is_replaced)
        missed = Counter((r.op, r.reason, r.line) for r in self if not r.is_replaced)
        lines = [f"{sum(replaced.values())} sites replaced"]
        rows: list[tuple[str, ...]]
        if replaced:
            rows = [("sites", "op", "sizes", "implementation", "line"),
                    *((str(n), *row) for row, n in replaced.items())]  # fmt: skip
            lines += table_lines(rows)
        if self.saves:
            lines.append(f"In place, ops save {self.saves:,} bytes where no gradient is taken.")
        if missed:
            lines += ["", f"{sum(missed.values())} near misses"]
            rows = [("sites", "nearly", "reason", "line"), *((str(n), *row) for row, n in missed.items())]
            lines += table_lines(rows)
        return "\n".join([*lines, "Element-wise chains stay with XLA, which fuses them itself."])


def report_of(program: Program) -> Report:
    """Describes the sites and near misses of a program."""

    def record(where: Site | Miss) -> Record:
        node = where.anchor
        if isinstance(where, Miss):
            return Record(where.family, "", "", 0, where.reason, node.line, node.scopes)
        sizes = {"shape": list(where.outs[0].shape), "dtype": str(where.outs[0].dtype), **where.static}
        text = " ".join(f"{n}={x:g}" if isinstance(x, float) else f"{n}={x}" for n, x in sizes.items())
        backends = f"as it was; in gradients {where.backends}" if where.in_gradients_only else where.backends
        return Record(where.op, text, backends, where.saves, "", node.line, node.scopes)

    return Report([*map(record, program.sites), *map(record, program.misses)])


@dataclasses.dataclass(frozen=True)
class Checked:
    """Errors of one site on real inputs, relative to the largest element of the float64 result.

    Attributes:
      op: the public op.
      line: the line of the source.
      original: the error of the equations.
      fused: the error of the op.
      allowed: twice the error of the equations, plus 2 ulp.
    """

    op: str
    line: str
    original: float
    fused: float
    allowed: float

    @property
    def is_exact(self) -> bool:
        """Tells whether the error of the op is allowed."""
        return self.fused <= self.allowed


class Checks(list[Checked]):
    """The records of `fuse(fn).check(*args)`. They print as a table."""

    @property
    def is_exact(self) -> bool:
        """Tells whether the errors of all sites are allowed."""
        return all(record.is_exact for record in self)

    def __str__(self) -> str:
        rows = [("op", "error before", "error fused", "within", "line")]
        rows += [(c.op, f"{c.original:.2e}", f"{c.fused:.2e}", "yes" if c.is_exact else "NO", c.line) for c in self]
        return "\n".join(table_lines(rows))


def check_of(program: Program, arrays: list[Any]) -> Checks:
    """Runs a program as it was, and at each site also the op and the equations in float64.

    Of a scan and a while loop the first iteration is checked, of a cond the branch that is taken. Sites inside a
    shard_map are not checked.
    """
    checks, g = Checks(), program.graph
    env = dict(zip(g.invars, arrays, strict=True))
    for node in g.nodes:
        if len(node.outs) == 1 and (g.find(node.out) is not node.out or node.out in g.uniform):
            continue
        operands = [program.read(env, v) for v in node.ins]
        for body, inner in _inner_calls(program, node, operands):
            checks += check_of(body, inner)
        plain = node.eqn.primitive.bind(*operands, **node.eqn.primitive.get_bind_params(node.params))
        env.update(zip(node.outs, plain if node.eqn.primitive.multiple_results else [plain], strict=True))
    for site in program.found.sites.values():
        inputs = [program.read(env, v) for v in site.inputs]
        results = jax.jit(site.run)(*inputs)
        exact = _in_float64(g, site, inputs)
        before, after, allowed = 0.0, 0.0, 0.0
        for v, result, true in zip(site.outs, results, exact, strict=True):
            top = max(float(np.max(np.abs(true), initial=0.0, where=np.isfinite(true))), 1e-30)
            errors = [_error(np.asarray(x).astype(np.float64), true) / top for x in (program.read(env, v), result)]
            ulp = float(jnp.finfo(v.dtype).eps)
            before, after = max(before, errors[0]), max(after, errors[1])
            allowed = max(allowed, 2 * errors[0] + 2 * ulp)
        checks.append(Checked(site.op, site.anchor.line, before, after, allowed))
    return checks


def _error(x: np.ndarray, true: np.ndarray) -> float:
    """Returns the largest difference. NaN and infinities in the same places are no difference."""
    with np.errstate(invalid="ignore"):
        same = (x == true) | (np.isnan(x) & np.isnan(true))
        difference = np.where(same, 0.0, np.abs(x - true))
    return float(np.max(np.where(np.isnan(difference), np.inf, difference), initial=0.0))


def _inner_calls(program: Program, node: Node, operands: list[Any]) -> list[tuple[Program, list[Any]]]:
    """Returns programs inside of a node with arguments that they get."""
    bodies = program.bodies.get(node, [])
    if not any(body.sites for body in bodies) or node.name == "shard_map":
        return []
    if node.name == "cond":
        index, *rest = operands
        return [(bodies[int(np.clip(int(index), 0, len(bodies) - 1))], rest)]
    if node.name == "while":
        return [(bodies[0], operands[node.params["cond_nconsts"] :])]
    if node.name == "scan":
        shapes = [v.shape for v in bodies[0].graph.invars]
        return [(bodies[0], [x if x.shape == s else x[0] for x, s in zip(operands, shapes, strict=True)])]
    return [(bodies[0], operands)]


def _in_float64(g: Graph, site: Site, inputs: list[Any]) -> list[np.ndarray]:
    """Computes the equations that a site replaces in float64, on the CPU."""
    with jax.enable_x64(True), jax.default_device("cpu"):
        return [np.asarray(x) for x in _wide_values(g, site.outs, site.inputs, inputs)]


def _wide_values(g: Graph, wanted: list[Var], given: list[Var], arrays: list[Any]) -> list[Any]:
    def widen(x: Any) -> Any:
        x = np.asarray(x)
        return jnp.asarray(x.astype(np.float64) if is_float(x.dtype) else x)

    known = {g.find(v): widen(x) for v, x in zip(given, arrays, strict=True)}

    def value(v: Var) -> Any:
        v = g.find(v)
        if v in known:
            return known[v]
        if v in g.uniform:
            known[v] = jnp.full(v.shape, g.uniform[v], np.float64 if is_float(v.dtype) else v.dtype)
            return known[v]
        if v in g.consts:
            known[v] = widen(g.consts[v])
            return known[v]
        node = g.defs[v]
        operands = [value(x) for x in node.ins]
        if node.name == "custom_jvp_call":
            inner = Graph(node.params["call_jaxpr"])
            results = _wide_values(inner, inner.outvars, inner.invars, operands)
        else:
            params = {name: np.dtype(np.float64) if name.endswith(("dtype", "element_type")) and _is_wide(p) else p
                      for name, p in node.params.items()}  # fmt: skip
            primitive = node.eqn.primitive
            result = primitive.bind(*operands, **primitive.get_bind_params(params))
            results = result if primitive.multiple_results else [result]
        known.update(zip(map(g.find, node.outs), results, strict=True))
        return known[v]

    return [value(v) for v in wanted]


def _is_wide(dtype: Any) -> bool:
    return dtype is not None and is_float(dtype)
