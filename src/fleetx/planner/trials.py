"""A model in trial steps: one choice of states after another, watched at every cut; nothing is left on it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch

from fleetx import memory
from fleetx.clock import wait_for
from fleetx.memory import Applied, Segment, offload
from fleetx.memory.arena import HostArena
from fleetx.memory.offload import Offloader
from fleetx.planner.agreement import ALONE, Agreement
from fleetx.planner.chain import State
from fleetx.planner.feeding import Feeding, placed, resized
from fleetx.planner.meter import meter_for
from fleetx.planner.observing import Step, Watch
from fleetx.slicing import Batch, batch_size

MOST_SAMPLES = 512
_SHARE = 0.25  # of the free memory that trials may take


class Trials:
    """Runs a model that is cut at these modules; workers with an agreement run the same trials."""

    def __init__(
        self,
        feeding: Feeding,
        sample: Batch,
        cuts: Sequence[str],
        compile: bool = False,
        agreement: Agreement = ALONE,
    ) -> None:
        self.feeding = feeding
        # No more than will be tried: the sample may be a whole global batch.
        self.sample = placed(resized(sample, min(batch_size(sample), MOST_SAMPLES)), feeding.device)
        self.cuts = list(cuts)
        self.compile = compile
        self.agreement = agreement
        self.on_gpu = feeding.device.type == "cuda"
        self._compilations: Any = None
        self._pinned = Pinned(feeding.device)

    def uncompiled(self) -> "Trials":
        """The same without the compiler."""
        other = copy(self)
        other.compile = False
        return other

    def for_counting(self) -> "Trials":
        """Those in which bytes are counted: torch does not run compiled code while tensors are counted one by one."""
        return self if self.on_gpu else self.uncompiled()

    def batch(self, size: int) -> Batch:
        """So many samples."""
        return resized(self.sample, size)

    @contextmanager
    def watched(self, states: Sequence[State]) -> Iterator[tuple[Watch, Applied | None]]:
        """Inside, the segments have these states."""
        segments = [Segment(name, *state) for name, state in zip(self.cuts, states, strict=True)]
        applied = self._applied(segments) if segments else None
        watch = Watch(self.feeding, self.cuts)
        try:
            yield watch, applied
        finally:
            watch.remove()
            if applied is not None:
                applied.remove()
                self._pinned.take_back(applied)
            wait_for(self.feeding.device)  # what is still being copied would count with the next trial

    def metered(self, watch: Watch, batch: Batch) -> Step:
        """A step whose bytes are counted."""
        return watch.step(batch, meter_for(self.feeding.device))

    def has_room(self, size: float) -> bool:
        """Whether so many bytes are but a part of the free memory."""
        if not self.on_gpu:
            return True
        device = self.feeding.device
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return size <= _SHARE * free

    def no_room(self, samples: int) -> torch.OutOfMemoryError:
        """What is to be raised if not even so many samples could be tried."""
        how = " with recompute" if self.cuts else ""
        return torch.OutOfMemoryError(
            f"measuring needs memory for {samples} samples{how}, and the device has too little free. "
            "Free some, or take shorter inputs."
        )

    def free(self) -> None:
        """Give back what the allocator has to spare."""
        if self.on_gpu:
            torch.cuda.empty_cache()

    def _applied(self, segments: list[Segment]) -> Applied:
        """The states on the model; what was compiled for one of them serves the others."""
        # Each size is compiled for itself, as in a training with one micro-batch size.
        options: dict[str, Any] = {"compile": True, "dynamic": False} if self.compile else {}
        applied = memory.apply(self.feeding.model, segments, **options)
        experience = applied.experience
        experience.compilations = self._compilations = self._compilations or experience.compilations
        self._pinned.lend_to(applied)
        return applied


class Pinned:
    """Host memory of a model's trials: pinning takes time, so what one of them had serves the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arena: HostArena | None = None

    def lend_to(self, applied: Applied) -> None:
        """Before its first step."""
        if self._arena is not None and self._arena.limit is None:  # else what others left there would count
            applied.experience.offloader = Offloader(self._device, arena=self._arena)

    def take_back(self, applied: Applied) -> None:
        """After its last one."""
        if applied.experience.offloader is not None:
            self._arena = applied.experience.offloader.arena


def steps_before(*, sends: bool, is_compiled: bool) -> int:
    """How many steps are not yet as all others.

    Of those that send, the first; dear outputs are compiled in the second, and nothing must be compiled while it is
    watched.
    """
    return 3 if is_compiled else 2 if sends else 1


@contextmanager
def all_worth_moving() -> Iterator[None]:
    """Inside, small tensors are sent too: those of a large micro-batch will not be small."""
    smallest, offload.SMALLEST = offload.SMALLEST, 1
    try:
        yield
    finally:
        offload.SMALLEST = smallest
