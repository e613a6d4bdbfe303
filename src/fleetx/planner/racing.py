"""Between plans that are predicted to be almost equally fast, a few real micro-batches decide.

A prediction adds up what segments took, each among others of its own kind. What they do to each other, and where the
host does not launch in time, shows in the whole only.
"""

from collections.abc import Callable

from fleetx.planner.fitting import DoesNotFit
from fleetx.planner.plan import Plan, RunnerUp
from fleetx.planner.verify import Make, Verified

_CLOSE = 0.08  # part of the predicted speed
_MOST = 2  # others, beside the one that is predicted to be the fastest
_CLEARLY = 0.01  # part of the time: by less nothing is decided


def fastest_in_reality(
    first: Verified, make: Make, run: Callable[[Plan], Plan | None], seconds_of: Callable[[Plan], float]
) -> Verified:
    """The plan, or one of its runners-up, if that took clearly less time.

    `run` tries a plan out and is None if it took more than the budget; `seconds_of` is what a plan took in reality.
    """
    best, least = first, seconds_of(first.plan)
    for other in _close_to(first.plan) if least else []:
        try:
            plan = make(first.profile, prefer=other.k_steps)
        except DoesNotFit:
            break  # what was learned about memory leaves no room; the plan had it all the same
        if plan.k_steps != other.k_steps:
            continue  # nor is there room for this one
        ran = run(plan)
        if ran is not None and seconds_of(ran) < least * (1 - _CLEARLY):
            best, least = first._replace(plan=ran), seconds_of(ran)
    return best


def _close_to(plan: Plan) -> list[RunnerUp]:
    """Runners-up that may be faster in reality, the most promising first."""
    return [other for other in plan.runners_up if other.samples_per_s > plan.samples_per_s * (1 - _CLOSE)][:_MOST]
