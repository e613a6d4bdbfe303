"""What a worker prints when the disk of its log is full: it is lost, and training goes on."""

import contextlib
import errno
import io
import os
import sys
from pathlib import Path
from typing import Any

# Where a worker notes why its log cannot be written. The launcher looks there, and says so.
TROUBLE = "FLEETX_LOG_TROUBLE"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


class ForgivingFile(io.FileIO):
    """A file that loses what it has no room for, rather than failing."""

    def __init__(self, descriptor: int, trouble: Path) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._trouble = trouble

    def write(self, data: Any, /) -> int:
        """All of it counts as written, as long as nothing but room is missing."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            note_trouble(self._trouble, error)
            return memoryview(data).nbytes


def forgive_full_disks() -> None:
    """From here on `print` and tracebacks do not fail because the log has no room."""
    trouble = os.environ.pop(TROUBLE, None)
    if trouble is None:  # what is printed goes to no log of ours
        return
    for name in ("stdout", "stderr"):
        before = getattr(sys, name)
        if isinstance(before, io.TextIOWrapper):
            before.flush()
            setattr(sys, name, _forgiving(before, Path(trouble)))


def _forgiving(before: io.TextIOWrapper, trouble: Path) -> io.TextIOWrapper:
    raw = ForgivingFile(before.fileno(), trouble)
    raw.name = before.name
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=before.encoding, errors=before.errors, line_buffering=True)


def note_trouble(path: Path, error: OSError) -> None:
    """Once: the file that is there says that the launcher knows, or soon will."""
    with contextlib.suppress(OSError), path.open("x", encoding="utf-8") as file:
        file.write(os.strerror(error.errno or 0))
