"""/dev/full stands for a disk that is full."""

import errno
import io
import os
import sys
from functools import partial

import pytest

from fleetx.launch.nursery import _opened
from fleetx.launch.output import forgive_lost_output, note_trouble
from fleetx.standard_streams import LossyFile


@pytest.fixture
def full():
    descriptor = os.open("/dev/full", os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


def test_what_a_full_disk_has_no_room_for_is_lost_and_noted(full, tmp_path):
    trouble = tmp_path / "trouble"
    file = LossyFile(full, partial(note_trouble, trouble))
    with io.TextIOWrapper(io.BufferedWriter(file), line_buffering=True) as stream:
        print("lost", file=stream)
        assert trouble.read_text() == "No space left on device"
        print("lost too" * 10_000, file=stream, flush=True)


def test_a_console_that_nobody_reads_or_that_lacks_a_character_does_not_end_a_worker(monkeypatch):
    """Worker 0 prints there if no logs are kept."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", encoding="ascii") as console:
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, console)
        forgive_lost_output()
        print("caf\u00e9", flush=True)
        assert os.read(reading, 100) == b"caf\\xe9\n"
        os.close(reading)
        print("lost", flush=True)
        print("lost too", file=sys.stderr, flush=True)


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
