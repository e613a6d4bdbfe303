"""How much of a window's communication its backward hid.

    hidden = 1 - time the step waited for messages / time messages were under way

Messages are under way from the moment the first gradients leave until the last sum is there, less the times in between
when none was. The step waits after its backward only. On the host a message that is complete is found when the next
gradient arrives; on a GPU events say it, and whoever reads the figure waits for them, not the step.
"""

import os
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import Any

import torch

from fleetx.clock import moment, seconds_between
from fleetx.comm.groups import Message, backend_of

# With these set, waiting for a message of NCCL holds up the host: looking for its end would hold up the backward.
_BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


class Overlap:
    """When the messages of one window were under way, and when the step waited for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._under_way: deque[tuple[Any, Message]] = deque()
        self._arrived: list[tuple[Any, Any]] = []
        self._waits: list[tuple[Any, Any]] = []

    def sent(self, message: Message) -> None:
        """A message has just left."""
        left = moment(self._device)
        if self._device.type == "cuda":
            with torch.cuda.stream(_side_stream(self._device)):
                message.follow()
                self._arrived.append((left, moment(self._device)))
        else:
            self._under_way.append((left, message))

    def look(self) -> None:
        """Find what has arrived by now. Messages overlap, so the oldest of them decides whether any is under way."""
        while self._under_way and self._under_way[0][1].is_complete:
            self._arrived.append((self._under_way.popleft()[0], moment(self._device)))

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Around the wait for a message."""
        began = moment(self._device)
        yield
        self._waits.append((began, moment(self._device)))
        self.look()

    def hidden(self) -> float | None:
        """The share of communication that nobody waited for; None if no time passed. Waits for the device."""
        if not self._waits:
            return None
        if self._device.type == "cuda":
            for event in chain(*self._arrived, *self._waits):
                event.synchronize()
        first = self._arrived[0][0]
        spans = [[seconds_between(first, end) for end in span] for span in self._arrived]
        waited = sum(seconds_between(*span) for span in self._waits)
        under_way = _covered(spans)
        return min(1.0, max(0.0, 1 - waited / under_way)) if under_way > 0 else None


def overlap_on(device: torch.device) -> Overlap | None:
    """What follows messages of tensors on this device; None where nothing can without holding them up."""
    if device.type == "cpu":
        return Overlap(device)
    can_follow = backend_of(device) == "nccl" and not any(os.environ.get(name) == "1" for name in _BLOCKING)
    return Overlap(device) if can_follow else None


def _covered(spans: list[list[float]]) -> float:
    """How long at least one of the spans lasts, which are in the order of their beginnings."""
    total, end = 0.0, 0.0
    for began, ended in spans:
        total += max(0.0, ended - max(began, end))
        end = max(end, ended)
    return total


@cache
def _side_stream(device: torch.device) -> Any:
    """A stream that waits for messages in the place of the one that computes."""
    return torch.cuda.Stream(device)
