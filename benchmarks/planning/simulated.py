"""A device of stated size on a machine without one: tensors are counted as they are made, and memory runs out."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fleetx.planner.meter import CountingMeter
from fleetx.units import format_bytes


class SimulatedDevice(CountingMeter):
    """While it is open, tensors that operations make may take so many bytes together with those that were there.

    What it counts are tensors; nothing is taken from anybody's formula.
    """

    def __init__(self, size: int, resident: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.size = size
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in resident}
        self.resident = sum(storages.values())
        self.highest = self.resident

    def _count(self, tensor: Tensor) -> None:
        super()._count(tensor)
        now = self.resident + self.bytes()
        self.highest = max(self.highest, now)
        if now > self.size:
            raise torch.OutOfMemoryError(
                f"the simulated device has {format_bytes(self.size)}, and {format_bytes(now)} are asked of it."
            )
