"""How a worker ended, and which of several endings was the cause of the others."""

import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
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
_COMMUNICATION = {"RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "CheckpointError"}


@dataclass(frozen=True)
class Ending:
    """One worker's end. `code` is as Python gives it: negative for a signal. `by_us` ones were told to end.

    `asked` is the signal that a worker got from somebody else, and left for by itself.
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
            return f"{who} got {name} from somebody other than fleetrun, and left as it asks (host {self.host})"
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

    Where nobody failed it is the first that was asked to leave by somebody else: the job is not done.
    """
    failed = [ending for ending in endings if ending.failed and not ending.by_us]
    if not failed:
        return min((ending for ending in endings if ending.asked), key=lambda e: (e.time, e.rank), default=None)
    return min(failed, key=lambda e: (not (e.stuck or e.lost_host), e.is_consequence, e.time, e.rank))


def signal_name(number: int) -> str:
    """SIGKILL rather than 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 300 else line[:297] + "..."
