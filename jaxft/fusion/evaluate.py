"""Runs a graph: the sites as ops, everything else as it was, effects in their order."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxft.fusion.graph import Graph, Node, Var, open_jaxpr, varying
from jaxft.fusion.plan import SCOPE, Found, Miss, find_sites, judge
from jaxft.fusion.site import Options, Site, region
from jaxft.ops import transforms

# Primitives whose programs are fused too, with the names of the programs.
_BODIES = {
    "checkpoint": "jaxpr", "cond": "branches", "jit": "jaxpr", "pjit": "jaxpr", "remat2": "jaxpr", "scan": "jaxpr",
    "shard_map": "jaxpr", "while": "body_jaxpr",
}  # fmt: skip


class Program:
    """A program with its sites. `bodies` holds the programs inside of nodes, such as the body of a scan."""

    def __init__(self, closed: Any, options: Options, scopes: str = "", cache: dict[Any, Any] | None = None) -> None:
        self.graph = g = Graph(closed, scopes)
        cache = {} if cache is None else cache
        self.found: Found = find_sites(g, options)
        judge(g, self.found, options, cache)
        self.bodies: dict[Node, list[Program]] = {}
        for node in g.nodes:
            if node.name in _BODIES and SCOPE not in node.scopes:
                every = node.params[_BODIES[node.name]]
                every = every if isinstance(every, tuple | list) else (every,)
                if all(type(v.aval).__name__ == "ShapedArray" for body in every for v in open_jaxpr(body)[0].invars):
                    name = node.params.get("name") or node.name
                    label = f"{node.scopes}/{name}" if node.scopes else name
                    self.bodies[node] = [Program(body, options, label, cache) for body in every]
        self.order = self._order()
        # A site inside of a larger one is not run.
        self.found.sites = {v: site for v, site in self.found.sites.items() if site in self.order}

    @property
    def programs(self) -> list["Program"]:
        """This program and all inside of it."""
        return [self, *(p for bodies in self.bodies.values() for body in bodies for p in body.programs)]

    @property
    def sites(self) -> list[Site]:
        """All sites that are replaced."""
        return [site for program in self.programs for site in program.found.sites.values()]

    @property
    def misses(self) -> list[Miss]:
        """All near misses."""
        return [miss for program in self.programs for miss in program.found.misses]

    def _order(self) -> list[Node | Site]:
        """Returns the nodes and sites to run, each after the ones whose results it reads."""
        g, makers = self.graph, dict[Var, Node | Site](self.graph.defs)
        makers |= {v: site for site in self.found.sites.values() for v in site.outs}
        order, done = list[Node | Site](), set[Any]()
        roots: list[Any] = [node for node in g.nodes if node.eqn.effects]
        for root in [*roots, *g.outvars]:
            stack = [root if isinstance(root, Node) else makers.get(g.find(root))]
            while stack:
                maker = stack[-1]
                if maker is None or maker in done:
                    stack.pop()
                    continue
                operands = maker.inputs if isinstance(maker, Site) else maker.ins
                needed = [makers[v] for v in map(g.find, operands) if v in makers and v not in g.uniform]
                needed = [above for above in needed if above not in done]
                if needed:
                    stack += needed
                else:
                    done.add(maker)
                    order.append(stack.pop())  # type: ignore[arg-type]
        return order

    def _run_in_gradients(self, site: Site, operands: Sequence[Any], env: dict[Var, Any]) -> list[Any]:
        """Computes a site as it was, and by the op where a gradient is taken."""
        # The equations may read values that the op does not, such as what a softmax subtracts from a row.
        g, inside = self.graph, region(self.graph, site.outs, site.inputs)
        nodes = [node for node in g.nodes if node in inside]
        made = {v for node in nodes for v in node.outs}
        read_by_nodes = dict.fromkeys(g.find(v) for node in nodes for v in node.ins)
        leaves = [v for v in read_by_nodes if v not in made and v not in g.uniform]

        @jax.custom_vjp
        def run(_: Any, read: Any) -> list[Any]:
            known = dict(zip(leaves, read, strict=True))
            for node in nodes:
                known.update(zip(node.outs, self.bind(node, [self.read(known, v) for v in node.ins]), strict=True))
            return [self.read(known, v) for v in site.outs]

        def forward(operands: Any, _: Any) -> Any:
            with jax.named_scope(f"{SCOPE}.{site.op}"):
                return jax.vjp(lambda *arrays: site.run(*arrays), *operands)

        run.defvjp(forward, lambda pull_back, cotangents: (pull_back(cotangents), None))
        return run(tuple(operands), tuple(self.read(env, v) for v in leaves))

    def __call__(self, *arrays: Any) -> list[Any]:
        """Computes the results."""
        env = dict(zip(self.graph.invars, arrays, strict=True))
        for step in self.order:
            operands = [self.read(env, v) for v in (step.inputs if isinstance(step, Site) else step.ins)]
            if isinstance(step, Site) and step.in_gradients_only:
                env.update(zip(step.outs, self._run_in_gradients(step, operands, env), strict=True))
            elif isinstance(step, Site):
                with jax.named_scope(f"{SCOPE}.{step.op}"):
                    env.update(zip(step.outs, step.run(*operands), strict=True))
            else:
                env.update(zip(step.outs, self.bind(step, operands), strict=True))
        return [self.read(env, v) for v in self.graph.outvars]

    def read(self, env: dict[Var, Any], v: Var) -> Any:
        """Returns the array that `v` is."""
        g, found = self.graph, self.graph.find(v)
        if found in env:
            return env[found]
        for known in (v, found):
            if known in g.consts:
                return g.consts[known]
        full = jnp.full(found.shape, g.uniform[found], found.dtype)
        return transforms.vary_over(full, varying(found.aval))

    def bind(self, node: Node, operands: Sequence[Any]) -> list[Any]:
        """Runs one node."""
        primitive, params = node.eqn.primitive, node.params
        bodies = self.bodies.get(node, [])
        if not any(body.sites for body in bodies):
            params = primitive.get_bind_params(params)
        elif node.name in ("checkpoint", "remat2"):
            again = jax.checkpoint(bodies[0], prevent_cse=params["prevent_cse"], policy=params["policy"])
            return list(again(*operands))
        elif node.name == "shard_map":
            return list(_shard_map(bodies[0], params)(*operands))
        else:
            name = _BODIES[node.name]
            old = params[name]
            traced = [body.retrace() for body in bodies]
            params = {**params, name: tuple(traced) if isinstance(old, tuple) else traced[0]}
        with contextlib.ExitStack() as stack:
            if node.scopes:
                stack.enter_context(jax.named_scope(node.scopes))
            stack.enter_context(node.eqn.ctx.manager)
            result = primitive.bind(*operands, **params)
        return list(result) if primitive.multiple_results else [result]

    def retrace(self) -> Any:
        """Returns the program as a closed jaxpr."""
        return jax.make_jaxpr(self)(*(v.aval for v in self.graph.invars))


def _shard_map(body: Program, params: dict[str, Any]) -> Any:
    manual = params.get("newly_manual_axes", params.get("manual_axes"))
    return jax.shard_map(
        lambda *arrays: tuple(body(*arrays)), mesh=params["mesh"], in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]), check_vma=params["check_vma"], axis_names=set(manual or ()),
    )  # fmt: skip
