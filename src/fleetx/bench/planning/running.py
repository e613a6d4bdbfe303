"""Runs a plan for real: the most memory it takes, and how many samples it trains per second."""

import gc
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fleetx.bench.planning.simulated import SimulatedDevice
from fleetx.planner.feeding import Feeding, placed, resized
from fleetx.planner.plan import Plan
from fleetx.slicing import Batch, map_tensors

_FEWEST, _MOST = 3, 6  # micro-batches that are timed
_SECONDS = 1.0  # so long, if it is no fewer and no more than these


class Ran(NamedTuple):
    """What running a plan showed; only `failed` if memory ran out."""

    peak: int = 0
    samples_per_s: float = 0.0
    allocated: int = 0  # bytes of tensors at most; the allocator has more
    allocator_retries: int = 0  # in each of which it waits for the device and gives memory back
    failed: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        if self.failed is not None:
            return {"failed": self.failed}
        return {name: value for name, value in self._asdict().items() if name != "failed"}


class Runner:
    """A model in training, on which one plan after the other is tried."""

    def __init__(self, feeding: Feeding, sample: Batch, optimizer: Optimizer) -> None:
        self.feeding = feeding
        self.sample = sample
        self.optimizer = optimizer
        self.on_gpu = feeding.device.type == "cuda"

    def run(self, plan: Plan, memory: int | None) -> Ran:
        """Train with a plan on a device that has so much memory; None: as much as there is."""
        self._free()
        try:
            applied = plan.apply(self.feeding.model)
        except Exception as error:  # a state that this model cannot have
            return Ran(failed=f"{type(error).__name__}: {error}")
        try:
            with self._limited(memory):
                return self._run(plan, memory)
        except torch.OutOfMemoryError as error:
            return Ran(failed=str(error).splitlines()[0])
        finally:
            if applied is not None:
                applied.remove()
            self._free()

    def _run(self, plan: Plan, memory: int | None) -> Ran:
        batch = placed(resized(self.sample, plan.micro_batch), self.feeding.device)
        first, _ = self._update(batch, min(plan.k_steps, 2))
        count = min(plan.k_steps, max(_FEWEST, min(_MOST, round(_SECONDS / first))))
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        retried = self._retries()
        micro, update = self._update(batch, count)
        # The last slices may be shorter: what counts is samples, not slices.
        speed = plan.k_steps * plan.micro_batch / (plan.k_steps * micro + update)
        if self.on_gpu:
            allocated, peak = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        else:
            allocated = peak = self._counted(batch, min(count, 2), memory)
        return Ran(peak, speed, allocated, self._retries() - retried)

    def _update(self, batch: Batch, count: int) -> tuple[float, float]:
        """Merge some micro-batches and update; the seconds of a micro-batch, and those of the update.

        Nobody waits between micro-batches, as in a training: the host is ahead of the device, if it can be.
        """
        self.optimizer.zero_grad()
        began = self._now()
        for _ in range(count):
            self.feeding.loss(batch).backward()
        merged = self._now()
        self.optimizer.step()
        return (merged - began) / count, self._now() - merged

    def _retries(self) -> int:
        return torch.cuda.memory_stats()["num_alloc_retries"] if self.on_gpu else 0

    def _counted(self, batch: Batch, count: int, memory: int | None) -> int:
        """What one more update takes on a simulated device."""
        self.optimizer.zero_grad()
        device = SimulatedDevice(memory or 2**60, self._resident(batch))
        with device:
            self._update(batch, count)
        return device.highest

    def _resident(self, batch: Batch) -> list[Tensor]:
        model, tensors = self.feeding.model, []
        map_tensors(batch, lambda tensor: (tensors.append(tensor), tensor)[1])
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        return [*model.parameters(), *model.buffers(), *tensors]

    def _limited(self, memory: int | None) -> AbstractContextManager[None]:
        return _capped(memory) if self.on_gpu and memory is not None else nullcontext()

    def _now(self) -> float:
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _free(self) -> None:
        self.optimizer.zero_grad()
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()


@contextmanager
def _capped(memory: int) -> Iterator[None]:
    """Inside, the allocator may reserve so much."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, memory / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
