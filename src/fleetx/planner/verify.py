"""One real step with a plan: what it takes, beside what was predicted; and a new plan, if that was too little."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from fleetx.planner.costs import Profile
from fleetx.planner.feeding import Feeding, placed, resized
from fleetx.planner.meter import meter_for
from fleetx.planner.observing import Watch
from fleetx.planner.plan import Moment, Plan
from fleetx.planner.untouched import untouched
from fleetx.slicing import Batch

TOLERANCE = 0.03
MOST_PLANS = 3


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
        if applied is not None:
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

    At most three times anew. If none was as predicted, the fastest of those that were within the budget is returned, or
    else the most frugal one; it says what it took. One that ran out of memory is returned unverified. `largest` makes
    of this worker's peak that of all workers.
    """
    tried: list[Verified] = []
    for attempt in range(1 + MOST_PLANS):
        plan = make(profile)
        ran, peak = _ran(plan, feeding, sample)
        peak = largest(peak)
        if peak <= allowed(plan):
            return Verified(ran, profile)
        # More each time: another plan is wrong by another amount.
        profile = profile.corrected(plan.micro_batch, (peak - plan.peak) * (1 + attempt))
        tried.append(Verified(ran, profile))
    return min(tried, key=lambda one: _badness(one.plan))


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


def _badness(plan: Plan) -> tuple[float, float]:
    """First how far beyond the budget, then how slow."""
    if plan.measured is None:
        return float("inf"), plan.seconds
    return max(0.0, plan.measured.peak / plan.memory - 1), plan.measured.seconds
