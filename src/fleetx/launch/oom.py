"""Whether the kernel has ended a process because memory ran out: its exit status alone says only SIGKILL."""

import re
from pathlib import Path

from fleetx.control_groups import group_folders, read_text

_PROC = Path("/proc")
_FILES = ("memory.events", "memory.oom_control")  # of versions 2 and 1


class OutOfMemory:
    """Counts what the kernel has ended for lack of memory, in the process's control groups and on the whole machine."""

    def __init__(self, pid: int | str = "self") -> None:
        self._files = _counters(pid)
        self._before = self._counts()

    def has_struck(self) -> bool:
        """Whether any count has grown since."""
        return any(now > before for before, now in zip(self._before, self._counts(), strict=True))

    def _counts(self) -> list[int]:
        return [_number(file, key) or 0 for file, key in self._files]


def _counters(pid: int | str) -> list[tuple[Path, str]]:
    """Files that count, with the word before the number: of the whole machine, and of the groups of the process."""
    groups = [folders[0] for folders in group_folders("memory", pid, _PROC)]
    return [(file, "oom_kill") for file in (_PROC / "vmstat", *(group / name for group in groups for name in _FILES))]


def _number(file: Path, key: str) -> int | None:
    match = re.search(rf"^{key} (\d+)$", read_text(file), re.MULTILINE)
    return int(match.group(1)) if match else None
