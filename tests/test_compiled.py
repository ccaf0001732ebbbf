"""Kernels and CUDA graphs that XLA makes of an encoder, of a layer and of attention. Needs a GPU."""

import collections

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxft
from bench_encoder import kernels
from cases import slow, slow_cases
from jaxft import dispatch
from jaxft.models.bert import BertConfig, BertModel
from jaxft.ops.attention import qkv_attention, varlen_qkv_attention

pytestmark = pytest.mark.skipif(dispatch.platform() != "cuda", reason="reads a program compiled for an NVIDIA GPU")

LAYERS = 3
SIZES = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}


def launched(batch, length, dtype, masked):
    config = BertConfig(num_hidden_layers=LAYERS, vocab_size=100, **SIZES)
    model = BertModel(config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model.layers)
    keep = jnp.ones((batch, 1, 1, length), bool) if masked else None

    def run(params, x, keep):
        for layer in nnx.merge(graph, params):
            x = layer(x, keep)
        return x

    x = jnp.zeros((batch, length, SIZES["hidden_size"]), dtype)
    return kernels(jax.jit(run).lower(params, x, keep).compile().as_text())


LAYER_SHAPES = [(1, 128), (8, 128), (32, 128), (32, 512)]


def moved(found):
    return [kind for kind in found if any(word in kind for word in ("copy", "slice", "transpose", "concatenate"))]


@pytest.mark.parametrize("masked", [True, *slow(False)])
@pytest.mark.parametrize(("batch", "length", "dtype"), [
    *((*shape, jnp.bfloat16) for shape in LAYER_SHAPES), (32, 512, jnp.float32),
    *slow_cases(*((*shape, jnp.float32) for shape in LAYER_SHAPES[:-1])),
    *slow_cases(*((*shape, jnp.float16) for shape in LAYER_SHAPES)),
])  # fmt: skip
def test_layer_has_a_bounded_number_of_kernels(batch, length, dtype, masked):
    found, rows = launched(batch, length, dtype, masked), batch * length
    hopper, after_hopper = dispatch.device().is_hopper, dispatch.device().is_after_hopper
    # In float32, another kernel transposes the weights for Mosaic GPU.
    transposed = hopper * (4 if rows >= 4096 else int(rows >= 1024)) if dtype == jnp.float32 else 0
    stacks = collections.Counter({"fusion loop_concatenate_fusion": int(masked)})  # the bounds of the mask
    layers = found - stacks
    assert all("transpose" in kind for kind in moved(layers)), found
    assert sum(layers[kind] for kind in moved(layers)) <= transposed * LAYERS, found
    if dtype == jnp.float32 and rows <= 1024:
        return  # XLA splits its matmuls and sums the parts in other kernels
    # A layer has four matmuls, attention, two LayerNorms, and one more kernel for the activation of an XLA matmul.
    activation = not hopper if dtype == jnp.float32 else after_hopper
    # Two kernels before the first layer find the first and the last key of the mask, and stack them.
    assert found.total() <= (7 + activation + transposed) * LAYERS + 2 * masked, found


@pytest.mark.filterwarnings("ignore:builtin type event_stats has no __module__")  # jax.profiler.ProfileData warns
def test_one_sequence_runs_as_one_cuda_graph(tmp_path):
    """CUPTI gives one number to what the driver launches by one call, a kernel or a graph of many."""
    config = BertConfig(num_hidden_layers=LAYERS, vocab_size=100, **SIZES)
    model = BertModel(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    arrays, rebuild = jaxft.bundle(model)

    def forward(arrays, ids, mask):
        output = rebuild(arrays)(ids, mask)
        return output.last_hidden_state, output.pooler_output

    arguments = arrays, jnp.zeros((1, 128), jnp.int32), jnp.ones((1, 128), jnp.int32)
    # By default, XLA launches kernels one by one while a profiler runs.
    options = {"xla_enable_command_buffers_during_profiling": True}
    compiled = jax.jit(forward).lower(*arguments).compile(compiler_options=options)
    for _ in range(3):  # the first call of some kernels is outside of a graph
        jax.block_until_ready(compiled(*arguments))
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(compiled(*arguments))
    (path,) = tmp_path.rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(path))
    launches = collections.defaultdict(list)
    for plane in profile.planes:
        for line in plane.lines:
            if plane.name.startswith("/device:GPU") and line.name.startswith("Stream"):
                for event in line.events:
                    launches[dict(event.stats)["correlation_id"]].append(event.name)
    assert len(launches) == 1, [*launches.values()]
    (names,) = launches.values()
    assert len(names) > 7 * LAYERS, names  # all kernels are there, and none is a graph that CUPTI does not look into


@pytest.mark.parametrize("lengths", ["whole", "keys", "packed"])
@pytest.mark.parametrize(("length", "dtype"), [
    (128, jnp.bfloat16), (512, jnp.bfloat16), *slow_cases((128, jnp.float32), (512, jnp.float32))
])  # fmt: skip
def test_attention_copies_no_arrays(dtype, length, lengths):
    """One or two kernels read packed QKV, and write its gradient, in place."""
    batch, heads, size = 8, 12, 64
    shape = (batch, length, 3, heads, size)
    if lengths == "packed":
        shape = (batch * length, *shape[2:])

    def run(qkv, dout, ends):
        def attend(qkv):
            if lengths == "packed":
                return varlen_qkv_attention(qkv, ends, max_seqlen=length, implementation="triton")
            given = ends[1:] if lengths == "keys" else None
            return qkv_attention(qkv, key_value_seq_lengths=given, implementation="triton")

        out, pull_back = jax.vjp(attend, qkv)
        return out, pull_back(dout)

    qkv, dout = jnp.zeros(shape, dtype), jnp.zeros((*shape[:-3], heads, size), dtype)
    ends = jnp.arange(batch + 1, dtype=jnp.int32) * length
    compiled = jax.jit(run).lower(qkv, dout, ends).compile()
    found = kernels(compiled.as_text())
    # Slices of block counts and lengths are a few bytes, inside of fusions.
    assert not [kind for kind in moved(found) if "fusion" not in kind], found
    assert sum(count for kind, count in found.items() if "triton" in kind) in (2, 3), found
    # The temporary memory has a few numbers per row and tile.
    assert compiled.memory_analysis().temp_size_in_bytes < qkv.nbytes / 4, found
