"""Makes sure, now and then, that all workers still hold the same weights.

They should, since all of them apply the same gradients; but a faulty device, a weight changed on one worker only, or a
random number in an update make them drift apart without a word.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from fleetx.comm import beats, world
from fleetx.names import label

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_NAMED = 3


class WorkersDifferError(RuntimeError):
    """The workers' weights are not the same any more."""


class ParameterGuard:
    """Compares checksums of all weights after every `every`-th window, at a flush and at a save; 0 never does."""

    def __init__(self, every: int) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ValueError(f"compare_every must be an int of at least 0 (0 never compares), not {every!r}.")
        self.every = every
        self.windows = 0
        self._parameters: Callable[[], list[Tensor]] = list

    def watch(self, parameters: Callable[[], list[Tensor]]) -> None:
        """Whose weights are compared."""
        self._parameters = parameters

    def after_window(self) -> None:
        """Count one window; compare if it is time. All workers must call it."""
        self.windows += 1
        if self.every and world.size() > 1 and self.windows % self.every == 0:
            self.compare()

    def after_epoch(self) -> None:
        """Compare, since the device is waited for anyway. All workers must call it."""
        if self.every and world.size() > 1:
            self.compare()

    @torch.no_grad()
    def sums(self) -> list[tuple[str, int]]:
        """Name and checksum of each parameter, for who compares by other ways; none where nobody compares."""
        return [(label(p), int(checksum(p))) for p in self._parameters()] if self.every and world.size() > 1 else []

    @torch.no_grad()
    def compare(self) -> None:
        """Raise on all workers if one holds other weights."""
        parameters = self._parameters()
        sums = torch.stack([checksum(parameter) for parameter in parameters])
        whole = (sums * _multipliers(len(sums), sums.device)).sum()
        pair = torch.stack([whole, ~whole])  # the least of the complements is that of the greatest
        with beats.waiting():
            dist.all_reduce(pair, op=dist.ReduceOp.MAX)
            greatest, complement = pair.tolist()
        if greatest != ~complement:
            self._name_the_different(parameters, sums)

    def _name_the_different(self, parameters: list[Tensor], sums: Tensor) -> None:
        gathered = [torch.empty_like(sums) for _ in range(world.size())]
        with beats.waiting():
            dist.all_gather(gathered, sums)
            table = torch.stack(gathered).cpu()
        usual = table.mode(dim=0).values
        workers = [rank for rank in range(len(table)) if not table[rank].equal(usual)]
        differing = [index for index in range(len(parameters)) if not bool((table[:, index] == usual[index]).all())]
        shown = ", ".join(label(parameters[index]) for index in differing[:_MOST_NAMED])
        who = "the workers" if len(table) == 2 else f"worker {', '.join(map(str, workers))}"
        verb = "differ" if len(table) == 2 else "differs from most of the others"
        raise WorkersDifferError(
            f"after {self.windows} windows {who} {verb} in {len(differing)} of {len(parameters)} parameters ({shown}"
            f"{', ...' if len(differing) > _MOST_NAMED else ''}). Weights must change only through the optimizer, with "
            "the same settings on all workers; if they do, suspect the device. Go on from the last checkpoint, or give "
            "compare_every=0 to fleet.distributed_optimizer if they are meant to differ."
        )


def checksum(parameter: Tensor) -> Tensor:
    """A number that changes with any bit, and with the order of values."""
    flat = parameter.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    # Copies only what has gaps; memory order is the same on all workers.
    flat = flat.as_strided((flat.numel(),), (1,)) if _is_dense(flat) else flat.reshape(-1)
    bits = flat.view(_BITS[flat.element_size()])
    size = 1 << (22 if bits.is_cuda else 16)  # as much as a cache holds, or as keeps a GPU busy
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for number, piece in enumerate(bits.split(size)):
        total += (2 * number + 1) * (piece.to(torch.int64) * _multipliers(len(piece), piece.device)).sum()
    return total


def _multipliers(count: int, device: torch.device) -> Tensor:
    return _all_multipliers(1 << max(1, (count - 1).bit_length()), device)[:count]


@cache
def _all_multipliers(count: int, device: torch.device) -> Tensor:
    """Odd numbers that look random, so that no two places weigh the same."""
    numbers = torch.arange(1, count + 1, dtype=torch.int64, device=device) * 0x9E3779B97F4A7C1
    return (numbers ^ (numbers >> 29)) | 1


def _is_dense(tensor: Tensor) -> bool:
    """Whether the values fill a block of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size if size > 1 else 1
    return tensor.numel() > 0
