"""How far each worker has come: a page of memory that workers write into and their launcher reads.

A beat costs well under a microsecond, needs no thread, and reaches the launcher even if it comes from a process that is
killed right after it.
"""

import mmap
import os
import struct
from pathlib import Path

FILE = "FLEETX_BEATS"
_SLOT = struct.Struct("=Q")


class BeatReader:
    """The launcher's side: one count for each of `workers`."""

    def __init__(self, path: Path, workers: int) -> None:
        self.path = path
        path.write_bytes(bytes(_SLOT.size * workers))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 0)

    def count(self, slot: int) -> int:
        """How often this worker has reported progress."""
        return _SLOT.unpack_from(self._page, slot * _SLOT.size)[0]

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

    def open(self, place: str) -> None:
        slot, _, path = place.partition(":")
        with Path(path).open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 0)
        self._place = int(slot) * _SLOT.size

    def beat(self) -> None:
        if self._page is not None:
            self._count += 1
            _SLOT.pack_into(self._page, self._place, self._count)


_beats = _Beats()
beat = _beats.beat


def open_from_environment() -> None:
    """Called once in a worker, before its script runs."""
    if FILE in os.environ:
        # Taken out, so that processes which the script starts do not beat in its name.
        _beats.open(os.environ.pop(FILE))
