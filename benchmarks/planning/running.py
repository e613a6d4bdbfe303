"""Runs a plan for real: the most memory it takes, and how many samples it trains per second."""

import gc
import itertools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.planning.simulated import SimulatedDevice
from fleetx.clock import moment, seconds_between, wait_for
from fleetx.planner.feeding import Feeding, placed, resized
from fleetx.planner.plan import Plan
from fleetx.slicing import Batch, map_tensors

_FEWEST, _MOST = 3, 6  # micro-batches that are timed
_SECONDS = 1.0  # so long, if it is no fewer and no more than these


class ByHand(NamedTuple):
    """A micro-batch of the user's choice, merged to the global batch; it runs in place of a plan."""

    micro_batch: int
    global_batch: int
    shorter: int = 0

    @property
    def k_steps(self) -> int:
        """How many micro-batches an update merges."""
        return math.ceil(self.global_batch / self.micro_batch)

    def apply(self, model: nn.Module) -> None:
        """Leave the model as it is."""


class Ran(NamedTuple):
    """What running a plan showed; only `failed` if memory ran out."""

    peak: int = 0
    samples_per_s: float = 0.0
    allocated: int = 0  # bytes of tensors at most; the allocator has more
    allocator_retries: int = 0  # in each of which it waits for the device and gives memory back
    limited: int = 0  # bytes that it took before the allocator was limited to the budget; 0 if it was not
    failed: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        if self.failed is not None:
            return {"failed": self.failed}
        return {name: value for name, value in self._asdict().items() if name != "failed"}


class _Seconds(NamedTuple):
    """Of an update: its first micro-batch, each further one, and the optimizer."""

    first: float
    later: float
    update: float


def _spread(slices: list[Batch], count: int) -> list[Batch]:
    """So many of them, the shorter ones in proportion."""
    return [slices[number * len(slices) // count] for number in range(count)]


class Runner:
    """A model in training, on which one plan after the other is tried."""

    def __init__(self, feeding: Feeding, sample: Batch, optimizer: Optimizer) -> None:
        self.feeding = feeding
        self.sample = sample
        self.optimizer = optimizer
        self.on_gpu = feeding.device.type == "cuda"

    def run(self, plan: Plan | ByHand, memory: int | None, *, limited: bool = False) -> Ran:
        """Train with a plan within so much memory; None: as much as there is.

        What takes more runs again with the allocator limited to it, and so does what was `limited` before. Not all:
        torch asks whether there is room for the whole of a block that only grows, which is stricter than a device of
        that size.
        """
        if memory is None or not self.on_gpu:  # a simulated device has its own limit
            return self._run_on_model(plan, memory, nullcontext())
        took = memory
        if not limited:
            ran = self._run_on_model(plan, memory, nullcontext())
            took = ran.peak
            if took <= memory:
                return ran
        ran = self._run_on_model(plan, memory, _capped(memory))
        return ran if ran.failed is not None else ran._replace(limited=took)

    def _run_on_model(self, plan: Plan | ByHand, memory: int | None, limited: AbstractContextManager[None]) -> Ran:
        self._free()
        try:
            applied = plan.apply(self.feeding.model)
        except Exception as error:  # a state that this model cannot have
            return Ran(failed=f"{type(error).__name__}: {error}")
        try:
            with limited:
                return self._run(plan, memory)
        except torch.OutOfMemoryError as error:
            return Ran(failed=str(error).splitlines()[0])
        finally:
            if applied is not None:
                applied.remove()
            self._free()

    def _run(self, plan: Plan | ByHand, memory: int | None) -> Ran:
        slices = self._slices(plan)
        first = self._update([slices[0], slices[-1]] if plan.k_steps > 1 else slices)  # each size, should it compile
        count = min(plan.k_steps, max(_FEWEST, min(_MOST, round(_SECONDS / first.later))))
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        retried = self._retries()
        taken = self._update(_spread(slices, count))
        speed = plan.global_batch / (taken.first + (plan.k_steps - 1) * taken.later + taken.update)
        if self.on_gpu:
            allocated, peak = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        else:
            allocated = peak = self._counted(slices[: min(count, 2)], memory)
        return Ran(peak, speed, allocated, self._retries() - retried)

    def _slices(self, plan: Plan | ByHand) -> list[Batch]:
        """Those of an update: the last ones may be a sample shorter."""
        longest = placed(resized(self.sample, plan.micro_batch), self.feeding.device)
        rest = [resized(longest, plan.micro_batch - 1)] * plan.shorter if plan.shorter else []
        return [longest] * (plan.k_steps - plan.shorter) + rest

    def _update(self, slices: list[Batch]) -> _Seconds:
        """Merge micro-batches and update.

        Nobody waits between micro-batches, as in a training: the host is ahead of the device, if it can be. Not in the
        first one, before which it waited for the last update.
        """
        self.optimizer.zero_grad()
        device = self.feeding.device
        wait_for(device)
        moments = [moment(device)]
        for batch in slices:
            self.feeding.loss(batch).backward()
            moments.append(moment(device))
        self.optimizer.step()
        moments.append(moment(device))
        wait_for(device)
        *micro, update = itertools.starmap(seconds_between, itertools.pairwise(moments))
        return _Seconds(micro[0], sum(micro[1:]) / (len(micro) - 1) if micro[1:] else micro[0], update)

    def _retries(self) -> int:
        return torch.cuda.memory_stats()["num_alloc_retries"] if self.on_gpu else 0

    def _counted(self, slices: list[Batch], memory: int | None) -> int:
        """What one more update takes on a simulated device."""
        self.optimizer.zero_grad()
        device = SimulatedDevice(memory or 2**60, self._resident(slices[0]))
        with device:
            self._update(slices)
        return device.highest

    def _resident(self, batch: Batch) -> list[Tensor]:
        model, tensors = self.feeding.model, []
        map_tensors(batch, lambda tensor: (tensors.append(tensor), tensor)[1])
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        return [*model.parameters(), *model.buffers(), *tensors]

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
