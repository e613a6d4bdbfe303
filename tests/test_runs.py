"""A run's files are where they belong, or where it is said; a disk that gets full ends no run."""

import errno
import json
import os
import tempfile

import pytest

from fleetx.runs import MetricsLog, RunFolder, read_metrics, require_room


@pytest.fixture
def said():
    return []


def refusing(monkeypatch, *folders):
    """Files in these folders cannot be written: their disk is full."""
    replace = os.replace

    def full(path, target, *rest):
        if any(str(target).startswith(str(folder)) for folder in folders):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(path, target, *rest)

    monkeypatch.setattr(os, "replace", full)


def test_a_file_that_its_folder_does_not_take_goes_elsewhere_and_is_reported(tmp_path, monkeypatch, said):
    (tmp_path / "run").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    refusing(monkeypatch, tmp_path / "run")
    files = RunFolder(tmp_path / "run", said.append)
    path = files.write("weights", b"123")
    assert path.read_bytes() == b"123"
    assert path.is_relative_to(tmp_path / "tmp")
    assert said == [f"weights could not be written to {tmp_path}/run (No space left on device): it is in {path}"]
    assert not files.complete
    assert list((tmp_path / "run").iterdir()) == []
    assert files.write("more", b"4").parent == path.parent


def test_a_file_that_nothing_takes_is_said_to_be_lost(tmp_path, monkeypatch, said):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    refusing(monkeypatch, tmp_path)
    assert RunFolder(tmp_path, said.append).write("weights", b"123") is None
    assert said[0].endswith("it is lost.")


def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch, said):
    files = RunFolder(tmp_path, said.append)
    files.write("weights", b"old")
    assert files.complete
    assert (tmp_path / "weights").read_bytes() == b"old"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    refusing(monkeypatch, tmp_path)
    files.write("weights", b"new")
    assert (tmp_path / "weights").read_bytes() == b"old"


def test_metrics_that_the_disk_has_no_room_for_are_handed_over_at_the_end(tmp_path, monkeypatch, said):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    refusing(monkeypatch, tmp_path / "metrics.jsonl")
    with MetricsLog(tmp_path / "metrics.jsonl", files=RunFolder(tmp_path, said.append)) as log:
        log.accuracy(0, 0.5)
        log.accuracy(1, 0.75)
    (path,) = (tmp_path / "tmp").glob("*/metrics.jsonl")
    assert [line["accuracy"] for line in read_metrics(path)] == [0.5, 0.75]
    assert len(said) == 1
    with pytest.raises(OSError, match="No space"), MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.accuracy(0, 0.5)


def test_a_resumed_log_goes_on_after_the_windows_that_count(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"seconds": 10.0 * window, "window": window} for window in (1, 2, 3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"seconds": 31, "win')
    with MetricsLog(path, resume_at=2) as log:
        log.accuracy(0, 0.5)
    after = read_metrics(path)
    assert after == log.lines
    assert [line["window"] for line in after] == [1, 2, 2]
    assert after[-1]["seconds"] >= 20.0


def test_room_is_required_before_and_nothing_is_left_of_the_rehearsal(tmp_path, monkeypatch):
    require_room(tmp_path, [1000, 1000])
    assert list(tmp_path.iterdir()) == []
    taken = []

    def allocate(descriptor, offset, size):
        if taken:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        taken.append(size)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with pytest.raises(OSError, match="Disk quota exceeded"):
        require_room(tmp_path, [1000, 1000])
    assert list(tmp_path.iterdir()) == []
