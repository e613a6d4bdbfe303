"""One real step with a plan: what it takes, beside what was predicted; and a new plan, if that was too little."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from fleetx.planner.costs import Profile
from fleetx.planner.feeding import Feeding, placed, resized
from fleetx.planner.meter import meter_for
from fleetx.planner.observing import Watch
from fleetx.planner.plan import Moment, Plan
from fleetx.planner.search import DoesNotFit
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
                for _ in range(2):
                    _forget_late_gradients(plan, feeding)
                    watch.step(batch)
                _forget_late_gradients(plan, feeding)
                began = time.perf_counter()
                watch.step(batch)
                took = time.perf_counter() - began
                _forget_late_gradients(plan, feeding)
                step = watch.step(batch, meter_for(feeding.device))
            finally:
                watch.remove()
    finally:
        applied.remove()
    assert step.turn is not None
    assert step.end is not None
    # What an earlier plan took beyond its prediction is a guess, which is not there.
    base = plan.fixed_bytes - plan.peak_by_kind.get("unexplained", 0) - step.start.bytes
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


def _forget_late_gradients(plan: Plan, feeding: Feeding) -> None:
    """As an optimizer's zero_grad() does before an only micro-batch."""
    if plan.gradients_come_late:
        for parameter in feeding.model.parameters():
            parameter.grad = None


class Verified(NamedTuple):
    """A plan after real micro-batches, and the profile with what these showed."""

    plan: Plan
    profile: Profile


def until_verified(
    profile: Profile,
    feeding: Feeding,
    sample: Batch,
    make: Callable[[Profile], Plan],
    largest: Callable[[int], int] = int,
) -> Verified:
    """Make a plan and run it; if it took more memory than predicted, or ran out of it, allow for that and plan again.

    At most three times anew. If none was as predicted, or no further one is possible, the fastest of those that were
    within the budget is returned, or else the most frugal one; it says what it took. One that ran out of memory is
    returned unverified. `largest` makes of this worker's number the largest of all workers', so that all of them
    choose the same plan.
    """
    tried: list[tuple[float, float, Verified]] = []
    for attempt in range(1 + MOST_PLANS):
        try:
            plan = make(profile)
        except DoesNotFit:
            if not any(beyond == 0 for beyond, _, _ in tried):
                raise
            break  # what this one would have allowed for had room all the same
        ran, peak = _ran(plan, feeding, sample)
        peak = largest(peak)
        if peak <= allowed(plan):
            return Verified(ran, profile)
        # More each time: another plan is wrong by another amount.
        profile = profile.corrected(plan.micro_batch, (peak - plan.peak) * (1 + attempt))
        beyond = math.inf if largest(int(not ran.verified)) else max(0.0, peak / plan.memory - 1)
        # Predicted seconds: those that were measured differ from worker to worker.
        tried.append((beyond, plan.seconds, Verified(ran, profile)))
    return min(tried, key=lambda one: one[:2])[2]


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
    return min(plan.peak, plan.memory) * (1 + TOLERANCE)


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
