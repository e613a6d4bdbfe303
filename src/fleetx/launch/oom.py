"""Whether the kernel has ended a process because memory ran out: its exit status alone says only SIGKILL."""

import re
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


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
    found = [(_PROC / "vmstat", "oom_kill")]
    for line in _read(_PROC / str(pid) / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        group = path.lstrip("/")
        if controllers == "":  # version 2; beside version 1 it may be mounted under another name
            found += [(root / group / "memory.events", "oom_kill") for root in (_CGROUPS, _CGROUPS / "unified")]
        elif "memory" in controllers.split(","):
            found.append((_CGROUPS / "memory" / group / "memory.oom_control", "oom_kill"))
    return found


def _number(file: Path, key: str) -> int | None:
    match = re.search(rf"^{key} (\d+)$", _read(file), re.MULTILINE)
    return int(match.group(1)) if match else None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:  # not this kernel, or not for us to see
        return ""
