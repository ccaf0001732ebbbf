"""Functions as users of JAX write them, and what `jaxft.fuse` finds in them."""

import functools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

# The benchmark takes larger ones.
B, T, D, N, H, F, V = map(int, os.environ.get("FUSION_SIZES", "2,12,32,4,8,64,50").split(","))

ATT, LN, RMS, SM, LSM = "dot_product_attention", "layer_norm", "rms_norm", "softmax", "log_softmax"
BA, DENSE, BRLN, DRLN = "bias_activation", "dense", "bias_residual_layer_norm", "dense_residual_layer_norm"
FF, EMB, LOSS = "feed_forward_residual_layer_norm", "embeddings_layer_norm", "linear_cross_entropy"


class Case(NamedTuple):
    """A function, its arguments by dtype, and the wanted number of sites of each op."""

    make: Callable[[Any], tuple[Callable, tuple]]
    wanted: dict[str, int]


CASES: dict[str, Case] = {}


def normal(i, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(i), shape, jnp.float32).astype(dtype)


def case(name, fn, wanted, *shapes, others=()):
    """Adds a case whose arguments are random arrays of these shapes, and then `others`."""
    CASES[name] = Case(lambda dtype: (fn, (*(normal(i, *s, dtype=dtype) for i, s in enumerate(shapes)), *others)),
                       wanted)  # fmt: skip


def linen(name, module, wanted, *inputs, shape=(B, T, D)):
    """Adds a Flax Linen module, applied to random parameters, a random array and `inputs`."""

    def make(dtype):
        x = normal(0, *shape)
        params = module.init(jax.random.key(1), x, *inputs)
        leaves, tree = jax.tree.flatten(params)
        params = jax.tree.unflatten(
            tree, [(p + 0.1 * (32 / D) ** 0.5 * normal(i, *p.shape)).astype(dtype) for i, p in enumerate(leaves)]
        )
        return lambda params, x: module.apply(params, x, *inputs), (params, x.astype(dtype))

    CASES[name] = Case(make, wanted)


ROWS = (B, T, D), (D,), (D,)
LENGTHS = jnp.where(jnp.arange(B) % 2, T // 2 + 1, T)
PAD = jnp.arange(T)[None] < LENGTHS[:, None]
EMPTY = PAD & (jnp.arange(B)[:, None] % 2 == 0)  # every other sequence is all padding

# --- Normalisations ----------------------------------------------------------------------------------------------


def mean(x):
    return x.mean(-1, keepdims=True)


def by_sqrt(x, g, b):
    centered = x - mean(x)
    return g * (centered / jnp.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)) + b


def in_float32(x, g, b):
    y = x.astype(jnp.float32)
    y = y - mean(y)
    y = y / jnp.sqrt(jnp.sum(y * y, -1, keepdims=True) / x.shape[-1] + 1e-12)
    return (y * g + b).astype(x.dtype)


def one_plus(x, w, b):
    c = x - (jnp.sum(x, -1) / D)[..., None]
    return c * jax.lax.rsqrt(jnp.mean(jnp.square(c), -1) + 1e-6)[..., None] * (1 + w) + b


def shifted(x, g, b):
    mu, inv = mean(x), jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-3) * g
    return x * inv + (b - mu * inv)


def nnx_case(name, make_module, wanted):
    def make(dtype):
        module = make_module()
        graph, state = nnx.split(module)
        state = jax.tree.map(lambda p: p.astype(dtype) if jnp.issubdtype(p.dtype, jnp.floating) else p, state)
        return lambda state, x: nnx.merge(graph, state)(x), (state, normal(0, B, T, D, dtype=dtype))

    CASES[name] = Case(make, wanted)


linen("linen.LayerNorm", nn.LayerNorm(), {LN: 1})
linen("linen.LayerNorm, two passes", nn.LayerNorm(use_fast_variance=False), {LN: 1})
linen("linen.LayerNorm, no parameters", nn.LayerNorm(use_scale=False, use_bias=False), {LN: 1})
nnx_case("nnx.LayerNorm", lambda: nnx.LayerNorm(D, rngs=nnx.Rngs(0)), {LN: 1})
nnx_case("nnx.RMSNorm", lambda: nnx.RMSNorm(D, rngs=nnx.Rngs(0)), {RMS: 1})
case("jnp.mean and jnp.var", lambda x, g, b: (x - mean(x)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * g + b,
     {LN: 1}, *ROWS)  # fmt: skip
case("a division by sqrt", by_sqrt, {LN: 1}, *ROWS)
case("statistics in float32", in_float32, {LN: 1}, *ROWS)
case("scale 1 + w", one_plus, {LN: 1}, *ROWS)
case("x * inv + shift", shifted, {LN: 1}, *ROWS)
case("a power of -0.5", lambda x, g: g * (x - mean(x)) * (x.var(-1, keepdims=True) + 1e-5) ** -0.5, {LN: 1}, *ROWS[:2])
case("the mean minus x", lambda x, g, b: (x - mean(x)) * jax.lax.rsqrt(mean((mean(x) - x) ** 2) + 1e-5) * g + b,
     {LN: 1}, *ROWS)  # fmt: skip
case("RMSNorm of the mean minus x", lambda x, g: (mean(x) - x) / jnp.sqrt(mean((mean(x) - x) ** 2) + 1e-5) * g,
     {RMS: 1}, *ROWS[:2])  # fmt: skip
case("RMSNorm of x and its mean", lambda x, g: (x + mean(x)) / jnp.sqrt(mean((x + mean(x)) ** 2) + 1e-5) * g, {RMS: 1},
     *ROWS[:2])  # fmt: skip
for sign, name in ((1, "x minus another mean"), (-1, "another mean minus x")):
    case(f"RMSNorm of {name}", lambda x, y, g, sign=sign: (lambda d: d * jax.lax.rsqrt(mean(d * d) + 1e-5) * g)(
        sign * (x - mean(y))), {RMS: 1}, ROWS[0], ROWS[0], ROWS[1])  # fmt: skip
case("RMSNorm, squares of -x", lambda x, g: x * jax.lax.rsqrt(mean(jnp.square(-x)) + 1e-6) * g, {RMS: 1}, *ROWS[:2])
case("RMSNorm by hand", lambda x, g: x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * g, {RMS: 1}, *ROWS[:2])
case("RMSNorm of LLaMA", lambda x, g: g * ((wide := x.astype(jnp.float32)) * jax.lax.rsqrt(
    mean(wide**2) + 1e-6)).astype(x.dtype), {RMS: 1}, *ROWS[:2])  # fmt: skip
case("RMSNorm of a residual", lambda x, r, g: (x + r) * jax.lax.rsqrt(mean((x + r) ** 2) + 1e-6) * g, {RMS: 1},
     (B, T, D), (B, T, D), (D,))  # fmt: skip


def norms(first, second):
    """Returns two norms of one array."""
    return lambda x, g, b, *more: (first(x, g, b), second(x, *more), x.sum())


def flax_norm(x, g, b):
    mu, square = mean(x), mean(x * x)
    return (x - mu) * (jax.lax.rsqrt(jnp.maximum(square - mu * mu, 0) + 1e-6) * g) + b


case("two norms of one array", norms(by_sqrt, by_sqrt), {LN: 2}, *ROWS, (D,), (D,))
case("two norms of one array by jnp.var", norms(*[lambda x, g, b: (x - mean(x)) / jnp.sqrt(
    x.var(-1, keepdims=True) + 1e-5) * g + b] * 2), {LN: 2}, *ROWS, (D,), (D,))  # fmt: skip
case("two norms of one array, in Flax", norms(flax_norm, flax_norm), {LN: 2}, *ROWS, (D,), (D,))
case("two norms of a residual", lambda x, r, *more: norms(by_sqrt, by_sqrt)(x + r, *more), {LN: 2}, (B, T, D),
     *ROWS, (D,), (D,))  # fmt: skip
case("standard deviation plus epsilon", lambda x: (x - mean(x)) / (x.std(-1, keepdims=True) + 1e-6), {}, (B, T, D))
case("a norm over two axes", lambda x: (x - x.mean((1, 2), keepdims=True)) * jax.lax.rsqrt(
    x.var((1, 2), keepdims=True) + 1e-6), {}, (B, T, D))  # fmt: skip
case("ddof of 1", lambda x: (x - mean(x)) / jnp.sqrt(x.var(-1, keepdims=True, ddof=1) + 1e-6), {}, (B, T, D))
linen("linen.GroupNorm", nn.GroupNorm(4), {})

# --- Activations -------------------------------------------------------------------------------------------------

for _name, _fn in {
    "jax.nn.gelu, erf": functools.partial(jax.nn.gelu, approximate=False),
    "jax.nn.gelu, tanh": jax.nn.gelu,
    "0.5 x (1 + erf)": lambda x: 0.5 * x * (1.0 + jax.scipy.special.erf(x / math.sqrt(2.0))),
    "x (0.5 + 0.5 erf)": lambda x: x * (0.5 + 0.5 * jax.lax.erf(x * 0.7071067811865476)),
    "tanh of a power": lambda x: 0.5 * x * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * jnp.power(x, 3)))),
    "tanh of x (1 + c x^2)": lambda x: x * 0.5 * (1 + jnp.tanh(0.7978845608 * x * (1 + 0.044715 * x * x))),
    "x norm.cdf(x)": lambda x: x * jax.scipy.stats.norm.cdf(x.astype(jnp.float32)).astype(x.dtype),
    "jax.nn.silu": jax.nn.silu,
    "x / (1 + exp(-x))": lambda x: x * (1 / (1 + jnp.exp(-x))),
    "jax.nn.relu": jax.nn.relu,
    "a bias and tanh": jnp.tanh,
}.items():
    case(_name, lambda x, b, fn=_fn: fn(x + b), {BA: 1}, (B, T, F), (F,))
for _name, _fn in {
    "quick GELU": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "a maximum with 0": lambda x: jnp.maximum(x, 0),
    "0.6 x (1 + erf)": lambda x: 0.6 * x * (1.0 + jax.lax.erf(x / math.sqrt(2.0))),
}.items():
    case(_name, lambda x, b, fn=_fn: fn(x + b), {}, (B, T, F), (F,))

# The GELU is replaced, and nothing around it.
case("a straight-through GELU", lambda x: x + jax.lax.stop_gradient(jax.nn.gelu(x) - x), {BA: 1}, (B, T, F))

# --- Softmax and attention ---------------------------------------------------------------------------------------

case("jax.nn.softmax", jax.nn.softmax, {SM: 1}, (B, T, D))
case("softmax by hand", lambda x: jnp.exp(x - x.max(-1, keepdims=True)) / jnp.exp(x - x.max(-1, keepdims=True)).sum(
    -1, keepdims=True), {SM: 1}, (B, T, D))  # fmt: skip
case("softmax over axis 1", lambda x: jax.nn.softmax(x, 1), {}, (B, T, D))
case("jax.nn.log_softmax", jax.nn.log_softmax, {LSM: 1}, (B, T, D))
case("x - logsumexp", lambda x: x - jax.nn.logsumexp(x, axis=-1, keepdims=True), {LSM: 1}, (B, T, D))

QKV = ((B, T, N, H),) * 3


def attention(name, fn, wanted=None, *others, shapes=QKV):
    case(name, fn, {ATT: 1} if wanted is None else wanted, *shapes, others=others)


def keys(mask):
    return mask[:, None, None, :]


def hf_style(q, k, v, m):
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(H) + (1.0 - keys(m).astype(q.dtype)) * -1e9
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s, -1), v)


def transposed(q, k, v):
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    p = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2) / jnp.sqrt(H).astype(q.dtype), -1)
    return (p @ v).transpose(0, 2, 1, 3).reshape(B, T, -1)


def scaled_query(q, k, v):
    p = jax.nn.softmax(jnp.matmul(q * H**-0.5, k.swapaxes(-1, -2)).astype(jnp.float32), -1)
    return jnp.matmul(p.astype(q.dtype), v)


def causal(q, k, v):
    s = jnp.einsum("htd,hsd->hts", q, k) / math.sqrt(H)
    return jnp.einsum("hts,hsd->htd", jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -1e10)), v)


def t5_style(q, k, v, table, m):
    ids = jnp.arange(T)[None, :] - jnp.arange(T)[:, None]
    bias = jnp.transpose(table[jnp.clip(ids + 8, 0, 15)], (2, 0, 1))[None]
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias + keys(jnp.where(m, 0, -1e10).astype(q.dtype))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s, -1), v)


def grouped(q, k, v):  # heads before the length
    q = q.transpose(0, 2, 1, 3).reshape(B, 2, N // 2, T, H)
    s = jnp.einsum("bkgtd,bskd->bkgts", q, k) * 0.3
    return jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(s, -1), v)


def minus_infinity(q, k, v, m):
    s = jnp.where(keys(m), jnp.einsum("btnh,bsnh->bnts", q, k) / 3.0, -jnp.inf)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return jnp.einsum("bnts,bsnh->btnh", e / e.sum(-1, keepdims=True), v)


def late(q, k, v):
    s = q @ k.T / 3.0
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return (e @ v) / e.sum(-1, keepdims=True)


def returned(q, k, v):
    p = jax.nn.softmax(q @ k.T / 3.0)
    return p @ v, p


def flax_masks(q, k, v, m):
    return nn.dot_product_attention(
        q, k, v, mask=nn.combine_masks(nn.make_attention_mask(m, m), nn.make_causal_mask(m), dtype=bool)
    )


attention("linen attention", nn.dot_product_attention)
attention("linen attention, mask", lambda q, k, v, m: nn.dot_product_attention(q, k, v, mask=keys(m)), None, PAD)
attention(
    "linen attention, empty rows", lambda q, k, v, m: nn.dot_product_attention(q, k, v, mask=keys(m)), None, EMPTY
)
attention("linen attention, bias", lambda q, k, v, b: nn.dot_product_attention(q, k, v, bias=b), None,
          shapes=(*QKV, (1, N, T, T)))  # fmt: skip
attention("linen attention, causal and padding", flax_masks, None, PAD)
attention("nnx attention", nnx.dot_product_attention)
attention("jax.nn attention, causal and mask", lambda q, k, v, m: jax.nn.dot_product_attention(
    q, k, v, mask=keys(m), is_causal=True), None, PAD)  # fmt: skip
attention("jax.nn attention, grouped heads", lambda q, k, v: jax.nn.dot_product_attention(q, k[:, :, :2], v[:, :, :2]))
attention("jax.nn attention, lengths",
          lambda q, k, v, n: jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=n), None,
          LENGTHS)  # fmt: skip
attention("einsum, (1 - m) * -1e9", hf_style, None, PAD)
attention("einsum, (1 - m) * -1e9, empty rows", hf_style, None, EMPTY)
attention("matmul of transposed arrays", transposed)
attention("matmul, scaled query", scaled_query, shapes=((B, N, T, H),) * 3)
attention("causal by tril", causal, shapes=((N, T, H),) * 3)
attention("one head", lambda q, k, v: jax.nn.softmax(q @ k.T / math.sqrt(H)) @ v, shapes=((T, H),) * 3)
attention("vmap", jax.vmap(lambda q, k, v: jnp.einsum("nts,snh->tnh", jax.nn.softmax(
    jnp.einsum("tnh,snh->nts", q, k) * H**-0.5), v)))  # fmt: skip
attention("batched matmul", lambda q, k, v: jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k) * 0.3) @ v,
          shapes=((B * N, T, H),) * 3)  # fmt: skip
attention("grouped heads before the length", grouped, shapes=((B, T, N, H), (B, T, 2, H), (B, T, 2, H)))
attention("T5's relative bias", lambda q, k, v, t, m: t5_style(q, k, v, t, m), None, PAD, shapes=(*QKV, (16, N)))
attention("a mask of -inf", minus_infinity, None, PAD)


def by_hand(masked, divided=lambda e, mask: e / e.sum(-1, keepdims=True)):
    """Returns attention with `masked` as the exponentials, and `divided` as their division by the sum."""

    def fn(q, k, v, m):
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.35
        e = masked(jnp.exp(s - s.max(-1, keepdims=True)), keys(m))
        return jnp.einsum("bhqk,bkhd->bqhd", divided(e, keys(m)), v)

    return fn


def where_and_after(q, k, v, m):
    s = jnp.where(keys(m), jnp.einsum("bqhd,bkhd->bhqk", q, k), -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(keys(m), jax.nn.softmax(s), 0), v)


def temperature(q, k, v, t, m):
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * jnp.exp(t)[:, None, None] / 3
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(keys(m), s, -1e9)), v)


attention("exponentials with a mask", by_hand(lambda e, m: jnp.where(m, e, 0)), None, PAD)
attention("exponentials times a mask", by_hand(lambda e, m: e * m), None, PAD)
attention("a softmax with where=", lambda q, k, v, m: jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(
    jnp.einsum("bqhd,bkhd->bhqk", q, k), where=keys(m)), v), None, PAD)  # fmt: skip
attention("a mask after the softmax too", where_and_after, None, EMPTY)
attention("a temperature for each head", temperature, None, PAD, shapes=(*QKV, (N,)))
attention("a mask after the softmax alone", by_hand(
    lambda e, m: e, lambda e, m: jnp.where(m, e / e.sum(-1, keepdims=True), 0)), {SM: 1}, PAD)  # fmt: skip
attention("a mask in the result alone", by_hand(
    lambda e, m: e, lambda e, m: jnp.where(m, e, 0) / e.sum(-1, keepdims=True)), {}, PAD)  # fmt: skip
attention("a mask in the sum alone", by_hand(
    lambda e, m: e, lambda e, m: e / jnp.where(m, e, 0).sum(-1, keepdims=True)), {}, PAD)  # fmt: skip
attention("a cap of the logits", lambda q, k, v: jax.nn.softmax(5 * jnp.tanh(q @ k.T / 5)) @ v,
          {SM: 1, "dot_general": 1}, shapes=((T, H),) * 3)  # fmt: skip
attention("a division after the values", late, {"dot_general": 1}, shapes=((T, H),) * 3)
attention("probabilities returned", returned, {SM: 1, "dot_general": 1}, shapes=((T, H),) * 3)
attention("dropout", lambda q, k, v: nn.dot_product_attention(
    q, k, v, dropout_rate=0.1, dropout_rng=jax.random.key(0), deterministic=False), {SM: 1})  # fmt: skip
attention("a low mask", lambda q, k, v: jax.nn.softmax(jnp.where(jnp.eye(T) > 0, q @ k.T, -100.0)) @ v,
          {SM: 1, "dot_general": 1}, shapes=((T, H),) * 3)  # fmt: skip
linen("linen.MultiHeadAttention", nn.MultiHeadDotProductAttention(N), {ATT: 1})
nnx_case("nnx.MultiHeadAttention", lambda: nnx.MultiHeadAttention(N, D, D, decode=False, rngs=nnx.Rngs(0)), {ATT: 1})

# --- Layers ------------------------------------------------------------------------------------------------------


class BertLayer(nn.Module):
    """A layer as the Flax models of Hugging Face have it, in words of our own."""

    @nn.compact
    def __call__(self, x, mask):
        q, k, v = (nn.Dense(D, name=name)(x).reshape(B, T, N, H) for name in "qkv")
        bias = jax.lax.select(keys(mask), jnp.zeros((B, 1, 1, T), x.dtype),
                              jnp.full((B, 1, 1, T), jnp.finfo(x.dtype).min, x.dtype))  # fmt: skip
        weights = nn.dot_product_attention_weights(q, k, bias=bias)
        weights = jnp.einsum("...hqk,h->...hqk", weights, jnp.ones(N, x.dtype))  # a head mask that masks nothing
        attended = jnp.einsum("...hqk,...khd->...qhd", weights, v).reshape(B, T, D)
        x = nn.LayerNorm(epsilon=1e-12)(nn.Dense(D, name="o")(attended) + x)
        h = nn.gelu(nn.Dense(F, name="inner")(x), approximate=False)
        return nn.LayerNorm(epsilon=1e-12)(nn.Dense(D, name="outer")(h) + x)


class Bert(nn.Module):
    """Embeddings and two layers."""

    @nn.compact
    def __call__(self, x, ids, mask):
        tables = (nn.Embed(n, D) for n in (V, T, 2))
        total = sum(table(i) for table, i in zip(tables, (ids, jnp.arange(T)[None].repeat(B, 0), 0 * ids), strict=True))
        y = nn.LayerNorm()(total) + x
        for _ in range(2):
            y = BertLayer()(y, mask)
        return y


class ViTBlock(nn.Module):
    """A pre-norm layer."""

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(N)(y, y)
        y = nn.gelu(nn.Dense(F)(nn.LayerNorm()(x)), approximate=False)
        return x + nn.Dense(D)(y)


class Scanned(nn.Module):
    """Three pre-norm layers in a scan."""

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(lambda m, c, _: (m(c), None), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return scan(ViTBlock(), x, None)[0]


def loss(x, table, b, labels, keep):
    log_p = jax.nn.log_softmax(x @ table.T + b)
    picked = jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
    return -jnp.sum(jnp.where(keep, picked, 0)) / jnp.sum(keep)


IDS = jnp.arange(B * T).reshape(B, T) % V
linen("linen MLP", nn.Sequential([nn.Dense(F), nn.gelu, nn.Dense(D)]), {DENSE: 1})
linen("a BERT layer", BertLayer(), {ATT: 1, DRLN: 1, FF: 1}, PAD)
linen("BERT", Bert(), {EMB: 1, ATT: 2, DRLN: 2, FF: 2}, IDS, PAD)
linen("a ViT block", ViTBlock(), {LN: 1, BRLN: 1, ATT: 1, DENSE: 1})
linen("a scan of ViT blocks", Scanned(), {LN: 1, BRLN: 1, ATT: 1, DENSE: 1})
linen("a rematerialised ViT block", nn.remat(ViTBlock)(), {LN: 1, BRLN: 1, ATT: 1, DENSE: 1})
case("the loss of labels", loss, {LOSS: 1}, (B, T, D), (V, D), (V,), others=(IDS, PAD))


def optax_loss(x, table):
    return (optax.softmax_cross_entropy_with_integer_labels(x @ table, IDS) * PAD).mean()


def one_hot_loss(x, table, labels, keep):  # a label of -1 is no class, and has no loss
    losses = optax.softmax_cross_entropy(x @ table, jax.nn.one_hot(labels, V))
    return (losses * keep).sum() / keep.sum()


case("one-hot labels of optax", one_hot_loss, {LOSS: 1}, (B, T, D), (D, V), others=(IDS - 1, PAD))
case("one-hot labels summed at once", lambda x, w: -jnp.sum(jax.nn.one_hot(IDS, V) * jax.nn.log_softmax(x @ w)) / T,
     {LOSS: 1}, (B, T, D), (D, V))  # fmt: skip
case("a row and a label of each", lambda x, w: -jax.nn.log_softmax(x @ w)[jnp.arange(T), IDS[0]].mean(), {LOSS: 1},
     (T, D), (D, V))  # fmt: skip
case("smoothed labels", lambda x, w: optax.softmax_cross_entropy(
    x @ w, optax.smooth_labels(jax.nn.one_hot(IDS, V), 0.1)).mean(), {LSM: 1}, (B, T, D), (D, V))  # fmt: skip
case("the loss of optax", optax_loss, {LOSS: 1}, (B, T, D), (D, V))
case("a LayerNorm of one row", by_sqrt, {LN: 1}, (D,), (D,), (D,))
case("transposes that cancel", lambda x: x.transpose(2, 0, 1).transpose(1, 2, 0) + 1, {"permute": 1}, (B, T, D))
case("transposes that compose", lambda x: jnp.sin(x.transpose(2, 0, 1).transpose(2, 0, 1)), {"permute": 1}, (B, T, D))
case("a matmul of a transposed array", lambda x, w: jnp.einsum("btd,df->btf", x, w.T.T.T), {"dot_general": 1},
     (B, T, D), (F, D))  # fmt: skip
