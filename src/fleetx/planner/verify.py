"""One real step with a plan: what it takes, beside what was predicted; and a new plan, if that was something else."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from fleetx.planner.costs import Profile
from fleetx.planner.feeding import Feeding, placed, resized
from fleetx.planner.fitting import DoesNotFit
from fleetx.planner.meter import Meter, meter_for
from fleetx.planner.observing import Step, Watch
from fleetx.planner.plan import Moment, Plan
from fleetx.planner.untouched import untouched
from fleetx.slicing import Batch

TOLERANCE = 0.03
MOST_PLANS = 3
FAR_OFF = 1.5  # times the predicted seconds, or less than these by as much


def verify(plan: Plan, feeding: Feeding, sample: Batch) -> Plan:
    """Run micro-batches of the plan's size for real: the plan with its measurement, and the memory at each cut.

    The model is left as it was, without the plan. The time is that of one micro-batch times `k_steps`, and what the
    plan predicts for everything else.
    """
    batch = placed(resized(sample, plan.micro_batch), feeding.device)
    on_gpu = feeding.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()  # what others left in the allocator is not this plan's
    applied = plan.apply(feeding.model)
    try:
        with untouched(feeding.model, gradients=not plan.gradients_come_late):
            watch = Watch(feeding, plan.names)
            try:
                for _ in range(2 if plan.host_bytes else 1):  # of those that send, the first is not yet as all others
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
    rest = plan.seconds - plan.k_steps * sum(point.seconds for point in plan.timeline)
    return plan.with_measurement(peak, took * plan.k_steps + max(0.0, rest), moments)


def _timed(watch: Watch, batch: Batch, meter: Meter | None = None) -> tuple[float, Step]:
    _wait(watch.feeding.device)
    began = time.perf_counter()
    step = watch.step(batch, meter)
    _wait(watch.feeding.device)
    return time.perf_counter() - began, step


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forget_late_gradients(plan: Plan, feeding: Feeding) -> None:
    """As an optimizer's zero_grad() does before an only micro-batch."""
    if plan.gradients_come_late:
        for parameter in feeding.model.parameters():
            parameter.grad = None


class Verified(NamedTuple):
    """A plan after real micro-batches, and its profile, with what these took beyond it."""

    plan: Plan
    profile: Profile


def until_verified(
    profile: Profile,
    feeding: Feeding,
    sample: Batch,
    make: Callable[[Profile], Plan],
    largest: Callable[[int], int] = int,
) -> Verified:
    """Make a plan and run it; if its memory was not as predicted, allow for that and plan again.

    At most three times anew, and not if the same plan came out again. The fastest of those that were within the budget
    is returned, or else the most frugal one; it says what it took. One that ran out of memory is returned unverified.
    `largest` makes of this worker's number the largest of all workers', so that all of them choose the same plan.
    """
    tried: list[_Tried] = []
    for attempt in range(1 + MOST_PLANS):
        try:
            plan = make(profile)
        except DoesNotFit:
            if not any(one.beyond == 0 for one in tried):
                raise
            break  # what this one would have allowed for had room all the same
        if any(_is_same(plan, one.verified.plan) for one in tried):
            break
        ran, peak = _ran(plan, feeding, sample)
        peak = largest(peak)
        beyond = math.inf if largest(int(not ran.verified)) else max(0.0, peak / plan.memory - 1)
        # Predicted seconds: those that were measured differ from worker to worker.
        tried.append(_Tried(beyond, plan.seconds, Verified(ran, profile)))
        if is_as_predicted(plan, peak):
            break
        missing = peak - plan.peak
        # More each time: another plan is wrong by another amount.
        profile = profile.corrected(plan.micro_batch, missing * (1 + attempt) if missing > 0 else missing)
        if missing > 0:  # where less was taken, the plan goes with the figures that it was made of: they are safe
            tried[-1] = tried[-1]._replace(verified=Verified(ran, profile))
    return min(tried, key=lambda one: one[:2]).verified


class _Tried(NamedTuple):
    beyond: float  # of the budget, as a part of it
    seconds: float
    verified: Verified


def _is_same(plan: Plan, other: Plan) -> bool:
    return (plan.micro_batch, plan.k_steps, plan.states) == (other.micro_batch, other.k_steps, other.states)


def time_is_right(plan: Plan) -> bool:
    """Whether a real step, if there was one, took about as long as predicted."""
    if plan.measured is None:
        return True
    return plan.seconds / FAR_OFF <= plan.measured.seconds <= plan.seconds * FAR_OFF


def with_doubtful_time(plan: Plan) -> Plan:
    """The plan, with a note on its time."""
    assert plan.measured is not None
    note = (
        f"a real step took {plan.measured.seconds / plan.seconds:.2f} times as long as predicted: the machine was busy "
        "in one of them, or steps are very short. The model is measured anew next time; another plan may be faster."
    )
    return replace(plan, notes=(*plan.notes, note))


def allowed(plan: Plan) -> float:
    """The bytes that a real step may take before the plan is made anew."""
    return min(plan.peak * (1 + TOLERANCE), plan.memory)


def is_as_predicted(plan: Plan, peak: int) -> bool:
    """Whether a real step that took so much neither took more than it may, nor left room for a faster plan."""
    return plan.peak * (1 - TOLERANCE) <= peak <= allowed(plan)


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
