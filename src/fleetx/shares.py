"""How much each micro-batch counts in the whole: items of the slice over items of all slices and workers."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fleetx.comm import world
from fleetx.comm.opening import Opening
from fleetx.numbers import Number
from fleetx.step import weigh

SAMPLES = "samples"
"""The name under which samples are counted."""
Counts = Mapping[str, Number]


class Shares:
    """Item counts of a window, summed over its micro-batches and over the workers.

    The sum over workers is started here and waited for when the first share is asked for, so that the first
    forward hides it. Shares are multiplied by the number of workers, because gradients are averaged over these.
    """

    def __init__(self, counts: Sequence[Counts], device: torch.device) -> None:
        self.names = sorted(counts[0])  # in the same order on all workers
        for count in counts:
            if sorted(count) != self.names:
                raise ValueError(
                    f"items() must give the same names for all micro-batches: {', '.join(self.names)} for the first, "
                    f"{', '.join(sorted(count))} for another."
                )
        self._counts = counts
        self._totals: list[Number] = [sum(count[name] for count in counts) for name in self.names]
        self._opening: Opening | None = None
        if world.size() > 1:
            self._opening = Opening(self._totals, device)
        self._is_open = self._opening is not None

    def leaving(self) -> int:
        """How many workers have no data any more, and take part in `flush`."""
        return 0 if self._opening is None else self._opening.leaving()

    def total(self, name: str) -> Tensor:
        """Items of the window on all workers."""
        self._wait()
        return torch.as_tensor(self._totals[self.names.index(name)])

    def weigh(self, loss: Tensor, micro_batch: int, name: str) -> Tensor:
        """The loss of one micro-batch times its share.

        A loss without any items in the window counts nothing; a window without any items has no mean, and is skipped.
        """
        self._wait()
        if name not in self.names:
            raise ValueError(
                f"the step has a loss but no {name}: items() gave {', '.join(self.names)}. "
                "Give one count per loss, under the same names."
            )
        count, total = self._counts[micro_batch][name], self._totals[self.names.index(name)]
        everything = self._everything(name)
        share = _share(count, total)
        if isinstance(everything, Tensor):
            if isinstance(share, Tensor):
                share = share.to(loss.device, loss.dtype)
            return torch.where((everything > 0).to(loss.device), weigh(loss, count, share), math.nan)
        if everything == 0:
            return loss * math.nan
        return loss if share == 1 else weigh(loss, count, share)

    def count(self, micro_batch: int, name: str) -> Number:
        """Items of one micro-batch."""
        return self._counts[micro_batch][name]

    def _everything(self, name: str) -> Number:
        """The items of all losses in the window; samples are counted beside them."""
        if name == SAMPLES:
            return self._totals[self.names.index(SAMPLES)]
        return sum(total for other, total in zip(self.names, self._totals, strict=True) if other != SAMPLES)

    def _wait(self) -> None:
        if self._is_open and self._opening is not None:
            self._totals = list(self._opening.totals())
            self._is_open = False


def _share(count: Number, total: Number) -> Number:
    """`total` items may be fewer than one: weights of samples are items too."""
    if isinstance(total, Tensor):
        return torch.where(total > 0, count * world.size() / total.double(), 0.0)
    return count * world.size() / total if total else 0.0
