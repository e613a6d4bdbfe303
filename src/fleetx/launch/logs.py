"""`log/workerlog.N`: what each worker prints, kept over restarts, and shown on the console for worker 0."""

import contextlib
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import TextIO

from fleetx.launch.say import LaunchError, show

_TRACEBACK = "Traceback (most recent call last):"
_MOST_LINES = 20
_MOST_TRACEBACK = 80
_MOST_BYTES = 1 << 18
# Of one line that is shown, and of what is shown at once: the launcher has other things to do meanwhile.
_LONGEST_LINE = 1 << 16
_MOST_AT_ONCE = 1 << 22


def require_folder(folder: Path) -> None:
    """Make the folder of the logs; raises if they cannot be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(0, "no permission to write")
    except OSError as error:
        raise LaunchError(
            f"--log_dir {folder} must be a folder to write to, and it is not ({error.strerror}): give another one."
        ) from error


class WorkerLog:
    """One worker's log during one attempt: a part of a file that earlier attempts may have begun."""

    def __init__(self, folder: Path, rank: int, title: str, *, first: bool = True) -> None:
        """`first` attempts need no header in a file that is new; of later ones each has its own."""
        self.path = folder / f"workerlog.{rank}"
        # A disk that is full, or a folder that is gone, is no reason to give up a job.
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            begun = self._size() > 0
            if begun or not first:
                blank = "\n" if begun else ""
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(f"{blank}===== {title}, {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z} =====\n")
        self.start = self._size()

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def end(self) -> list[str]:
        """The last lines of this attempt; a traceback among them is shown from its beginning."""
        if not self.path.is_file():  # a link to a device, which may have no end
            return []
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(self.start, size - _MOST_BYTES))
                text = file.read().decode("utf-8", errors="replace")
        except OSError:
            return []
        return last_lines(text)


def last_lines(text: str) -> list[str]:
    """The end of a log: some lines, or all of the last traceback and a few lines before it."""
    lines = [_last_state(line) for line in text.rstrip().split("\n")] if text.strip() else []
    lines = lines[-_MOST_TRACEBACK:]
    # The first of them, since an error may stand below those that led to it.
    traces = [index for index, line in enumerate(lines) if line.endswith(_TRACEBACK)]
    return lines[max(0, traces[0] - 5) :] if traces else lines[-_MOST_LINES:]


class Relay:
    """Shows a growing log on the console, whole lines only, each with the worker's name before it."""

    def __init__(self, log: WorkerLog, name: str, console: TextIO | None = None) -> None:
        self._path, self._place, self._name = log.path, log.start, name
        self._console = console or sys.stdout
        self._rest = b""

    def pump(self, whole: bool = True) -> None:
        """Show what is new, or a part of much; `whole=False` all of it, and a last line that has no end yet."""
        if not self._path.is_file():  # a link to a device, which may have no end
            return
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(self._place)
            # Where it ends now: a worker may write faster than a console shows.
            end = min(size, self._place + _MOST_AT_ONCE) if whole else size
            while self._place < end and (new := file.read(min(_MOST_BYTES, end - self._place))):
                self._place += len(new)
                self._show_lines(new)
        if not whole and self._rest:
            self._show_lines(b"\n")

    def _show_lines(self, new: bytes) -> None:
        *lines, rest = (self._rest + new).split(b"\n")
        rest = rest[rest.rfind(b"\r", 0, -1) + 1 :]  # a bar may redraw one line for ever
        while len(rest) > _LONGEST_LINE:
            lines.append(rest[:_LONGEST_LINE])
            rest = rest[_LONGEST_LINE:]
        self._rest = rest
        if lines:
            texts = [_last_state(line.decode("utf-8", errors="replace")) for line in lines]
            show("".join(f"{self._name}{text}\n" for text in texts), self._console)


def _last_state(line: str) -> str:
    """A bar redraws its line after a carriage return: the last state of it is what counts."""
    return line.rstrip("\r").rpartition("\r")[2]
