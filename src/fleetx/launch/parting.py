"""Makes sure that no process outlives the one that started it, however that one ends."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int, with_signal: int = signal.SIGKILL) -> None:
    """Let the kernel end this process when its parent dies; `parent` is who the parent should be."""
    _prctl(_PR_SET_PDEATHSIG, with_signal)
    if os.getppid() != parent:  # it died before the kernel was told
        os.kill(os.getpid(), with_signal)


def live_on() -> None:
    """Take that back."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of grandchildren whose own parent dies, so that they can be ended and waited for."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}) failed: {os.strerror(error)}")
