"""Names a worker that keeps the others waiting, window after window.

A worker's own time goes from the end of one reduction to the last gradient of the next, less what it spent waiting for
others: loading, forward and backward, and whatever the script does in between. It travels in the message of the window
after it, together with how many items the worker had, so that no message and no wait is added.

A worker is slow in a window if it took more than `SLOWER` times as long as the median worker, both in all and for each
item: one that has more to do is as quick for each item, and one that has less is not waited for. After `WINDOWS` slow
windows in a row the first worker logs it once.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fleetx.clock import has_come, moment, seconds_between
from fleetx.comm import beats, world
from fleetx.notices import tell_once
from fleetx.numbers import Number
from fleetx.outcome import HostValue

WINDOWS = 20
SLOWER = 1.25
LEAST_SECONDS = 0.01
"""What others wait less than this for is not worth a word."""


class OwnTime:
    """How long this worker took for a window, by itself."""

    def __init__(self) -> None:
        self._began: tuple[Any, float] | None = None
        self._ended: deque[tuple[Any, Any, float, Number]] = deque()

    def begin(self, device: torch.device) -> None:
        """All workers have been together."""
        self._began = moment(device), beats.seconds_waited()

    def end(self, device: torch.device, items: Number) -> None:
        """The last gradient is there, of so many items."""
        if self._began is not None:
            began, waited = self._began
            # Where a GPU computes, its stream waits rather than the host.
            waited = 0.0 if device.type == "cuda" else beats.seconds_waited() - waited
            self._ended.append((began, moment(device), waited, items))
        self._began = None

    def latest(self) -> tuple[float, Number]:
        """Seconds and items of the latest window that is over on the device too; zeros if nothing new is known."""
        found: tuple[float, Number] = 0.0, 0.0
        while self._ended and has_come(self._ended[0][1]):
            began, ended, waited, items = self._ended.popleft()
            found = max(0.0, seconds_between(began, ended) - waited), items
        return found


class Stragglers:
    """Looks at the times of all workers, on the first one."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._slow_windows: Counter[int] = Counter()
        self._latest: HostValue | None = None

    def note(self, times: Tensor) -> None:
        """Seconds and items of each worker, as two rows. On a GPU those of the window before are looked at."""
        if world.rank():
            return
        before, self._latest = self._latest, HostValue(times)
        known = before if self._latest.on_device else self._latest
        if known is not None:
            seconds, items = known.tolist()
            self._look(seconds, items)

    def _look(self, seconds: list[float], items: list[float]) -> None:
        """Workers of whom nothing is known, such as those that held nothing, are left out."""
        known = [rank for rank, count in enumerate(items) if count > 0 and seconds[rank] > 0]
        if len(known) < 2:
            return
        usual = _median([seconds[rank] for rank in known])
        usual_of_item = _median([seconds[rank] / items[rank] for rank in known])
        for rank in known:
            is_slow = seconds[rank] > max(SLOWER * usual, usual + LEAST_SECONDS)
            is_slow = is_slow and seconds[rank] / items[rank] > SLOWER * usual_of_item
            self._slow_windows[rank] = self._slow_windows[rank] + 1 if is_slow else 0
            if self._slow_windows[rank] == WINDOWS:
                self._tell(rank, seconds[rank], usual)

    def _tell(self, rank: int, seconds: float, usual: float) -> None:
        tell_once(
            f"straggler {rank}",
            f"worker {rank} on {self._hosts[rank]} was slow in the last {WINDOWS} windows: {seconds:.3g} s of its own "
            f"in the latest, and the median of the {len(self._hosts)} workers is {usual:.3g} s. The others wait for it "
            "in each update: look for other processes on its machine, a hot or throttled device, a slow disk or "
            "loader, or work that the script does on this worker only.",
        )


def _median(numbers: list[float]) -> float:
    """The lower one of two, so that of two workers the quicker one is the measure."""
    return sorted(numbers)[(len(numbers) - 1) // 2]
