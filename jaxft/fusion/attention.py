"""Attention: softmax(q @ k^T * scale + biases) @ v with masks, in any layout of the arrays."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxft.fusion.algebra import FLOATS, Map, identity, is_like, source, strip, view, widens
from jaxft.fusion.graph import ELEMENTWISE, Graph, Node, Var
from jaxft.fusion.rows import Softmax, read_softmax
from jaxft.fusion.site import (
    Options,
    Refused,
    Site,
    as_dtype,
    check_kept_inside,
    need,
    only_cast,
    precision_name,
    region,
)
from jaxft.ops.attention import dot_product_attention

_LOW = -1e4  # masked logits are at most this
_SURELY_LOW = -1e9  # no logit is near this, nor near the lowest number of a dtype


@dataclasses.dataclass
class Logits:
    """The parts of the logits: scale * product + biases, with masks. Each map is from the axes of the logits.

    Attributes:
      product: the node of q @ k^T.
      where: the map to the result of `product`.
      scale: the factor of the product.
      biases: (factor, value, map) of what is added.
      masks: (mask, map, whether True means masked).
      masked: the values of masked logits.
    """

    product: Node
    where: Map
    scale: float = 1.0
    biases: list[tuple[float, Var, Map]] = dataclasses.field(default_factory=list)
    masks: list[tuple[Var, Map, bool]] = dataclasses.field(default_factory=list)
    masked: set[float] = dataclasses.field(default_factory=set)


def _has_product(g: Graph, v: Var) -> bool:
    """Returns whether `v` is computed, element by element, from a matmul of the same size."""
    size, stack, seen = v.size, [g.find(v)], set[Var]()
    while stack:
        v = stack.pop()
        node = g.defs.get(v)
        if v in seen or node is None or v.size != size:
            continue
        seen.add(v)
        step = view(g, v)
        if node.name == "dot_general" and step is None:
            return True
        if step is not None:
            stack.append(step[0])
        elif node.name in ELEMENTWISE:
            stack += map(g.find, node.ins)
    return False


def _read_logits(g: Graph, z: Var) -> Logits:
    biases: list[tuple[float, Var, Map]] = []
    masks: list[tuple[Var, Map, bool]] = []
    masked = set[float]()
    v, where, scale = *strip(g, z), 1.0
    while True:
        node = g.defs.get(v)
        need(node is not None, "the logits are not a matmul")
        assert node is not None
        a, b = g.find(node.ins[0]), g.find(node.ins[-1])
        if node.name == "dot_general":
            return Logits(node, where, scale, biases, masks, masked)
        if node.name in ("add", "sub"):
            first, second = _has_product(g, a), _has_product(g, b)
            need(first != second, "the logits are a sum of two matmuls" if first else "the logits are not a matmul")
            other = b if first else a
            biases.append((scale * (-1.0 if node.name == "sub" and first else 1.0), *strip(g, other, where)))
            scale *= -1.0 if node.name == "sub" and second else 1.0
            v = a if first else b
        elif node.name in ("mul", "div") and (number := g.number(b)):
            v, scale = a, scale * number if node.name == "mul" else scale / number
        elif node.name == "mul" and (number := g.number(a)):
            v, scale = b, scale * number
        elif node.name == "neg":
            v, scale = a, -scale
        elif node.name == "select_n" and len(node.ins) == 3:
            chosen = [x for x in node.ins[1:] if _has_product(g, x)]
            low = g.number(strip(g, node.ins[1 if node.ins[2] in chosen else 2])[0])
            need(len(chosen) == 1 and isinstance(low, float), "the logits are selected from two arrays")
            assert low is not None
            need(low * scale <= _LOW, f"masked logits are {low * scale:.6g}, which is no mask")
            mask, mask_where = strip(g, node.ins[0], where)
            masks.append((mask, mask_where, chosen[0] is node.ins[1]))
            masked.add(low * scale)
            v = g.find(chosen[0])
        else:
            raise Refused(f"{node.name} between the matmul and the softmax")
        v, where = strip(g, v, where)


def _find_values(g: Graph, found: Softmax) -> tuple[Node, int, Map, bool]:
    """Returns the matmul of the probabilities and the values, the operand that the probabilities are, and their map.

    The last result says whether a where(mask, p, 0) with the mask of the logits is in between.
    """
    matmuls: list[tuple[Node, Var]] = []
    frontier, zeroed = [found.y], found.zeroed is not None
    mask = strip(g, found.zeroed)[0] if found.zeroed is not None else None
    passed = set[Var]()
    while frontier:
        p = frontier.pop()
        passed.add(p)
        for user in g.uses(p):
            need(user is not None, "the probabilities are also returned")
            assert user is not None
            out = g.find(user.out)
            step = view(g, out)
            if user.name == "stop_gradient":
                raise Refused("stop_gradient after the softmax")
            if step is not None and step[0] is p:
                frontier.append(out)
            elif user.name == "dot_general":
                matmuls.append((user, p))
            elif user.name == "select_n" and mask is not None and strip(g, user.ins[0])[0] is mask:
                frontier.append(out)
            elif _draws_random_bits(g, user):
                raise Refused("dropout between softmax and values")
            else:
                raise Refused(f"the probabilities also go to {user.name}")
    need(matmuls)
    need(len(matmuls) == 1, "the probabilities go to several matmuls")
    matmul, p = matmuls[0]
    v, where = strip(g, p, stop=passed - {p} | {found.y})
    while v is not found.y:  # through where(mask, p, 0)
        node = g.defs[v]
        if node.name == "select_n":
            v, where = strip(g, node.ins[2], where, stop=passed | {found.y})
        else:
            v, where = strip(g, v, where, stop={found.y})
    return matmul, 0 if g.find(matmul.ins[0]) is p else 1, where, zeroed


def _draws_random_bits(g: Graph, node: Node) -> bool:
    """Returns whether random bits are near among what a node is computed from."""
    stack, seen = [(node, 0)], set[Node]()
    while stack:
        node, depth = stack.pop()
        if node in seen or depth > 10:
            continue
        seen.add(node)
        if node.name.startswith(("random_", "threefry", "rng_")):
            return True
        stack += [(above, depth + 1) for v in node.ins if (above := g.node_of(v)) is not None]
    return False


def _conjuncts(g: Graph, v: Var, where: Map) -> list[tuple[Var, Map]]:
    v, where = strip(g, v, where)
    node = g.defs.get(v)
    if node is not None and node.name == "and":
        return [part for x in node.ins for part in _conjuncts(g, x, where)]
    return [(v, where)]


@dataclasses.dataclass(frozen=True)
class Axes:
    """Axes of one operand of a matmul: batch axes, head axes, length axes, group axes, and the rest."""

    batch: tuple[int, ...]
    heads: tuple[int, ...]
    length: tuple[int, ...]
    groups: tuple[int, ...]
    depth: int

    def arrange(self, x: Any) -> Any:
        """Transposes and reshapes an array to [B, L, N, H]."""
        order = (*self.batch, *self.length, *self.heads, *self.groups, self.depth)
        unit = tuple(a for a in range(x.ndim) if a not in order)
        sizes = [math.prod(x.shape[a] for a in part) for part in (self.batch, self.length, self.heads + self.groups)]
        return x.transpose(*unit, *order).reshape(*sizes, x.shape[self.depth])


def _free(node: Node, side: int) -> list[int]:
    contracted, batch = node.params["dimension_numbers"]
    return [a for a in range(len(node.ins[side].shape)) if a not in contracted[side] and a not in batch[side]]


def _unit_free(axes: list[int], shape: tuple[int, ...]) -> list[int]:
    """Returns the axes whose size is not 1, or the first one if all have size 1."""
    return [a for a in axes if shape[a] != 1] or axes[:1]


def _is_lower_triangle(a: np.ndarray, rows: int, columns: int) -> bool:
    return bool(np.array_equal(np.broadcast_to(a, (rows, columns)), np.tri(rows, columns, dtype=bool)))


def attention_site(g: Graph, anchor: Node, options: Options) -> Site:
    """Recognises attention by the exponential of its softmax."""
    found = read_softmax(g, anchor)
    z, axis = found.logits, found.axis
    need(_has_product(g, z))
    pv, p_side, p_where, zeroed = _find_values(g, found)
    logits = _read_logits(g, z)
    qk = logits.product

    # Each axis of the logits is one of the batch, the queries or the keys, as the first matmul says.
    contracted, batch = qk.params["dimension_numbers"]
    roles: list[tuple[Any, int]] = [("batch", i) for i in range(len(batch[0]))]
    roles += [(0, a) for a in _free(qk, 0)] + [(1, a) for a in _free(qk, 1)]
    role: list[Any] = [None if a is None else roles[a] for a in logits.where]
    need(role[axis] is not None and role[axis][0] in (0, 1), "the softmax is not over an axis of the keys")
    k_side = role[axis][0]
    q_side = 1 - k_side
    q, k = g.find(qk.ins[q_side]), g.find(qk.ins[k_side])
    (q_depth, *more), (k_depth, *_) = contracted[q_side], contracted[k_side]
    need(not more, "the first matmul contracts several axes")
    q_batch, k_batch = batch[q_side], batch[k_side]
    k_length = _unit_free(_free(qk, k_side), k.shape)
    need(len(k_length) <= 1, "the keys have further axes")
    place = {r: a for a, r in enumerate(role) if r is not None}  # where the logits have a role
    q_free = _unit_free(_free(qk, q_side), q.shape)
    # The longest axis is the length of the queries, the first one if there are two. The others are groups of heads.
    q_length = max(q_free, key=lambda a: q.shape[a], default=None)
    groups = [a for a in q_free if a != q_length]
    paired = [i for i, a in enumerate(q_batch) if q.shape[a] != 1]
    head = max(paired, key=lambda i: q_batch[i]) if len(paired) > 1 else None
    others = [i for i in paired if i != head]
    heads: list[int] = [] if head is None else [head]

    # The second matmul has the same batch, and contracts the keys.
    v_side = 1 - p_side
    v = g.find(pv.ins[v_side])
    pv_contracted, pv_batch = pv.params["dimension_numbers"]
    need(len(pv_contracted[p_side]) == 1, "the second matmul contracts several axes")
    need(
        p_where[pv_contracted[p_side][0]] == axis or z.shape[axis] == 1, "the second matmul does not sum over the keys"
    )
    v_of = {p_where[a]: b for a, b in zip(pv_batch[p_side], pv_batch[v_side], strict=True) if p_where[a] is not None}
    need(sorted(v_of) == sorted(place["batch", i] for i in paired), "the values have another batch than the keys")
    v_depth = _unit_free(_free(pv, v_side), v.shape)
    need(len(v_depth) == 1, "the values have further axes")
    size = q.shape[q_depth]
    need(v.shape[v_depth[0]] == size, f"heads of queries have size {size}, of values {v.shape[v_depth[0]]}")

    def axes(batch_axes: Any, length: list[int], group: list[int], depth: int) -> Axes:
        return Axes(tuple(batch_axes(i) for i in others), tuple(batch_axes(i) for i in heads), tuple(length),
                    tuple(group), depth)  # fmt: skip

    q_axes = axes(lambda i: q_batch[i], [] if q_length is None else [q_length], groups, q_depth)
    k_axes = axes(lambda i: k_batch[i], k_length, [], k_depth)
    v_axes = axes(lambda i: v_of[place["batch", i]], [pv_contracted[v_side][0]], [], v_depth[0])

    # Where q, k and v were only widened, the op may take them as they were if the result is narrow anyway.
    scale, operands = logits.scale, []
    for x in (q, k):
        factor, x = _unscaled(g, x)
        scale *= factor
        operands.append(x)
    operands.append(v)
    out = g.find(pv.out)
    cast = only_cast(g, out)
    narrow = [source(g, x) for x in operands]
    dtype = pv.ins[p_side].dtype
    if len({x.dtype for x in narrow}) == 1 and (cast.dtype == narrow[0].dtype or narrow[0].dtype == dtype):
        operands, dtype, out = narrow, narrow[0].dtype, cast if cast.dtype == narrow[0].dtype else out
    need(str(dtype) in FLOATS, f"the values are {dtype}")
    need(widens(out.dtype, dtype) or out.dtype == pv.out.dtype, f"the result is {out.dtype}")
    precision = precision_name(qk.params["precision"], pv.params["precision"])

    # Roles of the axes of [B, N, G, T, S] in the logits.
    length_place = place.get((q_side, q_length)) if q_length is not None else None
    layout: list[list[Any]] = [
        [place["batch", i] for i in others], [place["batch", i] for i in heads], [place[q_side, a] for a in groups],
        [length_place],
    ]  # fmt: skip
    t = 1 if length_place is None else z.shape[length_place]
    s = z.shape[axis]
    is_causal, masks = False, []
    for mask, where, inverted in logits.masks:
        for part, part_where in [(mask, where)] if inverted else _conjuncts(g, mask, where):
            known = g.constant(part)
            if known is not None:
                known = known.astype(bool) ^ inverted
                if known.all():
                    continue
                used = {a for a in part_where if a is not None}
                if length_place is not None and used <= {part_where[length_place], part_where[axis]}:
                    ends: list[Any] = [part_where[length_place], part_where[axis]]
                    full = np.broadcast_to(known, [size if a in used else 1 for a, size in enumerate(part.shape)])
                    if None not in ends and _is_lower_triangle(
                        full.transpose([a for a in range(full.ndim) if a not in ends] + ends).reshape(t, s), t, s
                    ):
                        is_causal = True
                        continue
            masks.append((part, part_where, inverted))
    biases = list(logits.biases)
    if options.masked_rows != "exact":
        for bias in list(biases):
            if (mask_of := _additive_mask(g, *bias)) is not None:
                biases.remove(bias)
                masks.append(mask_of)
    else:
        low = max(logits.masked, default=-math.inf)
        is_lowest = any(low == float(jnp.finfo(d).min) for d in FLOATS)
        need(not masks or is_lowest or low <= _SURELY_LOW,
             f'masked logits are {low:.6g}; masked_rows="mask" takes them for a mask')  # fmt: skip
        need(len(logits.masked) <= 1 or not masks or zeroed, "masks of different values")
    # What a query gets that may attend to nothing: 0, the mean of the values, or the NaN of a softmax over -inf.
    empty = "zero"
    if masks and options.masked_rows != "zero" and not zeroed:
        empty = "nan" if math.isinf(min(logits.masked, default=0.0)) else "mean"

    inputs = [*operands, *(m[0] for m in masks), *(b[1] for b in biases)]
    batches = [q.shape[q_batch[i]] for i in others]
    head_counts = [q.shape[q_batch[i]] for i in heads], [q.shape[a] for a in groups]
    free = _free(pv, p_side)
    result = [("place", p_where[a]) for a in pv_batch[p_side]]
    halves = [("place", p_where[a]) for a in free], [("depth", a) for a in _free(pv, v_side)]
    result += (*halves[p_side], *halves[v_side])
    produced: list[Any] = [*(("place", a) for part in (layout[0], layout[3], layout[1], layout[2]) for a in part),
                ("depth", v_depth[0])]  # fmt: skip

    def expand(x: Any, where: Map) -> Any:
        """An array of the logits' axes, as [B or 1, N * G or 1, T or 1, S or 1]."""
        order = [a for part in (*layout, [axis]) for a in part]
        kept = [None if a is None else where[a] for a in order]
        x = x.transpose([a for a in kept if a is not None] + [a for a in range(x.ndim) if a not in kept])
        sizes = iter(x.shape)
        shape = [1 if a is None else next(sizes) for a in kept]
        full, n = [*batches, *head_counts[0], *head_counts[1]], 0
        for part in (batches, [*head_counts[0], *head_counts[1]]):  # several axes become one
            mine = shape[n : n + len(part)]
            if any(size != 1 for size in mine):
                shape[n : n + len(part)] = full[n : n + len(part)]
            n += len(part)
        x = jnp.broadcast_to(x.reshape([1 if a is None else x.shape[i] for i, a in _counted(kept)]), shape)
        counts = math.prod(shape[: len(batches)]), math.prod(shape[len(batches) : n])
        return x.reshape(*counts, *shape[n:])

    def call(q: Any, k: Any, v: Any, *more: Any) -> Any:
        q, k, v = (a.arrange(as_dtype(x, dtype)) for a, x in zip((q_axes, k_axes, v_axes), (q, k, v), strict=True))
        mask = bias = None
        for (_, where, inverted), x in zip(masks, more, strict=False):
            x = expand(x if x.dtype == bool else x != 0, where)
            x = ~x if inverted else x
            mask = x if mask is None else mask & x
        for (factor, _, where), x in zip(biases, more[len(masks) :], strict=True):
            x = expand(x, where)
            x = x if factor == 1 else x.astype(jnp.float32) * factor
            bias = x if bias is None else bias.astype(jnp.float32) + x.astype(jnp.float32)
        with jax.default_matmul_precision(precision):
            y = dot_product_attention(
                q, k, v, bias, mask, scale=scale, is_causal=is_causal, implementation=options.implementation
            )
        if empty != "zero" and mask is not None:
            allowed = mask & jnp.tri(t, s, dtype=bool) if is_causal else mask
            is_empty = jnp.swapaxes(~jnp.any(allowed, axis=-1), 1, 2)[..., None]
            instead = jnp.asarray(jnp.nan, y.dtype)
            if empty == "mean":
                mean = jnp.mean(v, axis=1, keepdims=True, dtype=jnp.float32).astype(y.dtype)
                instead = jnp.repeat(mean, y.shape[2] // v.shape[2], axis=2)
            y = jnp.where(is_empty, instead, y)
        length = [] if length_place is None else [t]
        y = y.reshape(*batches, *length, *head_counts[0], *head_counts[1], size)
        names = [name for name in produced if name[1] is not None]
        order = [names.index(name) for name, n in zip(result, out.shape, strict=True) if n != 1 and name in names]
        return y.transpose(order + [a for a in range(y.ndim) if a not in order]).reshape(out.shape)

    leaves = set(inputs)
    inside = region(g, [out], leaves)
    check_kept_inside(g, inside, [out], leaves, z.size, "an intermediate result of the attention")
    n, kv = math.prod(head_counts[0] + head_counts[1]), math.prod(head_counts[0])
    static = {"B": math.prod(batches), "T": t, "S": s, "N": n, **({"K": kv} if kv != n else {}), "H": size}
    static |= {"causal": True} if is_causal else {}
    static |= {"masks": len(masks)} if masks else {}
    static |= {"biases": len(biases)} if biases else {}
    return Site("dot_product_attention", "attention", anchor, [out], inputs, call, static, inside)


def _counted(kept: list[int | None]) -> list[tuple[int, int | None]]:
    """Pairs each axis with the number of axes before it that are not None."""
    pairs, n = [], 0
    for a in kept:
        pairs.append((n, a))
        n += a is not None
    return pairs


def _unscaled(g: Graph, x: Var) -> tuple[float, Var]:
    """Returns (factor, y) where x is a number times y."""
    factor, v, where = 1.0, *strip(g, x, casts="none")
    while is_like(v, where, x) or where == identity(x.shape):
        node = g.defs.get(v)
        if node is None or node.name not in ("mul", "div"):
            break
        a, b = node.ins
        if number := g.number(b):
            v, factor = g.find(a), factor * number if node.name == "mul" else factor / number
        elif node.name == "mul" and (number := g.number(a)):
            v, factor = g.find(b), factor * number
        else:
            break
        if v.shape != x.shape or v.dtype != x.dtype:
            return 1.0, x
    return (factor, v) if v.shape == x.shape and factor != 1.0 else (1.0, x)


def _additive_mask(g: Graph, factor: float, v: Var, where: Map) -> tuple[Var, Map, bool] | None:
    """Returns (mask, map, inverted) where factor * v is 0 where attended and very low elsewhere."""
    node = g.defs.get(v)
    if node is None:
        return None
    if node.name == "select_n" and len(node.ins) == 3:
        no, yes = (g.number(strip(g, x)[0]) for x in node.ins[1:])
        mask, mask_where = strip(g, node.ins[0], where)
        if yes == 0 and no is not None and factor * no <= _LOW:
            return mask, mask_where, False
        if no == 0 and yes is not None and factor * yes <= _LOW:
            return mask, mask_where, True
    if node.name in ("mul", "div") and (number := g.number(node.ins[1])):
        inner = strip(g, node.ins[0], where)
        return _additive_mask(g, factor * number if node.name == "mul" else factor / number, *inner)
    if node.name == "mul" and (number := g.number(node.ins[0])):
        return _additive_mask(g, factor * number, *strip(g, node.ins[1], where))
    if node.name == "sub" and factor <= _LOW and g.number(node.ins[0]) == 1:
        mask, mask_where = strip(g, node.ins[1], where)
        return (mask, mask_where, False) if mask.dtype == bool else None
    if node.name == "sub" and factor >= -_LOW and g.number(node.ins[1]) == 1:
        mask, mask_where = strip(g, node.ins[0], where)
        return (mask, mask_where, False) if mask.dtype == bool else None
    return None
