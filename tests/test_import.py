"""`import jaxft` is light, and everything public is found there."""

import json
import subprocess
import sys

import pytest

import jaxft

SLOW = ("jax", "numpy", "ml_dtypes")
HEAVY = ("flax", "tokenizers", "huggingface_hub", "safetensors", "tqdm", "matplotlib", "optax", "torch", "transformers")
OPS = ("layer_norm", "bias_residual_layer_norm", "rms_norm", "embeddings_layer_norm", "bias_activation",
       "gated_activation", "softmax", "log_softmax",
       "qkv_bias_split_heads", "merge_heads", "permute", "rotary", "dot_product_attention", "qkv_attention",
       "varlen_qkv_attention", "dense", "dense_rotary", "dense_residual_layer_norm", "feed_forward_residual_layer_norm",
       "linear_cross_entropy", "remove_padding", "restore_padding", "bundle")  # fmt: skip
MODELS = (
    "BertConfig",
    "BertForMaskedLM",
    "BertForSequenceClassification",
    "BertModel",
    "CrossEncoder",
    "MultiVectorEncoder",
    "MultiVectorModel",
    "SentenceEncoder",
    "SparseEncoder",
    "SpladeModel",
)


def _loaded(code):
    """Returns the heavy packages that a fresh interpreter has loaded after `code`."""
    script = f"{code}\nimport json, sys\nprint(json.dumps([name for name in {SLOW + HEAVY} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", ["jaxft", "jaxft.cli"])
def test_import_is_light(module):
    """Otherwise Ctrl-C would give a traceback until the command line handles it."""
    assert _loaded(f"import {module}") == []


def test_ops_need_no_model_packages():
    found = _loaded("import jax.numpy as jnp, jaxft; jaxft.layer_norm(jnp.ones((2, 3)))")
    assert sorted(found) == sorted(SLOW)


def test_names_may_load_while_jax_traces():
    """A module that loads inside of a trace makes no arrays that belong to the trace."""
    code = """
import jax, jax.numpy as jnp, jaxft
with jax.checking_leaks():
    jax.jit(lambda x: [getattr(jaxft, name) for name in jaxft.__all__] and jaxft.softmax(x) + 1)(jnp.ones((2, 3)))
x = jnp.ones((2, 8))
jaxft.layer_norm(x), jaxft.softmax(x), jaxft.dispatch.platform(), jaxft.tuning.autotune
jaxft.BertModel(jaxft.BertConfig(num_hidden_layers=1), rngs=None)
"""
    assert "flax" in _loaded(code)


@pytest.mark.parametrize("name", ["dispatch", "dropout", "kernels", "ops", "reference", "tuning"])
def test_modules_of_the_ops_are_attributes(name):
    _loaded(f"import jaxft; jaxft.{name}")


def test_models_load_when_used():
    assert "flax" in _loaded("import jaxft; jaxft.BertModel")


def test_listing_the_names_loads_nothing():
    assert _loaded("import jaxft; assert {*jaxft.__all__} <= {*dir(jaxft)}; jaxft.__version__") == []


@pytest.mark.parametrize("name", OPS + MODELS)
def test_public_names(name):
    assert callable(getattr(jaxft, name))
    assert name in dir(jaxft)
    assert name in jaxft.__all__
    assert getattr(jaxft, name).__doc__


def test_all_lists_existing_names_once():
    for name in jaxft.__all__:
        assert hasattr(jaxft, name), name
    assert len(set(jaxft.__all__)) == len(jaxft.__all__)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="jaxft.*nonesuch"):
        jaxft.nonesuch  # noqa: B018
    with pytest.raises(ImportError):
        from jaxft import nonesuch  # noqa: F401
