"""One job writes to a folder at a time: a worker that outlived its job must not save among those of the next."""

import errno
import fcntl
import os
import re
import socket
import stat
import time
import weakref
from pathlib import Path

from fleetx.checkpoint.errors import CheckpointError
from fleetx.notices import tell_once

FILE = ".lock"
_OWNER = re.compile(rb"process \d+ on [^\n]* *\n")
_MOST_BYTES = 1000
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}


class Hold:
    """A folder that this process alone writes to, as long as the object lives."""

    def __init__(self, folder: Path, wait: float) -> None:
        self._descriptor = _open(folder / FILE)
        # A record lock: the system lifts it when the process dies, however it dies, and loading processes that were
        # forked meanwhile do not hold it.
        weakref.finalize(self, os.close, self._descriptor)
        end = time.monotonic() + wait
        while not self._taken():
            if time.monotonic() >= end:
                owner = os.pread(self._descriptor, _MOST_BYTES, 0).decode(errors="replace").strip()
                raise CheckpointError(
                    f"one job at a time saves to a folder, and {folder} belongs to {owner or 'another process'}. End "
                    "that process if it is left over, or give this job a folder of its own."
                )
            time.sleep(0.05)
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        # Spaces cover a longer line from before: a file is never cut.
        os.pwrite(self._descriptor, owner.encode().ljust(os.fstat(self._descriptor).st_size - 1) + b"\n", 0)

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


def _open(path: Path) -> int:
    """The descriptor of the lock file; raises if something else has the name, which is left alone."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # pipes would block
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _not_a_lock(path, "a link, a folder or a socket") from error
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _not_a_lock(path, "not a plain file")
        if found.st_nlink > 1:
            raise _not_a_lock(path, "a file that has other names too")
        if found.st_size and not _OWNER.fullmatch(os.pread(descriptor, _MOST_BYTES, 0)):
            raise _not_a_lock(path, "a file that something else wrote")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _not_a_lock(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} keeps other jobs from saving to this folder, and it is {what}. Remove it, or give another folder."
    )


# Such a lock is the process's: closing the file once would lift it for all that opened it, so it is opened once.
_held: "weakref.WeakValueDictionary[tuple[str, int], Hold]" = weakref.WeakValueDictionary()


def hold(folder: Path, wait: float = 10.0) -> Hold:
    """Keep the folder for this process; raises if another one still has it after `wait` seconds."""
    key = (str(folder.resolve()), os.getpid())
    held = _held.get(key)
    if held is None:
        held = _held[key] = Hold(folder, wait)
    return held
