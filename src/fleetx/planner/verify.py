"""One real step with a plan: what it takes, beside what was predicted; and a new plan, if that was too little."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fleetx.planner.costs import Profile
from fleetx.planner.feeding import Feeding, placed, resized
from fleetx.planner.meter import meter_for
from fleetx.planner.observing import Watch
from fleetx.planner.plan import Plan
from fleetx.planner.untouched import untouched
from fleetx.slicing import Batch

TOLERANCE = 0.03
MOST_PLANS = 3


@dataclass(frozen=True)
class Moment:
    """Bytes on the device at a cut of a real step, and the most since the cut before."""

    name: str
    phase: str
    bytes: int
    peak: int


def verify(plan: Plan, feeding: Feeding, sample: Batch) -> tuple[Plan, tuple[Moment, ...]]:
    """Run micro-batches of the plan's size for real: the plan with its measurement, and the memory at each cut.

    The model is left as it was, without the plan. The time is that of one micro-batch times `k_steps`, and what the
    plan predicts for everything else.
    """
    batch = resized(placed(sample, feeding.device), plan.micro_batch)
    applied = plan.apply(feeding.model)
    try:
        with untouched(feeding.model):
            watch = Watch(feeding, plan.names)
            try:
                for _ in range(2):
                    watch.step(batch)
                began = time.perf_counter()
                watch.step(batch)
                took = time.perf_counter() - began
                step = watch.step(batch, meter_for(feeding.device))
            finally:
                watch.remove()
    finally:
        if applied is not None:
            applied.remove()
    assert step.turn is not None
    assert step.end is not None
    base = plan.fixed_bytes - step.start.bytes
    names = plan.names[: len(step.forward)]
    marks = [(name, "forward", mark) for name, mark in zip(names, step.forward, strict=True)]
    marks.append(("tail", "forward", step.turn))
    marks += [(plan.names[i], "backward", step.backward[i]) for i in sorted(step.backward, reverse=True)]
    marks.append(("end", "backward", step.end))
    moments = tuple(Moment(name, phase, base + mark.bytes, base + mark.peak) for name, phase, mark in marks)
    peak = max(moment.peak for moment in moments)
    if feeding.device.type == "cuda":
        peak = max(peak, torch.cuda.max_memory_reserved(feeding.device))
    rest = plan.seconds - plan.k_steps * sum(point.seconds for point in plan.timeline)
    return plan.with_measurement(peak, took * plan.k_steps + max(0.0, rest)), moments


def until_verified(
    profile: Profile, feeding: Feeding, sample: Batch, make: Callable[[Profile], Plan]
) -> tuple[Plan, tuple[Moment, ...]]:
    """Make a plan and run it; if it took more memory than predicted, or ran out of it, allow for that and plan again.

    At most three times anew. If none was as predicted, the fastest of those that were within the budget is returned, or
    else the most frugal one; it says what it took. One that ran out of memory is returned unverified.
    """
    tried: list[tuple[Plan, tuple[Moment, ...]]] = []
    for attempt in range(1 + MOST_PLANS):
        plan = make(profile)
        ran, moments, peak = _ran(plan, feeding, sample)
        if peak <= min(plan.peak, plan.memory) * (1 + TOLERANCE):
            return ran, moments
        tried.append((ran, moments))
        # More each time: another plan is wrong by another amount.
        profile = profile.corrected(plan.micro_batch, (peak - plan.peak) * (1 + attempt))
    return min(tried, key=lambda pair: _badness(pair[0]))


def _ran(plan: Plan, feeding: Feeding, sample: Batch) -> tuple[Plan, tuple[Moment, ...], int]:
    """The plan after a step, and its peak; unverified, and with more than there is, if memory ran out."""
    try:
        ran, moments = verify(plan, feeding, sample)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return plan, (), int(plan.memory * 1.1)
    assert ran.measured is not None
    return ran, moments, ran.measured.peak


def _badness(plan: Plan) -> tuple[float, float]:
    """First how far beyond the budget, then how slow."""
    if plan.measured is None:
        return float("inf"), plan.seconds
    return max(0.0, plan.measured.peak / plan.memory - 1), plan.measured.seconds
