"""A save that stops at any of its calls to the system leaves the checkpoint before it, or is complete."""

import errno
import fcntl
import gc
import os
import resource
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import fleetx as X
from fleetx.checkpoint import CheckpointError, locking, survey
from tests.checkpoint.making import Parts, same

CALLS = ("open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir")


class Crash(BaseException):
    """Stands for the end of the process."""


class Calls:
    """Counts calls to the system, and crashes at one of them: before it happens, or in the middle of a write."""

    def __init__(self, monkeypatch, crash_at=None):
        self.log = []
        self._lock = threading.Lock()
        self.crash_at = crash_at
        for name in CALLS:
            monkeypatch.setattr(os, name, self._counting(name, getattr(os, name)))

    def _counting(self, name, original):
        def call(*args, **kwargs):
            is_path = isinstance(args[0], str | os.PathLike)
            path = Path(args[0]) if is_path else Path(f"/proc/self/fd/{args[0]}").readlink()
            with self._lock:
                number = len(self.log)
                self.log.append((name, path.name))
            if number == self.crash_at and name == "write":
                original(args[0], args[1][: len(args[1]) // 2])
            if self.crash_at is not None and number >= self.crash_at:  # a dead process does nothing more
                raise Crash
            return original(*args, **kwargs)

        return call


def test_a_save_that_is_cut_off_at_any_call_loses_nothing(tmp_path, monkeypatch):
    first = Parts(tmp_path / "counted", keep=1).train(2)
    first.saved(2)
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        first.train(2).saved(4)
    total = len(calls.log)
    assert total > 25
    resumed = []
    for number in range(total):
        folder = tmp_path / str(number)
        parts = Parts(folder, keep=1).train(2)
        parts.saved(2)
        weights = {2: parts.weights(), 4: parts.train(2).weights()}
        with monkeypatch.context() as patch:
            Calls(patch, crash_at=number)
            with pytest.raises(Crash):
                parts.saved(4)
        again = Parts(folder, seed=4)
        start = again.checkpoints.resume()
        assert same(again.weights(), weights[start.step]), number
        assert all(one.problem is None for one in survey(folder))
        again.checkpoints.save(9)
        assert not [entry for entry in folder.iterdir() if entry.name.startswith((".saving", ".deleting"))]
        resumed.append(start.step)
    # The old one up to the renaming, the new one from there on.
    assert resumed == sorted(resumed)
    assert set(resumed) == {2, 4}


def test_everything_is_on_the_disk_before_the_renaming_and_old_ones_go_last(tmp_path, monkeypatch):
    parts = Parts(tmp_path, keep=1).train(3)
    parts.saved(1)
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        parts.saved(2)
    log = calls.log
    draft = next(name for call, name in log if call == "mkdir")
    published = log.index(("rename", draft))
    written = [name for call, name in log[:published] if call == "open" and name.endswith((".json", ".safetensors"))]
    assert len(written) == 7
    for name in written:
        assert log.index(("fsync", name)) < published
        assert max(index for index, entry in enumerate(log) if entry == ("write", name)) < log.index(("fsync", name))
    assert log.index(("fsync", "manifest.json")) > max(
        log.index(("fsync", name)) for name in set(written) - {"manifest.json"}
    )
    assert (
        log.index(("fsync", "manifest.json")) < [i for i, e in enumerate(log) if e == ("fsync", draft)][-1] < published
    )
    assert log[published + 1 :][:2] == [("open", tmp_path.name), ("fsync", tmp_path.name)]
    removed = [index for index, (call, name) in enumerate(log) if call in ("unlink", "rmdir")]
    assert removed
    assert min(removed) > published
    assert log.index(("rename", "save-000001-step-1")) > published


def test_the_names_of_new_folders_are_brought_to_the_disk_at_every_level(tmp_path, monkeypatch):
    parts = Parts(tmp_path / "runs" / "today" / "first")
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        parts.saved(1)
    written = next(index for index, (call, _) in enumerate(calls.log) if call == "write")
    synced = [name for call, name in calls.log[:written] if call == "fsync"]
    assert {tmp_path.name, "runs", "today"} <= set(synced)


def broken(failure):
    def fail(*_args, **_kwargs):
        raise OSError(failure, os.strerror(failure))

    return fail


ERRORS = [
    ("write", errno.ENOSPC, r"must be room for one checkpoint more than are kept, and .* has [\d.,]+ MiB free"),
    ("write", errno.EDQUOT, "raise the quota"),
    ("fsync", errno.ENOSPC, "must be room"),
    ("fsync", errno.EIO, r"writing to .* failed \(Input/output error"),
    ("mkdir", errno.EACCES, "must be writable, and it is not"),
    ("mkdir", errno.EROFS, r"must be writable, and it is not \(Read-only file system"),
    ("rename", errno.EPERM, "must be writable"),
    ("open", errno.ENOENT, "all workers must see one and the same folder"),
]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("call", "failure", "message"), ERRORS, ids=lambda value: str(value)[:20])
def test_an_error_of_the_system_is_explained_and_nothing_is_lost(
    tmp_path, monkeypatch, call, failure, message, asynchronous
):
    parts = Parts(tmp_path).train(4)
    parts.saved(4)
    weights = parts.weights()
    parts.train(2)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, broken(failure))
        with pytest.raises(CheckpointError, match=message) as error:
            parts.saved(6, asynchronous=asynchronous) or parts.checkpoints.wait()
    assert "the checkpoint of step 6 was not saved" in str(error.value)
    assert "Checkpoints saved before are intact, and training can go on" in str(error.value)
    again = Parts(tmp_path, seed=2)
    assert again.checkpoints.resume().step == 4
    assert same(again.weights(), weights)
    parts.train(1).saved(7)
    assert Parts(tmp_path).checkpoints.resume().step == 7


def test_an_error_beside_training_is_raised_by_the_next_save_and_only_once(tmp_path, monkeypatch):
    parts = Parts(tmp_path)
    parts.saved(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken(errno.ENOSPC))
        parts.saved(2, asynchronous=True)
        parts.train(3)
        with pytest.raises(CheckpointError, match="the checkpoint of step 2 was not saved"):
            parts.saved(3)
    assert parts.checkpoints.wait().name == "save-000001-step-1"
    assert parts.saved(4).name == "save-000002-step-4"


FORGOTTEN = """
del checkpoints
gc.collect()
[thread.join() for thread in threading.enumerate() if thread.name == "fleetx-checkpoint"]
gc.collect()
"""


@pytest.mark.middle
@pytest.mark.parametrize("last", ["", FORGOTTEN], ids=["kept", "forgotten"])
def test_an_error_that_nobody_asks_for_is_told_at_the_end(tmp_path, last):
    script = (
        "import os, errno, gc, threading, torch, fleetx as X\n"
        f"checkpoints = X.Checkpoints({str(tmp_path)!r}, model=torch.nn.Linear(2, 2))\n"
        "def fail(*_): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "os.fsync = fail\n"
        "checkpoints.save(1, asynchronous=True)\n" + last
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "the last asynchronous save failed, and nobody asked for its result" in done.stderr
    assert "No space left on device" in done.stderr


@pytest.mark.middle
def test_a_save_is_finished_before_the_program_ends(tmp_path):
    script = (
        "import torch, fleetx as X\n"
        f"X.Checkpoints({str(tmp_path)!r}, model=torch.nn.Linear(500, 500)).save(1, asynchronous=True)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert [one.problem for one in survey(tmp_path)] == [None]


@pytest.mark.middle
def test_a_program_that_fails_finishes_its_save(tmp_path):
    script = (
        "import torch, fleetx as X\n"
        f"X.Checkpoints({str(tmp_path)!r}, model=torch.nn.Linear(500, 500)).save(1, asynchronous=True)\n"
        "raise SystemError('over')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "SystemError: over" in done.stderr
    assert [one.problem for one in survey(tmp_path)] == [None]


def test_a_file_that_does_not_read_back_is_no_checkpoint(tmp_path, monkeypatch):
    parts = Parts(tmp_path, keep=1)
    parts.saved(1)
    original = os.write

    def worn_out(descriptor, data):
        return original(descriptor, bytes(data).replace(b"I64", b"I46"))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", worn_out)
        with pytest.raises(CheckpointError, match=r"must read back as it was written, and .*SHA-256.*Do not trust"):
            parts.saved(2)
    assert [one.path.name for one in survey(tmp_path)] == ["save-000001-step-1"]


def test_a_limit_on_the_size_of_files_is_explained(tmp_path):
    checkpoints = X.Checkpoints(tmp_path, model=torch.nn.Linear(300, 300))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        with pytest.raises(CheckpointError, match="must be room .*File too large"):
            checkpoints.save(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert survey(tmp_path) == []
    checkpoints.save(2)


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting needs more rights")
    yield place
    gc.collect()  # a folder is held as long as its Checkpoints live
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_keeps_the_last_checkpoint_and_training_goes_on(small_disk):
    model = torch.nn.Linear(300, 300)  # 0.35 MiB
    checkpoints = X.Checkpoints(small_disk / "run", model=model, keep=3)
    checkpoints.save(1)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    (small_disk / "ballast").write_bytes(bytes(500_000))
    for number in (2, 3):
        with torch.no_grad():
            model.weight.add_(1)
        with pytest.raises(CheckpointError, match="No space left on device"):
            checkpoints.save(number)
    again = torch.nn.Linear(300, 300)
    assert X.Checkpoints(small_disk / "run", model=again).resume().step == 1
    assert same(again.state_dict(), weights)
    (small_disk / "ballast").unlink()
    checkpoints.save(4)
    assert X.Checkpoints(small_disk / "run", model=again).resume().step == 4


def test_a_read_only_disk_can_be_resumed_from_and_not_saved_to(small_disk):
    model = torch.nn.Linear(2, 2)
    X.Checkpoints(small_disk / "run", model=model).save(1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    checkpoints = X.Checkpoints(small_disk / "run", model=model)
    assert checkpoints.resume().step == 1
    with pytest.raises(CheckpointError, match="must be writable, and it is not .Read-only file system"):
        checkpoints.save(2)


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(CheckpointError, match="file must be a folder, and it is a file"):
        X.Checkpoints(tmp_path / "file", model=torch.nn.Linear(2, 2))
    checkpoints = X.Checkpoints(tmp_path / "file" / "below", model=torch.nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"must be a folder, and something else is in the way \(Not a directory"):
        checkpoints.save(1)


def test_a_file_system_without_locks_is_told_of_and_used(tmp_path, monkeypatch, caplog):
    def no_locks(*_args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    X.Checkpoints(tmp_path, model=torch.nn.Linear(2, 2)).save(1)
    assert "has no locks (No locks available)" in caplog.text


def test_a_file_system_that_cannot_sync_folders_is_used(tmp_path, monkeypatch):
    original = os.fsync

    def only_files(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    X.Checkpoints(tmp_path, model=torch.nn.Linear(2, 2)).save(1)
    assert [one.problem for one in survey(tmp_path)] == [None]


@pytest.mark.middle
def test_one_process_at_a_time_saves_to_a_folder(tmp_path, monkeypatch):
    script = (
        "import sys, torch, fleetx as X\n"
        f"checkpoints = X.Checkpoints({str(tmp_path)!r}, model=torch.nn.Linear(2, 2))\n"
        "checkpoints.save(1)\n"
        "print('saved', flush=True); sys.stdin.read()\n"
    )
    other = subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True)
    try:
        assert other.stdout.readline() == "saved\n"
        checkpoints = X.Checkpoints(tmp_path, model=torch.nn.Linear(2, 2))
        assert checkpoints.resume().step == 1  # whoever has no optimizer only wants to read
        model = torch.nn.Linear(2, 2)
        training = X.Checkpoints(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        monkeypatch.setattr(locking.time, "monotonic", iter([0.0, 11.0]).__next__)
        with pytest.raises(CheckpointError, match=f"belongs to process {other.pid} on .*End that process"):
            training.resume()
        monkeypatch.setattr(locking.time, "monotonic", iter([0.0, 11.0]).__next__)
        with pytest.raises(CheckpointError, match=f"belongs to process {other.pid} on .*End that process"):
            checkpoints.save(2)
        monkeypatch.undo()
    finally:
        other.kill()
        other.communicate()
    checkpoints.save(3)
