"""Forward pass of flash attention: tiles of queries against blocks of keys with an online softmax.

The kernel replaces five steps of FasterTransformer: split heads, two batched matmuls, masked softmax and merge heads.
It reads queries, keys and values in place, also from a packed `[B, T, 3, N, H]`, and writes the output as
`[B, T, N, H]`. It takes `4 * B * N * T * S * H` floating-point operations and moves q, k, v and the output once. Every
tile of queries reads k and v of its head again, from the L2 cache.

Source: Dao et al., "FlashAttention" (2022), section 3.1, and Dao, "FlashAttention-2" (2023), section 3.1.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from jaxft import reference
from jaxft.kernels.triton import attention_problem as parts
from jaxft.kernels.triton import attention_spans, common
from jaxft.kernels.triton.attention_problem import Options, Problem, Refs, Rules
from jaxft.tuning.table import AttentionConfig


def _fwd_kernel(
    *refs, p: Problem, config: AttentionConfig, tiles: int, single: bool, programs: int, float8_scale: float | None
):  # fmt: skip
    """Computes the output of tiles of queries and, given more output refs, the log-sum-exp.

    `tiles` is the number of query tiles per sequence and head. With `single`, one block holds all keys, and `programs`
    programs share the tiles of all sequences and heads (0: one program for each tile).
    """
    block_q, block_k = config.block_q, config.block_k
    q_ref, k_ref, v_ref, *rest = refs[: 3 + len(Refs._fields)]
    out_ref, top_ref, total_ref = (*refs[3 + len(Refs._fields) :], None, None)[:3]
    refs = Refs(*rest)
    # Base-2 logits are scaled after their maximum is taken, so the scale must be positive. `compute` applies the sign
    # of the scale to q.
    scale = abs(p.options.scale) or 1.0
    to_logits = 1.0 if p.natural else scale * parts.LOG2_E

    def compute(tile, head, batch):
        kv_head = head // p.group
        span = parts.load_span(refs.spans, batch, tile, p.query_length, p.key_length, block_k, full=not p.pair_mask)
        batch, start, index, offset, length = parts.load_place(p, refs, batch, tile, block_q, p.query_length)
        rows = common.positions(start, block_q)
        in_rows = None if p.query_length % block_q == 0 and not p.varlen else rows < length
        takes_part = in_rows if p.rules.query_lengths is None else rows < span.end
        q = parts.load_tile(p, q_ref, index, offset + start, block_q, head, in_rows)
        if p.options.scale <= 0.0:
            q = -q if p.options.scale < 0.0 else jnp.zeros_like(q)

        def visit(j, carry, *, edge, block_k=block_k, far=False):
            """Adds key block `j` to `carry`: sum of weighted values, sum of weights, greatest logit; None at first."""
            row = jnp.int32(j) * block_k
            columns, in_columns, used = common.positions(row, block_k), None, None
            if edge:
                in_columns = parts.in_span(p, span, columns)
                in_columns = parts.in_key_mask(p, refs, batch, columns, in_columns)
            pairs = parts.Pairs(
                batch, head, rows[:, None], columns[None, :], None if in_rows is None else in_rows[:, None],
                None if in_columns is None else in_columns[None, :], start, row, far,
            )  # fmt: skip
            # Load values before keys. With a single block, a program waits for the keys as soon as it transposes them,
            # and a load of values after that would start late.
            # H100, 16 tokens, 12 heads: 1.7 us (keys first 1.9), 2026-11-24
            v = parts.load_tile(p, v_ref, index, offset + row, block_k, p.v_head + kv_head, in_columns)
            k = parts.load_tile(p, k_ref, index, offset + row, block_k, p.k_head + kv_head, in_columns)
            logits = parts.dot(p, q, k, trans_b=True)  # [block_q, block_k], not yet scaled
            if p.natural:
                logits = parts.logits(p, refs, pairs, logits, scale)
            if edge:
                keep = parts.allowed(p, refs, pairs)
                logits = jnp.where(keep, logits, -jnp.inf)
                if p.by_pairs:
                    used = parts.any_of(keep if takes_part is None else keep & takes_part[:, None], axis=0)
            new_top = jnp.max(logits, axis=1) * to_logits
            if carry is not None:
                new_top = jnp.maximum(carry[2], new_top)
            shift = jnp.where(new_top == -jnp.inf, 0.0, new_top) if edge or refs.bias is not None else new_top
            weights = parts.exponentials(p, common.fma(logits, to_logits, -shift[:, None]))
            if used is not None:  # a NaN in a value that no query attends to must not reach the output
                v = parts.clear(v, used)
            kept = parts.drop(p, refs, pairs, weights).astype(v.dtype)
            # The matmul comes before the rescaling, which is faster in TF32.
            # H200, tf32, 32x512, 12 heads: 272 us (matmul after the rescaling 417), 2026-11-22
            weighted, total = parts.dot(p, kept, v), jnp.sum(weights, axis=1)
            if carry is None:
                return weighted, total, new_top
            rescale = parts.exponentials(p, carry[2] - shift)
            weighted = parts.add(p, carry[0] * rescale[:, None], weighted)
            return weighted, common.fma(carry[1], rescale, total), new_top

        if single:
            full = refs.spans is None and p.key_length == block_k and not p.pair_mask
            step = functools.partial(visit, 0, None, edge=not full)
            acc, total, top = parts.fewest_keys(step, span.last, block_k)
        else:
            carry = (
                jnp.zeros((block_q, p.width), jnp.float32),
                jnp.zeros((block_q,), jnp.float32),
                jnp.full((block_q,), -jnp.inf, jnp.float32),
            )
            leading = p.options.window[0] is not None or refs.query_ids is not None
            near = parts.near_blocks(p, start, block_q, block_k)
            acc, total, top = parts.visit_all(span, block_k, leading, visit, carry, near)
        if p.rules.query_lengths is not None:
            total = jnp.where(rows < span.end, total, 0.0)
        empty = total == 0.0
        safe_total = jnp.where(empty, 1.0, total)  # a query that attends to no key gives 0
        out = acc * (p.kept_scale * parts.reciprocal(p, safe_total))[:, None]
        if p.rules.query_lengths is not None:
            out = jnp.where(empty[:, None], 0.0, out)  # padding queries may hold NaN, so their output may be NaN
        out = out if float8_scale is None else common.to_float8(out, float8_scale)
        parts.store_tile(p, out_ref, index, offset + start, head, out, in_rows)
        if top_ref is not None:
            place = index, head, common.span(offset + start, block_q)
            # On a GPU, the maximum of a row of NaN is -inf, as if the row had no logits. A NaN in `total` tells the two
            # apart.
            top = jnp.where(total == total, top, jnp.nan)
            log_total = jnp.log(safe_total) * parts.LOG2_E
            if total_ref is None:
                top = top + log_total
            else:
                common.store(total_ref.at[place], log_total, mask=in_rows)
            common.store(top_ref.at[place], jnp.where(empty, -jnp.inf, top), mask=in_rows)

    parts.for_each_tile(compute, p, refs.spans, programs, tiles, p.heads)


def forward(
    query: Array,
    key: Array | None,
    value: Array | None,
    rules: Rules,
    options: Options,
    *,
    return_residual: bool,
    float8_scale: float | None = None,
    config: AttentionConfig,
    interpret: bool,
) -> list[Array]:
    """Launches the forward kernel for query `[B, T, N, H]` and key and value `[B, S, K, H]`; returns a list of results.

    Key and value are None for a packed query `[B, T, 3, N, H]`, or `[M, 3, N, H]` with `rules.cu_seqlens`. The list
    starts with the output, `[B, T, N, H]` or `[M, N, H]`. With `return_residual`, the log-sum-exp of each row follows,
    float32 `[B, N, T]` or `[N, M]`. With `joined_residual` it is one array, to base 2. Otherwise it is two arrays,
    because one number would have too few digits next to large logits: the greatest logit, natural or base 2 as
    `natural_logits` says, and the base-2 logarithm of the sum of the exponentials relative to it. The first array is
    -inf for a query that attends to no key. With `float8_scale`, the output is divided by that number and is
    float8_e4m3fn, clipped to 448.
    """
    p = parts.problem(query, key, value, rules, options)
    batch, rows = p.query.shape[:2]
    dtype = query.dtype if float8_scale is None else reference.FLOAT8
    outputs = [jax.ShapeDtypeStruct((batch, rows, p.heads, p.head_size), dtype)]
    if return_residual:
        numbers = 1 if parts.joined_residual(query.dtype, rules.bias) else 2
        outputs += [jax.ShapeDtypeStruct((batch, p.heads, rows), jnp.float32)] * numbers
    tiles = pl.cdiv(p.query_length, config.block_q)
    single = p.key_length <= config.block_k and p.rules.query_lengths is None
    spans = attention_spans.spans_of_queries(p, config.block_q, config.block_k)
    # Programs share tiles only without masks. With masks, a program does not load its next tile while it computes.
    # H200: sharing with masks takes 1.4x as long as one program for each tile, 2026-11-21
    programs = min(config.programs, tiles * p.heads * p.batch) if single and spans is None else 0
    found = common.launch(
        functools.partial(
            _fwd_kernel, p=p, config=config, tiles=tiles, single=single, programs=programs, float8_scale=float8_scale
        ),
        (programs,) if programs else p.grid(p.query_length, p.heads, config.block_q),
        p.operands(spans, max(config.block_q, config.block_k)),
        outputs,
        name="attention_fwd",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    return found if rules.cu_seqlens is None else [x[0] for x in found]
