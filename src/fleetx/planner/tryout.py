"""Plans on a model for real: what a few micro-batches take, beside what was predicted."""

import itertools
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from fleetx.clock import host_seconds, moment, seconds_between, wait_for
from fleetx.planner.feeding import Feeding, placed, resized
from fleetx.planner.meter import Meter, meter_for
from fleetx.planner.observing import Step, Watch
from fleetx.planner.plan import Moment, Plan
from fleetx.planner.trials import Pinned, steps_before
from fleetx.planner.untouched import untouched
from fleetx.slicing import Batch

_SHORT = 1.0  # seconds: of what takes longer, as few micro-batches are run as possible
_VERY_SHORT = 0.15  # of what takes longer, two are as good as three


class Tryout:
    """A model on which one plan after the other is tried; it is left as it was, with none of them."""

    def __init__(self, feeding: Feeding, sample: Batch) -> None:
        self.feeding = feeding
        self.sample = sample
        self.on_gpu = feeding.device.type == "cuda"
        self._pinned = Pinned(feeding.device)

    def run(self, plan: Plan) -> Plan:
        """The plan with what micro-batches of its size took, and the memory at each cut.

        The time is that of an update: what its micro-batches took, and what was predicted for everything else.
        """
        batch = placed(resized(self.sample, plan.micro_batch), self.feeding.device)
        if self.on_gpu:
            torch.cuda.empty_cache()  # what others left in the allocator is not this plan's
        if plan.compile and not self.on_gpu:  # tensors cannot be counted in compiled code
            step, _ = self._tried(replace(plan, compile=False), batch)
            took = _in_an_update(plan, self._tried_for_time(plan, batch))
        else:
            step, took = self._tried(plan, batch)
        moments, peak = self._memory(plan, step)
        return plan.with_measurement(peak, took + plan.update_seconds, moments)

    @contextmanager
    def _on_model(self, plan: Plan) -> Iterator[None]:
        """Inside, the model has the plan."""
        applied = plan.apply(self.feeding.model)
        self._pinned.lend_to(applied)
        try:
            with untouched(self.feeding.model, self.feeding.loss_fn, self.sample, gradients=False):
                yield
        finally:
            applied.remove()
            self._pinned.take_back(applied)

    def _tried(self, plan: Plan, batch: Batch) -> tuple[Step, float]:
        """A micro-batch, and the seconds of all that an update has."""
        with self._on_model(plan):
            shorter = resized(batch, plan.micro_batch - 1) if plan.shorter and self.on_gpu else None
            step, took = self._watched(plan, batch, shorter)
            if not (self.on_gpu and _is_short(plan)):
                return step, _in_an_update(plan, took)
            return step, self._seconds_of_all(plan, batch, shorter)

    def _tried_for_time(self, plan: Plan, batch: Batch) -> float:
        """The seconds of a micro-batch whose bytes nobody counts."""
        with self._on_model(plan):
            watch = Watch(self.feeding, plan.names)
            try:
                for _ in range(steps_before(sends=plan.host_bytes > 0, is_compiled=plan.compile)):
                    self._make_room(plan)
                    watch.step(batch)
                self._make_room(plan)
                return _timed(watch, batch)[0]
            finally:
                watch.remove()

    def _watched(self, plan: Plan, batch: Batch, shorter: Batch | None) -> tuple[Step, float]:
        """A micro-batch that is like all that follow, and its seconds."""
        watch = Watch(self.feeding, plan.names)
        try:
            others = steps_before(sends=plan.host_bytes > 0, is_compiled=plan.compile)
            for _ in range(others if plan.compile or _is_short(plan) else 1):  # the second one is almost as all others
                self._make_room(plan)
                watch.step(batch)
            if self.on_gpu and not plan.gradients_come_late:
                # The gradients of the next update come while activations go, and lie where these were: what the
                # allocator has then is in more pieces than before.
                self._free_gradients()
                watch.step(batch)
            if shorter is not None:  # another size leaves other gaps
                watch.step(shorter)
            took = 0.0
            if not self.on_gpu:  # where bytes are counted one by one, that takes time
                self._make_room(plan)
                took, _ = _timed(watch, batch)
            self._make_room(plan)
            counted, step = _timed(watch, batch, meter_for(self.feeding.device))
        finally:
            watch.remove()
        return step, took or counted

    def _seconds_of_all(self, plan: Plan, batch: Batch, shorter: Batch | None) -> float:
        """Of an update's micro-batches, from some that follow each other: the host is ahead, if it can be.

        Shorter ones are timed too: a sample less may take longer, since kernels like round sizes.
        """
        count = 3 if _seconds_of_micro_batch(plan) < _VERY_SHORT else 2
        row = [batch] * (1 + count) + ([] if shorter is None else [shorter] * count)
        self._free_gradients()
        ends = []
        for one in row:
            self._make_room(plan)
            with torch.enable_grad():
                self.feeding.loss(one).backward()
            ends.append(moment(self.feeding.device))
        wait_for(self.feeding.device)
        took = list(itertools.starmap(seconds_between, itertools.pairwise(ends)))  # without the first: nobody was ahead
        # Of two the faster one: what disturbed the other is not the plan's.
        seconds = (plan.k_steps - plan.shorter) * statistics.median_low(took[:count])
        return seconds + (plan.shorter * statistics.median_low(took[count:]) if shorter is not None else 0.0)

    def _memory(self, plan: Plan, step: Step) -> tuple[tuple[Moment, ...], int]:
        """At each cut and at most, with what is not there yet, such as the optimizer's state."""
        assert step.turn is not None
        assert step.end is not None
        # What is allowed for is not there: it shows in what the allocator reserves.
        allowances = sum(plan.peak_by_kind.get(kind, 0) for kind in ("unexplained", "gaps"))
        base = plan.fixed_bytes - allowances - step.start.bytes
        names = plan.names[: len(step.forward)]
        marks = [(name, "forward", mark) for name, mark in zip(names, step.forward, strict=True)]
        marks.append(("tail", "forward", step.turn))
        marks += [(plan.names[i], "backward", step.backward[i]) for i in sorted(step.backward, reverse=True)]
        marks.append(("end", "backward", step.end))
        moments = tuple(Moment(name, phase, base + mark.bytes, base + mark.peak) for name, phase, mark in marks)
        peak = max(moment.peak for moment in moments)
        if self.on_gpu:  # and with what the allocator keeps between blocks
            peak = max(peak, base + torch.cuda.max_memory_reserved(self.feeding.device))
        return moments, peak

    def _make_room(self, plan: Plan) -> None:
        """As an optimizer's zero_grad() does before an only micro-batch."""
        if plan.gradients_come_late:
            self._free_gradients()

    def _free_gradients(self) -> None:
        for parameter in self.feeding.model.parameters():
            parameter.grad = None


def _in_an_update(plan: Plan, took: float) -> float:
    """The seconds of all micro-batches if one took so long: shorter ones take as much less as was predicted."""
    predicted = _seconds_of_micro_batch(plan)
    return took * ((plan.seconds - plan.update_seconds) / predicted if predicted else plan.k_steps)


def _seconds_of_micro_batch(plan: Plan) -> float:
    """As predicted."""
    return sum(point.seconds for point in plan.timeline)


def _is_short(plan: Plan) -> bool:
    """By the prediction, which all workers share: they must run equally often."""
    return _seconds_of_micro_batch(plan) < _SHORT


def _timed(watch: Watch, batch: Batch, meter: Meter | None = None) -> tuple[float, Step]:
    wait_for(watch.feeding.device)
    began = host_seconds()
    step = watch.step(batch, meter)
    wait_for(watch.feeding.device)
    return host_seconds() - began, step
