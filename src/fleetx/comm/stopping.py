"""Whether the job was asked to stop: a signal may reach workers at different times, but all must leave together.

Each worker says in the message that closes a window whether it has got the signal. So all of them learn it from the
same window, and no further message is needed.

A script asks for it after its updates, so in the first window nobody knows yet whether it will. The launcher holds a
signal back until it is known: a worker that dies of the signal takes away what the others would have saved.
"""

import os
import signal
import threading
from types import FrameType
from typing import NoReturn

from torch import Tensor

from fleetx.comm import beats, world
from fleetx.comm.beats import Manner
from fleetx.notices import tell_once
from fleetx.outcome import HostValue

SILENT_WINDOWS = 2
"""A script that has not asked after so many windows is taken to be one that never does."""


class _State:
    """What this worker knows."""

    signal = 0  # that asked it to stop, or the one that its script's request counts as
    answered = False  # whether the script has learned that the job was asked
    asked = False
    listening = False
    process = 0
    windows = 0
    # What all workers said when the latest window closed, and when the one before it did.
    latest: HostValue | bool = False
    previous: HostValue | bool = False


_state = _State()


def begin_job() -> None:
    """What an earlier job of this process was asked, and has answered, does not concern the next one."""
    _state.latest = _state.previous = False
    if _state.answered:
        _state.signal, _state.answered = 0, False


def answer() -> bool:
    """Whether the job was asked, as the script learns it."""
    listen()
    is_asked = is_wanted() if world.size() == 1 else is_agreed()
    _state.answered = _state.answered or is_asked
    return is_asked


def listen() -> None:
    """From now on SIGTERM and Ctrl-C ask this worker to leave, rather than ending it."""
    is_new, _state.asked = not _state.asked, True
    if _state.listening:
        return
    if threading.current_thread() is threading.main_thread():
        _handle_signals()
        beats.note_manner(Manner.ASKS)  # from now on a signal does no harm
    elif is_new:
        beats.note_manner(Manner.NEVER_ASKS)
        tell_once(
            "no signals",
            "fleet.stop_requested() was first called outside the main thread, and Python handles signals only there: "
            "they end this process as before. Call it once in the main thread too, or fleet.request_stop() when the "
            "engine asks to stop.",
        )


def request() -> None:
    """Count as a worker that got SIGTERM."""
    if _state.process not in (0, os.getpid()):
        raise RuntimeError(
            "fleet.request_stop() must be called in the worker itself, and this is a process that the worker "
            f"({_state.process}) has forked ({os.getpid()}). Send the request to the worker, or SIGTERM."
        )
    _want(signal.SIGTERM)


def _want(number: int) -> None:
    _state.signal = _state.signal or number
    beats.note_signal(number)


def _handle_signals() -> None:
    _state.listening, _state.process = True, os.getpid()
    for number in (signal.SIGTERM, signal.SIGINT):
        # What the script has set up by itself stays.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _on_signal)


def exit_code() -> int:
    """Of a process that a signal has ended: a scheduler starts it again. It is that of SIGTERM if nobody sent one."""
    return 128 + (_state.signal or signal.SIGTERM)


def window_begins() -> None:
    """A window gets its first micro-batch: by now the script may have shown whether it asks."""
    if _state.asked or _state.windows > SILENT_WINDOWS:
        return
    beats.note_manner(Manner.UNDECIDED if _state.windows < SILENT_WINDOWS else Manner.NEVER_ASKS)
    _state.windows += 1


def is_wanted() -> bool:
    """Whether this worker has got a signal, or its script a request."""
    return _state.signal != 0


def note(stop: Tensor) -> None:
    """How many workers had got the signal when the window closed; of no interest to a script that does not ask."""
    if not _state.asked:
        return
    _state.previous, _state.latest = _state.latest, HostValue(stop.detach().clone())


def note_alone() -> None:
    """A worker alone need not ask anybody."""
    _state.previous = _state.latest = is_wanted()


def is_agreed() -> bool:
    """The same answer on all workers. On a GPU it is that of the window before the latest, so as not to wait."""
    latest = _state.latest
    if isinstance(latest, HostValue) and latest.on_device:
        return _true(_state.previous)
    return _true(latest)


def _true(value: HostValue | bool) -> bool:
    return value.get() > 0 if isinstance(value, HostValue) else value


def _on_signal(number: int, _frame: FrameType | None) -> None:
    """The same signal may come twice, from a batch system and from the launcher; who has no patience sends SIGKILL.

    At a terminal, without a launcher, a second Ctrl-C is meant as it always is. And so is any signal to a process that
    the script has forked: a pool that is taken down waits for its processes to die of it.
    """
    if os.getpid() != _state.process:
        _take_as_usual(number)
    if _state.signal and number == signal.SIGINT and world.launched_size() == 1:
        raise KeyboardInterrupt
    _want(number)


def _take_as_usual(number: int) -> NoReturn:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    raise AssertionError("the signal has ended this process by now")
