"""Every public op in NumPy float64, written apart from `jaxft.reference`: loops over rows, clarity over speed.

Random choices come in as explicit keep masks. Scores of excluded elements are left out of a sum, never multiplied by
zero, so a NaN or Inf behind a mask cannot get through here by construction.
"""

import math

import numpy as np

_erf = np.vectorize(math.erf, otypes=[np.float64])


def f64(x):
    return None if x is None else np.asarray(x).astype(np.float64)


def _activate(x, activation):
    with np.errstate(over="ignore"):
        match activation:
            case "gelu":
                return 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0)))
            case "gelu_tanh":
                return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
            case "relu":
                return np.maximum(x, 0.0)
            case "tanh":
                return np.tanh(x)
            case "silu":
                return x / (1.0 + np.exp(-x))
            case None:
                return x
    raise AssertionError(f"the oracle has no activation {activation!r}")


def _drop(x, keep, rate):
    return x if keep is None else np.where(keep, x / (1.0 - rate), 0.0)


def layer_norm(x, gamma=None, beta=None, *, epsilon=1e-6):
    x = f64(x)
    out = np.zeros_like(x)
    for row in np.ndindex(x.shape[:-1]):
        centred = x[row] - x[row].mean()
        out[row] = centred / math.sqrt((centred**2).mean() + epsilon)
    if gamma is not None:
        out = out * f64(gamma)
    return out if beta is None else out + f64(beta)


def bias_residual_layer_norm(x, bias, residual, gamma, beta, *, epsilon=1e-6, keep=None, rate=0.0, return_sum=False):
    total = f64(x) if bias is None else f64(x) + f64(bias)
    total = _drop(total, keep, rate) + f64(residual)
    out = layer_norm(total, gamma, beta, epsilon=epsilon)
    return (out, total) if return_sum else out


def rms_norm(x, gamma=None, *, residual=None, epsilon=1e-6, return_sum=False):
    total = f64(x) if residual is None else f64(x) + f64(residual)
    out = np.zeros_like(total)
    for row in np.ndindex(total.shape[:-1]):
        out[row] = total[row] / math.sqrt((total[row] ** 2).mean() + epsilon)
    out = out if gamma is None else out * f64(gamma)
    return (out, total) if return_sum else out


def embeddings_layer_norm(input_ids, word, position, token_type=None, gamma=None, beta=None, *, position_ids=None,
                          token_type_ids=None, epsilon=1e-6, keep=None, rate=0.0):  # fmt: skip
    total = np.zeros((*input_ids.shape, word.shape[1]))
    for token in np.ndindex(input_ids.shape):
        looked_up = [(word, input_ids[token]), (position, token[-1] if position_ids is None else position_ids[token])]
        if token_type is not None:
            looked_up.append((token_type, 0 if token_type_ids is None else token_type_ids[token]))
        for table, row in looked_up:
            total[token] += f64(table)[int(row)] if 0 <= int(row) < len(table) else np.nan
    return _drop(layer_norm(total, gamma, beta, epsilon=epsilon), keep, rate)


def bias_activation(x, bias, *, activation="gelu"):
    return _activate(f64(x) if bias is None else f64(x) + f64(bias), activation)


def gated_activation(x, bias=None, *, activation="gelu", gate="first"):
    x = f64(x) if bias is None else f64(x) + f64(bias)
    width = x.shape[-1] // 2
    halves = {"first": x[..., :width], "second": x[..., width:]}
    gated = _activate(halves.pop(gate), activation)
    return gated * next(iter(halves.values()))


def _softmax_row(logits):
    """Returns probabilities and log-sum-exp of one row of finite or -inf logits. A row of -inf gives zeros and -inf."""
    top = logits.max(initial=-np.inf)
    if top == -np.inf:
        return np.zeros_like(logits), -np.inf
    weights = np.exp(logits - top)
    return weights / weights.sum(), top + math.log(weights.sum())


def _row_logits(x, scale, bias, mask):
    """Returns `x * scale + bias`, and a mask of the same full shape."""
    x = f64(x)
    logits = x * (1.0 if scale is None else scale)
    if bias is not None:
        logits = logits + f64(bias)
    return logits, np.broadcast_to(True if mask is None else mask, logits.shape)


def softmax(x, *, scale=None, bias=None, mask=None):
    logits, mask = _row_logits(x, scale, bias, mask)
    out = np.zeros_like(logits)
    for row in np.ndindex(logits.shape[:-1]):
        out[row][mask[row]] = _softmax_row(logits[row][mask[row]])[0]
    return out


def log_softmax(x, *, scale=None, bias=None, mask=None):
    logits, mask = _row_logits(x, scale, bias, mask)
    out = np.full_like(logits, -np.inf)
    for row in np.ndindex(logits.shape[:-1]):
        picked = logits[row][mask[row]]
        lse = _softmax_row(picked)[1]
        if lse > -np.inf:
            out[row][mask[row]] = picked - lse
    return out


def qkv_bias_split_heads(qkv, bias, num_heads):
    qkv = f64(qkv) if bias is None else f64(qkv) + f64(bias)
    batch, length, width = qkv.shape
    size = width // (3 * num_heads)
    parts = tuple(np.zeros((batch, num_heads, length, size)) for _ in range(3))
    for which, part in enumerate(parts):
        for head in range(num_heads):
            start = (which * num_heads + head) * size
            part[:, head] = qkv[:, :, start : start + size]
    return parts


def merge_heads(x):
    batch, heads, length, size = np.shape(x)
    out = np.zeros((batch, length, heads * size))
    for head in range(heads):
        out[:, :, head * size : (head + 1) * size] = f64(x)[:, head]
    return out


def permute(x, axes):
    x = f64(x)
    out = np.zeros([x.shape[axis] for axis in axes])
    for index in np.ndindex(out.shape):
        source = [0] * x.ndim
        for position, axis in enumerate(axes):
            source[axis] = index[position]
        out[index] = x[tuple(source)]
    return out


def _turned(x, angles):
    """Turns each pair of `x` [N, H], as a complex number, by its angle [H // 2]."""
    first, second = np.split(x, 2, axis=-1)
    turned = (first + 1j * second) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def rotary(qkv, positions, theta=10000.0, *, frequency_scale=1.0):
    packed = not isinstance(qkv, tuple)
    outs = []
    for x in (qkv,) if packed else qkv:
        out = f64(x).copy()
        tokens = out.shape[: -3 if packed else -2]
        where = np.broadcast_to(positions, tokens)
        size = out.shape[-1]
        frequencies = np.array([frequency_scale * theta ** (-2.0 * i / size) for i in range(size // 2)])
        for token in np.ndindex(tokens):
            for part in [(0,), (1,)] if packed else [()]:
                out[(*token, *part)] = _turned(out[(*token, *part)], int(where[token]) * frequencies)
        outs.append(out)
    return outs[0] if packed else tuple(outs)


def _attends(b, i, j, *, is_causal, query_seq_lengths, key_value_seq_lengths, query_segment_ids,
             key_value_segment_ids, local_window_size):  # fmt: skip
    if is_causal and j > i:
        return False
    if query_seq_lengths is not None and i >= query_seq_lengths[b]:
        return False
    if key_value_seq_lengths is not None and j >= key_value_seq_lengths[b]:
        return False
    if query_segment_ids is not None and query_segment_ids[b][i] != key_value_segment_ids[b][j]:
        return False
    if local_window_size is not None:
        left, right = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
        return i - left <= j <= i + right
    return True


def dot_product_attention(
    query, key, value, bias=None, mask=None, *, scale=None, is_causal=False, query_seq_lengths=None,
    key_value_seq_lengths=None, query_segment_ids=None, key_value_segment_ids=None, local_window_size=None,
    relative_bias=None, keep=None, rate=0.0, return_residual=False,
):  # fmt: skip
    """Attention of `query` [B,T,N,H], `key` and `value` [B,S,K,H], with a table [N|1,2R+1] of biases.

    `keep` is [B,N,T,S], the log-sum-exp [B,T,N].
    """
    query, key, value = f64(query), f64(key), f64(value)
    batch, rows, heads, size = query.shape
    keys, groups = key.shape[1], heads // key.shape[2]
    full = (batch, heads, rows, keys)
    scale = 1.0 / math.sqrt(size) if scale is None else scale
    bias = np.broadcast_to(0.0 if bias is None else f64(bias), full)
    mask = np.broadcast_to(True if mask is None else mask, full)
    out = np.zeros(query.shape)
    residual = np.full((batch, rows, heads), -np.inf)
    for b, n, i in np.ndindex(batch, heads, rows):
        picked = [
            j for j in range(keys)
            if mask[b, n, i, j] and _attends(
                b, i, j, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
                key_value_seq_lengths=key_value_seq_lengths, query_segment_ids=query_segment_ids,
                key_value_segment_ids=key_value_segment_ids, local_window_size=local_window_size,
            )
        ]  # fmt: skip
        if not picked:
            continue
        logits = key[b, picked, n // groups] @ query[b, i, n] * scale + bias[b, n, i, picked]
        if relative_bias is not None:
            table = f64(relative_bias)[n % len(relative_bias)]
            reach = len(table) // 2
            logits = logits + [table[max(-reach, min(j - i, reach)) + reach] for j in picked]
        weights, residual[b, i, n] = _softmax_row(logits)
        if keep is not None:
            weights = _drop(weights, keep[b, n, i, picked], rate)
        out[b, i, n] = weights @ value[b, picked, n // groups]
    return (out, residual) if return_residual else out


def qkv_attention(qkv, bias=None, mask=None, **options):
    """Attention of `qkv` [B,T,3,N,H]."""
    qkv = f64(qkv)
    return dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], bias, mask, **options)


def varlen_qkv_attention(qkv, cu_seqlens, *, keep=None, return_residual=False, **options):
    """`qkv` [M,3,N,H]: one plain attention per sequence; rows outside all sequences are 0 with log-sum-exp -inf.

    `keep` [sequences, N, max_seqlen, max_seqlen] holds positions relative to each sequence.
    """
    qkv = f64(qkv)
    out = np.zeros(qkv[:, 0].shape)
    residual = np.full(out.shape[:-1], -np.inf)
    for n, (start, stop) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
        length = int(stop) - int(start)
        part = None if keep is None else keep[n : n + 1, :, :length, :length]
        got = qkv_attention(qkv[None, start:stop], keep=part, return_residual=True, **options)
        out[start:stop], residual[start:stop] = got[0][0], got[1][0]
    return (out, residual) if return_residual else out


def dense(x, kernel, bias=None, *, activation=None, gate=None, residual=None):
    x, kernel = f64(x), f64(kernel)
    out = np.einsum("...k,kn->...n", x, kernel)
    if bias is not None:
        out = out + f64(bias)
    out = _activate(out, activation) if gate is None else gated_activation(out, activation=activation, gate=gate)
    return out if residual is None else out + f64(residual)


def dense_rotary(x, kernel, bias, positions, theta=10000.0, *, num_heads, frequency_scale=1.0):
    y = dense(x, kernel, bias)
    return rotary(y.reshape(*y.shape[:-1], 3, num_heads, -1), positions, theta, frequency_scale=frequency_scale)


def linear_cross_entropy(x, embedding, labels, bias=None, *, ignore_index=-100):
    x, embedding = f64(x), f64(embedding)
    total, labelled = 0.0, 0
    for row in np.ndindex(np.shape(labels)):
        label = int(labels[row])
        if label == ignore_index:
            continue
        logits = embedding @ x[row] + (0.0 if bias is None else f64(bias))
        total += _softmax_row(logits)[1] - logits[label] if 0 <= label < len(embedding) else np.nan
        labelled += 1
    return np.float64(total), np.int32(labelled)


def padding_indices(mask):
    """Returns the flat positions of the tokens that `mask` [B,T] keeps, in order."""
    return [b * np.shape(mask)[1] + t for b, t in np.ndindex(np.shape(mask)) if mask[b][t]]
