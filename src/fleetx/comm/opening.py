"""What workers tell each other when a `Step` begins: what each has to count, or that its data has ended."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fleetx.comm import beats, world

_ROOM = 32
"""How many numbers the first message has: who has nothing to count does not know how many there are."""
_LEAVING, _COUNTS, _FIRST = 0, 1, 2


class Opening:
    """The sums over all workers of `counts`, of which all that have some have equally many.

    They are started here, and waited for when they are read.
    """

    @beats.waiting()
    def __init__(self, counts: Sequence[float | Tensor], device: torch.device) -> None:
        # fp64 counts exactly, up to far more items than any window holds.
        numbers = torch.zeros(max(_ROOM, _FIRST + len(counts)), dtype=torch.float64, device=device)
        numbers[_COUNTS] = len(counts)
        for place, count in enumerate(counts, start=_FIRST):
            numbers[place] = count
        self._numbers, self._size = numbers, _FIRST + len(counts)
        self._works = [dist.all_reduce(numbers[:_ROOM], async_op=True)]
        if len(numbers) > _ROOM:
            self._works.append(dist.all_reduce(numbers[_ROOM:], async_op=True))

    def totals(self) -> list[Tensor]:
        """The sums."""
        self._wait()
        return list(self._numbers[_FIRST : self._size].unbind())

    def leaving(self) -> int:
        """How many workers have no data any more."""
        self._wait()
        return int(self._numbers[_LEAVING].item())

    @beats.waiting()
    def _wait(self) -> None:
        for work in self._works:
            if work is not None:
                work.wait()
        self._works = []


@beats.waiting()
def take_part(device: torch.device) -> int:
    """Be there when others begin a `Step`, without data; gives how many workers do the same."""
    numbers = torch.zeros(_ROOM, dtype=torch.float64, device=device)
    numbers[_LEAVING] = 1
    dist.all_reduce(numbers)
    leaving, counts = (int(number) for number in numbers[: _COUNTS + 1].tolist())
    stepping = world.size() - leaving
    more = _FIRST + counts // stepping - _ROOM if stepping else 0
    if more > 0:
        dist.all_reduce(torch.zeros(more, dtype=torch.float64, device=device))
    return leaving
