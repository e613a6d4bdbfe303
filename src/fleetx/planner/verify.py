"""One real step with a plan: what it takes, beside what was predicted; and a new plan, if that was something else."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from fleetx.planner.costs import Profile
from fleetx.planner.feeding import Feeding, placed, resized
from fleetx.planner.fitting import DoesNotFit
from fleetx.planner.meter import Meter, meter_for
from fleetx.planner.observing import Step, Watch
from fleetx.planner.plan import Moment, Plan
from fleetx.planner.trials import steps_before, wait_for
from fleetx.planner.untouched import untouched
from fleetx.slicing import Batch

TOLERANCE = 0.03
MOST_PLANS = 3
_SHORT = 1.0  # seconds: of what takes longer, one micro-batch is enough to time
_IN_A_ROW = 3
FAR_OFF = 1.5  # times the predicted seconds, or less than these by as much


def verify(plan: Plan, feeding: Feeding, sample: Batch) -> Plan:
    """Run micro-batches of the plan's size for real: the plan with its measurement, and the memory at each cut.

    The model is left as it was, without the plan. The time is that of one sample times all of them, and what the plan
    predicts for everything else.
    """
    batch = placed(resized(sample, plan.micro_batch), feeding.device)
    on_gpu = feeding.device.type == "cuda"
    predicted = sum(point.seconds for point in plan.timeline)
    if on_gpu:
        torch.cuda.empty_cache()  # what others left in the allocator is not this plan's
    applied = plan.apply(feeding.model)
    try:
        with untouched(feeding.model, feeding.loss_fn, sample, gradients=not plan.gradients_come_late):
            watch = Watch(feeding, plan.names)
            try:
                for _ in range(steps_before(sends=plan.host_bytes > 0, is_compiled=plan.compile)):
                    _forget_late_gradients(plan, feeding)
                    watch.step(batch)
                _forget_late_gradients(plan, feeding)
                took = 0.0
                if not on_gpu:  # where bytes are counted one by one, that takes time
                    took, _ = _timed(watch, batch)
                    _forget_late_gradients(plan, feeding)
                counted, step = _timed(watch, batch, meter_for(feeding.device))
                took = took or counted
            finally:
                watch.remove()
            # By the prediction, which all workers share: they must run equally often.
            if on_gpu and predicted < _SHORT:
                took = _seconds_in_a_row(plan, feeding, batch)
    finally:
        applied.remove()
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
    if on_gpu:
        # With what is not there yet, such as the optimizer's state; and with what the allocator keeps between blocks.
        peak = max(peak, base + torch.cuda.max_memory_reserved(feeding.device))
    micro_batches = plan.global_batch / plan.micro_batch  # the last of them may have a sample less
    rest = plan.seconds - micro_batches * predicted
    return plan.with_measurement(peak, took * micro_batches + max(0.0, rest), moments)


def _timed(watch: Watch, batch: Batch, meter: Meter | None = None) -> tuple[float, Step]:
    wait_for(watch.feeding.device)
    began = time.perf_counter()
    step = watch.step(batch, meter)
    wait_for(watch.feeding.device)
    return time.perf_counter() - began, step


def _seconds_in_a_row(plan: Plan, feeding: Feeding, batch: Batch) -> float:
    """Of a micro-batch, one of some that follow each other as in a training: the host is ahead, if it can be."""
    ends = []
    for _ in range(1 + _IN_A_ROW):  # before the first one the device had nothing to do
        _forget_late_gradients(plan, feeding)
        with torch.enable_grad():
            feeding.loss(batch).backward()
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()
    wait_for(feeding.device)
    return ends[0].elapsed_time(ends[-1]) / 1e3 / _IN_A_ROW


def _forget_late_gradients(plan: Plan, feeding: Feeding) -> None:
    """As an optimizer's zero_grad() does before an only micro-batch."""
    if plan.gradients_come_late:
        for parameter in feeding.model.parameters():
            parameter.grad = None


class Make(Protocol):
    """Makes a plan from a profile, with so many micro-batches if these are preferred and among the fastest plans."""

    def __call__(self, profile: Profile, *, prefer: int | None = None) -> Plan:
        """The plan."""
        ...


class Verified(NamedTuple):
    """A plan after real micro-batches, and its profile, with what these took beyond it."""

    plan: Plan
    profile: Profile
    first_peak: int  # predicted before anything was tried
    beyond: float = 0.0  # part of the budget, that even this plan took more
    prefer: int | None = None  # its micro-batches, if it was not predicted to be the fastest


def until_verified(
    profile: Profile,
    feeding: Feeding,
    sample: Batch,
    make: Make,
    largest: Callable[[int], int] = int,
) -> Verified:
    """Make a plan and run it; if its memory was not as predicted, allow for that and plan again.

    At most three times anew; the same plan is not run twice, but has the new figures. The fastest of those that were
    within the budget is returned, or else the most frugal one; it says what it took, and does not promise less. One
    that ran out of memory is returned unverified. `largest` makes of this worker's number the largest of all workers',
    so that all of them choose the same plan.
    """
    tried: list[Tried] = []
    first_peak = 0
    for attempt in range(1 + MOST_PLANS):
        try:
            plan = make(profile)
            first_peak = first_peak or plan.peak
        except DoesNotFit:
            if not any(one.beyond == 0 for one in tried):
                raise
            break  # what this one would have allowed for had room all the same
        # All workers were given the same plans, and so all find the same one again, or none.
        known = next((one for one in tried if _is_same(plan, one.plan)), None)
        if known is None:
            one = tried_out(plan, profile, feeding, sample, largest)
        else:
            tried.remove(known)
            one = known.with_figures_of(plan, profile)
        if is_as_predicted(plan, one.peak):
            tried.append(one)
            break
        one = one.having_learned(times=1 + attempt)  # more each time: another plan is wrong by another amount
        tried.append(one)
        profile = one.profile if one.took_more else profile.corrected(plan.micro_batch, one.peak - plan.peak_of_trial)
    best = min(tried, key=lambda one: one[:2])
    found = best.verified(first_peak)
    less = 1 - best.peak / best.plan.peak_of_trial
    if less <= TOLERANCE:
        return found
    note = f"real micro-batches took {less:.1%} less memory than predicted, after all that was tried."
    return found._replace(plan=replace(found.plan, notes=(*found.plan.notes, note)))


class Tried(NamedTuple):
    """A plan after a real step."""

    beyond: float  # of the budget, as a part of it
    seconds: float  # predicted: those that were measured differ from worker to worker
    peak: int  # the largest of all workers'
    plan: Plan
    profile: Profile

    def with_figures_of(self, plan: Plan, profile: Profile) -> "Tried":
        """The same plan made again, with what is known of it; so it need not run again."""
        return self._replace(plan=plan.measured_as(self.plan), profile=profile)

    @property
    def took_more(self) -> bool:
        """Whether the real step took more memory than was predicted."""
        return self.peak > self.plan.peak

    def having_learned(self, times: int = 1) -> "Tried":
        """With figures that allow for what was missing, so many times; those of a step that took less are safe."""
        if not self.took_more:
            return self
        missing = times * (self.peak - self.plan.peak)
        return self._replace(profile=self.profile.corrected(self.plan.micro_batch, missing))

    def verified(self, first_peak: int) -> Verified:
        """The plan does not promise less than it took: it may be kept because all others were worse."""
        plan = self.plan
        if self.beyond < math.inf and self.peak > plan.peak * (1 + TOLERANCE):
            plan = plan.taking_more(self.peak - plan.peak)
        return Verified(plan, self.profile, first_peak, self.beyond)


def tried_out(plan: Plan, profile: Profile, feeding: Feeding, sample: Batch, largest: Callable[[int], int]) -> Tried:
    """The plan after a real step, the same on all workers."""
    ran, peak = _ran(plan, feeding, sample)
    peak = largest(peak)
    beyond = math.inf if largest(int(not ran.verified)) else max(0.0, peak / plan.memory - 1)
    return Tried(beyond, plan.seconds, peak, ran, profile)


def _is_same(plan: Plan, other: Plan) -> bool:
    return (plan.micro_batch, plan.k_steps, plan.states) == (other.micro_batch, other.k_steps, other.states)


def doubt_about_time(plan: Plan, seconds: float) -> str | None:
    """What to say if a real step took so long, and that is far from what was predicted."""
    if plan.seconds / FAR_OFF <= seconds <= plan.seconds * FAR_OFF:
        return None
    return (
        f"a real step took {seconds / plan.seconds:.2f} times as long as predicted: the machine was busy in one of "
        "them, or steps are very short. The model is measured anew next time; another plan may be faster."
    )


def allowed(plan: Plan) -> float:
    """The bytes that a real step may take before the plan is made anew."""
    return min(plan.peak * (1 + TOLERANCE), plan.memory)


def is_as_predicted(plan: Plan, peak: int) -> bool:
    """Whether micro-batches that took so much neither took more than they may, nor left room for a faster plan."""
    return plan.peak_of_trial * (1 - TOLERANCE) <= peak <= allowed(plan)


def _ran(plan: Plan, feeding: Feeding, sample: Batch) -> tuple[Plan, int]:
    """The plan after a step, and its peak; unverified, and with more than there is, if memory ran out."""
    try:
        ran = verify(plan, feeding, sample)
    except torch.OutOfMemoryError:
        if feeding.device.type == "cuda":
            torch.cuda.empty_cache()
        return plan, int(plan.memory * 1.1)
    assert ran.measured is not None
    return ran, ran.measured.peak
