"""How much each micro-batch counts in the whole: items of the slice over items of all slices and workers."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fleetx.comm import world
from fleetx.window import Number

Counts = Mapping[str, Number]


class Shares:
    """Item counts of a window, summed over its micro-batches and over the workers.

    The sum over workers is started here and waited for when the first share is asked for, so that the first
    forward hides it. Shares are multiplied by the number of workers, because gradients are averaged over these.
    """

    def __init__(self, counts: Sequence[Counts], device: torch.device) -> None:
        self._counts = counts
        self._names = list(counts[0])
        self._totals: list[Number] = [sum(count[name] for count in counts) for name in self._names]
        self._work: dist.Work | None = None
        if world.size() > 1:
            # fp64 counts exactly, up to far more items than any window holds.
            summed = torch.empty(len(self._totals), dtype=torch.float64, device=device)
            for position, total in enumerate(self._totals):
                summed[position] = total
            self._work = dist.all_reduce(summed, async_op=True)
            self._totals = list(summed.unbind())

    def total(self, name: str) -> Tensor:
        """Items of the window on all workers."""
        self._wait()
        return torch.as_tensor(self._totals[self._names.index(name)])

    def weigh(self, loss: Tensor, micro_batch: int, name: str) -> Tensor:
        """The loss of one micro-batch times its share."""
        self._wait()
        if name not in self._names:
            raise ValueError(
                f"the step has a loss but no {name}: items() gave {', '.join(self._names[1:])}. "
                "Give one count per loss, under the same names."
            )
        count = self._counts[micro_batch][name]
        if not isinstance(count, Tensor) and count == 0:
            # The mean over no items is NaN, but it weighs nothing.
            return torch.zeros((), dtype=loss.dtype, device=loss.device)
        share = count * world.size() / self._totals[self._names.index(name)]
        if isinstance(share, Tensor):
            return loss * share.to(loss.device, loss.dtype)
        return loss if share == 1 else loss * share

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
