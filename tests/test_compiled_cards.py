"""Kernels compile for cards that are not there: a card has the shared memory and the instructions.

JAX's CUDA plugin compiles without a GPU. Where it is installed but there is none, it wants to hear
JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1.
"""

import contextlib
import functools
import itertools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental.topologies import get_topology_desc
from jax.sharding import AbstractMesh, SingleDeviceSharding

import jaxft
from bench_encoder import kernels as launched
from cases import slow, slow_cases
from jaxft import dispatch
from jaxft.models.bert import BertConfig, BertModel


class Card(NamedTuple):
    kind: str
    capability: tuple[int, int]
    cores: int
    shared_kib: int  # per multiprocessor; a program gets one less


CARDS = [
    Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 164),
    Card("NVIDIA A10", (8, 6), 72, 100),
    Card("NVIDIA L4", (8, 9), 58, 100),
    Card("NVIDIA H100 80GB HBM3", (9, 0), 132, 228),
]
# `make test` and `make test-gpu` take the card with the least shared memory: a layer takes seconds to compile.
QUICK = "NVIDIA A10"
DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: {core} shared_memory_per_block_optin: {block}
  core_count: {cores} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 2000000000000 l2_cache_size: 41943040 clock_rate_ghz: 1.4 device_memory_size: 24000000000
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{kind}"
"""


@contextlib.contextmanager
def compiler_for(card):
    """Yields (function, *shapes, **XLA options) -> the program compiled for the card."""
    abstract = {}
    if jax.__version_info__ >= (0, 11):
        from jax.sharding import AbstractDevice

        abstract["abstract_device"] = AbstractDevice(device_kind=card.kind, num_cores=card.cores, platform="gpu")
    elif card.capability != (9, 0):
        pytest.skip("where it sees no GPU, this JAX lowers for Hopper only")
    major, minor = card.capability
    sizes = {"core": card.shared_kib * 1024, "block": (card.shared_kib - 1) * 1024}
    config = DESCRIPTION.format(kind=card.kind, cores=card.cores, major=major, minor=minor, **sizes)
    try:
        (device,) = get_topology_desc(card.kind, "cuda", target_config=config, topology="1x1x1").devices
    except NotImplementedError:
        pytest.skip("JAX's CUDA plugin is not there")
    sharding = SingleDeviceSharding(device)
    mesh = AbstractMesh((1,), ("x",), **abstract)

    def compiled(function, *shapes, **options):
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
        lowered = jax.jit(lambda *a: function(*a)).trace(*arguments).lower(lowering_platforms=("cuda",))
        return lowered.compile({"xla_gpu_autotune_level": 0, **options})  # timing kernels would need a GPU

    with dispatch.target(card.kind, card.capability, card.cores), jax.sharding.use_abstract_mesh(mesh):
        yield compiled


@pytest.fixture(autouse=True)
def default_matmuls():
    """Leaves TF32 on, as it is for users."""
    with jax.default_matmul_precision(None):
        yield


def gradients(function):
    """Returns a function that computes the value and the gradients of all float arrays."""

    def run(*arrays):
        places = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]
        return jax.value_and_grad(lambda *a: jnp.sum(function(*a).astype(jnp.float32)), places)(*arrays)

    return run


def of(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def one_layer(dtype, **options):
    """Returns the layers of a BERT-base with one layer, as a graph and the shapes of the parameters."""
    config = BertConfig(hidden_size=768, num_hidden_layers=1, vocab_size=8, **options)
    model = nnx.eval_shape(lambda: BertModel(config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0)))
    return nnx.split(model.layers)


def kernels(program):
    return program.as_text().count('custom_call_target="__gpu$xla.gpu.triton"')


@pytest.mark.parametrize(
    "card", [pytest.param(card, id=card.kind, marks=[pytest.mark.slow] * (card.kind != QUICK)) for card in CARDS]
)
class TestOfEveryCard:
    @pytest.mark.parametrize("dtype", ["bfloat16", *slow("float32")])
    @pytest.mark.parametrize(("batch", "length"), [(1, 7), (16, 128)])
    def test_layer_compiles(self, card, batch, length, dtype):
        """A layer compiles for inference with a mask, and for training with dropout."""
        graph, leaves = one_layer(dtype)
        x, mask = of(batch, length, 768, dtype=dtype), of(batch, 1, 1, length, dtype=bool)

        def infer(leaves, x, mask):
            return nnx.merge(graph, leaves)[0](x, mask)

        def train(leaves, x, mask, keys):
            def loss(leaves, x):
                return jnp.sum(nnx.merge(graph, leaves)[0](x, mask, dropout_rng=keys).astype(jnp.float32))

            return jax.value_and_grad(loss, (0, 1))(leaves, x)

        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))
        with compiler_for(card) as compiled:
            program = compiled(infer, leaves, x, mask)
            if batch == 1:  # in float32, XLA has the matmuls of few rows and what follows; attention is a kernel
                assert kernels(program) == {"bfloat16": 7, "float32": 1}[dtype]
            else:
                assert kernels(program) >= 2
            assert kernels(compiled(train, leaves, x, mask, keys)) >= 4

    @pytest.mark.parametrize(("batch", "length"), [(1, 7), (9, 123), *slow_cases((16, 128), (41, 123))])
    def test_16_bit_layer_has_at_most_seven_kernels(self, card, batch, length):
        graph, leaves = one_layer("bfloat16")

        def infer(leaves, x):
            return nnx.merge(graph, leaves)[0](x, None)

        with compiler_for(card) as compiled:
            found = launched(compiled(infer, leaves, of(batch, length, 768)).as_text())
        # On cards with many multiprocessors, XLA splits the depth of the last matmul of 1,107 rows before it times
        # anything. A further kernel sums the parts.
        adds = sum(count for kind, count in found.items() if "reduce_fusion" in kind)
        assert adds <= ((batch, length) == (9, 123)), found
        assert found.total() - adds <= 7, found

    @pytest.mark.parametrize("dtype", ["bfloat16", *slow("float32")])
    @pytest.mark.parametrize("head_size", [33, 256, *slow(64)])
    def test_attention_compiles(self, card, head_size, dtype):
        def attend(q, k, v, mask, bias):
            return jaxft.dot_product_attention(q, k, v, bias, mask)

        with compiler_for(card) as compiled:
            for batch, queries, keys, heads in ((1, 100, 200, 2), (20, 500, 500, 8)):
                q, k = (of(batch, length, heads, head_size, dtype=dtype) for length in (queries, keys))
                mask, bias = of(batch, 1, 1, keys, dtype=bool), of(1, heads, queries, keys, dtype=dtype)
                assert kernels(compiled(gradients(attend), q, k, k, mask, bias)) >= 2
                assert kernels(compiled(gradients(jaxft.dot_product_attention), q, k, k)) >= 2

    @pytest.mark.parametrize("width", [5000, *slow(768, 3072)])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_dense_compiles(self, card, dtype, width):
        def dense(x, kernel, bias):
            return jaxft.dense(x, kernel, bias, activation="gelu", implementation="triton")

        with compiler_for(card) as compiled:
            for rows, depth in itertools.product((16, 128, 300), (33, 3072)):
                arrays = [of(*shape, dtype=dtype) for shape in ((rows, depth), (depth, width), (width,))]
                assert kernels(compiled(dense, *arrays)) == 1

    @pytest.mark.parametrize(("depth", "width"), [(768, 3072), (100, 5000)])
    def test_dense_with_many_rows_spills_no_registers(self, card, depth, width):
        """The kernels have an activation, and for a gradient they store the sum before it as well."""

        def dense(x, kernel, bias):
            return jaxft.dense(x, kernel, bias, activation="gelu", implementation="triton")

        fail = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
        with compiler_for(card) as compiled:
            for function, count in ((dense, 1), (gradients(dense), 2)):
                assert kernels(compiled(function, of(4097, depth), of(depth, width), of(width), **fail)) == count

    @pytest.mark.parametrize(
        ("rows", "width", "dtype"),
        [(7, 80, "float32"), (300, 768, "bfloat16"), (2000, 5000, "float32"), (3, 100000, "bfloat16"),
         *slow_cases((7, 80, "bfloat16"), (300, 768, "float32"), (2000, 5000, "bfloat16"), (3, 100000, "float32"))],
    )  # fmt: skip
    def test_row_ops_compile(self, card, rows, width, dtype):
        x, vector = of(rows, width, dtype=dtype), of(width, dtype=dtype)
        with compiler_for(card) as compiled:
            assert kernels(compiled(gradients(jaxft.bias_residual_layer_norm), x, vector, x, vector, vector)) >= 2
            assert kernels(compiled(gradients(jaxft.softmax), x)) >= 2
            assert kernels(compiled(gradients(jaxft.log_softmax), x)) >= 2
            assert (
                kernels(
                    compiled(gradients(lambda x, bias: jaxft.bias_activation(x, bias, activation="gelu")), x, vector)
                )
                >= 2
            )
            assert kernels(compiled(lambda x: jaxft.permute(x, (1, 0)), x)) == 1

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_ops_of_modern_encoders_spill_no_registers(self, card, dtype):
        fail = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
        with compiler_for(card) as compiled:
            for rows in (100, 16384):
                x, vector, positions = of(rows, 2304, dtype=dtype), of(2304, dtype="float32"), of(rows, dtype="int32")
                for activation in ("gelu", "silu"):
                    gated = functools.partial(jaxft.gated_activation, activation=activation)
                    assert kernels(compiled(gradients(gated), x, vector, **fail)) == 2
                rms = gradients(lambda x, gamma: jaxft.rms_norm(x, gamma, residual=x))
                assert kernels(compiled(rms, of(rows, 768, dtype=dtype), of(768), **fail)) == 3
                for in_place in (False, True):
                    rotate = gradients(functools.partial(jaxft.rotary, in_place=in_place))
                    for heads, size in ((12, 64), (7, 80)):
                        qkv = of(rows, 3, heads, size, dtype=dtype)
                        assert kernels(compiled(rotate, qkv, positions, **fail)) == 2

    def test_gated_matmul_spills_no_registers(self, card):
        fail = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}

        def dense(x, kernel):
            return jaxft.dense(x, kernel, activation="gelu", gate="first", implementation="triton")

        with compiler_for(card) as compiled:
            for rows in (16, 128, 4097):
                for function, count in ((dense, 1), (gradients(dense), 2)):
                    assert kernels(compiled(function, of(rows, 768), of(768, 2304), **fail)) == count


@pytest.mark.parametrize("activation", ["gelu", *slow("gelu_new")])
@pytest.mark.parametrize(
    ("dtype", "batch", "length"),
    [("bfloat16", 1, 16), ("bfloat16", 1, 128), ("bfloat16", 8, 128), ("bfloat16", 32, 512), ("float32", 8, 128)],
)
def test_layer_spills_no_registers(dtype, batch, length, activation):
    """A layer in inference spills none. XLA cannot look into Mosaic GPU kernels."""
    graph, leaves = one_layer(dtype, hidden_act=activation)

    def infer(leaves, x):
        return nnx.merge(graph, leaves)[0](x, None)

    with compiler_for(CARDS[-1]._replace(kind="NVIDIA H200")) as compiled:
        fail = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
        compiled(infer, leaves, of(batch, length, 768, dtype=dtype), **fail)


@pytest.mark.parametrize("card", [card for card in CARDS if card.capability >= (8, 9)], ids=lambda card: card.kind)
@pytest.mark.parametrize("rows", [16, *slow(64, 128, 256)])
def test_split_depth_in_float8_compiles(card, rows):
    def half(x, stored, scale, residual, vector):
        op = functools.partial(jaxft.dense_residual_layer_norm, float8_scale=1.0, implementation="triton")
        return op(x, stored.T, vector, residual, vector, vector, kernel_scale=scale)

    shapes = of(rows, 3072, dtype="float8_e4m3fn"), of(768, 3072, dtype="float8_e4m3fn"), of(768, dtype="float32")
    with compiler_for(card) as compiled:
        found = launched(compiled(half, *shapes, of(rows, 768), of(768)).as_text())
    assert found.total() == 2, found


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="since JAX 0.11, XLA does not dump the PTX of a Triton kernel"
)
def test_float8_result_leaves_the_layout_of_16_bit_loads(tmp_path):
    """Threads store 8 float8. With 16, each load of a warp would leave out every other 16 bytes."""

    def attend(qkv):
        return jaxft.qkv_attention(qkv, float8_scale=1.0, implementation="triton")

    def normalise(x, vector):
        norm = functools.partial(jaxft.bias_residual_layer_norm, implementation="triton", float8_scale=1.0)
        return norm(x, vector, x, vector, vector)

    with compiler_for(CARDS[-1]) as compiled:
        compiled(attend, of(32, 512, 3, 12, 64), xla_dump_to=str(tmp_path / "attend"))
        compiled(normalise, of(4096, 768), of(768), xla_dump_to=str(tmp_path / "normalise"))
    for name, words in (("attend", {"2"}), ("normalise", {"2", "4"})):  # LayerNorm stores 8 bfloat16 as well
        code = "".join(path.read_text() for path in (tmp_path / name).glob("*.ptx"))
        assert set(re.findall(r"st\.global\.v(\d)\.b32", code)) == words
        assert set(re.findall(r"cvt\S*e4m3\S*", code)) == {"cvt.rn.satfinite.e4m3x2.f32"}  # it clips


def test_cross_entropy_copies_nothing_in_its_loop():
    """cuBLAS does not take 30,522 classes as they are: the table is padded once, and not in every chunk."""

    def loss(x, embedding, bias, labels):
        return jaxft.linear_cross_entropy(x, embedding, labels, bias).total

    arrays = of(4096, 768), of(30522, 768), of(30522), of(4096, dtype="int32")
    with compiler_for(CARDS[-1]) as compiled:
        text = compiled(gradients(loss), *arrays).as_text()
    padded = re.findall(r"= (\w+\[[\d,]+\])\S* pad\(", text)
    assert padded.count("bf16[30528,768]") == 1
    assert not [shape for shape in padded if "1024," in shape]  # the number of rows in a chunk
