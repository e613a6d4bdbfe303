"""One job at a time writes its logs into a folder."""

import contextlib
import fcntl
import os
import time
from collections.abc import Generator
from datetime import datetime
from pathlib import Path

from fleetx.launch.say import LaunchError, say

# Starts with a dot: it is no log.
LOCK = ".fleetrun.lock"
# How often, and for how many seconds in all, a lock is tried before a job is refused: the one that holds it may not
# have written its name yet.
_TRIES, _WAIT = 10, 0.5


@contextlib.contextmanager
def locked(folder: Path, job: str, host: str, *, is_shared: bool = False) -> Generator[None]:
    """Keep the folder for `job` while the block runs; raises if another job has it.

    The kernel frees the lock when this process ends, however that is. `is_shared` jobs run on several machines, which
    may see one folder: each writes the logs of its own workers there. File systems that have no locks are used without,
    which is said.
    """
    lock = None
    try:
        try:
            lock = _opened(folder / LOCK)
            if _is_ours(lock, folder, job if is_shared else None):
                _write(lock, f"{job}, process {os.getpid()} on {host}, since {datetime.now():%Y-%m-%d %H:%M:%S}")
        except OSError as error:
            say(
                f"--log_dir {folder} cannot be locked ({error.strerror}): the logs of another job that uses it would "
                "mix with those of this one."
            )
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _opened(path: Path) -> int:
    """The lock's file; another user may have made it."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)


def _is_ours(lock: int, folder: Path, shared_job: str | None) -> bool:
    """Whether the lock was got; if not, another machine of the same job has it. An OSError where there are no locks."""
    holder = ""
    for _ in range(_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            holder = _read(lock)
            if shared_job is not None and holder.startswith(f"{shared_job}, "):
                return False
            time.sleep(_WAIT / _TRIES)
    raise LaunchError(
        f"--log_dir {folder} is in use by another job ({holder or 'its name is not known'}), and their logs would mix: "
        "give this one a folder of its own with --log_dir, or wait for the end of the other one."
    )


def _read(lock: int) -> str:
    with contextlib.suppress(OSError):
        return os.pread(lock, 500, 0).decode(errors="replace").strip()
    return ""


def _write(lock: int, text: str) -> None:
    """Who has the lock, for those that do not get it; a full disk or another user's file is no reason to fail."""
    with contextlib.suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{text}\n".encode(), 0)
