"""Programs that a later process loads without a trace, and what it does not load."""

import dataclasses
import pickle
import sys
import types

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxft
import tiny
from cases import slow_cases
from jaxft import compilation_cache, dispatch
from jaxft.text import batching, devices, programs
from jaxft.text.sentence_encoder import SentenceEncoder
from test_compilation_cache import as_before  # noqa: F401  (a fixture for each test)
from test_warmup import load

TEXTS = tiny.texts(20)


@pytest.fixture
def folder(tmp_path):
    return jaxft.use_compilation_cache(tmp_path / "programs")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_sentence_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def lowered():
    """Programs that are lowered, a name for each."""
    found: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        listen := lambda event, *_, **__: found.append(event) if "jaxpr_to_mlir_module" in event else None
    )
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def kept(folder):
    return sorted(folder.glob("jaxft-*-cache"))


@pytest.mark.parametrize(("kind", "packed"), [
    ("sentence", False), ("multi-vector", False), ("cross", True), *slow_cases(("sentence", True), ("sparse", True)),
])  # fmt: skip
def test_later_encoder_lowers_nothing(kind, packed, model, tmp_path, folder, lowered):
    assert compilation_cache.is_empty()
    _, compute, options = load(kind, model, tmp_path, packed)
    expected = compute(TEXTS, **options), compute(TEXTS[:1], **options)
    assert lowered and kept(folder) and not compilation_cache.is_empty()
    _, compute, options = load(kind, model, tmp_path, packed)
    before = len(lowered)
    found = compute(TEXTS, **options), compute(TEXTS[:1], **options)
    assert len(lowered) == before
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (x.toarray() if hasattr(x, "toarray") else x for x in (a, b))  # SciPy's sparse arrays
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("kind", "more"), [
    ("sentence", {}), ("sentence", {"precision": "ubinary"}), ("multi-vector", {}), ("cross", {}), ("sparse", {}),
])  # fmt: skip
def test_programs_write_their_results_to_the_hosts_memory(kind, more, model, tmp_path, monkeypatch):
    _, compute, options = load(kind, model, tmp_path, packed=False)
    options = {**options, **more}
    expected, places, start = compute(TEXTS, **options), [], batching._start_copy
    if dispatch.platform() == "cpu":
        monkeypatch.setattr(dispatch, "on_host", lambda x: jax.device_put(x, jax.memory.Space.Host))
    monkeypatch.setattr(batching, "_start_copy", lambda x: places.append(x.sharding.memory_kind) or start(x))
    _, compute, _ = load(kind, model, tmp_path, packed=False)
    found = compute(TEXTS, **options)
    assert {*places} == {"pinned_host"}
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (x.toarray() if hasattr(x, "toarray") else x for x in (a, b))
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("change", [tiny.scale_and_delete, lambda model: model.train()])
@pytest.mark.parametrize("options", [{}, {"show_progress_bar": True}])
def test_one_text_compiles_no_program_for_arrays_of_before(options, change, model, folder):
    encoder = SentenceEncoder.from_pretrained(model)
    for _ in range(3):
        encoder.encode("rain")
    kept = change(encoder.model)  # deleted arrays are assumed only while somebody has them
    found, made = encoder.encode("rain", truncate_dim=8, **options), encoder._dealer._programs
    assert len(made) == 2 and None not in made.values()
    del kept
    ids = jnp.array(encoder.tokenize("rain"))
    expected = encoder.model(ids, deterministic=True).last_hidden_state[0].mean(0)[:8]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def name_of(encoder, **options):
    arrays, rebuild = encoder._bundled(encoder.embedder)
    ids, lengths = np.zeros((2, 8), np.int32), np.full(2, 8, np.int32)
    last_steps = options.get("last_steps", (None, False, False, "float32"))
    call = (options.get("arrays", arrays), options.get("ids", ids), lengths, 8, last_steps, rebuild)
    return programs.name(options.get("function", encoder._embed), encoder.embedder, call)


def test_name_depends_on_what_the_trace_depends_on(model, folder, monkeypatch):
    encoder = SentenceEncoder.from_pretrained(model)
    names = [name_of(encoder), name_of(encoder, ids=np.zeros((4, 8), np.int32))]
    for last_steps in ((3, False, False, "float32"), (None, True, False, "float32"), (None, False, False, "int8")):
        names.append(name_of(encoder, last_steps=last_steps))
    assert name_of(SentenceEncoder.from_pretrained(model)) == names[0]
    names.append(name_of(SentenceEncoder.from_pretrained(model, dtype="bfloat16")))
    names.append(name_of(SentenceEncoder.from_pretrained(model, implementation="xla")))
    for context in (jax.default_matmul_precision("bfloat16"), jax.debug_nans(True), dispatch.target("other")):
        with context:
            names.append(name_of(encoder))
    other = SentenceEncoder.from_pretrained(model)
    other.embedder.encoder.config = dataclasses.replace(other.embedder.encoder.config, layer_norm_eps=1e-5)
    names.append(name_of(other))
    for target, value in (
        ("jaxft.text.programs._sources", lambda: "other"), ("jax.__version__", "0"), ("jaxlib.__version__", "0"),
        ("flax.__version__", "0"), ("jaxft.tuning.cache.load", lambda kind: {"dense": {}}),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(target, value)
            names.append(name_of(encoder))
    monkeypatch.setenv("XLA_FLAGS", "--xla_other")
    names.append(name_of(encoder))
    assert None not in names and [*dict.fromkeys(names)] == names


def test_name_depends_on_each_fact_about_an_array(model, folder):
    encoder, x = SentenceEncoder.from_pretrained(model), jax.numpy.zeros((2, 8), np.int32)
    (device, *_), mesh = jax.devices(), jax.make_mesh((1,), ("d",), (jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    ids = [x, jax.device_put(x, device), jax.device_put(x, sharding), jax.numpy.asarray(1), x[0, 0], x[0, 0] > 0]
    assert not ids[0].committed and ids[1].committed and ids[3].weak_type and not ids[4].weak_type
    ids += [np.zeros((2, 8), dtype) for dtype in (np.int32, np.int8)]
    names = [name_of(encoder, ids=x) for x in ids]
    with jax.set_mesh(mesh):
        names.append(name_of(encoder, ids=x))
    assert None not in names and [*dict.fromkeys(names)] == names


def test_name_depends_on_the_function_and_not_on_the_cache(model, folder):
    encoder = SentenceEncoder.from_pretrained(model)

    def embed(*args):
        return args

    names = [name_of(encoder)]
    for module, function in (("jaxft.a", "f"), ("jaxft.a", "g"), ("jaxft.b", "g")):
        embed.__module__, embed.__qualname__ = module, function
        names.append(name_of(encoder, function=jax.jit(embed)))
    assert None not in names and [*dict.fromkeys(names)] == names
    jaxft.use_compilation_cache(folder, max_bytes=1 << 29)
    assert name_of(encoder) == names[0]


def test_value_that_is_not_printed_in_full_is_not_kept(model, folder):
    @dataclasses.dataclass
    class Static:
        value: np.ndarray

    encoder = SentenceEncoder.from_pretrained(model)
    assert name_of(encoder, last_steps=Static(np.arange(9))) is not None
    assert name_of(encoder, last_steps=Static(np.arange(9000))) is None


def test_sources_are_all_files_that_choose_programs(monkeypatch, tmp_path):
    (tmp_path / "text").mkdir()
    monkeypatch.setattr(programs, "__file__", str(tmp_path / "text" / "programs.py"))
    (tmp_path / "a.py").write_text("newer than the import")
    programs._sources.cache_clear()
    assert programs._sources() is None
    monkeypatch.setattr(programs, "_IMPORTED", float("inf"))
    found = set()
    for name, content in (("a.py", "1"), ("a.py", "2"), ("text/b.json", "1"), ("text/c.py", "1")):
        (tmp_path / name).write_text(content)
        programs._sources.cache_clear()
        found.add(programs._sources())
    (tmp_path / "text" / "c.py").rename(tmp_path / "text" / "d.py")
    programs._sources.cache_clear()
    found.add(programs._sources())
    programs._sources.cache_clear()
    assert len(found) == 5


def test_loaded_program_is_for_its_settings_and_parameters(model, folder, lowered):
    SentenceEncoder.from_pretrained(model).encode(TEXTS)
    encoder = SentenceEncoder.from_pretrained(model)
    before = len(lowered)
    expected = encoder.encode(TEXTS)
    assert len(lowered) == before
    with jax.default_matmul_precision("bfloat16"):
        encoder.encode(TEXTS)
    assert len(lowered) > before
    halved = jax.tree.map(lambda x: x.astype("bfloat16"), nnx.state(encoder.embedder, nnx.Param))
    nnx.update(encoder.embedder, halved)
    found = encoder.encode(TEXTS)
    assert 0 < np.abs(found - expected).max() < 0.05


def test_unknown_code_is_not_kept(model, folder):
    encoder = SentenceEncoder.from_pretrained(model)
    assert name_of(encoder) is not None
    number = 2
    assert name_of(encoder, function=jax.jit(lambda *a: number)) is None
    assert name_of(encoder, function=lambda *a: 2) is None

    class Own(nnx.Module):
        def __call__(self, x):
            return x * 2

    encoder.embedder.own = Own()
    assert name_of(encoder) is None
    encoder = SentenceEncoder.from_pretrained(model)
    encoder.embedder.own = lambda x: x
    assert name_of(encoder) is None


def test_own_subclass_of_an_encoder_is_not_kept(model, folder):
    encoder = SentenceEncoder.from_pretrained(model)

    def embed(*args):
        return args

    assert embed.__closure__ is None and name_of(encoder, function=jax.jit(embed)) is None


def test_program_of_several_devices_is_not_kept(model, folder, monkeypatch):
    encoder = SentenceEncoder.from_pretrained(model)
    monkeypatch.setattr(dispatch, "homes", lambda arrays: {*"ab"})
    assert name_of(encoder) is None


def test_nothing_is_kept_without_the_call(model, tmp_path):
    assert compilation_cache.folder() is None and name_of(SentenceEncoder.from_pretrained(model)) is None
    jaxft.use_compilation_cache(tmp_path / "own")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    assert name_of(SentenceEncoder.from_pretrained(model)) is None


def _flip(content):
    return content[:100] + bytes([content[100] ^ 1]) + content[101:]


@pytest.mark.parametrize("damage", [_flip, lambda content: content[:-5], lambda content: b""])
def test_damaged_program_is_compiled_again(model, folder, damage, lowered):
    expected = SentenceEncoder.from_pretrained(model).encode("a bird")
    (file,) = kept(folder)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert compilation_cache.read(file.name.removesuffix("-cache")) is None
    lowered.clear()
    for _ in range(2):
        np.testing.assert_array_equal(SentenceEncoder.from_pretrained(model).encode("a bird"), expected)
    on_cpu = jax.default_backend() == "cpu"
    assert len(lowered) == (2 if on_cpu else 1)  # CPUs do not keep what JAX's cache has
    _forget(folder)
    for _ in range(2):
        np.testing.assert_array_equal(SentenceEncoder.from_pretrained(model).encode("a bird"), expected)
    assert len(lowered) == (3 if on_cpu else 1)


def _forget(folder):
    """Removes the programs that JAX has kept."""
    for file in folder.glob("jit_*"):
        file.unlink()


def test_program_that_cannot_be_loaded_is_compiled_again(model, folder, caplog, lowered):
    expected = SentenceEncoder.from_pretrained(model).encode("a bird")
    (file,) = kept(folder)
    compilation_cache.write(file.name.removesuffix("-cache"), pickle.dumps((False, b"", None, None)))
    np.testing.assert_array_equal(SentenceEncoder.from_pretrained(model).encode("a bird"), expected)
    assert "compiled again, because it cannot be loaded" in caplog.text and not kept(folder)
    _forget(folder)
    SentenceEncoder.from_pretrained(model).encode("a bird")
    assert kept(folder) == [file]


@pytest.mark.parametrize("text", ["custom_call @mosaic_gpu_v2", "custom_call @other"])
def test_calls_of_mosaic_are_registered_before_loading(folder, monkeypatch, text):
    function, x = jax.jit(lambda x: x * 3 + 1), np.arange(7.0, dtype=np.float32)
    program = function.lower(x)
    monkeypatch.setattr(jax.stages.Lowered, "as_text", lambda self: text)
    programs.compile(program, "jaxft-1", None, "cpu", 64)
    content = compilation_cache.read("jaxft-1")
    monkeypatch.setitem(sys.modules, "jax.experimental.mosaic.gpu", None)  # so that an import fails
    monkeypatch.delattr("jax.experimental.mosaic.gpu", raising=False)
    loaded = programs.load("jaxft-1", content, jax.devices()[0], None)
    assert (loaded is None) == ("mosaic" in text)


def test_name_depends_on_the_version_of_the_platform(model, folder, monkeypatch):
    class Home:
        client, platform = types.SimpleNamespace(platform_version="1"), "gpu"

        def __repr__(self):
            return "a device"

    encoder, home = SentenceEncoder.from_pretrained(model), Home()
    monkeypatch.setattr(dispatch, "homes", lambda arrays: {home})
    before = name_of(encoder)
    home.client.platform_version = "2"
    assert None not in (before, name_of(encoder)) and name_of(encoder) != before


def test_new_program_is_kept_whatever_else_jax_reports(folder):
    function, x = jax.jit(lambda x: x * 5 + 1), np.arange(7.0, dtype=np.float32)
    program = function.lower(x)

    class Lowered:
        as_text = program.as_text

        def compile(self, options):
            compiled = program.compile(options)
            jax.monitoring.record_event("/jax/another_event")
            return compiled

    programs.compile(Lowered(), "jaxft-2", None, "cpu", 64)
    assert compilation_cache.read("jaxft-2") is not None


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_programs_from_caches_of_jax_are_kept(folder, platform):
    """An upgrade of jaxft changes the name of a program, and JAX may find the program under its own name."""
    function, x = jax.jit(lambda x: x * 7 + 1), np.arange(7.0, dtype=np.float32)
    programs.compile(function.lower(x), "jaxft-5", None, "cpu", 1000)
    jax.clear_caches()
    programs.compile(function.lower(x), "jaxft-6", None, platform, 1000)
    assert (compilation_cache.read("jaxft-6") is not None) == (platform != "cpu")


@pytest.mark.parametrize(("body", "tokens", "platform", "expected"), [
    (jnp.sin, 256, "cuda", True), (jnp.sin, 257, "cuda", False), (jnp.sin, 64, "cpu", False),
    (lambda x: x @ x, 64, "cuda", False), (jax.jit(lambda x: x @ x), 64, "cuda", False),
    (lambda x: jax.lax.fori_loop(0, 3, lambda _, x: x @ x, x), 64, "cuda", False),
    (lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, jnp.sin, x), 64, "cuda", False),
    (lambda x: jnp.convolve(x[0], x[1]), 64, "cuda", False),
])  # fmt: skip
def test_small_programs_are_compiled_without_timing(body, tokens, platform, expected):
    function, x = jax.jit(body), jnp.ones((8, 8)) / 8
    result = function(x)
    program = programs.compile(function.lower(x), None, programs.state([[x]]), platform, tokens)
    assert (program is not None) == expected
    if program is not None:
        assert program.fits([[x]]) and not program.fits([[np.asarray(x)]])
        np.testing.assert_array_equal(program(x), result)


def test_program_without_timing_replaces_the_function(model, monkeypatch):
    expected = SentenceEncoder.from_pretrained(model).encode(TEXTS)
    tokens, sizes = [], []
    monkeypatch.setattr(
        programs, "_options", lambda lowered, platform, count: tokens.append(count) or programs._WITHOUT_TIMING
    )
    encoder = SentenceEncoder.from_pretrained(model)
    monkeypatch.setattr(encoder, "_embed", Lowers(encoder._embed, sizes))
    for _ in range(3):
        np.testing.assert_array_equal(encoder.encode(TEXTS), expected)
    encoder._dealer.wait()
    assert sorted(tokens) == sorted(sizes) and max(sizes) > len(TEXTS)
    tiny.scale(encoder.model, 0.5)
    assert np.abs(encoder.encode(TEXTS) - expected).max() > 1e-3
    assert len(tokens) == len(sizes)


class Lowers:
    """A jitted function that is lowered and never called. Notes the numbers of tokens."""

    def __init__(self, function, sizes):
        self.function, self.sizes = function, sizes

    def lower(self, arrays, input_ids, *others):
        self.sizes.append(input_ids.size)
        return self.function.lower(arrays, input_ids, *others)


@pytest.mark.parametrize("devices", [None, [0]])
@pytest.mark.parametrize("options", [{}, {"precision": "int8", "ranges": np.array([[-1.0] * 16, [1.0] * 16])}])
def test_encoders_with_numpy_parameters_find_programs(options, devices, model, folder):
    found = []
    for _ in range(2):
        encoder = SentenceEncoder.from_pretrained(model)
        for _, value in nnx.iter_graph(encoder.model):
            if isinstance(value, nnx.Param):
                value.set_value(np.asarray(value.get_value()))
        found += [encoder.encode(TEXTS[0], devices=devices, **options)]
        found += [encoder.encode(TEXTS[:1], devices=devices, **options)[0]]
    expected = SentenceEncoder.from_pretrained(model).encode(TEXTS[0], **options)
    for one in found:
        np.testing.assert_array_equal(one, expected)


def test_models_may_have_keys_of_random_numbers(model, folder):
    expected = SentenceEncoder.from_pretrained(model).encode(TEXTS[0])
    for _ in range(2):
        encoder = SentenceEncoder.from_pretrained(model)
        encoder.model.rngs = nnx.Rngs(0)
        np.testing.assert_array_equal(encoder.encode(TEXTS[0]), expected)


def test_program_is_loaded_for_the_device_of_its_arrays(monkeypatch):
    home, asked = types.SimpleNamespace(client="a client"), []  # not the first device
    monkeypatch.setattr(
        programs.serialize_executable, "deserialize_and_load", lambda *_, **options: asked.append(options)
    )
    programs.load("jaxft-3", pickle.dumps((False, b"", None, None)), home, None)
    assert asked == [{"backend": "a client", "execution_devices": [home]}]


def test_state_has_what_may_change_between_calls():
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.zeros(3)
    before = programs.state([[x]])
    assert programs.state([[x + 1]]) == before
    others = [x.astype("bfloat16"), jnp.zeros(4), jax.device_put(x, jax.devices()[0])]
    assert before not in [programs.state([[other]]) for other in others]
    for context in (dispatch.target("another card"), jax.sharding.use_abstract_mesh(mesh), jax.enable_x64(True)):
        with context:
            assert programs.state([[x]]) != before


@pytest.mark.parametrize(("reason", "stays"), [("RESOURCE_EXHAUSTED: 9 GB", True), ("INVALID_ARGUMENT: x", False)])
def test_program_without_memory_stays(folder, monkeypatch, reason, stays):
    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError(reason)

    monkeypatch.setattr(programs.serialize_executable, "deserialize_and_load", fail)
    compilation_cache.write("jaxft-4", content := pickle.dumps((False, b"", None, None)))
    assert programs.load("jaxft-4", content, jax.devices()[0], None) is None
    assert (compilation_cache.read("jaxft-4") is not None) == stays


def test_size_is_limited(folder):
    jaxft.use_compilation_cache(folder, max_bytes=1000)
    for letter in "abcdef":
        compilation_cache.write(f"jaxft-{letter * 64}", bytes(300))
        assert compilation_cache.read(f"jaxft-{'a' * 64}") == bytes(300)  # so it is used later than the others
    assert [file.name[6] for file in kept(folder)] == ["a", "e", "f"]
    compilation_cache.write(f"jaxft-{'b' * 64}", bytes(990))
    assert compilation_cache.read(f"jaxft-{'b' * 64}") is None and len(kept(folder)) == 3


def test_full_disk_leaves_nothing(folder, monkeypatch):
    def write(file, content):
        with file.open("wb") as opened:
            opened.write(content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(folder), "write_bytes", write)
    compilation_cache.write(f"jaxft-{'0' * 64}", b"content")
    assert not kept(folder)


def test_later_encoder_loads_before_the_call_of_a_batch(model, folder, monkeypatch):
    """Programs are loaded in the threads that compile."""
    SentenceEncoder.from_pretrained(model).encode(TEXTS, batch_size=2)
    calls = []
    monkeypatch.setattr(devices.programs, "load", lambda *a: calls.append(a))  # None: the jitted function is called
    found = SentenceEncoder.from_pretrained(model).encode(TEXTS, batch_size=2)
    assert len(calls) == len(kept(folder)) and np.isfinite(found).all()
