"""One job writes to a folder at a time: a worker that outlived its job must not save among those of the next."""

import errno
import fcntl
import os
import socket
import time
import weakref
from pathlib import Path

from fleetx.checkpoint.errors import CheckpointError
from fleetx.notices import tell_once

FILE = ".lock"
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}


class Hold:
    """A folder that this process alone writes to, as long as the object lives."""

    def __init__(self, folder: Path, wait: float) -> None:
        self._descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # A record lock: the system lifts it when the process dies, however it dies, and loading processes that were
        # forked meanwhile do not hold it.
        weakref.finalize(self, os.close, self._descriptor)
        end = time.monotonic() + wait
        while not self._taken():
            if time.monotonic() >= end:
                owner = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip()
                raise CheckpointError(
                    f"one job at a time saves to a folder, and {folder} belongs to {owner or 'another process'}. End "
                    "that process if it is left over, or give this job a folder of its own."
                )
            time.sleep(0.05)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _taken(self) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            tell_once(
                "checkpoint-locks",
                f"the file system of the checkpoints has no locks ({error.strerror}): nothing but care keeps two jobs "
                "from saving to one folder.",
            )
        return True


# Such a lock is the process's: closing the file once would lift it for all that opened it, so it is opened once.
_held: "weakref.WeakValueDictionary[tuple[str, int], Hold]" = weakref.WeakValueDictionary()


def hold(folder: Path, wait: float = 10.0) -> Hold:
    """Keep the folder for this process; raises if another one still has it after `wait` seconds."""
    key = (str(folder.resolve()), os.getpid())
    held = _held.get(key)
    if held is None:
        held = _held[key] = Hold(folder, wait)
    return held
