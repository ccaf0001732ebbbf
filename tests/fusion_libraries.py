"""`jaxft.fuse` on the models of other libraries: `make test-fuse` runs this file in an environment of its own.

It needs equinox and transformers 4.53, the last line of versions with models in Flax. The models are tiny and random.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
import transformers

import fusion_cases
import jaxft
from fusion_cases import ATT, DRLN, EMB, FF, PAD, B, D, F, N, T, normal
from test_fusion import assert_as_exact, standard_promotion  # noqa: F401

SIZES = {"hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": N, "intermediate_size": F}
TEXT = {"input_ids": fusion_cases.IDS, "attention_mask": PAD.astype(jnp.int32)}
MODELS = {
    "Bert": (SIZES | {"vocab_size": 100}, TEXT, {ATT: 2, DRLN: 2, FF: 2, EMB: 1}),
    "Roberta": (SIZES | {"vocab_size": 100}, TEXT, {ATT: 2, DRLN: 2, FF: 2, EMB: 1}),
    "ViT": (SIZES | {"image_size": 32, "patch_size": 16}, {"pixel_values": normal(0, B, 3, 32, 32)}, {ATT: 2}),
    "GPT2": ({"vocab_size": 100, "n_embd": D, "n_layer": 2, "n_head": N, "n_positions": T}, TEXT, {ATT: 2}),
}


@pytest.mark.parametrize("name", MODELS)
def test_hugging_face_is_recognised_and_exact(name):
    settings, inputs, wanted = MODELS[name]
    config = getattr(transformers, f"{name}Config")(**settings)
    image = {"input_shape": (1, 32, 32, 3)} if name == "ViT" else {}
    make = getattr(transformers, f"Flax{name}Model")
    model = make(config, **image)
    with jax.enable_x64(True):
        wide = make(config, dtype=jnp.float64, _do_init=False, **image)

    def fn(params):
        return model(**inputs, params=params)[0]

    def exact(params):
        return wide(**inputs, params=params)[0]

    fused = jaxft.fuse(fn, force=True)
    report = fused.report(model.params)
    assert {op: report.counts.get(op, 0) for op in wanted} == wanted, report
    assert_as_exact(fn, fused, (model.params,), exact)


EQUINOX = {
    "attention": (lambda key: eqx.nn.MultiheadAttention(N, D, key=key), lambda m, x: m(x, x, x), {ATT: 1}),
    "LayerNorm": (lambda key: eqx.nn.LayerNorm(D), lambda m, x: jax.vmap(m)(x), {"layer_norm": 1}),
    "MLP": (
        lambda key: eqx.nn.MLP(D, D, F, 1, jax.nn.gelu, key=key),
        lambda m, x: jax.vmap(m)(x),
        {"bias_activation": 1},
    ),
}


@pytest.mark.parametrize("name", EQUINOX)
def test_equinox_is_recognised_and_exact(name):
    make, apply, wanted = EQUINOX[name]
    arrays, rest = eqx.partition(make(jax.random.key(0)), eqx.is_array)

    def fn(arrays, x):
        return jax.vmap(lambda x: apply(eqx.combine(arrays, rest), x))(x)

    fused, x = jaxft.fuse(fn, force=True), normal(0, B, T, D)
    assert fused.report(arrays, x).counts == wanted, fused.report(arrays, x)
    assert_as_exact(fn, fused, (arrays, x))
