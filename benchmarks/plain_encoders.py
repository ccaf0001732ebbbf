"""Modern encoders in plain JAX, as an experienced user writes them, and their times beside jaxft's.

The peers get the weights of jaxft's model and run as one jitted function: matmuls in bfloat16 with q, k and v from one
matmul (which is faster than three in most rows of BERT-base), LayerNorm in float32, rotary positions in the dtype
of the computation, and the attention of `jax.nn` by XLA or by cuDNN. The XLA implementations of jaxft's own ops are no
peers: they accumulate and add biases in float32, which XLA's matmuls do not need.

cuDNN has no window that reaches to the right without a causal mask. So a layer with local attention gets a mask, and in
the variants with "blocks" each block of tokens attends to itself and half a block on either side. DeBERTa's attention,
which no peer has, is jaxft's own XLA version in both.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import bench_encoder
import bench_train
import jaxft
import shapes
import timing
from bench_peers import Job
from jaxft.comparison import PLAIN_ACTIVATIONS, Attention, plain_layer_norm
from jaxft.models.bert import BertModel
from jaxft.models.config import BertConfig
from jaxft.models.positions import bucket_table, disentangled_attention
from jaxft.training import COMPILER_OPTIONS

DTYPE = "bfloat16"
Forward = Callable[[Any, jax.Array, jax.Array | None], jax.Array]  # (parameters, ids, lengths) -> hidden states


def config_of(model: str) -> BertConfig:
    """Returns the config of a model of `shapes.MODERN_CONFIGS`."""
    return BertConfig.from_dict(shapes.MODERN_CONFIGS[model])


def random_model(model: str) -> BertModel:
    """Makes a float32 model without a pooler, with random parameters that bfloat16 represents exactly."""
    made = BertModel(config_of(model), add_pooling_layer=False, rngs=nnx.Rngs(0))
    nnx.update(made, cast(cast(nnx.state(made), DTYPE), "float32"))
    return made


def inputs(case: shapes.Modern) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns random ids `[B, T]`, with the padding id where there is padding, and lengths `[B]` or None."""
    config = config_of(case.model)
    rng = np.random.default_rng(0)
    # Ids from half of the vocabulary on are no special tokens, but for those of ModernBERT, which are the last ones.
    ids = rng.integers(config.vocab_size // 2, config.vocab_size * 15 // 16, (case.batch, case.length), np.int32)
    lengths = bench_encoder.random_lengths(shapes.Encoder(case.model, case.batch, case.length, valid=case.valid))
    if lengths is None:
        return ids, None
    keep = np.arange(case.length) < np.asarray(lengths)[:, None]
    return np.where(keep, ids, np.int32(config.pad_token_id)), np.asarray(lengths)


def flops(case: shapes.Modern) -> int:
    """Returns the FLOP of the matmuls of layers. Only valid tokens, and keys in the window, count."""
    config, lengths = config_of(case.model), inputs(case)[1]
    width, matrices = config.hidden_size, 2 if config.activated_half is None else 3
    found = 0
    for n in [case.length] * case.batch if lengths is None else lengths.tolist():
        for layer in range(config.num_hidden_layers):
            window = config.window(layer)
            keys = n if window is None else min(n, 2 * window + 1)
            found += n * (2 * (4 * width**2 + matrices * width * config.intermediate_size) + 4 * keys * width)
    return found * (3 if case.training else 1)


# --- Plain JAX ---------------------------------------------------------------------------------------------------


def norm(x: jax.Array, p: Mapping[str, Any], name: str, epsilon: float) -> jax.Array:
    """Computes the LayerNorm `name` of the parameters `p`, which may have no beta."""
    gamma = p[f"{name}_gamma"]
    beta = p.get(f"{name}_beta")
    return plain_layer_norm(x, gamma, jnp.zeros_like(gamma) if beta is None else beta, epsilon)


def linear(x: jax.Array, p: Mapping[str, Any], name: str) -> jax.Array:
    """Computes the dense layer `name` of the parameters `p`, which may have no bias."""
    y, bias = x @ p[f"{name}_kernel"], p.get(f"{name}_bias")
    return y if bias is None else y + bias


def rotate(x: jax.Array, theta: float, factor: float) -> jax.Array:
    """Rotates `[B, T, N, H]` by its positions, in its dtype."""
    half = x.shape[-1] // 2
    frequencies = (theta * factor) ** (-np.arange(half) / half) * factor ** (-1 / half)
    angles = np.arange(x.shape[1])[:, None, None] * frequencies
    cos, sin = (jnp.asarray(f(angles), x.dtype) for f in (np.cos, np.sin))
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array | None, bias: jax.Array | None, window: int | None,
    attention: Attention,
) -> jax.Array:  # fmt: skip
    """Computes attention `[B, T, N, H]` with the function of `jax.nn`."""
    options: dict[str, Any] = {}
    if window is not None and window + 1 < q.shape[1]:
        position = np.arange(q.shape[1])
        near = np.abs(position[:, None] - position) <= window
        options = {"local_window_size": window} if attention == "xla" else {"mask": jnp.asarray(near[None, None])}
    return jax.nn.dot_product_attention(
        q, k, v, bias, key_value_seq_lengths=lengths, implementation=attention, **options
    )  # fmt: skip


def attend_in_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array | None, window: int, attention: Attention
) -> jax.Array:
    """Computes local attention `[B, T, N, H]`: blocks of `2 * window` queries with twice as many keys."""
    batch, length, *rest = q.shape
    size = 2 * window
    blocks = length // size

    def around(x: jax.Array) -> jax.Array:
        parts = jnp.pad(x, ((0, 0), (window, window), (0, 0), (0, 0))).reshape(batch, blocks + 1, size, *rest)
        return jnp.concatenate([parts[:, :-1], parts[:, 1:]], 2).reshape(batch * blocks, 2 * size, *rest)

    query, key = np.arange(size)[:, None], np.arange(2 * size) - window
    absolute = np.arange(blocks)[:, None] * size + key
    mask = jnp.asarray((np.abs(query - key) <= window) & ((absolute >= 0) & (absolute < length))[:, None])
    mask = jnp.broadcast_to(mask, (batch, *mask.shape))
    if lengths is not None:
        mask &= (jnp.asarray(absolute)[None] < lengths[:, None, None])[:, :, None]
    out = jax.nn.dot_product_attention(
        q.reshape(batch * blocks, size, *rest), around(k), around(v),
        mask=mask.reshape(batch * blocks, 1, size, 2 * size), implementation=attention,
    )  # fmt: skip
    return out.reshape(q.shape)


def all_pairs(table: jax.Array, length: int) -> jax.Array:
    """Returns the bias of all pairs, `[N, L, L]`, from a table by distance, so that its gradient needs no scatter."""
    heads, reach = table.shape[0], table.shape[1] // 2
    by_distance = table[:, jnp.clip(jnp.arange(1 - length, length), -reach, reach) + reach]
    row = jnp.pad(by_distance, ((0, 0), (0, 1)))  # one element longer than a row below, which moves each row by one
    rows = jnp.broadcast_to(row[:, None], (heads, length, 2 * length)).reshape(heads, -1)
    return rows[:, : length * (2 * length - 1)].reshape(heads, length, -1)[:, :, length - 1 :]


def encode(
    params: Any, ids: jax.Array, lengths: jax.Array | None, *, config: BertConfig, attention: Attention,
    blocks: bool = False, remat: bool = False,
) -> jax.Array:  # fmt: skip
    """Computes the last hidden states `[B, T, D]` in plain JAX.

    `blocks`: layers with local attention run in blocks. `remat`: the backward pass computes layers once more.
    """
    (batch, length), heads, epsilon = ids.shape, config.num_attention_heads, config.layer_norm_eps
    tables = params["embeddings"]
    x = tables["word"][ids]
    if "position" in tables:
        x += tables["position"][config.position_offset : config.position_offset + length]
    if "token_type" in tables:
        x += tables["token_type"][0]
    x = norm(x, tables, "norm", epsilon)
    if tables.get("projection_kernel") is not None:
        x = linear(x, tables, "projection")
    bias = relative = None
    if config.relative_bias:
        bias = all_pairs(bucket_table(params["relative_bias"]).astype(x.dtype), length)[None]
    if config.positions == "disentangled":
        relative = norm(params["relative_embeddings"], params, "relative_norm", epsilon)
    layers = [params["layers"][i % len(params["layers"])] for i in range(config.num_hidden_layers)]

    def layer(x: jax.Array, residual: jax.Array, i: int) -> tuple[jax.Array, jax.Array]:
        p = layers[i]
        qkv = linear(x, p, "qkv").reshape(batch, length, 3, heads, -1)
        q, k, v = (qkv[:, :, j] for j in range(3))
        window = config.window(i)
        if config.positions == "rotary":
            theta = config.rope_theta if window is None else config.local_rope_theta
            q, k = (rotate(y, theta, config.rope_factor) for y in (q, k))
        if relative is not None:
            two = {name: value[..., : 2 * config.hidden_size] for name, value in p.items() if name.startswith("qkv")}
            keys = linear(relative, two, "qkv").reshape(-1, 2, *qkv.shape[-2:])
            mask = None if lengths is None else (jnp.arange(length) < lengths[:, None])[:, None, None]
            context = disentangled_attention(qkv, keys, mask, config.position_buckets, config.max_relative_positions)
        elif blocks and window is not None:
            context = attend_in_blocks(q, k, v, lengths, window, attention)
        else:
            context = attend(q, k, v, lengths, bias, window, attention)
        residual = residual + linear(context.reshape(x.shape), p, "out")
        following = (p, "ffn_norm") if config.norm_first else (p, "attention_norm")
        x = norm(residual, *following, epsilon)
        y = linear(x, p, "ffn_in")
        activation = PLAIN_ACTIVATIONS[config.activation]
        if config.activated_half is None:
            y = activation(y)
        else:
            first, second = jnp.split(y, 2, -1)
            y = activation(first) * second if config.activated_half == "first" else first * activation(second)
        residual = (residual if config.norm_first else x) + linear(y, p, "ffn_out")
        following = p, "ffn_norm"
        if config.norm_first:
            is_last = i + 1 == len(layers)
            following = (params, "final_norm") if is_last else (layers[i + 1], "attention_norm")
        x = norm(residual, *following, epsilon)
        return x, residual if config.norm_first else x

    residual = x
    for i in range(len(layers)):
        run = functools.partial(layer, i=i)
        x, residual = (jax.checkpoint(run) if remat else run)(x, residual)
    return x


# --- The comparison ----------------------------------------------------------------------------------------------


def peers(case: shapes.Modern, config: BertConfig, *, quick: bool) -> dict[str, Forward]:
    """Returns the peers of a case by their names in the results.

    Where blocks are possible, each kind of attention runs without and with them. If `quick`, it runs with them only,
    and cuDNN's attention of less than 1,024 tokens without them only.
    """
    on_gpu = jax.default_backend() == "gpu"
    kinds: list[Attention] = ["xla", "cudnn"] if on_gpu and config.positions != "disentangled" else ["xla"]
    windows = {config.window(i) for i in range(config.num_hidden_layers)} - {None}
    fits = [window for window in windows if window and case.length > 4 * window and case.length % (2 * window) == 0]
    names: dict[str, str] = {"xla": "xla", "cudnn": "xla+cudnn"}
    found: dict[str, Forward] = {}
    for kind in kinds:
        ways = (False, True) if len(fits) == 1 else (False,)
        if quick:
            ways = ways[:1] if kind == "cudnn" and case.length < 1024 else ways[-1:]
        for blocks in ways:
            forward = functools.partial(encode, config=config, attention=kind, blocks=blocks)
            found[names[kind] + ", blocks" * blocks] = forward
    return found


def jaxft_forward(case: shapes.Modern, rebuild: Callable[[Any], Any], *, packed: bool) -> Forward:
    """Returns jaxft's forward pass. `packed`: it removes padding first and restores it last."""

    def padded_call(arrays: Any, ids: jax.Array, lengths: jax.Array | None) -> jax.Array:
        mask = None if lengths is None else jnp.arange(case.length) < lengths[:, None]
        return rebuild(arrays)(ids, mask).last_hidden_state

    def packed_call(arrays: Any, ids: jax.Array, lengths: jax.Array | None) -> jax.Array:
        assert lengths is not None
        keep = jnp.arange(case.length) < lengths[:, None]
        capacity = -(-(case.valid or ids.size) // 128) * 128
        rows, indices, cu_seqlens = jaxft.remove_padding(ids, keep, capacity=capacity)
        out = rebuild(arrays)(rows, cu_seqlens=cu_seqlens, max_seqlen=case.length).last_hidden_state
        return jaxft.restore_padding(out, indices, batch=case.batch, length=case.length)

    return packed_call if packed else padded_call


def step(forward: Forward, weights: jax.Array) -> Callable[..., Any]:
    """Returns a function of the arguments of `forward` -> the gradients of the parameters."""

    def value(params: Any, ids: jax.Array, lengths: jax.Array | None) -> jax.Array:
        return jnp.sum(forward(params, ids, lengths).astype(weights.dtype) * weights)

    return lambda *args: jax.value_and_grad(value)(*args)[1]


def cast(tree: Any, dtype: str) -> Any:
    """Casts the arrays of a tree."""
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def variants_of(
    case: shapes.Modern, model: BertModel, *, quick: bool
) -> dict[str, tuple[Callable[..., Any], Any, str]]:
    """Returns name -> function (parameters, ids, lengths), parameters, precision of float32 matmuls.

    "exact" is plain JAX in float32.
    """
    wide: Any = nnx.to_pure_dict(nnx.state(model))
    params = cast(wide, DTYPE)
    graph, state = nnx.split(in_bfloat16(model))
    found: dict[str, tuple[Callable[..., Any], Any, str]] = {}
    if case.training:
        ours = jaxft_forward(case, lambda state: nnx.merge(graph, state), packed=False)
        found["jaxft"] = ours, state, "default"
    else:
        arrays, rebuild = jaxft.bundle(nnx.merge(graph, state))
        for name in ("jaxft",) if case.valid is None else ("jaxft", "jaxft, padded"):
            packed = case.valid is not None and name == "jaxft"
            found[name] = jaxft_forward(case, rebuild, packed=packed), arrays, "default"
    plain = peers(case, model.config, quick=quick)
    found |= {name: (forward, params, "default") for name, forward in plain.items()}
    exact = functools.partial(encode, config=model.config, attention="xla", remat=case.training)
    found["exact"] = exact, wide, "highest"
    if case.training:
        config = model.config
        shape = (case.batch, case.length, config.hidden_size)
        weights = jnp.asarray(np.random.default_rng(1).standard_normal(shape, np.float32))
        found = {name: (step(forward, weights), *rest) for name, (forward, *rest) in found.items()}
    return found


def in_bfloat16(model: BertModel) -> BertModel:
    """Returns a copy of a model in bfloat16."""
    copy = BertModel(model.config, add_pooling_layer=False, dtype=DTYPE, param_dtype=DTYPE, rngs=None)
    nnx.update(copy, cast(nnx.state(model), DTYPE))
    return copy


def measure(job: Job, cases: Sequence[shapes.Modern], args: Any) -> Iterator[shapes.Modern]:
    """Checks and times jaxft and plain JAX, in turns, in cases of one model. Yields the cases that are done.

    A variant that fails has a row that says why. All programs are compiled first, in parallel. `job` gets the hidden
    states of the first sequence.
    """
    model = random_model(job.name)
    planned: list[tuple[shapes.Modern, dict[str, Any]]] = []
    with ThreadPoolExecutor() as threads:
        for case in cases:
            ids, lengths = (None if x is None else jnp.asarray(x) for x in inputs(case))
            programs: dict[str, Any] = {}
            for name, (f, params, precision) in variants_of(case, model, quick=args.quick).items():
                try:
                    with jax.default_matmul_precision(precision):
                        lowered = jax.jit(f).lower(params, ids, lengths)
                except Exception as error:  # a peer that does not support the case
                    programs[name] = error, ()
                    continue
                options = [COMPILER_OPTIONS] if name == "exact" else [{}, COMPILER_OPTIONS] if case.training else [{}]
                programs[name] = [threads.submit(lowered.compile, own) for own in options], (params, ids, lengths)
            planned.append((case, programs))
    while planned:  # the programs of a case are freed after it
        case, programs = planned.pop(0)
        try:
            measure_case(job, case, programs, args)
        except Exception as error:
            failed(case, {"jaxft": reason(error)}, args)
        yield case


def measure_case(job: Job, case: shapes.Modern, programs: Mapping[str, Any], args: Any) -> None:
    """Checks and times the compiled programs of one case, and writes the rows."""
    variants: dict[str, timing.Variant] = {}
    problems: dict[str, str] = {}
    results: dict[str, list[jax.Array]] = {}
    lengths = inputs(case)[1]
    valid = None if lengths is None else jnp.arange(case.length) < jnp.asarray(lengths)[:, None]

    def arrays(out: Any) -> list[jax.Array]:
        leaves = jax.tree.leaves(out)
        return leaves if valid is None or case.training else [jnp.where(valid[..., None], x, 0) for x in leaves]

    for name, (found, sets) in programs.items():
        try:
            if isinstance(found, Exception):
                raise found
            compiled = [future.result() for future in found]
            results[name] = jax.block_until_ready(arrays(compiled[0](*sets)))
            variants[name] = compiled[0], [sets]
            if len(compiled) > 1:
                variants[name] = bench_train.fastest(f"{case.label}, {name}", compiled, sets)
        except Exception as error:
            problems[name] = reason(error)
    exact = results.pop("exact", None)
    plain = next((own for name, own in results.items() if name.startswith("xla")), None)
    variants.pop("exact", None)
    for name, own in results.items():
        if exact is None or plain is None:
            problems["jaxft"] = f"no numbers to compare with: {'; '.join(problems.values())}"
            break
        errors = [float(jnp.max(jnp.abs(x.astype(jnp.float32) - y))) for x, y in zip(own, exact, strict=True)]
        scale = max(float(jnp.max(jnp.abs(y))) for y in exact)
        print(f"{case.label}, {name}: largest error {max(errors):.3g} of values up to {scale:.3g}", flush=True)
        try:
            if name.startswith("jaxft"):
                for each in zip(own, plain, exact, strict=True):
                    timing.check(f"{case.label}, {name}, {list(each[0].shape)}", *each)
            elif not max(errors) < 0.2 * scale:
                raise SystemExit(f"error {max(errors):.3g} of values up to {scale:.3g}")
        except SystemExit as error:
            problems[name] = str(error)
    if not case.training and "jaxft" not in problems:  # transformers compares with them
        job.check(case.label, np.asarray(results["jaxft"][0][:1], np.float32).reshape(1, -1), 0.999)
    results.clear()
    failed(case, {name: said for name, said in problems.items() if name != "exact"}, args)
    left = {name: variant for name, variant in variants.items() if name not in problems}
    key: dict[str, Any] = dict(op=case.op, direction=direction(case), shape=(case.batch, case.length), dtype=DTYPE)
    timing.measure(left, work=flops(case), unit="TFLOP/s", args=args, **key)


def direction(case: shapes.Modern) -> str:
    """Returns the direction in the results."""
    return "value and gradient" if case.training else "forward"


def reason(error: BaseException) -> str:
    """Returns an error in a line of at most 200 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def failed(
    case: shapes.Modern, problems: Mapping[str, str], args: Any, kind: str | None = None
) -> list[dict[str, str]]:
    """Writes and returns rows of what failed."""
    key: dict[str, Any] = dict(op=case.op, direction=direction(case), shape=(case.batch, case.length), dtype=DTYPE)
    rows = [
        timing.as_row(key, name, "queued_us", [math.nan], 0.0, "TFLOP/s", f"failed: {said}") | timing.origin()
        for name, said in problems.items()
    ]
    for name, said in problems.items():
        print(f"{case.label}, {name}: failed: {said}", flush=True)
    if rows:
        timing.write_rows(rows, args.out, kind)
    return rows
