"""How far each worker has come: a page of memory that workers write into and their launcher reads.

Each worker writes the number of its steps, whether its first step is due, which signal it received, whether its script
asks for signals, and whether it is waiting for the other workers.

A beat costs well under a microsecond, needs no thread, and reaches the launcher even if it comes from a process that is
killed right after it.
"""

import enum
import mmap
import os
import struct
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fleetx import clock

FILE = "FLEETX_BEATS"
_SLOT = struct.Struct("=QBBBB4x")
_COUNT, _FLAG = struct.Struct("=Q"), struct.Struct("=B")
_DUE, _SIGNAL, _MANNER, _WAIT = (_COUNT.size + place for place in range(4))


class Manner(enum.IntEnum):
    """How a script takes a request to leave."""

    UNKNOWN = 0  # it has not begun to train
    UNDECIDED = 1  # it trains, and may ask yet
    ASKS = 2
    NEVER_ASKS = 3


class Wait(enum.IntEnum):
    """Whether a worker can go on by itself."""

    NONE = 0
    FOR_OTHERS = 1
    TO_JOIN = 2  # in fleet.init(), for others too


class Beat(NamedTuple):
    """What a worker has noted."""

    count: int = 0  # its steps so far
    due: bool = False  # whether the first is
    signal: int = 0  # that asked it to leave
    manner: int = Manner.UNKNOWN
    wait: int = Wait.NONE


class BeatReader:
    """The launcher's side: one place for each of `workers`."""

    def __init__(self, path: Path, workers: int) -> None:
        self.path = path
        path.write_bytes(bytes(_SLOT.size * workers))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 0)

    def read(self, slot: int) -> Beat:
        """What this worker has noted."""
        count, due, number, manner, wait = _SLOT.unpack_from(self._page, slot * _SLOT.size)
        return Beat(count, bool(due), number, manner, wait)

    def reset(self) -> None:
        """A new attempt counts anew."""
        self._page[:] = bytes(len(self._page))

    def place(self, slot: int) -> str:
        """What a worker needs to know, as the value of an environment variable."""
        return f"{slot}:{self.path}"


class _Beats:
    """The worker's side. Without a launcher of ours it does nothing."""

    def __init__(self) -> None:
        self._page: mmap.mmap | None = None
        self._place = 0
        self._count = 0
        self._wait = Wait.NONE
        self.seconds_waited = 0.0

    def open(self, place: str) -> None:
        slot, _, path = place.partition(":")
        with Path(path).open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 0)
        self._place = int(slot) * _SLOT.size

    def has_launcher(self) -> bool:
        return self._page is not None

    def beat(self) -> None:
        if self._page is not None:
            self._count += 1
            _COUNT.pack_into(self._page, self._place, self._count)

    def expect(self, due: bool) -> None:
        self._note(_DUE, due)

    def note_signal(self, number: int) -> None:
        self._note(_SIGNAL, number)

    def note_manner(self, manner: Manner) -> None:
        self._note(_MANNER, manner)

    @contextmanager
    def waiting(self, wait: Wait = Wait.FOR_OTHERS) -> Generator[None]:
        """Around whatever lasts until other workers come to the same place; also a decorator.

        Only of the main thread: a save in the background may wait for the others while training does not.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before, self._wait = self._wait, wait
        self._note(_WAIT, wait)
        began = clock.host_seconds()
        try:
            yield
        finally:
            self._wait = before
            self._note(_WAIT, before)
            if before is Wait.NONE:
                self.seconds_waited += clock.host_seconds() - began

    def _note(self, place: int, flag: int) -> None:
        if self._page is not None:
            _FLAG.pack_into(self._page, self._place + place, flag)


_beats = _Beats()
has_launcher = _beats.has_launcher
beat = _beats.beat
expect = _beats.expect
note_signal = _beats.note_signal
note_manner = _beats.note_manner
waiting = _beats.waiting


def seconds_waited() -> float:
    """How long this worker's main thread has waited for others so far."""
    return _beats.seconds_waited


def open_from_environment() -> None:
    """Called once in a worker, before its script runs."""
    if FILE in os.environ:
        # Taken out, so that processes which the script starts do not beat in its name.
        _beats.open(os.environ.pop(FILE))
