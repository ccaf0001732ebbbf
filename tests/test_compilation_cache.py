"""`use_compilation_cache`: what is kept, which folders are refused, and what damage does."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path

import jax
import jax.monitoring
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache

import jaxft
import tiny
from jaxft import cli, compilation_cache

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = (
    "jax_compilation_cache_dir", "jax_compilation_cache_max_size", "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes", "jax_persistent_cache_enable_xla_caches",
)  # fmt: skip


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """Restores JAX's settings, which hold for the whole process."""
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    monkeypatch.delenv(compilation_cache.VARIABLE)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "programs"


def compiled():
    """Compiles a program, the same each time, and checks its result. Returns whether it was found in the cache."""
    found = []
    jax.monitoring.register_event_listener(listen := lambda event, **_: found.append(event))
    try:
        x = np.arange(5, dtype=np.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            np.testing.assert_array_equal(jax.jit(lambda x: x * 2 + 1)(x), x * 2 + 1)
    finally:
        jax.monitoring.unregister_event_listener(listen)
    return "/jax/compilation_cache/cache_hits" in found


def programs(folder):
    return [file for file in folder.iterdir() if file.name.endswith("-cache")]


def test_programs_are_kept(folder):
    assert jaxft.use_compilation_cache(folder) == folder
    assert not compiled()
    jaxft.use_compilation_cache(str(folder))
    assert compiled()


def test_programs_are_kept_in_the_latest_folder(folder):
    for name in ("a", "b"):
        jaxft.use_compilation_cache(folder / name)
        assert not compiled() and len(programs(folder / name)) == 1


def test_new_folder_is_for_its_owner_alone(folder):
    jaxft.use_compilation_cache(folder / "new")
    assert (folder / "new").stat().st_mode & 0o777 == 0o700


def test_default_folder_is_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jaxft.use_compilation_cache().is_relative_to(tmp_path if sys.platform == "linux" else Path.home())
    assert not compiled()
    assert not [name for name in os.listdir(tmp_path) if name != "jaxft"]


@pytest.mark.parametrize("named", ["{}", "~/programs"])
def test_variable_names_the_folder(tmp_path, monkeypatch, named):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(compilation_cache.VARIABLE, named.format(tmp_path / "programs"))
    assert jaxft.use_compilation_cache() == tmp_path / "programs"
    assert jaxft.use_compilation_cache(tmp_path / "other") == tmp_path / "other"


def test_variable_turns_the_cache_off(monkeypatch):
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    monkeypatch.setenv(compilation_cache.VARIABLE, "off")
    assert jaxft.use_compilation_cache() is None
    assert {name: getattr(jax.config, name) for name in OPTIONS} == before


def test_folder_may_have_the_name_off(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert jaxft.use_compilation_cache("off") == tmp_path / "off"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no modes")
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777, 0o750, 0o701])
def test_folder_that_others_can_enter_is_refused(folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(PermissionError, match=f"{folder}: other users can enter it"):
        jaxft.use_compilation_cache(folder)
    assert jax.config.jax_compilation_cache_dir != str(folder)
    folder.chmod(0o700)
    jaxft.use_compilation_cache(folder)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no modes")
@pytest.mark.parametrize("link", [False, True])
def test_folder_that_others_can_replace_is_refused(tmp_path, link):
    (parent := tmp_path / "parent").mkdir()
    (given := parent / "programs").mkdir(mode=0o700)
    if link:
        (given := tmp_path / "link").symlink_to(parent / "programs")
    parent.chmod(0o777)
    with pytest.raises(PermissionError, match=f"{given}: other users can write to {parent} .mode 0777.; `chmod go-w"):
        jaxft.use_compilation_cache(given)
    parent.chmod(0o1777)  # as /tmp: only an owner can replace a folder
    jaxft.use_compilation_cache(given)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no user ids")
@pytest.mark.parametrize("link", [False, True])
def test_folder_of_another_user_is_refused(folder, monkeypatch, link):
    folder.mkdir(mode=0o700)
    if link:
        (given := folder.with_name("link")).symlink_to(folder)
    else:
        given = folder
    jaxft.use_compilation_cache(given)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(PermissionError, match=f"{given}: it belongs to another user"):
        jaxft.use_compilation_cache(given)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no modes")
@pytest.mark.parametrize(("name", "members", "is_refused"), [
    ("me", [], False), ("me", ["me"], False), ("me", ["me", "you"], True), ("us", ["me"], True), (None, [], True),
])  # fmt: skip
def test_folder_that_a_group_can_replace_is_refused(tmp_path, monkeypatch, name, members, is_refused):
    def group(_):
        return types.SimpleNamespace(gr_name=name, gr_mem=members) if name else {}["no such group"]

    monkeypatch.setattr("grp.getgrgid", group)
    monkeypatch.setattr("pwd.getpwuid", lambda _: types.SimpleNamespace(pw_name="me"))
    (parent := tmp_path / "parent").mkdir()
    parent.chmod(0o775)
    with pytest.raises(PermissionError, match="other users can write") if is_refused else contextlib.nullcontext():
        jaxft.use_compilation_cache(parent / "programs")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no user ids")
@pytest.mark.parametrize(("owner", "is_refused"), [(0, False), (54321, True)])
def test_parent_of_another_user_is_refused(tmp_path, monkeypatch, owner, is_refused):
    (parent := tmp_path / "parent").mkdir()
    lstat = Path.lstat

    def of_another(path):
        status = lstat(path)
        return os.stat_result((*status[:4], owner, *status[5:])) if path == parent else status

    monkeypatch.setattr(Path, "lstat", of_another)
    match = f"{parent} belongs to another user, who can replace the folder"
    with pytest.raises(PermissionError, match=match) if is_refused else contextlib.nullcontext():
        jaxft.use_compilation_cache(parent / "a" / "programs")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no modes")
def test_missing_parents_are_for_their_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        jaxft.use_compilation_cache(tmp_path / "a" / "b" / "programs")
    finally:
        os.umask(before)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "a/b/programs")} == {0o700}


def test_file_as_folder_is_refused(folder):
    folder.write_text("")
    with pytest.raises(OSError, match=f"cannot use the folder {folder}"):
        jaxft.use_compilation_cache(folder)


def test_missing_home_is_an_error(monkeypatch):
    def fail(*_):
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "expanduser", fail)
    with pytest.raises(OSError, match="cannot use the folder ~.programs: no home"):
        jaxft.use_compilation_cache("~/programs")
    monkeypatch.setattr("platformdirs.user_cache_path", fail)
    with pytest.raises(OSError, match="cannot use the folder in the user's cache: no home"):
        jaxft.use_compilation_cache()


@pytest.mark.parametrize(("error", "options"), [
    (TypeError, {"path": 3}), (TypeError, {"path": b"x"}), (ValueError, {"max_bytes": 0}),
    (ValueError, {"max_bytes": -1}), (ValueError, {"max_bytes": True}), (ValueError, {"max_bytes": 1e9}),
])  # fmt: skip
def test_wrong_arguments_are_named(error, options, tmp_path):
    (name,) = options
    with pytest.raises(error, match=f"use_compilation_cache: {name} must be"):
        jaxft.use_compilation_cache(**({"path": tmp_path} | options))


def _truncate(file):
    file.write_bytes(file.read_bytes()[:-9])


def _flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x55
    file.write_bytes(content)


def _empty(file):
    file.write_bytes(b"")


def _without_time(file):
    file.with_name(file.name.removesuffix("-cache") + "-atime").unlink()


def _time_of_another_kind(file):
    _flip(file)
    file.with_name(file.name.removesuffix("-cache") + "-atime").write_text("yesterday")


def _link(file):
    content = file.read_bytes()
    file.unlink()
    file.with_name("target").write_bytes(content[:50])
    file.symlink_to("target")


DAMAGES = [_truncate, _flip, _empty, _without_time, _time_of_another_kind, _link]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_program_is_replaced(folder, damage):
    jaxft.use_compilation_cache(folder)
    assert not compiled()
    (file,) = programs(folder)
    time.sleep(0.05)  # a file system keeps times in ticks of a few milliseconds
    damage(file)
    jaxft.use_compilation_cache(folder)
    assert not compiled()
    jaxft.use_compilation_cache(folder)
    assert compiled()


def test_program_damaged_later_is_ignored(folder):
    jaxft.use_compilation_cache(folder)
    assert not compiled()
    jaxft.use_compilation_cache(folder)
    (file,) = programs(folder)
    _flip(file)
    with pytest.raises(UserWarning, match="Error reading persistent compilation cache entry"):
        compiled()  # it makes warnings errors


@pytest.mark.parametrize("name", ["notes-cache", "notes", f"jit_x-{'0' * 64}-cache"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_foreign_file_is_ignored(folder, name, is_folder):
    folder.mkdir(mode=0o700)
    if is_folder:
        (folder / name / "inner").mkdir(parents=True)
    else:
        (folder / name).write_text("notes")
    jaxft.use_compilation_cache(folder)
    assert not compiled()
    jaxft.use_compilation_cache(folder)
    assert compiled()
    assert (folder / name).exists() == (is_folder or "0" not in name)


def test_another_version_compiles_again(folder, monkeypatch):
    jaxft.use_compilation_cache(folder)
    assert not compiled()
    monkeypatch.setattr("jax._src.cache_key.jaxlib_version_str", "0.0.1")
    assert not compiled()
    assert len(programs(folder)) == 2


def test_size_is_limited(folder):
    jaxft.use_compilation_cache(folder)
    assert not compiled()
    size = programs(folder)[0].stat().st_size
    jaxft.use_compilation_cache(folder, max_bytes=4 * size)
    for number in range(8):
        jax.jit(lambda x, number=number: x * 2 + number)(np.arange(5, dtype=np.float32))
    assert sum(file.stat().st_size for file in programs(folder)) <= 4 * size


SCRIPT = """
import sys, jax, numpy as np, jaxft, jax.monitoring
jaxft.use_compilation_cache(sys.argv[1])
found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event))
x = np.arange(3, dtype=np.float32)
for number in range(20):
    np.testing.assert_array_equal(jax.jit(lambda x: x + number)(x), x + number)
print(found.count("/jax/compilation_cache/cache_hits"))
"""


def start(folder, *, before=""):
    environment = os.environ | {"PYTHONWARNINGS": "", "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-c", before + SCRIPT, str(folder)], env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_several_processes_write_at_once(folder):
    running = [start(folder) for _ in range(3)]
    outputs = [process.communicate() for process in running]  # of all: a process that is left is an error later
    for process, (_, errors) in zip(running, outputs, strict=True):
        assert process.returncode == 0 and not errors, errors
    assert len(programs(folder)) == 20
    output, _ = start(folder).communicate()
    assert int(output) == 20


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of the size of files")
def test_full_disk_keeps_the_results(folder):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))\n"
    process = start(folder, before=limit)
    output, errors = process.communicate()
    assert process.returncode == 0 and int(output) == 0, errors
    assert "Error writing persistent compilation cache entry" in errors
    output, errors = start(folder).communicate()
    assert int(output) == 0 and not errors
    assert len(programs(folder)) == 20


# --- The command line --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny.write_sentence_model(tmp_path_factory.mktemp("model")))


def command(model, *options, **environment):
    return subprocess.run(
        [sys.executable, "-m", "jaxft.cli", "encode", "--model", model, "-o", "-", *options], input="a bird\n",
        env=os.environ | {"PYTHONWARNINGS": "", **environment}, capture_output=True, text=True,
    )  # fmt: skip


def test_command_keeps_programs(model, folder):
    done = command(model, XDG_CACHE_HOME=str(folder), HOME=str(folder))
    assert done.returncode == 0
    assert [file for file in folder.rglob("*-cache") if file.name.startswith("jit_embed")]


@pytest.mark.parametrize("options, environment", [
    (["--no-compilation-cache"], {}), ([], {"JAXFT_COMPILATION_CACHE": "off"}),
])  # fmt: skip
def test_command_keeps_no_programs_on_request(model, folder, options, environment):
    done = command(model, *options, XDG_CACHE_HOME=str(folder), HOME=str(folder), **environment)
    assert done.returncode == 0
    assert not [*folder.rglob("*-cache")]  # CUDA's driver may write there


def test_command_leaves_the_users_own_setting(model, folder):
    done = command(model, XDG_CACHE_HOME=str(folder), JAX_COMPILATION_CACHE_DIR=str(folder / "own"))
    assert done.returncode == 0
    assert os.listdir(folder) == ["own"]


def test_command_keeps_nothing_in_the_users_folder(model, folder):
    own = {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    assert command(model, "--no-compilation-cache", **own).returncode == 0
    assert not [*folder.rglob("*-cache")]
    assert command(model, **own).returncode == 0
    assert [*folder.rglob("*-cache")]


def test_command_refuses_a_named_folder(model, folder):
    folder.mkdir()
    folder.chmod(0o777)
    done = command(model, JAXFT_COMPILATION_CACHE=str(folder))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and f"{folder}: other users can enter it" in done.stderr


def test_command_works_without_a_cache(model, folder):
    folder.write_text("")
    done = command(model, XDG_CACHE_HOME=str(folder), HOME=str(folder))
    assert done.returncode == 0
    assert done.stderr.count(f"jaxft: compiled programs are not kept: cannot use the folder {folder}") == 1


@pytest.mark.parametrize("mode", [None, 0o755])
def test_nothing_is_kept_in_a_folder_that_was_replaced(folder, mode):
    jaxft.use_compilation_cache(folder)
    shutil.rmtree(folder)
    if mode is not None:
        folder.mkdir(mode=mode)
    compilation_cache.write("jaxft-1", b"1")
    assert compilation_cache.folder() is None and compilation_cache.read("jaxft-1") is None
    assert not folder.exists() or not [*folder.iterdir()]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has links for administrators only")
def test_programs_are_kept_in_a_folder_behind_a_link(folder):
    folder.mkdir(mode=0o700)
    (link := folder.with_name("link")).symlink_to(folder)
    assert jaxft.use_compilation_cache(link) == folder
    link.unlink()  # so that nothing depends on the link any more, wherever it leads
    link.symlink_to(folder.parent)
    compilation_cache.write("jaxft-1", b"1")
    assert compilation_cache.folder() == folder and compilation_cache.read("jaxft-1") == b"1"
    assert not compiled() and len(programs(folder)) == 2


@pytest.mark.parametrize(("environment", "reason"), [
    ({}, "the compilation cache"), ({"JAX_ENABLE_COMPILATION_CACHE": "0"}, "the compilation cache"),
    ({"JAX_COMPILATION_CACHE_DIR": "own"}, "all programs to be kept"),
])  # fmt: skip
def test_warmup_that_would_keep_nothing_is_an_error(folder, environment, reason):
    if not environment:
        folder.write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "jaxft.cli", "warmup", "--model", "none"], capture_output=True, text=True,
        env=os.environ | {"XDG_CACHE_HOME": str(folder), "HOME": str(folder), **environment},
    )  # fmt: skip
    assert done.returncode == 2 and f"warmup needs {reason}" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of the size of files")
def test_warmup_on_a_full_disk_is_an_error(model, folder):
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))\n"
    code = limit + "from jaxft import cli; sys.exit(cli.main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "warmup", "--model", model], capture_output=True, text=True,
        env=os.environ | {"JAXFT_COMPILATION_CACHE": str(folder)},
    )  # fmt: skip
    *progress, line = done.stderr.splitlines()
    assert done.returncode == 2 and all("program/s" in line for line in progress if line)
    assert line.startswith(f"jaxft: error: cannot write the compilation cache {folder}: ")
    assert line.endswith("File too large")


def test_error_of_a_full_disk_has_the_first_reason():
    """JAX leaves a part of a program, and fails at the programs of other threads for another reason."""
    message = "Error writing persistent compilation cache entry for 'jit_f': "
    with pytest.warns(UserWarning, match="^of something else$") as others:
        with pytest.raises(cli._UserError, match="No space left$"), cli._kept_programs():
            warnings.warn("of something else", stacklevel=1)
            with contextlib.suppress(UserWarning):
                warnings.warn(f"{message}No space left", stacklevel=1)
            warnings.warn(f"{message}No such file", stacklevel=1)
    assert len(others) == 1


def test_programs_are_stored_again_after_a_full_disk(folder):
    jaxft.use_compilation_cache(folder)
    part = folder / f"jit_f-{'0' * 64}-cache"
    part.write_bytes(b"part")  # without a time of last use, as JAX leaves it
    name = f"jaxft-{'1' * 64}"
    compilation_cache.write(name, b"content")
    assert compilation_cache.read(name) == b"content" and not part.exists()


def test_function_main_leaves_jax_settings(model, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (file := tmp_path / "texts.txt").write_text("a bird\n")
    assert cli.main(["encode", "--model", model, str(file), "-o", str(tmp_path / "out.npy")]) == 0
    assert jax.config.jax_compilation_cache_dir is None
