"""Makes sure that no process outlives the job that started it, however that one ends.

A process dies with its parent if it asks the kernel to (`die_with_parent`); what a script starts does not ask. So the
processes above it adopt orphans: whatever loses its parent, a daemon in a session of its own too, becomes their child,
and they end all children they have.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
# How long a process may take to die of SIGKILL, which can take for ever: in a call of a driver, or of a network disk.
_DYING = 5.0


def die_with_parent(parent: int, with_signal: int = signal.SIGKILL) -> None:
    """Let the kernel end this process when its parent dies; `parent` is who the parent should be."""
    _prctl(_PR_SET_PDEATHSIG, with_signal)
    if os.getppid() != parent:  # it died before the kernel was told
        os.kill(os.getpid(), with_signal)


def go_on_without_parent() -> None:
    """Live on when the parent dies, even if somebody has stopped this process: what is left to do must be done."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def adopt_orphans(adopts: bool = True) -> bool:
    """Become the parent of grandchildren whose own parent dies, so that they can be ended and waited for.

    Gives whether this process did so before.
    """
    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, adopts)
    return bool(before.value)


def children() -> set[int]:
    """The processes whose parent is this one, also those that have ended and were not waited for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()
    found = (_parent_of(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return {pid for pid, parent in found if parent == os.getpid()}


def children_at_a_glance() -> set[int]:
    """The same at little cost on a machine with many processes; one may be missing while another ends."""
    try:
        lists = [(task / "children").read_text("utf-8") for task in Path("/proc/self/task").iterdir()]
    except OSError:  # the kernel has no such lists, or a thread has just ended
        return children()
    return {int(pid) for pids in lists for pid in pids.split()}


def has_ended(child: int) -> bool:
    """Whether a child of this process has ended; its exit code stays there for whom it is for."""
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return True


def end_children(spared: Collection[int] = ()) -> set[int]:
    """Kill all children but the `spared` ones, and what they have started; gives those that would not end.

    Only children are killed, whose numbers cannot have passed to other processes; in a process that adopts orphans
    their own children are the next.
    """
    end = time.monotonic() + _DYING
    while left := children().difference(spared):
        ended = [pid for pid in left if _kill(pid)]
        if not ended:
            if time.monotonic() > end:
                return left
            time.sleep(0.01)
    return set()


def _kill(child: int) -> bool:
    """Whether it has ended by now."""
    try:
        os.kill(child, signal.SIGKILL)
        return os.waitpid(child, os.WNOHANG)[0] == child
    except (PermissionError, ChildProcessError, ProcessLookupError):
        return False


def _parent_of(pid: str) -> tuple[int, int]:
    try:
        # The name of the program stands in brackets, and may hold anything.
        return int(pid), int(Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return int(pid), 0


def _prctl(option: int, value: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}) failed: {os.strerror(error)}")
