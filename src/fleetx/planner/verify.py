"""A plan is tried, and made anew if what it took was not what was predicted."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from fleetx.planner.agreement import Agreement
from fleetx.planner.costs import Profile
from fleetx.planner.fitting import DoesNotFit
from fleetx.planner.plan import Plan
from fleetx.planner.tryout import Tryout

if TYPE_CHECKING:
    from fleetx.planner.driver import Driver

TOLERANCE = 0.03
MOST_PLANS = 3
FAR_OFF = 1.5  # times the predicted seconds, or less than these by as much


class Verified(NamedTuple):
    """A plan after real micro-batches, and its profile, with what these took beyond it."""

    plan: Plan
    profile: Profile
    first_peak: int  # predicted before anything was tried
    beyond: float = 0.0  # part of the budget, that even this plan took more
    prefer: int | None = None  # its micro-batches, if it was not predicted to be the fastest


def until_verified(profile: Profile, driver: "Driver") -> Verified:
    """Make a plan and run it; if its memory was not as predicted, allow for that and plan again.

    At most three times anew; the same plan is not run twice, but has the new figures. The fastest of those that were
    within the budget is returned, or else the most frugal one; it says what it took, and does not promise less. One
    that ran out of memory is returned unverified.
    """
    tried: list[Tried] = []
    first_peak = 0
    bolder: Profile | None = None
    for attempt in range(1 + MOST_PLANS):
        try:
            plan, profile = _made(driver, profile, bolder)
            first_peak = first_peak or plan.peak
        except DoesNotFit:
            if not any(one.beyond == 0 for one in tried):
                raise
            break  # what this one would have allowed for had room all the same
        # All workers were given the same plans, and so all find the same one again, or none.
        known = next((one for one in tried if _is_same(plan, one.plan)), None)
        if known is None:
            one = driver.run(plan, profile)
        else:
            tried.remove(known)
            one = known.with_figures_of(plan, profile)
        if is_as_predicted(plan, one.peak):
            tried.append(one)
            break
        bolder = one.having_learned().profile
        one = one.having_learned(times=1 + attempt)  # more each time: another plan is wrong by another amount
        tried.append(one)
        profile = one.profile if one.took_more else profile.corrected(plan.micro_batch, one.peak - plan.peak_of_trial)
    return min(tried, key=lambda one: one[:2]).verified(first_peak)


def _made(driver: "Driver", profile: Profile, bolder: Profile | None) -> tuple[Plan, Profile]:
    """A plan, and the profile that it was made of: one that allows for less, if there is no room with all caution."""
    try:
        return driver.plan_from(profile), profile
    except DoesNotFit:
        if bolder is None or bolder == profile:
            raise
        return driver.plan_from(bolder), bolder


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
        """The plan does not promise less than it took, and says if that was far less than it promises."""
        plan, less = self.plan, 1 - self.peak / self.plan.peak_of_trial
        if self.beyond < math.inf and self.peak > plan.peak * (1 + TOLERANCE):
            plan = plan.taking_more(self.peak - plan.peak)
        if less > TOLERANCE:
            note = f"real micro-batches took {less:.1%} less memory than predicted."
            plan = replace(plan, notes=(*plan.notes, note))
        return Verified(plan, self.profile, first_peak, self.beyond)


def tried_out(plan: Plan, profile: Profile, tryout: Tryout, agreement: Agreement) -> Tried:
    """The plan after a real step, the same on all workers."""
    ran, peak = _ran(plan, tryout)
    peak = agreement.largest(peak)
    beyond = math.inf if not agreement.everywhere(ran.verified) else max(0.0, peak / plan.memory - 1)
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


def _ran(plan: Plan, tryout: Tryout) -> tuple[Plan, int]:
    """The plan after a step, and its peak; unverified, and with more than there is, if memory ran out."""
    try:
        ran = tryout.run(plan)
    except torch.OutOfMemoryError:
        if tryout.on_gpu:
            torch.cuda.empty_cache()
        return plan, int(plan.memory * 1.1)
    assert ran.measured is not None
    return ran, ran.measured.peak
