"""`autotune`: what it tries, takes, stores and finds again, on a CPU with made-up times."""

import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from cases import slow, slow_cases
from jaxft import dispatch
from jaxft.kernels.triton import dense
from jaxft.kernels.triton import softmax as softmax_kernel
from jaxft.tuning import cache as tuning_cache
from jaxft.tuning import dense as tuning_dense
from jaxft.tuning import profiler as tuning_profiler
from jaxft.tuning import rows as tuning_rows
from jaxft.tuning import search as tuning_search
from jaxft.tuning import table as tuning_table
from jaxft.tuning.table import AttentionConfig, RowConfig
from test_tuning import OPS

DEVICE = dispatch.device()
KIND = DEVICE.kind
SOFTMAX = functools.partial(jaxft.softmax, implementation="triton")
KEY = "rows=8,width=32,itemsize=4"
PRESENT = tuning_rows.softmax(6, 24, 4, DEVICE)
FAST, SLOW = RowConfig(2, 32, 2), RowConfig(1, 32, 1)
X = jnp.arange(6 * 24, dtype=jnp.float32).reshape(6, 24) % 7


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, request):
    """The user's cache folder, which this process has forgotten afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning_cache._warned.clear()
    tuning_cache.load.cache_clear()
    yield tmp_path / "jaxft"
    tuning_cache.load.cache_clear()
    if "machine" in request.fixturenames:
        jax.clear_caches()


@pytest.fixture
def machine(monkeypatch):
    """A device that takes these times with these configurations, the candidates, and 100 us with others."""

    def use(times, seen=None):
        def sample(program):
            if seen is not None:
                seen.append(program.config)
            return times.get(program.config, 100.0)

        def candidates(op, present, device, **sizes):
            return [c for c in times if c != present and type(c) is type(present)]

        monkeypatch.setattr(tuning_search, "_device", lambda: DEVICE)
        monkeypatch.setattr(tuning_search, "candidates", candidates)
        monkeypatch.setattr(tuning_search, "_sampler", lambda present, sets: sample)

    return use


def entries():
    file = tuning_cache.path(KIND)
    return json.loads(file.read_text()) if file.is_file() else {}


def warned(caplog):
    """Returns the log, except for the line about interpret mode that any test may be the first to cause."""
    return [message for message in caplog.messages if "interpret mode" not in message]


def write(text):
    file = tuning_cache.path(KIND)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    tuning_cache.load.cache_clear()


# --- The search ----------------------------------------------------------------------------------------------------


def test_the_fastest_config_is_stored_and_found(machine):
    machine({SLOW: 120.0, FAST: 50.0, RowConfig(4, 32, 1): 60.0})
    wanted = SOFTMAX(X)
    (found,) = tuning_search.autotune(SOFTMAX, X)
    assert found == tuning_search.Tuned("softmax", KEY, PRESENT, FAST, 100.0, 50.0)
    assert entries() == {"softmax": {KEY: dataclasses.asdict(FAST)}}
    assert tuning_rows.softmax(6, 24, 4, DEVICE) == FAST
    assert tuning_rows.softmax(5, 30, 4, DEVICE) == FAST  # the same powers of two
    assert tuning_rows.softmax(9, 24, 4, DEVICE) != FAST
    np.testing.assert_allclose(SOFTMAX(X), wanted, rtol=1e-6)
    code = "from jaxft import dispatch; from jaxft.tuning import rows; print(rows.softmax(6, 24, 4, dispatch.device()))"
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert fresh.stdout.strip() == str(FAST)


def kernels(fn, *args):
    return str(jax.make_jaxpr(fn)(*args))


@pytest.mark.parametrize(
    "wrap", [jax.jit, lambda f: jax.jit(lambda x: jax.lax.scan(lambda c, y: (c, f(y)), 0, x[None]))]
)
def test_jitted_functions_are_traced_again(wrap, machine):
    """JAX has traced them already. Neither the search nor later calls may use that trace."""
    fn, seen = wrap(SOFTMAX), []
    jax.block_until_ready(fn(X))
    assert "num_warps=4" in kernels(fn, X)
    machine({FAST: 50.0}, seen)
    (found,) = tuning_search.autotune(fn, X)
    assert found.after == FAST and set(seen) == {PRESENT, FAST}
    assert "num_warps=2" in kernels(fn, X)


def test_jitted_ops_look_up_configs_again(machine):
    x = jnp.ones((5, 33))
    fast = tuning_table.PermuteConfig(16, 256, 1)
    machine({fast: 10.0})
    fn = functools.partial(jaxft.permute, axes=(1, 0), implementation="triton")
    jax.block_until_ready(fn(x))
    (found,) = tuning_search.autotune(fn, x)
    assert (found.op, found.after) == ("permute", fast)
    assert "num_warps=1" in kernels(fn, x)


def test_a_table_stores_what_is_taken(machine, tmp_path):
    """In the given file alone, beside what it holds."""
    machine({FAST: 50.0})
    table = tmp_path / "somewhere" / "table.json"
    table.parent.mkdir()
    table.write_text(json.dumps({"softmax": {"other": {"num_warps": 1}}}))
    (found,) = tuning_search.autotune(SOFTMAX, X, table=table)
    assert found.after == FAST and entries() == {}
    stored = json.loads(table.read_text())
    assert stored == {"softmax": {"other": {"num_warps": 1}, KEY: dataclasses.asdict(FAST)}}
    assert tuning_rows.softmax(6, 24, 4, DEVICE) == PRESENT  # another table is not read
    (again,) = tuning_search.autotune(SOFTMAX, X, table=str(tmp_path / "new" / "table.json"))
    assert (again.before, again.after) == (PRESENT, FAST)


def test_a_table_that_cannot_be_written(machine, tmp_path):
    machine({FAST: 50.0})
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="autotune: cannot read and write .*file/table.json .*; name another table"):
        tuning_search.autotune(SOFTMAX, X, table=tmp_path / "file" / "table.json")


@pytest.mark.parametrize(("us", "taken"), [(98.5, False), (97.0, True)])
def test_a_gain_below_the_margin_is_ignored(us, taken, machine):
    machine({FAST: us})
    (found,) = tuning_search.autotune(SOFTMAX, X)
    assert (found.after == FAST) == taken
    assert bool(entries()) == taken
    if not taken:
        assert found.after == found.before and found.us_after == found.us_before == 100.0


def test_noise_is_no_gain():
    """The same kernel, timed with 5 % of noise and a drift, in a hundred searches."""
    rng = np.random.default_rng(0)
    taken = 0
    for _ in range(100):
        clock = iter(np.linspace(90, 130, 10_000))
        programs = [tuning_search.Program(i, None) for i in range(10)]
        chosen, _, _ = tuning_search._race(programs, lambda p: next(clock) * rng.normal(1.0, 0.05))  # noqa: B023
        taken += chosen.config != 0
    assert taken <= 5


def test_untimed_configs_are_not_taken():
    programs = [tuning_search.Program(i, None) for i in range(3)]
    times = {0: 10.0, 1: float("nan"), 2: 8.0}
    assert tuning_search._race(programs, lambda p: times[p.config])[0].config == 2
    assert tuning_search._race(programs, lambda p: float("nan"))[0].config == 0


def test_only_kernels_that_run_are_tuned(machine):
    """softmax looks up its gradient's config too. dense and attention look up kernels that they do not launch."""
    machine({FAST: 50.0})
    assert [t.op for t in tuning_search.autotune(SOFTMAX, X)] == ["softmax"]
    gradient = jax.grad(lambda x: jnp.sum(SOFTMAX(x) ** 2))
    assert {t.op for t in tuning_search.autotune(gradient, X)} == {"softmax", "softmax_backward"}


def test_attention_tunes_gradient_kernels_its_configs_need(machine):
    """One kernel suffices if a block holds all keys. Once none does, the kernel for queries is tuned as well."""
    small = AttentionConfig(16, 16, 2, 1)
    machine({small: 50.0})
    qkv = jax.random.normal(jax.random.key(0), (1, 32, 3, 1, 16))
    loss = jax.grad(lambda qkv: jnp.sum(jaxft.qkv_attention(qkv, implementation="triton") ** 2))
    assert "attention_dqkv" in kernels(loss, qkv)
    found = {t.op: t.after for t in tuning_search.autotune(loss, qkv)}
    assert found == dict.fromkeys(("attention", "attention_dq", "attention_dkv"), small)
    assert "attention_dqkv" not in kernels(loss, qkv)


def test_a_new_implementation_is_tuned_too(machine):
    """XLA's matmul has no config. Triton's matmul is tuned in the same call once it is the choice."""
    sizes, kernel = (6, 24, 24), jnp.eye(24)

    def fn(x):
        if tuning_dense.dense_implementation(*sizes, None, 4, DEVICE) == "xla":
            return x @ kernel
        config = tuning_dense.dense(*sizes, 4, DEVICE)
        options = {"activation": None, "precision": "float32", "config": config, "interpret": True}
        return dense.forward(x, kernel, None, None, **options)[0]

    fast = tuning_dense.DenseConfig(16, 16, 16, 2, 1)
    machine({tuning_dense.DenseChoice("triton"): 80.0, fast: 50.0})
    chosen, product = tuning_search.autotune(fn, X)
    assert (chosen.op, chosen.before.implementation, chosen.after.implementation) == (
        "dense_implementation", "xla", "triton",
    )  # fmt: skip
    assert (product.op, product.after) == ("dense", fast)
    assert {op: [*table.values()] for op, table in entries().items()} == {
        "dense_implementation": [{"implementation": "triton"}], "dense": [dataclasses.asdict(fast)],
    }  # fmt: skip


def split_dense(x):
    kernel = jnp.tile(x, (100, 1)).astype(jnp.bfloat16)
    return jaxft.dense_residual_layer_norm(kernel.T[:6], kernel, None, kernel[:6], None, None, implementation="triton")


def embedded(table):
    return jaxft.embeddings_layer_norm(jnp.ones((2, 3), jnp.int32), table, table, implementation="triton")


@pytest.mark.parametrize(("fn", "variant"), [(split_dense, "sums"), (embedded, "embeddings")])
def test_kernel_variants_have_entries_of_their_own(fn, variant, machine):
    present = tuning_rows.layer_norm(6, 24, 4, DEVICE)
    machine({FAST: 50.0})
    found = {t.op: t for t in tuning_search.autotune(fn, X)}["layer_norm"]
    assert (found.key, found.before, found.after) == (f"{KEY},{variant}", present, FAST)
    assert tuning_rows.layer_norm(6, 24, 4, DEVICE, variant) == FAST
    assert tuning_rows.layer_norm(6, 24, 4, DEVICE) == present
    (other,) = tuning_search.autotune(functools.partial(jaxft.layer_norm, implementation="triton"), X)
    assert (other.key, other.before) == (KEY, present)


def change_results(monkeypatch, change):
    """Changes the results of the kernel with the config FAST."""
    forward = softmax_kernel.forward

    def changed(x, *args, config, **options):
        (y,) = forward(x, *args, config=config, **options)
        return [change(y) if config == FAST else y]

    monkeypatch.setattr(softmax_kernel, "forward", changed)


def unknown_call(y):
    return jax.ffi.ffi_call("there_is_no_such_function", jax.ShapeDtypeStruct(y.shape, y.dtype))(y)


@pytest.mark.parametrize("change", [lambda y: 1 / 0, unknown_call], ids=["trace", "compile"])
def test_a_config_that_does_not_compile_is_left_out(change, machine, monkeypatch, caplog):
    change_results(monkeypatch, change)
    seen = []
    machine({FAST: 1.0, SLOW: 50.0}, seen)
    (found,) = tuning_search.autotune(lambda x: SOFTMAX(x) + x, X)
    assert found.after == SLOW and FAST not in seen
    assert warned(caplog) == []


@pytest.mark.parametrize("change", [lambda y: y.at[0, 0].add(0.1), lambda y: y.at[2, 3].set(jnp.nan)])
def test_a_wrong_result_is_left_out_with_a_warning(change, machine, monkeypatch, caplog):
    change_results(monkeypatch, change)
    machine({FAST: 1.0, SLOW: 60.0})
    (found,) = tuning_search.autotune(SOFTMAX, X)
    assert found.after == SLOW
    (message,) = warned(caplog)
    assert str(FAST) in message and "softmax" in message


def in_products(precision):
    return lambda x: jnp.matmul(SOFTMAX(x), jnp.eye(24, dtype=x.dtype), precision=precision)


@pytest.mark.parametrize(
    ("fn", "dtype", "error", "taken"),
    [(SOFTMAX, "float32", 2.0**-18, True), (SOFTMAX, "float32", 2.0**-14, False), (SOFTMAX, "bfloat16", 2.0**-6, True),
     (in_products("highest"), "float32", 2.0**-14, False), (in_products("default"), "float32", 2.0**-8, True),
     *slow_cases(
         (in_products("highest"), "float32", 2.0**-18, True), (in_products("default"), "float32", 2.0**-4, False),
         (lambda x: SOFTMAX(x.astype("bfloat16")).astype("float32"), "float32", 2.0**-7, True),
     )],
)  # fmt: skip
def test_rounding_is_accepted(fn, dtype, error, taken, machine, monkeypatch):
    """The unit is float32's, TF32's in matmuls by default, and a 16-bit dtype's if there is one."""
    change_results(monkeypatch, lambda y: (y * (1 + error)).astype(y.dtype))
    machine({FAST: 1.0})
    x = X.at[1].set(jnp.nan).astype(dtype)  # NaN where the present one has NaN, too
    assert (tuning_search.autotune(fn, x)[0].after == FAST) == taken


def test_precision_of_a_kernel():
    loss = jax.grad(lambda qkv: jnp.sum(jaxft.qkv_attention(qkv, implementation="triton")))
    for precision, coarse in (("highest", False), (None, True)):
        with jax.default_matmul_precision(precision):
            assert tuning_search._is_coarse(jax.make_jaxpr(loss)(jnp.ones((1, 8, 3, 1, 16))).jaxpr) == coarse


def test_an_interrupt_keeps_what_was_found(machine):
    machine({FAST: 50.0})
    race, races = tuning_search._race, []

    def interrupted(*args):
        races.append(args)
        if len(races) > 1:
            raise KeyboardInterrupt
        return race(*args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tuning_search, "_race", interrupted)
        tuning_search.autotune(jax.grad(lambda x: jnp.sum(SOFTMAX(x) ** 2)), X)
    assert list(entries()) == ["softmax_backward"]
    assert tuning_rows.softmax_backward(6, 24, 4, DEVICE) == FAST and tuning_rows.softmax(6, 24, 4, DEVICE) == PRESENT


@pytest.mark.parametrize("show", [None, True])
def test_progress_needs_no_stderr(machine, monkeypatch, show):
    machine({FAST: 50.0, SLOW: 100.0})
    monkeypatch.setattr(sys, "stderr", None)
    tuning_search.autotune(SOFTMAX, X, show_progress_bar=show)


def test_progress(machine, capsys):
    machine({FAST: 50.0, SLOW: 100.0})
    tuning_search.autotune(SOFTMAX, X, show_progress_bar=True)
    assert "4/4" in capsys.readouterr().err  # of both kernels, the one that does not run included
    tuning_search.autotune(SOFTMAX, X)
    assert capsys.readouterr().err == ""


# --- Timers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", [tuning_profiler.queued_us, tuning_profiler.device_us])
def test_timers(measure):
    us = measure(functools.partial(jax.jit(lambda x: x + 1).lower(X).compile(), X), 3)
    assert us > 0 or (measure is tuning_profiler.device_us and jax.default_backend() == "cpu" and np.isnan(us))


def test_a_running_profiler_leaves_no_kernel_times(tmp_path):
    with jax.profiler.trace(tmp_path):
        assert np.isnan(tuning_search._device_us(lambda: jnp.sin(X), 3))


def test_variants_take_turns_in_both_orders():
    order = []
    times = tuning_profiler.turns("abc", 3, lambda variant: order.append(variant) or len(order))
    assert "".join(order) == "abccbaabc"
    np.testing.assert_array_equal(times, [[1, 2, 3], [6, 5, 4], [7, 8, 9]])


@pytest.mark.slow
def test_calls_take_turns_with_copies_of_the_arguments(monkeypatch):
    """The timer of all programs goes through the copies, and each search sees the copies that it asked for."""
    seen = []
    sample = tuning_search._sampler(lambda x: seen.append(x) or jnp.zeros(2**28), [("a",), ("b",), ("c",)])
    first = len(seen)
    sample(tuning_search.Program("config", lambda x: seen.append(x)))
    assert "".join(seen) == ("abc" * 9)[: len(seen)] and len(seen) > first

    def sampler(present, sets):
        found.extend(x for (x,) in sets)
        return lambda program: 1.0

    found = []
    monkeypatch.setattr(tuning_search, "_device", lambda: DEVICE)
    monkeypatch.setattr(tuning_search, "_sampler", sampler)
    tuning_search.autotune(SOFTMAX, X, copies=3)
    assert len(found) == 3 and len({x.unsafe_buffer_pointer() for x in found}) == 3
    assert all((x == X).all() for x in found)


def test_time_of_kernels_that_overlap():
    """A kernel that waits for another on the GPU is not counted twice."""
    spans = {"first": (0.0, 3.0), "waits": (2.0, 5.0), "within": (2.5, 4.0), "later": (7.0, 8.0)}
    assert tuning_profiler.busy_us(tuning_profiler.Kernel(name, *span) for name, span in spans.items()) == 6.0


# --- Errors --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="it has a GPU")
def test_autotune_needs_a_gpu():
    with pytest.raises(RuntimeError, match="autotune: it needs an NVIDIA GPU .* this is cpu"):
        tuning_search.autotune(SOFTMAX, X)


@pytest.mark.parametrize("copies", [0, -1, 1.0, True, None])
def test_copies_are_a_positive_integer(copies):
    with pytest.raises(ValueError, match="autotune: copies must be a positive integer"):
        tuning_search.autotune(SOFTMAX, X, copies=copies)


def test_autotune_takes_arrays():
    with pytest.raises(TypeError, match=r"autotune: args\[1\] must be arrays or trees of them, got 'gelu'; bind"):
        tuning_search.autotune(SOFTMAX, [X], "gelu")


@pytest.mark.parametrize(
    "fn", [lambda x: x + 1, lambda x: jaxft.dense(x, x.T, implementation="xla")], ids=["no op", "a config, not used"]
)
def test_autotune_needs_a_kernel(fn, machine):
    machine({FAST: 50.0, SLOW: 60.0})
    with pytest.raises(ValueError, match="autotune: fn runs no kernel of jaxft"):
        tuning_search.autotune(fn, X)


def test_an_unwritable_folder_is_reported(machine, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    machine({FAST: 50.0})
    called = []
    with pytest.raises(OSError, match="autotune: cannot read and write .*file/jaxft.* XDG_CACHE_HOME"):
        tuning_search.autotune(called.append, X)
    assert called == []
    assert SOFTMAX(X).shape == X.shape  # and there is nothing to read


def test_no_home_directory(machine, monkeypatch):
    """A user without a name, as in a container. There is nothing to read and nowhere to write."""
    monkeypatch.delenv("XDG_CACHE_HOME")

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    machine({FAST: 50.0})
    tuning_cache.load.cache_clear()
    assert SOFTMAX(X).shape == X.shape
    with pytest.raises(FileNotFoundError, match="home directory. Set XDG_CACHE_HOME to a folder"):
        tuning_search.autotune(SOFTMAX, X)


# --- The store -----------------------------------------------------------------------------------------------------


def test_the_file_is_named_by_device_and_versions(cache, monkeypatch):
    monkeypatch.setattr(jax, "__version__", "1.2.3")
    monkeypatch.setattr(tuning_cache, "__version__", "4.5.6")
    assert tuning_cache.path("NVIDIA RTX/A 6000") == cache / "NVIDIA_RTX_A_6000-jax_1.2.3-jaxft_4.5.6.json"
    for folder in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        assert tuning_cache.path("x").parent == Path.home() / ".cache" / "jaxft"


def test_entries_of_other_versions_and_devices_are_ignored(machine, monkeypatch):
    machine({FAST: 50.0})
    tuning_search.autotune(SOFTMAX, X)
    assert tuning_rows.softmax(6, 24, 4, DEVICE._replace(kind="another")) == PRESENT
    monkeypatch.setattr(jax, "__version__", "1.2.3")
    tuning_cache.load.cache_clear()
    assert tuning_rows.softmax(6, 24, 4, DEVICE) == PRESENT


def test_the_users_entry_comes_before_jaxfts(monkeypatch):
    monkeypatch.setattr(tuning_table, "_table", lambda kind: {"softmax": {KEY: {"num_warps": 16}}})
    assert tuning_rows.softmax(6, 24, 4, DEVICE).num_warps == 16
    tuning_cache.check_writable(tuning_cache.path(KIND))
    tuning_cache.save(tuning_cache.path(KIND), "softmax", KEY, FAST)
    assert tuning_rows.softmax(6, 24, 4, DEVICE) == FAST


def test_matmul_entries_with_rounded_sizes_are_ignored(caplog):
    """jaxft stored such entries before it kept exact depths and widths."""
    present, stored = tuning_dense.dense(6, 768, 3072, 2, DEVICE), tuning_dense.DenseConfig(16, 16, 16, 2, 1)
    write(json.dumps({"dense": {"rows=8,depth=1024,width=4096,itemsize=2": dataclasses.asdict(stored)}}))
    assert tuning_dense.dense(6, 768, 3072, 2, DEVICE) == present != stored
    assert warned(caplog) == []


SOUND = dataclasses.asdict(FAST)
DAMAGED = {
    "empty": "",
    "cut off": '{"softmax": {"rows',
    "binary": b"\xff\xfe\x00",
    "deep": "[" * 100_000,
    "a list": "[]",
    "ops that are no tables": '{"softmax": 3}',
    "entries that are no tables": json.dumps({"softmax": {KEY: [1, 2]}}),
    **{
        name: json.dumps({"softmax": {KEY: entry}})
        for name, entry in {
            "a field too many": SOUND | {"colour": 1},
            "a field too few": {"block_rows": 1},
            "a word": SOUND | {"num_warps": "4"},
            "a float": SOUND | {"num_warps": 4.0},
            "a truth": SOUND | {"num_warps": True},
            "nothing": SOUND | {"num_warps": None},
            "zero": SOUND | {"block_rows": 0},
            "negative": SOUND | {"block_rows": -2},
            "no power of two": SOUND | {"block_width": 48},
            "too many warps": SOUND | {"num_warps": 64},
            "huge": SOUND | {"block_rows": 2**40},
            "a huge tile": SOUND | {"block_rows": 2**12, "block_width": 2**12},
        }.items()
    },
}


def test_sound_entries_stay_when_one_is_added(machine, caplog, monkeypatch):
    machine({FAST: 50.0})
    write(json.dumps({"softmax": {"other": SOUND}, "layer_norm": []}))
    tuning_search.autotune(SOFTMAX, X)
    assert entries()["softmax"] == {"other": SOUND, KEY: SOUND}
    file = tuning_cache.path(KIND)
    assert file.stat().st_mode & 0o777 == 0o666 & ~(umask := os.umask(0)) and os.umask(umask) == 0

    def fails(*_, **__):
        raise OSError("input/output error")

    before = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", fails)
        with pytest.raises(OSError, match="input/output error"):
            tuning_cache.save(tuning_cache.path(KIND), "softmax", "third", FAST)
        with pytest.raises(OSError, match="autotune: cannot read and write .*input/output error"):  # before it searches
            tuning_search.autotune(SOFTMAX, X)
    assert file.read_bytes() == before and [*file.parent.iterdir()] == [file]


def test_a_damaged_file_is_kept_aside(machine):
    machine({FAST: 50.0})
    write("{")
    tuning_search.autotune(SOFTMAX, X)
    assert tuning_cache.path(KIND).with_suffix(".damaged").read_text() == "{"


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_ignored_with_one_warning(text, caplog):
    write(text)
    for _ in range(3):
        assert tuning_rows.softmax(6, 24, 4, DEVICE) == PRESENT
        tuning_cache.load.cache_clear()
    (message,) = warned(caplog)
    assert str(tuning_cache.path(KIND)) in message


SOME = ("cut off", "entries that are no tables", "huge")


@pytest.mark.parametrize("name", [*SOME, *slow(*(name for name in DAMAGED if name not in SOME))])
def test_a_damaged_file_gives_way_to_a_sound_one(name, machine):
    write(DAMAGED[name])
    machine({FAST: 50.0})
    tuning_search.autotune(SOFTMAX, X)
    assert tuning_rows.softmax(6, 24, 4, DEVICE) == FAST and entries()["softmax"][KEY] == SOUND


def test_a_folder_in_place_of_the_file(caplog):
    tuning_cache.path(KIND).mkdir(parents=True)
    assert tuning_rows.softmax(6, 24, 4, DEVICE) == PRESENT
    assert len(warned(caplog)) == 1


@pytest.mark.parametrize(
    ("op", "change"),
    [("attention", {"block_q": 8}), ("dense", {"block_n": 8}), ("dense", {"num_stages": 99}),
     ("permute", {"elements": 16}), ("layer_norm_backward", {"programs": 0}), ("layer_norm", {"block_rows": 2**16}),
     *(("dense_mosaic", change) for change in (
         {"split": "x"}, {"split": []}, {"tile_n": 100}, {"tile_k": 128}, {"cluster_m": 3}, {"stages": 1},
         {"tile_m": 256, "tile_n": 256}, {"cluster_m": 2, "programs": 1}))],
)  # fmt: skip
def test_entries_no_kernel_can_run_are_ignored(op, change, caplog):
    config, names = OPS[op]
    default = {
        RowConfig: RowConfig(1, 32, 1),
        tuning_table.GradientConfig: tuning_table.GradientConfig(1, 32, 8, 1),
        tuning_table.PermuteConfig: tuning_table.PermuteConfig(32, 1024, 4),
        AttentionConfig: AttentionConfig(64, 64, 4, 2),
        tuning_dense.DenseConfig: tuning_dense.DenseConfig(64, 64, 64, 4, 2),
        tuning_dense.MosaicDenseConfig: tuning_dense.MosaicDenseConfig(64, 192, programs=132),
    }[config]
    name = tuning_table.key(**dict.fromkeys(names, 1))
    for entry, found in ((dataclasses.asdict(default), default), (dataclasses.asdict(default) | change, None)):
        write(json.dumps({op: {name: entry}}))
        assert tuning_cache.restore(KIND, op, name, default) == found
    assert len(warned(caplog)) == 1


@pytest.mark.parametrize("itemsize", [2, 4])
def test_an_entry_of_a_mosaic_matmul_gets_the_stages_that_fit(itemsize, caplog):
    """227 KiB hold them beside four pieces of 64 x 64 results, with a residual beside eight."""
    card = DEVICE._replace(compute_capability=(9, 0), shared_memory=227 * 1024)
    sizes = {"rows": 512, "depth": 768, "width": 768, "activation": 1, "itemsize": itemsize}
    for split, block, fit in (("none", 192 + 128, {2: 4, 4: 4}), ("m", 384 + 128, {2: 3, 4: 2})):
        stored = tuning_dense.MosaicDenseConfig(192, 128, 128 // itemsize, 16, split, programs=132)
        assert 2 * block * 128 < 227 * 1024 < 16 * block * 128
        names = [tuning_table.key(variant, **sizes) for variant in ("", "residual")]
        write(json.dumps({"dense_mosaic": dict.fromkeys(names, dataclasses.asdict(stored))}))
        config = tuning_dense.dense_mosaic(512, 768, 768, None, itemsize, card)
        assert config == dataclasses.replace(stored, stages=fit[itemsize])
        with_residual = tuning_dense.dense_mosaic(512, 768, 768, None, itemsize, card, residual=True)
        assert with_residual.stages >= 2  # an entry is not taken if not even two fit
        sizes_of_gradient = {name: size for name, size in sizes.items() if name != "activation"}
        entry = {tuning_table.key(**sizes_of_gradient): dataclasses.asdict(stored)}
        write(json.dumps({"dense_mosaic_gradient": entry}))
        gradient = tuning_dense.dense_mosaic_gradient(512, 768, 768, itemsize, card)
        fitting = tuning_dense.with_room(stored, itemsize, 7, card)
        assert (gradient == fitting) == (fitting.stages > 1) and 2 <= gradient.stages < 16
    assert warned(caplog) == []


def test_processes_that_save_at_once_lose_nothing():
    """Two processes, and a reader that always finds a sound file with no fewer entries than before."""
    tuning_cache.check_writable(tuning_cache.path(KIND))
    code = f"""if True:
        import sys
        from jaxft.tuning import cache, table
        for i in range(40):
            cache.save(cache.path({KIND!r}), "softmax", f"{{sys.argv[1]}}/{{i}}", table.RowConfig(1, 32, 1))"""
    found = 0
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(subprocess.Popen([sys.executable, "-c", code, str(n)])) for n in range(2)]
        while any(process.poll() is None for process in running):
            now = len(entries().get("softmax", {}))
            assert now >= found
            found = now
    assert [process.returncode for process in running] == [0] * 2
    assert len(entries()["softmax"]) == 80
    assert os.listdir(tuning_cache.path(KIND).parent) == [tuning_cache.path(KIND).name]


def test_a_failed_write_leaves_the_file(cache, monkeypatch):
    tuning_cache.check_writable(tuning_cache.path(KIND))
    tuning_cache.save(tuning_cache.path(KIND), "softmax", KEY, FAST)
    before = tuning_cache.path(KIND).read_bytes()

    def full(*args, **options):
        raise OSError("no space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(OSError, match="no space"):
        tuning_cache.save(tuning_cache.path(KIND), "softmax", KEY, SLOW)
    assert tuning_cache.path(KIND).read_bytes() == before
    assert len(list(cache.iterdir())) == 1
