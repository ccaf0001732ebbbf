"""Files appear whole or not at all; what killed processes leave behind is removed, and nothing else is."""

import contextlib
import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import jaxft
from jaxft import atomic
from jaxft.checkpoint import tensors

ROOT = Path(__file__).resolve().parents[1]
HOLD = """
import sys, time
from pathlib import Path
from jaxft import atomic
with atomic.replacing(Path(sys.argv[1])) as (new,):
    new.write_text("half")
    print("ready", flush=True)
    time.sleep(60)
"""
# Writes pairs of equal files, again and again.
HAMMER = """
import sys
from pathlib import Path
from jaxft import atomic
folder, files, name, times = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
for number in range(times):
    with atomic.replacing(*(folder / file for file in files)) as pair:
        for new in pair:
            new.write_text(f"{name} {number}")
"""


def start(code, *arguments, **options):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, **options)  # fmt: skip


def test_error_names_the_file_once():
    with pytest.raises(OSError, match="^.Errno 28. cannot write a: No space left on device$"):
        with atomic.writing("b"), atomic.writing("a"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def holding(target):
    """A process that has half of the target."""
    process = start(HOLD, target)
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def write(target, text="new"):
    with atomic.replacing(target) as (new,):
        new.write_text(text)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def unfinished(folder):
    return [name for name in names(folder) if name.startswith(".jaxft-")]


def test_files_appear_together_at_the_end(tmp_path):
    a, b, c = targets = [tmp_path / name for name in "abc"]
    a.write_text("old")
    c.write_text("kept")
    with atomic.replacing(*targets) as (new_a, new_b, _):
        new_a.write_text("new a")
        new_b.write_text("new b")
        assert a.read_text() == "old" and not b.exists()
    assert [target.read_text() for target in targets] == ["new a", "new b", "kept"]
    assert names(tmp_path) == ["a", "b", "c"]


def test_one_file_is_there_at_any_moment(tmp_path, monkeypatch):
    """A process that is killed while it replaces the file leaves the old one or the new one."""
    (tmp_path / "a").write_text("old")
    seen = []

    def watched(own):
        return lambda *paths: (seen.append((tmp_path / "a").read_text()), own(*paths))

    for name in ("rename", "replace", "link"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    write(tmp_path / "a")
    assert "old" in seen and (tmp_path / "a").read_text() == "new"


def test_file_system_without_hard_links(tmp_path, monkeypatch):
    def no_links(*paths):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    for name in "ab":
        (tmp_path / name).write_text("old")
    with atomic.replacing(tmp_path / "a", tmp_path / "b") as pair:
        for new in pair:
            new.write_text("new")
    assert tree(tmp_path) == {"a": "new", "b": "new"}


def tree(folder):
    """Returns the text of all files below a folder by their path, and its folders."""
    return {str(path.relative_to(folder)): path.read_text() if path.is_file() else None for path in folder.rglob("*")}


def write_tree(folder, **texts):
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def test_targets_in_subfolders_and_removed_files(tmp_path):
    write_tree(tmp_path, **{"1/a": "old", "2/a": "stale", "3/a": "stale", "3/b": "kept", "c": "stale", "a": "old"})
    targets = [tmp_path / name for name in ("new/a", "1/a", "a")]
    (tmp_path / "d").symlink_to(tmp_path / "nowhere")
    without = [tmp_path / name for name in ("2/a", "3/a", "c", "d", "4/a")]
    with atomic.replacing(*targets, without=without) as files:
        for file, target in zip(files, targets, strict=True):
            file.write_text(f"new {target.name}")
    assert tree(tmp_path) == {
        "new": None, "new/a": "new a", "1": None, "1/a": "new a", "a": "new a", "3": None, "3/b": "kept",
    }  # fmt: skip


@pytest.mark.parametrize("failing", ["new/a", "1/a", "a", "2/a", "c"])
def test_failed_renaming_restores_subfolders_and_removed_files(tmp_path, monkeypatch, failing):
    write_tree(tmp_path, **{"1/a": "old", "2/a": "stale", "c": "stale", "a": "old"})
    before, failed = tree(tmp_path), []

    def fail(own):
        def run(*paths, **options):
            if Path(paths[-1]) == tmp_path / failing and not failed:
                failed.append(own)
                raise KeyboardInterrupt
            return own(*paths, **options)

        return run

    monkeypatch.setattr(os, "replace", fail(os.replace))
    monkeypatch.setattr(os, "unlink", fail(os.unlink))
    with pytest.raises(KeyboardInterrupt):
        targets = [tmp_path / name for name in ("new/a", "1/a", "a")]
        with atomic.replacing(*targets, without=[tmp_path / "2" / "a", tmp_path / "c"]) as files:
            for file in files:
                file.write_text("new")
    assert failed and tree(tmp_path) == before


def test_temporary_folder_is_removed_where_it_cannot_be_renamed(tmp_path, monkeypatch):
    def in_use(*paths):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "rename", in_use)
    write(tmp_path / "a")
    assert tree(tmp_path) == {"a": "new"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError(errno.ENOSPC, "full")])
def test_failed_block_changes_nothing(tmp_path, error):
    (tmp_path / "a").write_text("old")
    with pytest.raises(error if isinstance(error, type) else OSError):
        with atomic.replacing(tmp_path / "a", tmp_path / "b") as (new, _):
            new.write_text("half")
            raise error
    assert names(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "old"


@pytest.mark.parametrize("old", [{}, {"a": "old"}, {"b": "old"}, {"a": "old", "b": "old"}])
@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_error_at_the_end_changes_nothing_and_names_the_target(tmp_path, monkeypatch, failing, old):
    for name, text in old.items():
        (tmp_path / name).write_text(text)
    real, calls = getattr(os, failing), []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == 2:  # the first file is in place already
            raise OSError(errno.EIO, "Input/output error", "temporary name")
        real(*arguments)

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match=rf"cannot write {tmp_path}/[ab]: Input/output error") as raised:
        with atomic.replacing(tmp_path / "a", tmp_path / "b") as pair:
            for new in pair:
                new.write_text("new")
    assert raised.value.errno == errno.EIO
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == old


# Writes a checkpoint, and kills itself before it renames a file for the time of the given number.
KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from jaxft.checkpoint import tensors
folder, text, left = Path(sys.argv[1]), sys.argv[2], [int(sys.argv[3])]
def wrap(real):
    def rename(source, target):
        left[0] -= 1
        if left[0] < 0 and not str(target).endswith("-.tmp"):
            os.kill(os.getpid(), signal.SIGKILL)
        real(source, target)
    return rename
os.rename, os.replace = wrap(os.rename), wrap(os.replace)
tensors.write(folder, {"config.json": {"text": text}, "model.safetensors": {text: np.zeros(2, np.float32)}})
"""


@pytest.mark.parametrize(("number", "complete"), [(0, True), (1, False), (2, False)])
def test_killed_writer_leaves_no_old_and_new_files_together(tmp_path, number, complete):
    """Weights of one model and the settings of another would load and compute wrong numbers."""
    tensors.write(tmp_path, {"config.json": {"text": "old"}, "model.safetensors": {"old": np.zeros(2, np.float32)}})
    process = start(KILLED, tmp_path, "new", number)
    assert process.wait() == -signal.SIGKILL, process.communicate()
    process.communicate()
    assert (tmp_path / "config.json").exists() == complete
    assert (b"old" in (tmp_path / "model.safetensors").read_bytes()) == (number < 2)
    if not complete:
        with pytest.raises(jaxft.CheckpointError, match="config.json"):
            jaxft.BertModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("target", "kind", "reason"),
    [("no/a", FileNotFoundError, "No such file or directory"), ("file/a", NotADirectoryError, "Not a directory")],
)
def test_impossible_target_is_named(tmp_path, target, kind, reason):
    (tmp_path / "file").touch()
    with pytest.raises(kind, match=f"cannot write {tmp_path / target}: {reason}"):
        write(tmp_path / target)
    assert names(tmp_path) == ["file"]


def test_error_without_a_number_is_named():
    with pytest.raises(OSError, match="cannot write x: odd") as raised, atomic.writing("x"):
        raise OSError("odd")
    assert raised.value.errno == errno.EIO and raised.value.strerror


def test_next_writer_removes_what_a_killed_one_left(tmp_path):
    with holding(tmp_path / "a"):
        pass
    assert len(unfinished(tmp_path)) == 1
    write(tmp_path / "b")
    assert names(tmp_path) == ["b"]


def test_next_writer_leaves_a_living_one_alone(tmp_path):
    with holding(tmp_path / "a") as process:
        os.kill(process.pid, signal.SIGSTOP)
        (old,) = unfinished(tmp_path)
        write(tmp_path / "a")
        assert names(tmp_path) == [old, "a"] and (tmp_path / old / "a").read_text() == "half"


def test_folder_of_a_process_killed_before_it_had_a_lock_is_removed(tmp_path):
    (tmp_path / ".jaxft-x.tmp").mkdir()
    write(tmp_path / "a")
    assert names(tmp_path) == ["a"]


def test_folder_of_another_program_stays(tmp_path):
    """It has the name of a temporary folder, and files, but no lock."""
    (tmp_path / ".jaxft-x.tmp" / "more").mkdir(parents=True)
    (tmp_path / ".jaxft-x.tmp" / "notes").write_text("mine")
    write(tmp_path / "a")
    assert names(tmp_path / ".jaxft-x.tmp") == ["more", "notes"]


def test_process_killed_while_removing_its_folder_leaves_nothing(tmp_path):
    (tmp_path / ".jaxft-x-.tmp").mkdir()
    (tmp_path / ".jaxft-x-.tmp" / "a").write_text("half")
    write(tmp_path / "a")
    assert names(tmp_path) == ["a"]


def test_only_folders_of_this_user_are_removed(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    (tmp_path / ".jaxft-link.tmp").symlink_to(tmp_path / "other")
    (tmp_path / ".jaxft-file.tmp").touch()
    write(tmp_path / "a")
    assert names(tmp_path) == [".jaxft-file.tmp", ".jaxft-link.tmp", "a", "other"] and names(tmp_path / "other") == []
    (tmp_path / ".jaxft-x.tmp").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    write(tmp_path / "a")
    assert ".jaxft-x.tmp" in names(tmp_path)


def test_nothing_is_removed_where_there_are_no_locks(tmp_path, monkeypatch):
    def no_locks(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / ".jaxft-x.tmp").mkdir()
    monkeypatch.setattr(fcntl, "flock", no_locks)
    write(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "new" and unfinished(tmp_path) == [".jaxft-x.tmp"]


@pytest.mark.parametrize(("age", "stays"), [(3600, True), (8 * 24 * 3600, False)])
def test_folder_of_another_host_stays_for_a_week(tmp_path, age, stays):
    """Its lock may be unknown here."""
    with holding(tmp_path / "a"):
        pass
    (work,) = (tmp_path / name for name in unfinished(tmp_path))
    (work / "lock").write_text("elsewhere")
    os.utime(work / "lock", (time.time() - age,) * 2)
    write(tmp_path / "b")
    assert work.exists() == stays


@pytest.mark.parametrize("step", ["open", "flock"])
def test_folder_that_is_taken_for_abandoned_is_made_anew(tmp_path, monkeypatch, step):
    """Another process may find a new temporary folder before its lock is held."""
    real = {"open": os.open, "flock": fcntl.flock}[step]
    seen = []

    def late(*arguments):
        if not seen:
            seen.append(unfinished(tmp_path))
            monkeypatch.setattr({"open": os, "flock": fcntl}[step], step, real)
            atomic.remove_abandoned(tmp_path)
        return real(*arguments)

    monkeypatch.setattr({"open": os, "flock": fcntl}[step], step, late)
    with atomic.replacing(tmp_path / "a") as (new,):
        new.write_text("new")
        atomic.remove_abandoned(tmp_path)  # as other processes do, which see the lock
        assert names(new.parent) == ["a", "lock"]
    assert len(seen[0]) == 1 and names(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "new"


def test_folder_whose_lock_another_process_has_is_not_used(tmp_path, monkeypatch):
    flock = fcntl.flock
    held = []

    def second(descriptor, operation):
        if not held:
            held.append(tmp_path / unfinished(tmp_path)[0])
            lock = os.open(held[0] / "lock", os.O_RDWR)
            flock(lock, fcntl.LOCK_EX)
            try:
                flock(descriptor, operation)
            finally:
                os.close(lock)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", second)
    with atomic.replacing(tmp_path / "a") as (new,):
        assert new.parent != held[0] and unfinished(tmp_path) == [new.parent.name]


def test_files_that_belong_together_wait_for_other_writers(tmp_path):
    def write_both():
        with atomic.replacing(tmp_path / "a", tmp_path / "b") as pair:
            for new in pair:
                new.write_text("new")

    writer = threading.Thread(target=write_both)
    with atomic.locked(tmp_path):  # as while another process renames its files
        writer.start()
        writer.join(0.3)
        assert writer.is_alive() and len(unfinished(tmp_path)) == len(names(tmp_path)) == 1
        write(tmp_path / "c")  # a single file never waits
    writer.join()
    assert names(tmp_path) == ["a", "b", "c"]


def test_concurrent_writers_do_not_mix_their_files(tmp_path):
    processes = [start(HAMMER, tmp_path, "ab", number, 50) for number in range(3)]
    rng = random.Random(0)
    for _ in range(3):  # three more, which are killed
        process = start(HAMMER, tmp_path, "cd", "killed", 10_000)
        time.sleep(0.1 + 0.2 * rng.random())
        process.kill()
        process.communicate()
    for process in processes:
        assert process.communicate() == ("", "") and process.returncode == 0
    write(tmp_path / "c")
    assert unfinished(tmp_path) == []
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
