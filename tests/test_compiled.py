"""What XLA makes of an encoder, a layer of it and of attention on a GPU: kernels and CUDA graphs. Needs one."""

import collections

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxft
from bench_encoder import kernels
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


def moved(found):
    return [kind for kind in found if any(word in kind for word in ("copy", "slice", "transpose", "concatenate"))]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize(("batch", "length"), [(1, 128), (8, 128), (32, 128), (32, 512)])
def test_layer_is_at_most_so_many_kernels(batch, length, dtype, masked):
    found, rows = launched(batch, length, dtype, masked), batch * length
    hopper, after_hopper = dispatch.device().is_hopper, dispatch.device().is_after_hopper
    # In float32, Mosaic GPU multiplies by weights that a kernel has transposed before.
    transposed = hopper * (4 if rows >= 4096 else int(rows >= 1024)) if dtype == jnp.float32 else 0
    assert all("transpose" in kind for kind in moved(found)), found
    assert sum(found[kind] for kind in moved(found)) <= transposed * LAYERS, found
    if dtype == jnp.float32 and rows <= 1024:
        return  # XLA splits its products and adds the parts in kernels of their own
    # Four products, attention and two LayerNorms; one more for the activation where no kernel of ours is the product.
    activation = not hopper if dtype == jnp.float32 else after_hopper
    # The mask is looked at once, before the first layer: where it begins and where it ends.
    assert found.total() <= (7 + activation + transposed) * LAYERS + 2 * masked, found


@pytest.mark.filterwarnings("ignore:builtin type event_stats has no __module__")  # of jax.profiler.ProfileData
def test_forward_pass_of_one_sequence_is_one_cuda_graph(tmp_path):
    """What the driver launches by one call, be it a kernel or a graph of many, has one number in CUPTI's records."""
    config = BertConfig(num_hidden_layers=LAYERS, vocab_size=100, **SIZES)
    model = BertModel(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    arrays, rebuild = jaxft.bundle(model)

    def forward(arrays, ids, mask):
        output = rebuild(arrays)(ids, mask)
        return output.last_hidden_state, output.pooler_output

    arguments = arrays, jnp.zeros((1, 128), jnp.int32), jnp.ones((1, 128), jnp.int32)
    # Else XLA launches each kernel by itself while a profiler is at work.
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
@pytest.mark.parametrize("length", [128, 512])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_attention_and_its_gradient_move_nothing(dtype, length, lengths):
    """Packed QKV is read, and its gradient written, where it lies, by one kernel or by two, one after the other."""
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
    # Of numbers of blocks and lengths, a slice is a few bytes and in a fusion.
    assert not [kind for kind in moved(found) if "fusion" not in kind], found
    assert sum(count for kind, count in found.items() if "triton" in kind) in (2, 3), found
    # Beside the results there are a few numbers for each row and tile.
    assert compiled.memory_analysis().temp_size_in_bytes < qkv.nbytes / 4, found
