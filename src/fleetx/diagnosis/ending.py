"""How a worker ended, and which of several endings was the cause of the others."""

import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

# The exit code of a job that lost a machine, and of one that had to end a worker that stood still, as `timeout` has it.
LOST, STUCK = 1, 124
# What a worker says that lost another one: true, but not the cause.
_CONSEQUENCE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|connection was (closed|likely)|remote process exited"
    r"|socket (timeout|error)|timed out|timeout|one of them is gone|failed to (recv|connect|send)|recvvalue"
    r"|\b(tcp|prefix|file)?store\b",
    re.IGNORECASE,
)
# How much later than a failure that it caused the end of a worker may seem to be: clocks of machines are compared by
# messages, and a process takes a moment to end.
_SEEMS_LATER = 0.5
_COMMUNICATION = {"RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "CheckpointError"}


@dataclass(frozen=True)
class Ending:
    """One worker's end. `code` is as Python gives it: negative for a signal. `by_us` ones were told to end.

    `asked` is the signal that a worker got from somebody else, and left for by itself. `left_early` is what others
    failed with because this one had left, all being well for itself.
    """

    rank: int
    host: str
    code: int
    time: float
    log: str | None = None
    lines: list[str] = field(default_factory=list)
    error_type: str = ""
    error: str = ""
    out_of_memory: bool = False
    by_us: bool = False
    asked: int = 0
    left_early: int = 0
    stuck: str = ""
    lost_host: str = ""

    def as_message(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @property
    def failed(self) -> bool:
        """Whether something went wrong."""
        return self.code != 0 or bool(self.stuck)

    @property
    def exit_code(self) -> int:
        """What a shell would call it."""
        if self.asked:
            return 128 + self.asked
        if self.left_early:
            return self.left_early
        return 128 - self.code if self.code < 0 else self.code

    @property
    def is_consequence(self) -> bool:
        """Whether the worker failed only because another one was gone."""
        return self.error_type in _COMMUNICATION and _CONSEQUENCE.search(self.error) is not None

    def sentence(self) -> str:
        """What happened, in one line."""
        who = f"worker {self.rank}"
        if self.lost_host:
            return f"host {self.host} with {who} is lost: {self.lost_host}"
        if self.asked:
            name = signal_name(self.asked)
            return f"{who} was asked to stop ({name}) by somebody other than fleetrun, and left (host {self.host})"
        if self.left_early:
            return (
                f"{who} left with exit code 0 while others were still at work (host {self.host}): all workers must do "
                "the same steps"
            )
        if self.stuck:
            return f"{who} made no progress: {self.stuck} (host {self.host})"
        if self.out_of_memory:
            return f"{who} was ended by SIGKILL: the machine or its memory limit ran out of memory (host {self.host})"
        if self.code < 0:
            return f"{who} was ended by {signal_name(-self.code)} (host {self.host})"
        reason = f": {self.error_type}: {_first_line(self.error)}" if self.error_type else ""
        return f"{who} failed with exit code {self.code} (host {self.host}){reason}"


def root_cause(endings: Sequence[Ending]) -> Ending | None:
    """The ending that explains the others: the first that failed by itself, not for want of another worker.

    Where all failed for want of another, it is the one that had left without an error before, if there is one. Where
    nobody failed it is the first that was asked to leave by somebody else: the job is not done.
    """
    failed = [ending for ending in endings if ending.failed and not ending.by_us]
    if not failed:
        return min((ending for ending in endings if ending.asked), key=lambda e: (e.time, e.rank), default=None)
    first = min(failed, key=lambda e: (not (e.stuck or e.lost_host), e.is_consequence, e.time, e.rank))
    if first.is_consequence and not first.stuck and not first.lost_host:
        return _left_before(first, endings) or first
    return first


def _left_before(failure: Ending, endings: Sequence[Ending]) -> Ending | None:
    """The first worker that had left without an error, and unasked by the launcher, when another one lost it."""
    left = [e for e in endings if e.code == 0 and not e.failed and not e.by_us]
    early = [e for e in left if e.time <= failure.time + _SEEMS_LATER]
    if not early:
        return None
    return replace(min(early, key=lambda e: (e.time, e.rank)), left_early=failure.exit_code)


def signal_name(number: int) -> str:
    """SIGKILL rather than 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _first_line(text: str) -> str:
    """And the second, if the first only announces it."""
    line, _, rest = (part.strip() for part in text.strip().partition("\n"))
    if line.endswith(":") and rest:
        line = f"{line} {rest.partition(chr(10))[0].rstrip()}"
    return line if len(line) <= 300 else line[:297] + "..."
