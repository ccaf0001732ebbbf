"""Whole BERT encoders, forward: jaxft beside plain XLA and XLA with cuDNN attention, the same random weights for all.

The peers are written as a good JAX user would: `jax.nn.dot_product_attention`, `jax.nn.gelu`, a LayerNorm in float32,
and one jit around everything. Each runs in two forms, with q, k and v from one matmul and from three.
"""

import argparse
import collections
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxft
import shapes
import timing
from jaxft.comparison import Attention, plain_encoder
from jaxft.models.bert import BertConfig, BertModel
from jaxft.training import COMPILER_OPTIONS

Params = list[dict[str, jax.Array]]  # one dict per layer, named as in jaxft.models.bert


# implementation: (attention of jax.nn, q, k and v from one matrix product)
PEERS: dict[str, tuple[Attention, bool]] = {
    "xla": ("xla", True),
    "xla, separate qkv": ("xla", False),
    "xla+cudnn": ("cudnn", False),
    "xla+cudnn, packed qkv": ("cudnn", True),
}


def random_lengths(case: shapes.Encoder) -> jax.Array | None:
    """Returns random lengths of the sequences that add up to the valid tokens, or None if all tokens are valid."""
    if case.valid is None:
        return None
    share = np.random.default_rng(0).dirichlet(np.full(case.batch, 2.0)) * (case.valid - case.batch)
    lengths = np.minimum(1 + share.astype(int), case.length)
    while lengths.sum() < case.valid:
        lengths[np.flatnonzero(lengths < case.length)[: case.valid - lengths.sum()]] += 1
    return jnp.asarray(lengths, jnp.int32)


def keep(case: shapes.Encoder, lengths: jax.Array) -> jax.Array:
    """Returns which tokens are valid: bool `[B, T]`."""
    return jnp.arange(case.length) < lengths[:, None]


def random_params(model: str, dtype: str) -> Params:
    """Returns random parameters of each layer."""
    layers, width, _, ff = shapes.MODELS[model]
    sizes = {
        "qkv_kernel": (width, 3 * width), "qkv_bias": (3 * width,),
        "out_kernel": (width, width), "out_bias": (width,),
        "attention_norm_gamma": (width,), "attention_norm_beta": (width,),
        "ffn_in_kernel": (width, ff), "ffn_in_bias": (ff,),
        "ffn_out_kernel": (ff, width), "ffn_out_bias": (width,),
        "ffn_norm_gamma": (width,), "ffn_norm_beta": (width,),
    }  # fmt: skip

    @functools.partial(jax.jit, static_argnums=1)
    def make(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(key, shape, jnp.float32) * 0.03

    params = []
    for key in jax.random.split(jax.random.key(0), layers):
        keys = jax.random.split(key, len(sizes))
        values = {name: make(k, size) for k, (name, size) in zip(keys, sizes.items(), strict=True)}
        params.append({n: (v + 1 if n.endswith("gamma") else v).astype(dtype) for n, v in values.items()})
    return params


# --- The peers ---------------------------------------------------------------------------------------------------


def separate(params: Params) -> Params:
    """Returns the same parameters with the q, k and v projections as separate arrays."""
    result = []
    for p in params:
        rest = {name: value for name, value in p.items() if not name.startswith("qkv")}
        for part in ("kernel", "bias"):
            q, k, v = jnp.split(p[f"qkv_{part}"], 3, axis=-1)
            rest |= {f"q_{part}": q, f"k_{part}": k, f"v_{part}": v}
        result.append(rest)
    return result


# --- jaxft -------------------------------------------------------------------------------------------------------


def jaxft_layers(
    case: shapes.Encoder, params: Params, gelu: str, *, implementation: str | None = None, dropout: float = 0.0
) -> tuple[Callable[[list[jax.Array]], Any], list[jax.Array]]:
    """Returns a function from leaves to the layers of a BertModel, and the leaves: `params` in the model's order."""
    _, width, heads, ff = shapes.MODELS[case.model]
    config = BertConfig(
        vocab_size=8, hidden_size=width, num_hidden_layers=len(params), num_attention_heads=heads, intermediate_size=ff,
        max_position_embeddings=8, hidden_act=gelu, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    dtype = jnp.dtype(case.dtype)
    options: dict[str, Any] = {"dtype": dtype, "param_dtype": dtype, "implementation": implementation}
    model = nnx.eval_shape(lambda: BertModel(config, **options, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model.layers)
    paths, structure = jax.tree_util.tree_flatten_with_path(state)
    leaves = []
    for path, shape in paths:
        index, name = re.findall(r"\w+", jax.tree_util.keystr(path))[:2]
        leaves.append(params[int(index)][name])
        assert leaves[-1].shape == shape.shape, (path, shape.shape)

    return lambda leaves: nnx.merge(graph, jax.tree_util.tree_unflatten(structure, leaves)), leaves


def jaxft_encoder(
    case: shapes.Encoder, params: Params, gelu: str, *, packed: bool = False, bundled: bool = True, joined: bool = False
) -> tuple[jax.stages.Wrapped, list[jax.Array]]:
    """Returns a function (arrays, x, lengths) -> y through the layers of BertModel, and the arrays.

    `bundled`: the arrays come from `jaxft.bundle`. `joined`: the layers come from `jaxft.models.join_kernels`.
    `packed`: padding is removed before the first layer and put back after the last.
    """
    layers_of, leaves = jaxft_layers(case, params, gelu)
    layers = layers_of(leaves)
    arrays, rebuild = jaxft.bundle(
        jaxft.models.join_kernels(layers) if joined else layers, implementation=None if bundled else "xla"
    )

    @jax.jit
    def encode(arrays: list[jax.Array], x: jax.Array, lengths: jax.Array | None) -> jax.Array:
        mask = None if lengths is None else keep(case, lengths)[:, None, None, :]
        for layer in rebuild(arrays):
            x = layer(x, mask)
        return x

    @jax.jit
    def encode_packed(arrays: list[jax.Array], x: jax.Array, lengths: jax.Array) -> jax.Array:
        capacity = -(-(case.valid or x[..., 0].size) // 128) * 128
        rows, indices, cu_seqlens = jaxft.remove_padding(x, keep(case, lengths), capacity=capacity)
        for layer in rebuild(arrays):
            rows = layer(rows, None, cu_seqlens=cu_seqlens, max_seqlen=case.length)
        return jaxft.restore_padding(rows, indices, batch=case.batch, length=case.length)

    return encode_packed if packed else encode, arrays


def jaxft_scanned(case: shapes.Encoder, params: Params, gelu: str) -> tuple[jax.stages.Wrapped, list[jax.Array]]:
    """Returns a function (leaves, x, lengths) -> y that scans one layer, and the stacked leaves `[layers, ...]`."""
    (layer_of, *_), leaves = zip(*(jaxft_layers(case, [p], gelu) for p in params), strict=True)

    @jax.jit
    def encode(leaves: list[jax.Array], x: jax.Array, lengths: jax.Array | None) -> jax.Array:
        mask = None if lengths is None else keep(case, lengths)[:, None, None, :]

        def step(x: jax.Array, own: list[jax.Array]) -> tuple[jax.Array, None]:
            (layer,) = layer_of(own)
            return layer(x, mask), None

        return jax.lax.scan(step, x, leaves)[0]

    return encode, [jnp.stack(same) for same in zip(*leaves, strict=True)]


# --- Kernels of a compiled program -------------------------------------------------------------------------------


def kernels(compiled_text: str) -> collections.Counter[str]:
    """Counts what a compiled program launches: fusions, custom calls, copies, transposes, dots, by their kind."""
    free = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "call", "partition-id"}
    found: collections.Counter[str] = collections.Counter()
    launches = False
    for line in compiled_text.splitlines():
        if line and not line[0].isspace():  # the head of a computation; only these two kinds are not inside of a fusion
            launches = line.startswith("ENTRY") or line.startswith("%command_buffer")
        elif launches and (match := re.match(r"\s+(?:ROOT )?%(\S+) = .*?[\])}] ([a-z][\w-]*)\(", line)):
            name, opcode = match.groups()
            target = re.search(r'custom_call_target="([^"]+)"', line)
            words = [opcode, *([target[1]] if target else []), re.sub(r"[.\d]+$", "", name)]
            if opcode not in free:
                found[" ".join(dict.fromkeys(words))] += 1
    return found


def print_kernels(name: str, variant: timing.Variant, layers: int) -> None:
    """Prints what one call launches, per layer. On a GPU it adds each kernel's name and its time, waits included."""
    f, inputs = variant
    jax.block_until_ready([f(*inputs[0]) for _ in range(2)])  # compile first
    print(f"\n{name}: kernels in the compiled program")
    compiled = f if isinstance(f, jax.stages.Compiled) else f.lower(*inputs[0]).compile()
    for kind, count in kernels(compiled.as_text() or "").most_common():
        print(f"  {count / layers:6.2f} a layer  {kind}")
    if jax.default_backend() == "gpu":
        times: dict[str, list[float]] = {}
        for launched in timing.kernel_times(variant):
            times.setdefault(launched.name, []).append(launched.end - launched.start)
        for kernel, each in sorted(times.items(), key=lambda item: -sum(item[1])):
            print(f"  {len(each) / layers:6.2f} a layer  {sum(each) / len(each):8.2f} us each  {kernel[:90]}")


def run(case: shapes.Encoder, gelu: str, args: argparse.Namespace) -> list[timing.Row]:
    """Checks and times one case."""
    layers, width, heads, ff = shapes.MODELS[case.model]
    params = random_params(case.model, case.dtype)
    x = jax.random.normal(jax.random.key(1), (case.batch, case.length, width), case.dtype)
    lengths = random_lengths(case)
    variants: dict[str, timing.Variant] = {}
    ways = {"jaxft": False} if lengths is None else {"jaxft": True, "jaxft, padded": False}
    for name, packed in ways.items():
        ours, arrays = jaxft_encoder(case, params, gelu, packed=packed)
        variants[name] = (ours, [(arrays, x, lengths)])
    for name, (attention, packed) in PEERS.items():
        if attention == "cudnn" and (jax.default_backend() != "gpu" or case.dtype == "float32"):
            continue  # cuDNN's attention has no float32
        activation = "gelu_tanh" if gelu == "gelu_new" else "gelu"
        f = functools.partial(plain_encoder, heads=heads, activation=activation, epsilon=1e-12, attention=attention)
        variants[name] = (jax.jit(f), [(params if packed else separate(params), x, lengths)])

    latency = case.batch * case.length <= 1024
    if latency and case.dtype != "float32":
        scanned, stacked = jaxft_scanned(case, params, gelu)
        variants["jaxft, scanned"] = scanned, [(stacked, x, lengths)]
        # A small call may wait for the host, which handles each argument. Not in float32: there XLA would transpose the
        # constants while it compiles.
        unbundled, leaves = jaxft_encoder(case, params, gelu, bundled=False)
        variants["jaxft, not bundled"] = unbundled, [(leaves, x, lengths)]
        joined, few = jaxft_encoder(case, params, gelu, joined=True)
        variants["jaxft, joined"] = joined, [(few, x, lengths)]
        variants["jaxft, constants"] = jax.jit(functools.partial(unbundled, leaves)), [(x, lengths)]
    xla: Any = variants["xla"][0]
    wide = *jax.tree.map(lambda a: a.astype(jnp.float32), (params, x)), lengths

    def lowered() -> Iterator[tuple[jax.stages.Lowered, dict[str, Any] | None]]:
        jitted: Any
        for jitted, inputs in variants.values():
            yield jitted.lower(*inputs[0]), None
        with jax.default_matmul_precision("highest"):
            program = xla.lower(*wide)
        yield program, COMPILER_OPTIONS  # not timed, so XLA need not search its matmuls

    *_, exact_encoder = timing.compile_all(lowered())
    plain, exact = xla(params, x, lengths), exact_encoder(*wide)
    valid = jnp.ones(x.shape[:2], bool) if lengths is None else keep(case, lengths)
    for name in [name for name in variants if name.startswith("jaxft")]:
        encode, inputs = variants[name]
        results = (jnp.where(valid[:, :, None], y, jnp.zeros_like(y)) for y in (encode(*inputs[0]), plain, exact))
        timing.check(f"{case.label(gelu)}, {name}", *results)
    if args.kernels:
        for name, variant in variants.items():
            print_kernels(f"{case.label(gelu)}, {name}", variant, layers)
    counted = [case.length] * case.batch if lengths is None else lengths.tolist()
    return timing.measure(
        variants, work=shapes.encoder_flops(case.model, counted), unit="TFLOP/s", args=args, latency=latency,
        op=case.op(gelu), direction="forward", shape=(case.batch, case.length), dtype=case.dtype,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__)
    parser.add_argument("--kernels", action="store_true", help="list the kernels of each program as well")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="cases with TEXT in their name, as '32x512 bfloat16'"
    )
    args = parser.parse_args(argv)
    results: list[timing.Row] = []
    for case in shapes.ENCODER_QUICK if args.quick else shapes.ENCODER:
        for gelu in shapes.GELUS:
            if args.only in case.label(gelu):
                results += run(case, gelu, args)
    timing.print_tables(results)


if __name__ == "__main__":
    main()
