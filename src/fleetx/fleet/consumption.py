"""What a real update took: bytes at the peak, and seconds."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from fleetx.clock import host_seconds
from fleetx.planner.meter import CountingMeter


class Taken(NamedTuple):
    """By one update."""

    peak: int
    seconds: float | None  # None where counting made it slower


class Consumption:
    """Watches updates: a GPU's allocator is asked, and on the CPU, where nobody counts, tensors are counted."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self._meter: CountingMeter | None = None
        self._resident = 0
        self._began = 0.0
        self.begin()

    def begin(self) -> None:
        """The next update begins now."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        if self._meter is not None:
            self._meter.take_peak()  # of what was given up
        self._began = host_seconds()

    @contextmanager
    def counting(self, resident: Iterable[Tensor]) -> Iterator[None]:
        """Around a whole update; `resident` is what was there before. On a GPU nothing needs to be counted."""
        self._meter = None if self.on_gpu else CountingMeter()
        self._resident = _bytes(resident)
        self.begin()
        try:
            with self._meter or nullcontext():
                yield
        finally:
            self._meter = None

    def taken(self) -> Taken | None:
        """Since the beginning; None if nobody counted."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            return Taken(torch.cuda.max_memory_reserved(self.device), host_seconds() - self._began)
        return None if self._meter is None else Taken(self._resident + self._meter.take_peak(), None)


def _bytes(tensors: Iterable[Tensor]) -> int:
    strided = [t.untyped_storage() for t in tensors if t.layout is torch.strided]
    return sum({storage.data_ptr(): storage.nbytes() for storage in strided}.values())
