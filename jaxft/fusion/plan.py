"""Chooses the sites of a graph that are replaced, and records near misses with their reasons."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxft import dispatch
from jaxft.fusion import activations, algebra, attention, dense, rows
from jaxft.fusion.graph import ELEMENTWISE, IDENTITIES, Graph, Node, Var
from jaxft.fusion.site import Options, Refused, Site, is_used_outside
from jaxft.ops import plans

FAMILIES = (
    "attention", "softmax", "layer_norm", "rms_norm", "activation", "dense", "embeddings", "cross_entropy", "permute",
)  # fmt: skip
_ROW_OPS = ("bias_residual_layer_norm", "layer_norm", "log_softmax", "rms_norm", "softmax")
SCOPE = "jaxft.fuse"  # name scope of the equations of a replaced site, so that they are not matched again

# Where XLA is as fast as an op. See docs/performance-notes.md, "Sites of jaxft.fuse".
_FEW_ELEMENTS = 2**17  # of a softmax
_FEW_LOSSES = 2500  # rows of a loss
_FEW_BYTES = 2**30  # of logits
_SHORT = 128  # queries and keys of attention

_DIFFERENTIATED = "a differentiated graph: fuse first, as in jax.grad(jaxft.fuse(f))"


@dataclasses.dataclass(frozen=True)
class Miss:
    """A near miss: the node where matching started, the family of ops that it nearly matches, and the reason."""

    anchor: Node
    family: str
    reason: str


@dataclasses.dataclass
class Found:
    """Sites and near misses of a graph. The key of a site is the first value that it computes."""

    sites: dict[Var, Site] = dataclasses.field(default_factory=dict)
    misses: list[Miss] = dataclasses.field(default_factory=list)


_Matcher = Callable[[Graph, Node, Options], Site | list[Site]]
_EXPONENTIALS = ("exp", "exp2")
_ROOTS = ("pow", "rsqrt", "sqrt")
# Each step is (families, names of the nodes where matching starts, matcher), and goes over the whole graph. Nodes that
# an earlier step takes are not matched by a later step.
_STEPS: tuple[tuple[tuple[str, ...], tuple[str, ...], _Matcher], ...] = (
    (("attention",), _EXPONENTIALS, attention.attention_site),
    (("softmax",), _EXPONENTIALS, rows.softmax_site),
    (("cross_entropy",), ("log",), dense.normalised_loss_site),
    (("softmax", "cross_entropy"), ("log",), rows.log_softmax_site),
    (("layer_norm", "rms_norm"), _ROOTS, rows.norm_sites),
    (("activation", "dense"), activations.ANCHORS, activations.activation_site),
    (("permute",), ("transpose",), dense.permute_site),
    (("permute",), ("dot_general",), dense.matmul_site),
)


def find_sites(g: Graph, options: Options) -> Found:
    """Finds all sites of a graph. `judge` then drops the sites that are not faster."""
    found, taken = Found(), set[Node]()
    for node in g.nodes:
        if any(not isinstance(n, int) for v in (*node.ins, *node.outs) for n in getattr(v.aval, "shape", ())):
            return Found(misses=[Miss(node, "all ops", "sizes are symbolic, as in jax.export: kernels need numbers")])
    for families, anchors, match in _STEPS:
        if not any(family in options.only for family in families):
            continue
        for node in g.nodes:
            if node.name not in anchors or node in taken or SCOPE in node.scopes or node.eqn.effects:
                continue
            is_scalar = not node.out.shape and anchors is not _ROOTS  # the norm of a single row has a scalar root
            if is_scalar or not node.out.size or g.find(node.out) is not node.out or node.out in g.uniform:
                continue
            try:
                sites = match(g, node, options)
                if node.is_differentiated:
                    raise Refused(_DIFFERENTIATED)
            except Refused as refused:
                if str(refused):
                    reason = _DIFFERENTIATED if node.is_differentiated else str(refused)
                    if all(miss.anchor is not node or miss.reason != reason for miss in found.misses):
                        found.misses.append(Miss(node, families[0], reason))
                continue
            for site in sites if isinstance(sites, list) else [sites]:
                if not any(v in found.sites for v in site.outs):
                    found.sites[site.outs[0]] = site
                    taken |= site.region
    _absorb(g, found, options)
    _leave_transposes_to_xla(g, found)
    found.sites = {v: site for v, site in found.sites.items() if site.family in options.only}
    replaced = set().union(*(site.region for site in found.sites.values()))
    # These near misses are reported even if a part of them, such as the softmax, is replaced.
    whole = ("attention", "cross_entropy", "embeddings")
    found.misses = [miss for miss in found.misses if miss.family in whole or miss.anchor not in replaced]
    return found


def _absorb(g: Graph, found: Found, options: Options) -> None:
    """Extends sites by the matmuls, look-ups and residuals before them."""
    for site in list(found.sites.values()):
        if site.op == "bias_activation" and "dense" in options.only:
            dense.absorb_dense(g, site, options)
        if site.op == "log_softmax" and "cross_entropy" in options.only:
            try:
                loss = dense.cross_entropy_site(g, site, options)
            except Refused as refused:
                if str(refused):
                    found.misses.append(Miss(site.anchor, "cross_entropy", str(refused)))
                continue
            del found.sites[site.outs[0]]
            found.sites[loss.outs[0]] = loss
    for site in list(found.sites.values()):
        if site.op in ("layer_norm", "rms_norm") and site.parts is not None:
            if "embeddings" in options.only:
                try:
                    dense.absorb_embeddings(g, site, options)
                except Refused as refused:
                    found.misses.append(Miss(site.anchor, "embeddings", str(refused)))
            if site.op in ("layer_norm", "rms_norm"):
                dense.absorb_residual(g, site, found.sites, options)


def _leave_transposes_to_xla(g: Graph, found: Found) -> None:
    """Drops transposes that are next to another site or a matmul.

    The neighbour transposes too, and XLA merges adjacent transposes into one.
    """
    others = [site for site in found.sites.values() if site.family != "permute"]
    inside = set().union(*(site.region for site in others))
    beside = {v for site in others for v in site.outs}
    feeding = beside | {v for site in others for v in site.inputs}
    for v, site in list(found.sites.items()):
        if site.op == "permute":
            feeds_matmul = any(user is not None and user.name == "dot_general" for user in g.uses(v))
            drops = not site.always and (feeds_matmul or not feeding.isdisjoint([v, *site.inputs]))
        else:
            drops = site.op == "dot_general" and not beside.isdisjoint(site.inputs)
        if site.family == "permute" and (drops or site.anchor in inside):
            del found.sites[v]


def judge(g: Graph, found: Found, options: Options, cache: dict[Any, tuple[str, str]]) -> None:
    """Asks each op which kernels it runs on this device. Drops the sites that would not be faster than in XLA.

    A dropped site becomes a near miss. With `options.force`, no site is dropped. `cache` stores the answers of the ops,
    because the layers of a model are alike.
    """
    on_gpu = dispatch.platform() == "cuda"
    for v, site in list(found.sites.items()):
        key = site.op, str(site.static), *(str(x.aval) for x in site.inputs)
        if key not in cache:
            cache[key] = _backends(site)
        site.backends, no_kernel = cache[key]
        if not on_gpu:
            reason = f"no kernels on {dispatch.device_kind()} (see force)"
        else:
            reason = _no_gain(g, site) if site.always else no_kernel or _no_gain(g, site)
        if reason and not options.force:
            found.misses.append(Miss(site.anchor, site.op, reason))
            del found.sites[v]
    of_ops = {g.find(v) for site in found.sites.values() for v in site.outs}
    for site in found.sites.values():
        site.in_gradients_only = _gains_in_gradients_only(g, site, found, of_ops, options)
        site.saves = 0 if site.in_gradients_only else _bytes_saved(g, site)


def _no_gain(g: Graph, site: Site) -> str:
    """Returns the reason why XLA is as fast as the op, or "" if XLA is slower.

    docs/performance-notes.md, "Sites of jaxft.fuse", and docs/benchmarks have the times.
    """
    out = site.outs[0]
    if site.op in _ROW_OPS and out.size == out.shape[-1]:
        return "one row, for which XLA is as fast"
    if site.op in ("log_softmax", "softmax") and out.size < _FEW_ELEMENTS:
        return "a small array, for which XLA is as fast"
    if site.op == "log_softmax" and any(map(_is_arithmetic, g.uses(out))):
        return "XLA fuses the log-softmax with what follows it"
    if site.op == "linear_cross_entropy" and site.static["rows"] < _FEW_LOSSES:
        return f"fewer than {_FEW_LOSSES:,} rows, for which XLA is as fast"
    if site.op == "dot_product_attention" and _transposes_short_values(g, site):
        return f"up to {_SHORT} queries and keys with the heads before the length, which the kernel needs after it"
    if site.op == "bias_activation" and not (site.static["bias"] and any(node.name == "erfc" for node in site.region)):
        return "an element-wise chain, which XLA fuses with what is around it"
    if site.op == "permute" and not site.always:
        around = [g.node_of(site.inputs[0]), *g.uses(out)]
        if any(node is not None and node.name in ELEMENTWISE for node in around):
            return "a transpose that XLA fuses with what is around it"
    return ""


def _gains_in_gradients_only(g: Graph, site: Site, found: Found, of_ops: set[Var], options: Options) -> bool:
    """Returns whether the op is faster than XLA in a training step, but not in a forward pass alone.

    `of_ops` has the values that the sites compute. docs/performance-notes.md, "Sites of jaxft.fuse", has the times.
    """
    if options.force:
        return False
    first, *parameters = site.inputs
    if site.op == "linear_cross_entropy":  # Beyond this size the op also saves the memory of the logits.
        return bool(site.static["rows"] * site.static["V"] * first.dtype.itemsize <= _FEW_BYTES)
    if site.op == "softmax" and any(map(_is_arithmetic, [g.node_of(first), *g.uses(site.outs[0])])):
        return True
    if site.op in ("layer_norm", "rms_norm"):  # XLA computes common statistics once, and scales without a kernel.
        norms = [other for other in found.sites.values() if other.op == site.op and any(map(g.uses, other.outs))]
        of_this = [other for other in norms if g.find(other.inputs[0]) is g.find(first)]
        if len(of_this) > 1 or any(_is_arithmetic(g.node_of(v)) for v in parameters if v.size < first.size):
            return True
    if site.op == "rms_norm" and not any(_scales_roots(g, node) for node in site.region):
        return True  # XLA computes it in one kernel.
    read = [] if site.op not in _ROW_OPS else site.inputs
    if site.op == "dense_residual_layer_norm":  # the first input is in memory for the matmul
        read = [v for v in parameters if v.shape == site.outs[0].shape and g.find(v) is not g.find(site.inputs[1])]
    return any(
        g.find(v) not in of_ops and _is_fused_into_reader(g, v, site) for v in read if v.size == site.outs[0].size
    )


def _scales_roots(g: Graph, node: Node) -> bool:
    """Returns whether a node multiplies a number for each row by a vector, which makes an array of the size of x."""
    sizes = [algebra.strip(g, v)[0].size for v in node.ins]
    return node.name == "mul" and 1 < max(sizes) < node.out.size


def _is_fused_into_reader(g: Graph, v: Var, site: Site) -> bool:
    """Returns whether XLA computes `v` in the kernel that reads it, so that `v` is in memory for the op only.

    That is so if `v` is element-wise and nothing else reads it. A matmul plus a bias, or times a factor, is an
    exception: XLA computes it in the kernel of the matmul.
    """
    node = g.node_of(algebra.source(g, v))
    is_epilogue = (
        node is not None
        and node.name in ("add", "div", "mul", "sub")
        and any(
            (above := g.node_of(algebra.strip(g, x)[0])) is not None and above.name == "dot_general" for x in node.ins
        )
    )
    return _is_arithmetic(node) and not is_epilogue and not is_used_outside(g, v, site.region)


def _is_arithmetic(node: Node | None) -> bool:
    return node is not None and node.name in ELEMENTWISE and node.name not in (*IDENTITIES, "convert_element_type")


def _transposes_short_values(g: Graph, site: Site) -> bool:
    """Returns whether values of few keys, with the axis of heads before the axis of keys, have to be transposed."""
    axes, (_, _, values, *_) = site.parts.v, site.inputs
    above = g.node_of(values)
    is_short = max(site.static["T"], site.static["S"]) <= _SHORT
    is_made = above is not None and above.name in ("dot_general", "transpose")
    return bool(is_short and not is_made and axes.heads and axes.length and min(axes.heads) < min(axes.length))


def _backends(site: Site) -> tuple[str, str]:
    """Returns two texts: how the op runs, and the reason why all its passes run as plain XLA ("" if they do not)."""
    arguments = []
    for v in site.inputs:
        sharding = getattr(v.aval, "sharding", None)
        is_explicit = sharding is not None and sharding.mesh.explicit_axes
        arguments.append(jax.ShapeDtypeStruct(v.shape, v.dtype, **({"sharding": sharding} if is_explicit else {})))
    plan = plans.first_plan(site.call, *arguments)
    if plan is None:
        return "xla", "the op is plain XLA here, too"
    texts = [plans.describe(plan, way, with_config=False) for way in ("forward", "backward")]
    is_plain = all(set(text.split()) <= {"xla", "+"} for text in texts)
    reason = f"the op is plain XLA here, too{plan.why and ': '}{plan.why}" if is_plain else ""
    return " / ".join(dict.fromkeys(texts)), reason


def _bytes_saved(g: Graph, site: Site) -> int:
    """Returns the bytes that the op saves by writing its results into operands that nothing else reads."""
    for x, out in zip(site.operands, site.outs, strict=True) if site.operands else ():
        node = g.node_of(x)
        is_made_here = node is not None and algebra.view(g, g.find(x)) is None and g.find(x) not in g.uniform
        if not is_made_here or is_used_outside(g, x, site.region) or x.dtype != out.dtype:
            return 0
    return sum(v.nbytes for v in site.outs) if site.operands else 0
