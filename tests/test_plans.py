"""Plans: what `explain` returns is what runs, and a plan is chosen once, before anything is traced."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxft
import tiny
from cases import lower, slow
from jaxft import dispatch
from jaxft.models.bert import BertModel
from jaxft.ops import plans, samples
from jaxft.ops.plans import Pass, Plan
from lowered import operations

CONFIG = tiny.config(num_hidden_layers=3)
CALLS = samples.calls(1, 128, jnp.bfloat16)
MARKS = {"triton": "__gpu$xla.gpu.triton", "mosaic_gpu": "mosaic_gpu", "cudnn": "__cudnn"}


def backends_of(text):
    """The backends of the custom calls in a StableHLO text, in any number."""
    calls = [name.removeprefix("custom_call @") for name in operations(text) if name.startswith("custom_call")]
    return {backend for backend, mark in MARKS.items() if any(mark in call for call in calls)}


def backends(plan, direction):
    """The backends that a plan names for "forward", "saving" or "backward", with the plans of composed ops."""
    part = plan.with_gradient if direction == "saving" else getattr(plan, direction)
    if part.backend == "ops":
        return set().union(*(backends(inner, direction) for inner in part.config))
    return set(part.backend.replace(" ", "").split("+")) - {"xla"}


def gradient_of(fn):
    """A function that returns the result of `fn` and its gradients in the float arguments."""

    def gradient(*arrays):
        floats = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

        def of_floats(*values):
            every = list(arrays)
            for i, value in zip(floats, values, strict=True):
                every[i] = value
            return fn(*every)

        out, pull_back = jax.vjp(of_floats, *(arrays[i] for i in floats))
        return out, pull_back(jax.tree.map(jnp.ones_like, out))

    return gradient


NAMES = [name for name in CALLS if name != "bundle"]


@pytest.mark.parametrize(
    ("name", "batch"),
    [pytest.param(name, batch, marks=[pytest.mark.slow] * (batch == 1 and "(" in name))
     for name in NAMES for batch in (1, 32)],
)  # fmt: skip
def test_explain_names_the_backends_that_are_lowered(name, batch):
    fn, arguments = samples.calls(batch, 128, jnp.bfloat16)[name]
    with dispatch.target():
        (record,) = jaxft.explain(fn, *arguments)
    assert backends_of(lower(fn, *arguments)) == backends(record.plan, "forward")
    assert record.op == name.partition(" ")[0] and record.forward == record.plan.forward


@pytest.mark.parametrize("size", [(1, 128), *slow((32, 128), (8, 512))], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_explain_names_the_backends_of_gradients(name, size):
    fn, arguments = samples.calls(*size, jnp.bfloat16)[name]
    with dispatch.target():
        (record,) = jaxft.explain(fn, *arguments)
    assert record.saving == record.plan.saving
    expected = backends(record.plan, "saving") | backends(record.plan, "backward")
    assert backends_of(lower(gradient_of(fn), *arguments)) == expected


def test_sample_calls_cover_every_public_op():
    named = {name.partition(" ")[0] for name in CALLS}
    others = {"EXPORT_DISABLED_CHECKS", "explain", "fuse", "SentenceEncoder", "CrossEncoder", "CheckpointError",
              "SparseEncoder", "MultiVectorEncoder", "SpladeModel", "MultiVectorModel", "max_sim", "EmbeddingModel",
              "quantize_embeddings", "semantic_search", "paraphrase_mining",
              "paraphrase_mining_embeddings", "use_compilation_cache"}  # fmt: skip
    assert named == {name for name in jaxft.__all__ if name not in others and not name.startswith("Bert")}


def test_sample_calls_are_what_their_names_say():
    for size, (batch, length) in samples.SIZES.items():
        assert size == f"{batch}x{length}"
        table = samples.plan_table(size, jnp.float32)
        for name in table:
            assert getattr(table[name], "activation", None) in (None, "gelu")
            if name.startswith("dense ("):
                assert (table[name].activation == "gelu") == ("gelu" in name)
                rows, depth = samples.calls(batch, length, jnp.float32)[name][1][0].shape
                assert rows == batch * length and name.startswith(f"dense ({depth}x")


def test_explain_reads_configurations_of_the_target():
    with dispatch.target("NVIDIA A100-SXM4-80GB", (8, 0), multiprocessors=108):
        (record,) = jaxft.explain(jaxft.layer_norm, jax.ShapeDtypeStruct((4096, 768), jnp.bfloat16))
    assert record.shapes == ("bf16[4096,768]",)
    assert record.forward.backend == record.backward.backend == "triton"
    assert record.backward.config.programs % 108 == 0


def test_explain_says_why_not_another():
    with dispatch.target("NVIDIA A100-SXM4-80GB", (8, 0)):
        (record,) = jaxft.explain(*CALLS["dense (768x768, gelu)"][:1], *CALLS["dense (768x768, gelu)"][1])
    assert "mosaic_gpu: it needs compute capability 9.0" in record.why
    (record,) = jaxft.explain(jaxft.softmax, jnp.ones((2, 3)))
    assert "NVIDIA" in record.why or dispatch.platform() == "cuda"


def test_explain_meets_ops_inside_of_compiled_functions():
    """Even where the function was compiled before."""
    fn = jax.jit(lambda x: jaxft.softmax(jaxft.layer_norm(x)))
    x = jnp.ones((4, 8))
    fn(x)
    for _ in range(2):
        assert [record.op for record in jaxft.explain(fn, x)] == ["layer_norm", "softmax"]
    gradient = jax.grad(lambda x: jnp.sum(fn(x)))
    assert [record.op for record in jaxft.explain(gradient, x)] == ["layer_norm", "softmax"]


def test_explain_takes_modules_and_counts_equal_calls():
    model = jax.eval_shape(lambda: BertModel(CONFIG, rngs=nnx.Rngs(0)))
    found = jaxft.explain(lambda model, ids: model(ids), model, jax.ShapeDtypeStruct((2, 8), jnp.int32))
    lines = str(found).splitlines()
    assert lines[0].split() == ["calls", "op", "arrays", "forward", "backward", "why", "not", "another"]
    layers = CONFIG.num_hidden_layers
    assert any(re.match(rf"{layers} +qkv_attention ", line) for line in lines)
    assert len(found) > len(lines) - 1


def test_explain_of_a_function_without_ops_is_empty():
    assert jaxft.explain(jnp.sin, jnp.ones(3)) == []
    assert len(str(jaxft.explain(jnp.sin, jnp.ones(3))).splitlines()) == 1


def test_explain_refuses_what_is_no_function():
    with pytest.raises(TypeError, match="explain: fn must be a function, got float"):
        jaxft.explain(3.0)


def test_nothing_is_recorded_outside_of_explain():
    found = jaxft.explain(jaxft.softmax, jnp.ones((2, 3)))
    jaxft.softmax(jnp.ones((2, 3)))
    assert len(found) == 1


def test_plans_with_other_reasons_are_equal():
    """Or a reason would make a compiled function compile again."""
    assert Plan(why="a") == Plan(why="b") and hash(Plan(why="a")) == hash(Plan(why="b"))
    assert Plan(forward=Pass("triton")) != Plan()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, *slow(jnp.float32)])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_ask_for_no_device(name, dtype, monkeypatch):
    """Configurations are chosen outside of traced functions, and a gradient is traced later."""
    fn, arguments = samples.calls(32, 128, dtype)[name]

    def forgotten(*arrays):
        with dispatch.target():
            out, pull_back = jax.vjp(fn, *arrays)
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "device", None)
            return pull_back(jax.tree.map(jnp.ones_like, out))

    if all(jnp.issubdtype(x.dtype, jnp.floating) for x in arguments):
        jax.eval_shape(forgotten, *arguments)


def test_explain_logs_nothing(caplog):
    with dispatch.target():
        jaxft.explain(jaxft.softmax, jax.ShapeDtypeStruct((2, 3), jnp.int8).update(dtype=jnp.dtype("float8_e5m2")))
    assert caplog.messages == []


@pytest.mark.parametrize(("rows", "lines"), [([("a", "bb"), ("ccc", "d")], ["a    bb", "ccc  d"]), ([("x",)], ["x"])])
def test_table_lines_align_columns(rows, lines):
    assert plans.table_lines(rows) == lines
