"""How many cores this process may use: in containers and batch jobs fewer than the machine has.

torch's threads wait for each other in every operation. Two threads on one core made a training run a hundred times
slower.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from fleetx.control_groups import group_folders, read_text


@dataclass(frozen=True)
class Cores:
    """What the machine has, and what limits this process: its CPU set, and the processor time of its control groups."""

    machine: int
    affinity: int
    quota: float | None = None

    @property
    def usable(self) -> int:
        """How many threads can run all the time, at least one."""
        return max(1, int(min(self.affinity, self.quota or self.affinity)))

    def share(self, workers: int) -> int:
        """How many of them each of `workers` processes gets, at least one."""
        return max(1, self.usable // workers)

    def __str__(self) -> str:
        limits = [f"{self.affinity} in the CPU set"] if self.affinity < self.machine else []
        limits += [f"a quota of {self.quota:g}"] if self.quota is not None else []
        return f"{self.usable} of {self.machine}" + (f" ({', '.join(limits)})" if limits else "")


def cores(proc: Path = Path("/proc")) -> Cores:
    """Count them now: a CPU set and a quota may be changed at any time."""
    machine = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    return Cores(machine, affinity, _quota(chain.from_iterable(group_folders("cpu", proc=proc))))


def _quota(folders: Iterable[Path]) -> float | None:
    """The smallest quota of the groups, in cores; None if none has one."""
    found = (quota for folder in folders for quota in (_version_2(folder), _version_1(folder)))
    return min((quota for quota in found if quota is not None), default=None)


def _version_2(folder: Path) -> float | None:
    return _ratio(*(read_text(folder / "cpu.max").split() + ["", ""])[:2])


def _version_1(folder: Path) -> float | None:
    return _ratio(read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us"))


def _ratio(quota: str, period: str) -> float | None:
    """Microseconds of processor time in a period; none is "max" or -1."""
    try:
        time, of = int(quota), int(period)
        return time / of if time > 0 and of > 0 else None
    except (ValueError, OverflowError):
        return None
