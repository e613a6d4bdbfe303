"""/dev/full stands for a disk that is full."""

import errno
import io
import os

import pytest

from fleetx.launch.nursery import _opened
from fleetx.launch.output import ForgivingFile, note_trouble


@pytest.fixture
def full():
    descriptor = os.open("/dev/full", os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


def test_what_a_full_disk_has_no_room_for_is_lost_and_noted(full, tmp_path):
    trouble = tmp_path / "trouble"
    with io.TextIOWrapper(io.BufferedWriter(ForgivingFile(full, trouble)), line_buffering=True) as stream:
        print("lost", file=stream)
        assert trouble.read_text() == "No space left on device"
        print("lost too" * 10_000, file=stream, flush=True)


def test_other_errors_are_errors(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    with pytest.raises(BrokenPipeError):
        ForgivingFile(writing, tmp_path / "trouble").write(b"x")
    os.close(writing)
    assert not (tmp_path / "trouble").exists()


def test_the_first_reason_is_kept(tmp_path):
    for number in (errno.ENOSPC, errno.EIO):
        note_trouble(tmp_path / "trouble", OSError(number, ""))
    assert (tmp_path / "trouble").read_text() == "No space left on device"
    note_trouble(tmp_path / "nowhere" / "trouble", OSError(errno.EIO, ""))  # nobody to tell: no reason to fail


def test_a_log_that_cannot_be_made_goes_nowhere(tmp_path):
    descriptor = _opened(str(tmp_path / "nowhere" / "workerlog.0"), str(tmp_path / "trouble"))
    os.write(descriptor, b"lost")
    os.close(descriptor)
    assert (tmp_path / "trouble").read_text() == "No such file or directory"
