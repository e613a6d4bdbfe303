"""Between plans that are predicted to be almost equally fast, or were not, a few real micro-batches decide.

A prediction adds up what segments took, each among others of its own kind. What they do to each other, and where the
host does not launch in time, shows in the whole only.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from fleetx.planner.costs import Profile
from fleetx.planner.fitting import DoesNotFit
from fleetx.planner.making import CLOSE, TOLERATED
from fleetx.planner.plan import Plan, RunnerUp
from fleetx.planner.verify import Verified, is_as_predicted

if TYPE_CHECKING:
    from fleetx.planner.driver import Driver

_MOST = 2  # others, beside the one that is predicted to be the fastest
_CLEARLY = 0.02  # part of the time: by less nothing is decided
_LEAVES_ROOM = 0.95  # of the memory: a plan that takes no more than this, and no longer either, is the better one


def fastest_in_reality(first: Verified, driver: "Driver") -> Verified:
    """The plan, or one of its runners-up, if that took clearly less time; or if only that was within the budget.

    Also one that leaves more room, if it took no longer.
    """
    least = expected = math.inf if first.beyond else driver.slowest(first.plan)
    peak = first.plan.peak  # predicted, as all others here: what was measured differs from worker to worker
    best, has_run_again, profile = None, bool(first.beyond), first.profile
    for plan in _others(first, driver, expected):
        tried = driver.run(plan, profile)
        took = driver.slowest(tried.plan)
        if not tried.beyond and _is_better(took, plan.peak, least, peak) and not has_run_again:
            first, has_run_again = _at_its_best(first, driver, profile), True
            least = expected = driver.slowest(first.plan)
        if not tried.beyond and _is_better(took, plan.peak, least, peak):
            least, peak = took, plan.peak
            known = tried if is_as_predicted(plan, tried.peak) else tried.having_learned()
            best = known.verified(plan.peak)._replace(prefer=plan.k_steps)
    if best is None:
        return first
    reason = f"{best.plan.reason} {_surprise(first.plan, best.plan, expected, least)}"
    return best._replace(plan=replace(best.plan, reason=reason))


def _at_its_best(first: Verified, driver: "Driver", profile: Profile) -> Verified:
    """With the time of another run, if that was better: the machine may have been busy with something else before."""
    again = driver.run(replace(first.plan, measured=None), profile)
    if again.beyond or driver.slowest(again.plan) >= driver.slowest(first.plan):
        return first
    return first._replace(plan=first.plan.measured_as(again.plan))


def _others(first: Verified, driver: "Driver", took: float) -> Iterator[Plan]:
    """Runners-up as plans, as far as there is room for them with what was learned about memory."""
    for other in _worth_trying(first.plan, took):
        try:
            plan = driver.plan_from(first.profile, other.k_steps)
        except DoesNotFit:
            return  # for none of them; the plan had it all the same
        if plan.k_steps == other.k_steps:
            yield plan


def _worth_trying(plan: Plan, took: float) -> list[RunnerUp]:
    """Runners-up that may be faster in reality than the plan, which took so long; the most promising first.

    These are predicted to be almost as fast as the plan was, or faster than it is, and not far slower than it was.
    """
    least = max(plan.samples_per_s / TOLERATED, min(plan.samples_per_s * (1 - CLOSE), plan.global_batch / took))
    return [other for other in plan.runners_up if other.samples_per_s > least][:_MOST]


def _is_better(seconds: float, peak: int, least: float, of_it: int) -> bool:
    """Than a plan that took `least` seconds and is predicted to take `of_it` bytes."""
    return _is_clearly_less(seconds, least) or (seconds <= least and peak <= of_it * _LEAVES_ROOM)


def _is_clearly_less(seconds: float, than: float) -> bool:
    return seconds < than * (1 - _CLEARLY)


def _surprise(plan: Plan, best: Plan, took: float, least: float) -> str:
    """Why the plan that was predicted to be the fastest was not taken."""
    if took == math.inf:
        how = "took more than the budget"
    elif _is_clearly_less(least, took):
        how = f"real micro-batches took {took / least - 1:.1%} longer"
    else:
        how = f"was no faster in reality, and takes {plan.peak / best.peak - 1:.1%} more memory"
    return f"{plan.micro_batch:,} × {plan.k_steps:,} was predicted to be the fastest, but {how}."
