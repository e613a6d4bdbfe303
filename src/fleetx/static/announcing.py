"""Says on stderr that a program is being compiled, and for how long: it may take minutes, and nothing else moves."""

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from fleetx.comm import world
from fleetx.launch.say import show
from fleetx.notices import is_quiet

FIRST_AFTER = 2.0
"""Seconds; what is compiled sooner is not worth a line."""


class Announcement:
    """One compilation as it is shown: in a terminal a line that counts the seconds, elsewhere a line now and then."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._began = clock()
        self._shown = False
        self._is_live = sys.stderr is not None and sys.stderr.isatty()

    def show(self) -> None:
        """Say that it goes on."""
        line = f"compiling {self._what} ... {self._clock() - self._began:.0f} s"
        self._write(f"\r{line}" if self._is_live else f"{line}\n")
        self._shown = True

    def end(self) -> None:
        """Say how long it took, if it was shown."""
        if self._shown:
            line = f"compiled {self._what} in {self._clock() - self._began:.0f} s"
            # The line before is up to three letters longer.
            self._write(f"\r{line}    \n" if self._is_live else f"{line}\n")

    def next_after(self, waited: float) -> float:
        """Seconds until the next line: one in a terminal; elsewhere twice as long each time."""
        return 1.0 if self._is_live else waited * 2

    def _write(self, text: str) -> None:
        if sys.stderr is not None:
            show(text, sys.stderr)


@contextmanager
def announcing(what: str) -> Generator[None]:
    """Inside, what torch compiles is announced, on the first worker."""
    if is_quiet() or not world.is_first():
        yield
        return
    from torch._dynamo.callback import callback_handler  # the whole compiler: it is about to be needed

    announcer = _Announcer(what)
    callback_handler.register_start_callback(announcer.begin)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(announcer.begin)
        announcer.end()


class _Announcer:
    """Shows an announcement from a thread of its own, as the compiler keeps this one busy."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, _what_torch_says: object) -> None:
        """For the first graph; others of the same forward belong to it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._count, daemon=True, name="fleetx-compiling")
            self._thread.start()

    def end(self) -> None:
        """Leave the last word to the thread."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()

    def _count(self) -> None:
        announcement, wait = Announcement(self._what), FIRST_AFTER
        while not self._ended.wait(wait):
            announcement.show()
            wait = announcement.next_after(wait)
        announcement.end()
