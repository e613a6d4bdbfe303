"""What a person sees while a job goes on: a live bar in a terminal, lines elsewhere, on any kind of output."""

import contextlib
import io
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import TracebackType
from typing import IO, Self, TextIO, cast

from rich.console import Console
from rich.progress import Progress, Task
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fleetx.launch.say import show

_LINES_IN_A_LOG = 20
_SHORTEST_BAR = 8


class SteadyStream(io.TextIOBase):
    """Passes text on to a stream. A character that it cannot encode becomes a `?`; a reader that left is no error.

    What a job prints must not end it: the reader may be `head`, the disk of a log may be full.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's own."""
        return self._stream.encoding or "utf-8"

    def write(self, text: str) -> int:
        """All of it counts as written."""
        show(text.encode(self.encoding, "replace").decode(self.encoding), self._stream)
        return len(text)

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        with contextlib.suppress(ValueError):  # closed
            return self._stream.isatty()
        return False

    def fileno(self) -> int:
        """The stream's own."""
        return self._stream.fileno()


def open_console() -> Console:
    """Open a console on stdout that takes any text and outlives its reader."""
    return Console(file=cast(IO[str], SteadyStream(sys.stdout)), highlight=False)


def broken_between_words(text: str, width: int) -> str:
    """The text in lines of this width; words that are longer, as paths are, stay whole."""
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()))
        lines += textwrap.wrap(
            line,
            width,
            subsequent_indent=indent,
            drop_whitespace=True,
            replace_whitespace=False,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(lines)


def reopen_closed_streams() -> None:
    """Lead stdout and stderr nowhere if this process was started without them.

    Otherwise the next file that is opened gets their number, and what workers print lands in it.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                if nowhere != number:
                    os.dup2(nowhere, number)
                    os.close(nowhere)
                os.set_inheritable(number, True)  # the workers print there too
                setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115


class JobProgress:
    """One bar over all parts of a job, counted in samples, with the rate and the time left.

    In a terminal it is one live line, of which the numbers stay longest where the terminal is narrow. Elsewhere a line
    is printed for each twentieth of the job.
    """

    def __init__(
        self,
        samples: int,
        *,
        enabled: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or open_console()
        self._enabled = enabled
        self._live = enabled and self._console.is_terminal
        self._bar = _OneLine(console=self._console, disable=not self._live, get_time=clock)
        self._id = self._bar.add_task("", total=samples, figures="")
        self._lines = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the line as it is: what is printed from now on comes below it."""
        self._bar.stop()

    def begin(self, part: str) -> None:
        """Name the part of the job that comes next."""
        self._bar.update(self._id, description=part, figures="")

    def advance(self, samples: int, figures: str | None = None) -> None:
        """Count samples; `figures` are shown from now on, until the next part begins."""
        if not self._enabled:
            return
        task = self._bar.tasks[0]
        self._bar.update(self._id, advance=samples, figures=task.fields["figures"] if figures is None else figures)
        lines = int(_LINES_IN_A_LOG * task.percentage / 100)
        if not self._live and lines > self._lines and task.speed is not None:
            self._lines = lines
            self._console.print(log_line(task), markup=False, soft_wrap=True)


class _OneLine(Progress):
    """A bar that leaves out what does not fit, never the numbers."""

    def make_tasks_table(self, tasks: Iterable[Task]) -> Table:
        """As one row for each task; there is one, or none yet."""
        table = Table.grid(padding=(0, 1), expand=True)
        for task in tasks:
            parts = fitting(task, self.console.width)
            for part in parts:
                table.add_column(no_wrap=True, ratio=1 if part is None else None)
            bar = ProgressBar(total=task.total, completed=task.completed)
            table.add_row(*(bar if part is None else Text(part) for part in parts))
        return table


def fitting(task: Task, width: int) -> list[str | None]:
    """What a line of this width has room for, in its order; None is the bar."""
    numbers = f"{task.completed:,.0f}/{task.total:,.0f} {_rate(task)} {_left(task)}"
    choices: list[list[str | None]] = [
        [task.description, None, numbers, task.fields["figures"]],
        [task.description, None, numbers],
        [task.description, numbers],
    ]
    for choice in choices:
        parts = [part for part in choice if part != ""]
        if sum(_SHORTEST_BAR if part is None else len(part) for part in parts) + len(parts) - 1 <= width:
            return parts
    return [numbers]


def log_line(task: Task) -> str:
    """What a log gets now and then."""
    figures = task.fields["figures"]
    parts = [task.description, f"{_rate(task)}", f"{_left(task)} left", *([figures] if figures else [])]
    return f"{task.percentage:3.0f}%  {'  '.join(parts)}"


def _rate(task: Task) -> str:
    return "-/s" if task.speed is None else f"{task.speed:,.0f}/s"


def _left(task: Task) -> str:
    if task.finished:
        return "0:00:00"
    return "-:--:--" if task.time_remaining is None else str(timedelta(seconds=int(task.time_remaining)))
