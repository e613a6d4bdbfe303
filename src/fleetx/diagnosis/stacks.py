"""Where a worker is: its Python stack, written by itself when the launcher asks, and its state in the kernel."""

import os
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed

_MOST_LINES = 25
# Where torch sends the messages that a script sends by itself.
_TORCH_SENDS = f'File "{Path(torch.distributed.__file__).parent}{os.sep}'
# Frames that are the same in every worker, and those of imports.
_MACHINERY = re.compile(r'"<frozen |[/\\]fleetx[/\\]launch[/\\]')


@dataclass(frozen=True)
class Stack:
    """One worker's main thread, the innermost frame first."""

    lines: list[str] = field(default_factory=list)
    stopped: bool = False
    state: str = ""
    in_message: bool = False  # of the script's own, of which FleetX knows nothing

    def as_message(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def read_stack(path: Path, pid: int | None, stopped: bool, end: float) -> Stack:
    """The stack that the worker writes into `path`, waited for until `end`."""
    text = ""
    while time.monotonic() < end:
        text = _text(path)
        if _complete(text):
            break
        time.sleep(0.01)
    lines = main_thread(text)
    return Stack(lines, stopped, state_of(pid), bool(lines) and lines[0].startswith(_TORCH_SENDS))


def main_thread(text: str) -> list[str]:
    """The lines of the main thread in what faulthandler wrote; of all threads, it comes last."""
    lines = text.strip().splitlines()
    starts = [index for index, line in enumerate(lines) if line.startswith(("Thread ", "Current thread "))]
    current = [index for index in starts if lines[index].startswith("Current thread ")]
    begin = (current or starts or [-1])[-1]
    frames = [line.strip() for line in lines[begin + 1 :] if line.startswith("  ")]
    return [frame for frame in frames if not _MACHINERY.search(frame)][:_MOST_LINES]


def is_stopped(pid: int | None) -> bool:
    """Whether somebody has stopped the process (SIGSTOP, a debugger)."""
    return _letter(pid) in ("T", "t")


def state_of(pid: int | None) -> str:
    """In words what the kernel says about the process."""
    words = {"R": "running", "S": "sleeping", "D": "waiting for a device or disk", "Z": "ended"}
    return words.get(_letter(pid), "")


def _letter(pid: int | None) -> str:
    if pid is None:
        return ""
    # The name of the program stands in brackets, and may hold anything.
    return _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].strip()[:1]


def _complete(text: str) -> bool:
    """faulthandler writes the current thread last; a process of one thread has only that."""
    return "Current thread " in text and text.endswith("\n") and "  File " in text.rpartition("Current thread ")[2]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
