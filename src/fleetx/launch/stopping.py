"""Signals that the launcher gets."""

import contextlib
import signal
from collections.abc import Generator
from dataclasses import dataclass, field
from types import FrameType

# What asks a launcher to stop its job: Ctrl-C, a batch system, a terminal that was closed.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Stopping:
    """The first signal asks the workers to save and leave, the second ends them."""

    numbers: list[int] = field(default_factory=list)

    def note(self, number: int, _frame: FrameType | None) -> None:
        """A signal handler."""
        self.numbers.append(number)

    @contextlib.contextmanager
    def listening(self) -> Generator["Stopping"]:
        """Handle signals here rather than dying of them."""
        # Under `nohup` the job goes on when the terminal is closed.
        heard = [n for n in STOPPING if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, self.note) for number in heard}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
