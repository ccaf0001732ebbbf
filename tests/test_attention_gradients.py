"""All options of attention at once, forward and backward: random cases, with blocks that are smaller than sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
import oracle
from cases import check, normal, seeds, some
from jaxft import reference, tuning
from jaxft.tuning import AttentionConfig


@pytest.fixture
def blocks(monkeypatch):
    """Sets the blocks of the forward kernel, of that for queries and of that for keys, whatever the sizes."""

    def use(*configs):
        for name, (block_q, block_k) in zip(("attention", "attention_dq", "attention_dkv"), configs, strict=True):
            config = AttentionConfig(block_q, block_k, 4, 2)
            monkeypatch.setattr(tuning, name, lambda *_, config=config: config)

    return use


def attention_case(rng):
    """Sizes, float arrays and options of a random call of `dot_product_attention` or `qkv_attention`."""
    k, groups = (int(n) for n in rng.integers(1, 4, 2))
    t, s = (int(n) for n in rng.choice([1, 2, 7, 16, 31, 48, 70], 2))
    h = int(rng.choice([1, 8, 16, 24, 40, 64]))
    # Of a few elements, the greatest error is a matter of chance.
    b = max(int(rng.integers(1, 4)), 32 // (min(t, s) * k))
    dtype = jnp.dtype(str(rng.choice(["float32", "float16", "bfloat16"])))
    packed = rng.random() < 0.4
    if packed:
        s, groups = t, 1
        floats = normal(rng, dtype, qkv=(b, t, 3, k, h))
    else:
        floats = normal(rng, dtype, query=(b, t, k * groups, h), key=(b, s, k, h), value=(b, s, k, h))
    full = (b, k * groups, t, s)

    def broadcast():
        return tuple(size if rng.random() < 0.6 else 1 for size in full)

    floats |= normal(rng, some(rng, jnp.float32) or dtype, bias=some(rng, broadcast()[int(rng.integers(0, 3)) :], 0.4))
    options = {
        "mask": some(rng, rng.random(broadcast()) < rng.choice([0.2, 0.8]), 0.4),
        "scale": some(rng, float(rng.choice([0.0, -0.4, 0.7])), 0.2),
        "is_causal": bool(rng.random() < 0.3),
        "query_seq_lengths": some(rng, rng.integers(0, t + 1, b, np.int32), 0.3),
        "key_value_seq_lengths": some(rng, rng.integers(0, s + 1, b, np.int32), 0.3),
        "local_window_size": some(rng, tuple(int(w) for w in rng.integers(0, 40, 2)), 0.3),
        "return_residual": bool(rng.random() < 0.5),
    }
    if rng.random() < 0.3:
        order = np.sort if rng.random() < 0.7 else lambda x, axis: x
        options["query_segment_ids"] = order(rng.integers(0, 4, (b, t), np.int32), axis=1)
        options["key_value_segment_ids"] = order(rng.integers(0, 4, (b, s), np.int32), axis=1)
    return full, floats, options


def keys_per_query(full, mask, **options):
    """The most keys that any query attends to."""
    names = reference.attention_mask.__kwdefaults__
    allowed = reference.attention_mask(
        *full[2:], mask=mask, **{name: options[name] for name in names if name in options}
    )
    return full[3] if allowed is None else int(jnp.sum(jnp.broadcast_to(allowed, full), axis=3).max())


def dropout(rng, full):
    """Options of dropout for the ops, and what the oracle takes for them."""
    if rng.random() < 0.7:
        return {}, {}
    key, rate = jax.random.key(int(rng.integers(1000))), float(rng.choice([0.1, 0.6]))
    keep = np.asarray(reference.dropout_mask(key, rate, full))
    return {"dropout_rate": rate, "dropout_rng": key}, {"keep": keep, "rate": rate}


def random_blocks(rng):
    return [tuple(int(n) for n in rng.choice([16, 32], 2)) for _ in range(2)] + [
        (int(rng.choice([16, 32])), int(rng.choice([16, 32, 128])))
    ]


@pytest.mark.parametrize("seed", seeds(12))
def test_random(seed, blocks):
    rng = np.random.default_rng(seed)
    full, floats, options = attention_case(rng)
    drop, keep = dropout(rng, full)
    blocks(*random_blocks(rng))
    op = jaxft.qkv_attention if "qkv" in floats else jaxft.dot_product_attention
    exact = oracle.qkv_attention if "qkv" in floats else oracle.dot_product_attention

    def plain(qkv=None, **f):
        f = f if qkv is None else dict(zip(("query", "key", "value"), jnp.moveaxis(qkv, 2, 0), strict=True)) | f
        return reference.dot_product_attention(**f, **options, **drop)

    check(lambda implementation, **f: op(**f, **options, **drop, implementation=implementation), plain,
          lambda **f: exact(**f, **options, **keep), floats, seed=seed,
          gradients=keys_per_query(full, **options) > 1)  # fmt: skip


@pytest.mark.parametrize("seed", seeds(6))
def test_random_packed_sequences(seed, blocks):
    rng = np.random.default_rng(seed)
    b, n, h = int(rng.integers(0, 5)), int(rng.integers(1, 4)), int(rng.choice([1, 8, 24, 64]))
    longest = int(rng.choice([1, 7, 33, 64]))
    b = max(b, 64 // longest) if b else 0
    boundaries = np.append(0, np.cumsum(rng.integers(0, longest + 1, b))).astype(np.int32)
    rows = int(boundaries[-1]) + int(rng.choice([0, 1, 40]))
    dtype = jnp.dtype(str(rng.choice(["float32", "float16", "bfloat16"])))
    options = {
        "scale": some(rng, 0.7, 0.2),
        "is_causal": bool(rng.random() < 0.3),
        "local_window_size": some(rng, tuple(int(w) for w in rng.integers(0, 40, 2)), 0.3),
        "return_residual": bool(rng.random() < 0.5),
    }
    drop, keep = dropout(rng, (b, n, longest, longest))
    blocks(*random_blocks(rng))
    check(
        lambda implementation, qkv: jaxft.varlen_qkv_attention(
            qkv, boundaries, max_seqlen=longest, **options, **drop, implementation=implementation),
        lambda qkv: reference.varlen_qkv_attention(qkv, jnp.asarray(boundaries), max_seqlen=longest, **options, **drop),
        lambda qkv: oracle.varlen_qkv_attention(qkv, boundaries, **options, **keep),
        normal(rng, dtype, qkv=(rows, 3, n, h)), seed=seed,
    )  # fmt: skip
