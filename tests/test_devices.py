"""Encoders on several devices: the same bits as on one device, whichever device computes, and memory that runs out."""

import contextlib
import functools
import gc
import logging
import threading
import time
import weakref

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

import peer_models
import tiny
from cases import pytest_on
from jaxft import dispatch
from jaxft.models import partition_specs
from jaxft.text import batching, devices, programs
from jaxft.text.cross_encoder import CrossEncoder
from jaxft.text.multi_vector_encoder import MultiVectorEncoder
from jaxft.text.sentence_encoder import SentenceEncoder
from jaxft.text.sparse_encoder import SparseEncoder
from test_warmup import Held

several = pytest.mark.skipif(jax.local_device_count() < 4, reason="needs four devices, see the first test")
TEXTS = tiny.texts(300)


@pytest.mark.skipif(jax.local_device_count() >= 4, reason="the other tests have four devices already")
def test_encoders_compute_on_four_devices():
    told = pytest_on(4, __file__)
    assert told.count("PASSED") >= 13 and told.count("SKIPPED") == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_sentence_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def encoder(folder):
    return SentenceEncoder.from_pretrained(folder, max_seq_length=32)  # two lengths, for few programs


@pytest.fixture
def used(monkeypatch):
    """Devices of the results, in the order in which their batches were started. Batches take a while."""
    found = []
    monkeypatch.setattr(batching.Lane, "has_result", False)
    original = batching.Batcher._finish

    def finish(self, work, *others):
        leaves = jax.tree.leaves(work.started.result())
        found.extend(home for leaf in leaves if hasattr(leaf, "devices") for home in leaf.devices())
        return original(self, work, *others)

    monkeypatch.setattr(batching.Batcher, "_finish", finish)
    return found


@several
def test_results_equal_those_of_one_device(encoder, used):
    expected = encoder.encode(TEXTS, batch_size=8)
    assert {*used} == {jax.devices()[0]}
    np.testing.assert_array_equal(encoder.encode(TEXTS, batch_size=8, devices=[0, 1, 2, 3]), expected)
    encoder._dealer.wait()
    used.clear()
    np.testing.assert_array_equal(encoder.encode(TEXTS, batch_size=8, devices=jax.devices()), expected)
    counts = [used.count(device) for device in jax.devices()]
    assert min(counts) > 3 and max(counts) < 3 * min(counts)


@several
def test_every_encoder_takes_devices(folder, tmp_path, used):
    peer_models.write(tmp_path / "splade", "splade")
    peer_models.write_stanford(tmp_path / "colbert", None)
    (tmp_path / "ranker").mkdir()
    texts = ["a bird sings", "rain", "the old tree falls on the river"] * 20
    sparse = SparseEncoder.from_pretrained(tmp_path / "splade")
    colbert = MultiVectorEncoder.from_pretrained(tmp_path / "colbert")
    ranker = CrossEncoder.from_pretrained(tiny.write_classifier(tmp_path / "ranker"))
    pairs = [("rain", text) for text in texts]
    for call, dealer in (
        (lambda **on: sparse.encode(texts, batch_size=8, convert_to_sparse_tensor=False, **on), sparse._dealer),
        (lambda **on: np.concatenate(colbert.encode_document(texts, batch_size=8, **on)), colbert._dealer),
        (lambda **on: ranker.predict(pairs, batch_size=8, **on), ranker._dealer),
        (lambda **on: [x["score"] for x in ranker.rank("rain", texts, batch_size=8, **on)], ranker._dealer),
    ):
        expected = call()
        call(devices=[0, 1])
        dealer.wait()
        used.clear()
        np.testing.assert_array_equal(call(devices=[0, 1]), expected)
        assert {*used} == {*jax.devices()[:2]}


@several
def test_one_text_stays_on_one_device(encoder, used, caplog):
    caplog.set_level(logging.INFO, logger="jaxft")
    encoder.encode("rain", devices=[2, 1])
    encoder.encode(["rain"], devices=[3])
    assert used == [jax.devices()[2], jax.devices()[3]] and "computes on" not in caplog.text


@several
def test_one_text_is_computed_on_the_chosen_device(encoder, used):
    for _ in range(3):  # by then, a text for which no device is chosen is computed with the last arrays
        encoder.encode("rain")
    used.clear()
    encoder.encode("rain", devices=[2])
    with jax.default_device(jax.devices()[3]):
        encoder.encode("rain")
    encoder.encode("rain")
    assert used == [jax.devices()[i] for i in (2, 3, 0)]


@several
def test_default_device_is_obeyed(encoder, used, monkeypatch):
    monkeypatch.setattr(dispatch, "platform", lambda: "cuda")
    expected = encoder.encode("rain")
    with jax.default_device(jax.devices()[3]):
        np.testing.assert_allclose(encoder.encode(["rain"] * 40, batch_size=4)[7], expected, atol=1e-5)
    assert {*used[1:]} == {jax.devices()[3]}


@several
def test_all_gpus_compute_by_default(folder, used, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="jaxft")
    devices._say.cache_clear()
    encoder = SentenceEncoder.from_pretrained(folder, packed=False, max_seq_length=32)
    expected = encoder.encode(TEXTS, batch_size=8)
    assert {*used} == {jax.devices()[0]} and "computes on" not in caplog.text  # CPUs
    monkeypatch.setattr(dispatch, "work_devices", lambda many: jax.local_devices() if many else [])
    encoder.encode(TEXTS, batch_size=8)
    encoder._dealer.wait()
    used.clear()
    np.testing.assert_array_equal(encoder.encode(TEXTS, batch_size=8), expected)
    assert {*used} == {*jax.devices()}
    assert caplog.text.count("encode: computes on 4 devices: ") == 1
    used.clear()
    encoder.encode("rain")
    assert used == [jax.devices()[0]]


def test_work_devices(monkeypatch):
    assert dispatch.work_devices(many=True) == []
    monkeypatch.setattr(dispatch, "platform", lambda: "cuda")
    assert dispatch.work_devices(many=True) == jax.local_devices() and dispatch.work_devices(many=False) == []
    with jax.default_device(jax.devices()[-1]):
        assert dispatch.work_devices(many=True) == [jax.devices()[-1]]


@several
def test_devices_of_one_call_are_of_one_kind(monkeypatch):
    monkeypatch.setattr(dispatch, "_describe", lambda x: dispatch.Device("cuda", f"card {x.id // 2}", (9, 0)))
    a, b, c, d = jax.local_devices()
    assert dispatch.named_devices("encode", [3, 2]) == [d, c] and dispatch.work_devices(many=True) == [a, b]
    with pytest.raises(ValueError, match="encode: devices must be one or more different devices of one kind, got"):
        dispatch.named_devices("encode", [1, 2])


@several
@pytest.mark.parametrize("count", [1, 1000])
def test_committed_parameters_stay(count, folder, used, monkeypatch):
    monkeypatch.setattr(dispatch, "work_devices", lambda many: jax.local_devices())
    encoder = SentenceEncoder.from_pretrained(folder)
    leaves, structure = jax.tree.flatten(encoder.embedder)
    leaves[:count] = jax.device_put(leaves[:count], jax.devices()[2])
    encoder.embedder = jax.tree.unflatten(structure, leaves)
    encoder.encode(TEXTS[:40], batch_size=4)
    assert {*used} == {jax.devices()[2]}


@several
def test_parameters_are_copied_once(encoder, monkeypatch):
    copied, put = [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, device: copied.append(device) or put(x, device))
    for _ in range(2):
        encoder.encode(TEXTS, batch_size=8, devices=[0, 1])
        encoder._dealer.wait()
    assert copied == [jax.devices()[1]]
    before = encoder.encode(TEXTS, devices=[1])
    encoder.embedder = jax.tree.map(lambda x: 2 * x, encoder.embedder)
    assert np.abs(encoder.encode(TEXTS, devices=[1]) - before).max() > 1e-3
    assert copied == [jax.devices()[1]] * 2


@several
def test_numpy_parameters_changed_in_place_are_copied_again(encoder):
    bias = encoder.model.layers[0].out_bias
    bias.set_value(np.zeros(bias.shape, np.float32))
    before = encoder.encode(TEXTS[:3], devices=[1])
    bias.get_value()[...] = np.arange(bias.size)
    found, expected = (encoder.encode(TEXTS[:3], devices=devices) for devices in ([1], None))
    assert np.abs(found - before).max() > 0.01
    np.testing.assert_array_equal(found, expected)


@several
def test_parameters_may_be_on_another_device(folder, used, monkeypatch):
    first, *_, last = jax.devices()
    with jax.default_device(last):
        encoder = SentenceEncoder.from_pretrained(folder)
    copied, put = [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, device: copied.append(device) or put(x, device))
    for device in (last, first):
        encoder.encode(TEXTS[:9], devices=[device])
        assert {*used} == {device}
        used.clear()
    assert copied == [last, first]


@several
def test_shapes_are_compiled_once_for_each_device(encoder):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: name.endswith("backend_compile_duration") and compiled.append(name)
    )
    encoder.encode(TEXTS, batch_size=8)
    one = len(compiled)
    for _ in range(3):
        encoder.encode(TEXTS, batch_size=8, devices=[0, 1])
        encoder._dealer.wait()
    assert one < len(compiled) <= 2 * one + 2


def test_program_without_memory_is_compiled_again_later(encoder, monkeypatch):
    def fail(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory for the program")

    def count(*arguments):
        compiled.append(arguments)
        return real(*arguments)

    real, compiled, counts = programs.compile, [], []
    for compile_ in (fail, count, count):
        monkeypatch.setattr(programs, "compile", compile_)
        encoder.encode(TEXTS[:4])
        encoder._dealer.wait()
        counts.append(len(compiled))
    assert counts == [0, 1, 1]


@several
def test_first_device_computes_while_others_compile(encoder, used, monkeypatch):
    first = devices._compilers(is_first=True)
    monkeypatch.setattr(devices, "_compilers", lambda is_first: first if is_first else _Never)
    expected = encoder.encode(TEXTS, batch_size=8)
    np.testing.assert_array_equal(encoder.encode(TEXTS, batch_size=8, devices=[0, 1]), expected)
    assert {*used} == {jax.devices()[0]}


@several
def test_programs_of_other_devices_wait_for_the_first(encoder, monkeypatch):
    """XLA times algorithms when it first compiles a program on a GPU, and takes the same ones later."""
    held, threads, compile_program = Held(), [], jax.stages.Lowered.compile
    compilers = devices._compilers
    monkeypatch.setattr(devices, "_compilers", lambda is_first: held if is_first else compilers(is_first=False))
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda *x: threads.append(threading.current_thread()) or compile_program(*x)
    )
    encoder.max_seq_length, options = 16, {"batch_size": 1, "devices": [0, 1]}
    thread = threading.Thread(target=lambda: encoder.warmup(**options), daemon=True)
    thread.start()
    while len(encoder._dealer._programs) < 2:
        assert thread.is_alive()
        thread.join(0.01)
    thread.join(0.2)
    assert len(held.tasks) == 1 and threads == []
    held.release()
    thread.join()
    assert len(threads) == 2 and threads[0] is threading.current_thread()


class _Lowers:
    """A jitted function. `see` gets the number of the device before a program is lowered."""

    def __init__(self, function, see):
        self._function, self._see = function, see

    def lower(self, arrays, *others):
        (device,) = arrays[0].sharding.device_set
        self._see(device.id)
        return self._function.lower(arrays, *others)

    def __call__(self, *arguments):
        return self._function(*arguments)


@several
@pytest.mark.parametrize("precision", [None, "bfloat16"])
def test_threads_lower_the_programs_of_other_devices(encoder, monkeypatch, precision):
    """Lowering may take a second, in which the caller must go on. The caller's settings hold for all devices."""

    def see(device):
        threads.setdefault(device, set()).add(threading.current_thread())
        settings.add((jax.config.jax_default_matmul_precision, jax.config.jax_default_device))

    threads, settings, caller = {}, set(), threading.current_thread()
    expected = encoder.encode(TEXTS, batch_size=8)
    monkeypatch.setattr(encoder, "_embed", _Lowers(encoder._embed, see))
    # As if the first device were of another kind than JAX's default device, so that ops must be traced for it.
    monkeypatch.setattr(dispatch, "_describe", lambda device: dispatch.Device("cpu", f"kind {device.id > 0}", None))
    with contextlib.nullcontext() if precision is None else jax.default_matmul_precision(precision):
        for _ in range(3):
            np.testing.assert_array_equal(encoder.encode(TEXTS, batch_size=8, devices=[1, 2, 3]), expected)
            encoder._dealer.wait()
    assert settings == {(precision or jax.config.jax_default_matmul_precision, jax.devices()[1])}
    assert threads.keys() == {1, 2, 3} and threads[1] == {caller}
    assert all((caller in threads[other]) == (precision is not None) for other in (2, 3))


@several
@pytest.mark.parametrize("reason", ["settings", "settings meanwhile", "end"])
def test_programs_of_other_settings_are_not_used(encoder, monkeypatch, reason):
    """The caller may change the settings while a thread waits. At the end of the process, nothing new begins."""

    def see(device):
        seen.append(device)
        if device == 1 and reason == "settings meanwhile":
            jax.config.update("jax_default_matmul_precision", "bfloat16")

    seen, compiled, compile_program, before = [], [], programs.compile, jax.config.jax_default_matmul_precision
    expected = encoder.encode(TEXTS, batch_size=8)
    monkeypatch.setattr(encoder, "_embed", _Lowers(encoder._embed, see))
    monkeypatch.setattr(programs, "compile", lambda *x: compiled.append(x) or compile_program(*x))
    monkeypatch.setattr(devices, "_ENDS", threading.Event())
    try:
        with devices._LOWERING:
            np.testing.assert_array_equal(encoder.encode(TEXTS, batch_size=8, devices=[0, 1]), expected)
            if reason == "settings":
                jax.config.update("jax_default_matmul_precision", "bfloat16")
            if reason == "end":
                devices._ENDS.set()
        encoder._dealer.wait()
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    assert len(compiled) == seen.count(0) and ((1 in seen) == (reason == "settings meanwhile"))
    np.testing.assert_array_equal(encoder.encode(TEXTS, batch_size=8, devices=[0, 1]), expected)


@several
@pytest.mark.parametrize(("kind", "precision"), [(ValueError, None), (jax.errors.JaxRuntimeError, "bfloat16")])
def test_program_that_cannot_be_lowered_leaves_the_device_out(encoder, used, monkeypatch, caplog, kind, precision):
    """A thread lowers the program, or the caller if it has settings of its own. The error keeps no arrays."""

    def see(device):
        if device == 1:
            raise kind("this device has no program") from KeyError("cause")

    expected = encoder.encode(TEXTS, batch_size=8)
    monkeypatch.setattr(encoder, "_embed", _Lowers(encoder._embed, see))
    with contextlib.nullcontext() if precision is None else jax.default_matmul_precision(precision):
        np.testing.assert_array_equal(encoder.encode(TEXTS, batch_size=8, devices=[0, 1]), expected)
    encoder._dealer.wait()
    latest = time.monotonic() + 20
    while "computed on the device cpu:1: this device has no program" not in caplog.text.lower():
        assert time.monotonic() < latest
        time.sleep(0.01)
    assert {*used} == {jax.devices()[0]}
    copies = [*map(weakref.ref, encoder._bundled._copies[jax.devices()[1]][1])]
    encoder._bundled.on(jax.devices()[1], [np.zeros(1)])  # in place of the copies
    gc.collect()
    assert copies and not any(copy() is not None for copy in copies)


@several
def test_copies_are_freed_while_a_program_waits(encoder):
    with devices._LOWERING:
        encoder.encode(TEXTS, batch_size=8, devices=[0, 1])
        copies = [*map(weakref.ref, encoder._bundled._copies[jax.devices()[1]][1])]
        encoder._bundled.on(jax.devices()[1], [np.zeros(1)])  # in place of the copies
        gc.collect()
        assert copies and not any(copy() is not None for copy in copies)
    encoder._dealer.wait()


class _Never:
    """An executor whose tasks never end."""

    @staticmethod
    def submit(function):
        return devices.Future()


@several
@pytest.mark.parametrize("most", [4, 0])
def test_memory_runs_out_on_one_device(encoder, used, monkeypatch, caplog, most):
    expected, embed = encoder.encode(TEXTS, batch_size=8), encoder._embed
    encoder.encode(TEXTS, batch_size=8, devices=[0, 1])
    encoder._dealer.wait()

    def small(arrays, ids, *others):
        if arrays[0].devices() == {jax.devices()[1]} and len(ids) > most:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return embed(arrays, ids, *others)

    monkeypatch.setattr(encoder, "_embed", small)
    monkeypatch.setattr(devices.Dealer, "lanes", _ready(devices.Dealer.lanes))
    found = encoder.encode(TEXTS, batch_size=8, devices=[0, 1])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert "the device cpu:1 has too little memory for batches of 256 tokens; going on with 128" in caplog.text.lower()
    assert caplog.text.count("going on without it") == (most == 0)  # once: the device gets no further batch
    batcher = encoder._texts(None).batcher
    assert jax.devices()[0] not in batcher._largest
    caplog.clear()
    used.clear()
    encoder.encode(TEXTS, batch_size=8, devices=[0])
    assert not caplog.text


def _ready(lanes):
    """Makes every lane ready."""

    def made(*args, **options):
        found = lanes(*args, **options)
        for lane in found:
            lane.is_ready = lambda _: True
        return found

    return made


@several
@pytest.mark.parametrize(("kind", "options"), [
    ("Explicit", {}), ("Explicit", {"model_axis": "model"}), ("Auto", {"fsdp": True}),
])  # fmt: skip
def test_models_on_a_mesh_compute_on_chosen_devices(kind, options, encoder):
    expected = encoder.encode(TEXTS[:3])
    axis = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh((2, 2), ("data", "model"), (axis, axis))
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), partition_specs(encoder.model, **options))
    nnx.update(encoder.model, jax.device_put(nnx.state(encoder.model), shardings))
    for chosen in (None, [3]):
        np.testing.assert_allclose(encoder.encode(TEXTS[:3], devices=chosen), expected, rtol=0, atol=1e-6)


@several
def test_copies_that_do_not_fit_leave_the_device_out(encoder, used, monkeypatch, caplog):
    def put(x, device):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    expected = encoder.encode(TEXTS, batch_size=8)
    monkeypatch.setattr(jax, "device_put", put)
    np.testing.assert_array_equal(encoder.encode(TEXTS, batch_size=8, devices=[0, 1]), expected)
    assert {*used} == {jax.devices()[0]} and "are not computed on the device" in caplog.text
