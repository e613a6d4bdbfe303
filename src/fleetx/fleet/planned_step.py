"""A `Step` whose model is planned: with its first batch, watched in its first updates, repeated if memory runs out."""

from typing import TYPE_CHECKING

import torch

from fleetx.comm import sharing, world
from fleetx.fleet.planning import Planning
from fleetx.memory.structures import tensors_in
from fleetx.notices import tell_once
from fleetx.outcome import Outcome
from fleetx.planner.feeding import Feeding
from fleetx.planner.untouched import Before
from fleetx.shares import Shares
from fleetx.slicing import Batch, batch_size, is_empty

if TYPE_CHECKING:
    from fleetx.batch_step import Step

MOST_RETRIES = 5
_LONGER = 1.05


class PlannedStep:
    """Runs a step's batches with its plan."""

    def __init__(self, step: "Step", planning: Planning, feeding: Feeding) -> None:
        self.step = step
        self.planning = planning
        self.feeding = feeding
        self.engine = step.optimizer.engine
        self._length = 0.0  # numbers per sample of the batch that was planned with
        planning.door = "Step"

    def run(self, batch: Batch) -> Outcome:
        """One update."""
        if self.planning.plan is None:
            self._begin(batch)
        self._tell_of_more_than_planned(batch)
        self.engine.stopwatch.start()
        with self.planning.watched():
            retries = self.planning.strategy.recompute_configs.oom_retry
            return self.step.close(self._merge_with_retries(batch) if retries else self.step.merge(batch))

    def _begin(self, batch: Batch) -> None:
        if is_empty(batch) and world.size() > 1:
            raise ValueError(
                "this worker's batch is empty (first dimension 0), and the planner measures with the first one: give "
                "each worker samples in the first batch, also of a run that was resumed."
            )
        size, wanted = batch_size(batch), self.planning.strategy.recompute_configs.global_batch
        if wanted is not None and abs(size * world.size() - wanted) >= world.size():
            where = f" on each of {world.size()} workers" if world.size() > 1 else ""
            raise ValueError(
                f"recompute_configs.global_batch is {wanted}, but the first batch has {size} samples{where}. Give Step "
                f"batches of {max(1, wanted // world.size())}, or correct it."
            )
        if wanted is None:
            self.step.require_enough(size)
        self.engine.window.discard()
        k_steps = self.engine.k_steps if wanted is None else None
        self.planning.begin(self.feeding, batch, samples=size, k_steps=k_steps)

    def _tell_of_more_than_planned(self, batch: Batch) -> None:
        """Larger batches and longer inputs take more memory than the plan says; the last batch of an epoch does not."""
        plan, size = self.planning.plan, 0 if is_empty(batch) else batch_size(batch)
        if not size:
            return
        length = _numbers_of_samples(batch, size) / size
        self._length = self._length or length
        if length > _LONGER * self._length:
            tell_once(
                "planning.length",
                f"a batch has {length:,.0f} numbers per sample, and the plan was made with {self._length:,.0f}: it "
                "takes more memory than planned. Give the longest inputs first.",
            )
        if plan is not None and size > plan.global_batch:
            tell_once(
                "planning.size",
                f"a batch has {size:,} samples, and the plan is for {plan.global_batch:,}: it takes more memory than "
                "planned. Give the largest batch first, or batches of one size.",
            )

    def _merge_with_retries(self, batch: Batch) -> Shares:
        """Merge the batch; if memory runs out on any worker, all begin again with a smaller plan.

        Nothing has left for the other workers by then, and buffers and random numbers are as before, so that the update
        is the same.
        """
        device = self.engine.updater.device
        for attempt in range(1 + MOST_RETRIES):
            before, merged, failure = None, None, None
            try:
                before = Before(self.step.model)  # which takes memory too
                merged = self.step.merge(batch, reduce_later=True)
            except torch.OutOfMemoryError as error:
                failure = error.with_traceback(None)  # whose frames hold activations
            if not sharing.any_worker(failure is not None, device):
                assert merged is not None
                return merged
            merged = None
            self.engine.window.start_over()
            if before is not None:
                before.restore()
            if attempt == MOST_RETRIES:
                raise failure or torch.OutOfMemoryError(f"another worker ran out of memory {attempt + 1} times.")
            self.planning.shrink(failure)
        raise AssertionError("unreachable")


def _numbers_of_samples(batch: Batch, size: int) -> int:
    return sum(tensor.numel() for tensor in tensors_in(batch) if tensor.dim() and len(tensor) == size)
