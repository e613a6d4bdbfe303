"""Real times decide between plans that are predicted to be almost equally fast, and between no others."""

from functools import partial

import pytest

from fleetx.planner.making import plan_for
from fleetx.planner.plan import Plan
from fleetx.planner.racing import fastest_in_reality
from fleetx.planner.verify import Verified
from tests.planner.profiles import transformer

GIB = 2**30
make = partial(plan_for, memory=32 * GIB, global_batch=1024, curve=False)


def raced(seconds, make=make, fits=lambda _: True, profile=None):
    """The winner, and the numbers of micro-batches that were run; `seconds`: of a plan in reality."""
    profile = profile or transformer()
    first, ran = make(profile), []

    def run(plan):
        ran.append(plan.k_steps)
        return plan.with_measurement(plan.peak, seconds(plan)) if fits(plan) else None

    measured = first.with_measurement(first.peak, seconds(first))
    begun = Verified(measured, profile, first.peak)
    return first, fastest_in_reality(begun, make, run, lambda plan: plan.measured.seconds).plan, ran


def as_predicted(plan):
    return plan.seconds


def slow(slow_one, times=1.2):
    return lambda plan: plan.seconds * (times if plan.k_steps == slow_one.k_steps else 1.0)


def test_what_is_as_predicted_stays():
    first, winner, ran = raced(as_predicted)
    assert winner.k_steps == first.k_steps
    assert winner.reason == first.reason
    assert ran == [one.k_steps for one in first.runners_up[:2]]


def test_a_runner_up_that_is_faster_in_reality_is_taken_and_says_so():
    first, winner, _ = raced(slow(make(transformer())))
    second = first.runners_up[0]
    assert (winner.micro_batch, winner.k_steps) == (second.micro_batch, second.k_steps)
    assert winner.samples_per_s == pytest.approx(second.samples_per_s)
    assert f"{first.micro_batch:,} × {first.k_steps:,} was predicted to be" in winner.reason
    assert "real micro-batches took longer" in winner.reason
    assert first.k_steps in [one.k_steps for one in winner.runners_up]
    assert winner.peak <= winner.memory
    assert Plan.from_json(winner.to_json()) == winner


def test_little_is_no_reason():
    first, winner, _ = raced(lambda plan: 1.0 if plan.micro_batch > 60 else 0.995)
    assert winner.k_steps == first.k_steps


def test_what_takes_more_than_the_budget_does_not_win():
    first = make(transformer())
    _, winner, ran = raced(slow(first), fits=lambda plan: plan.k_steps != first.runners_up[0].k_steps)
    assert winner.k_steps == first.runners_up[1].k_steps
    assert len(ran) == 2
    assert raced(slow(first), fits=lambda _: False)[1].k_steps == first.k_steps


def test_only_close_ones_run():
    profile = transformer(overhead=0.1)  # launches are all that counts: twice as many micro-batches take twice as long
    first, winner, ran = raced(slow(make(profile)), profile=profile)
    assert first.runners_up
    assert not ran
    assert winner.k_steps == first.k_steps


def test_a_plan_that_was_not_timed_stays():
    profile = transformer()
    first = make(profile)
    begun = Verified(first, profile, first.peak)
    assert fastest_in_reality(begun, make, pytest.fail, lambda _: 0.0) is begun


def test_there_is_nothing_to_decide_where_the_slicing_is_given():
    for given in ({"k_steps": 16}, {"one_forward": True, "memory": 64 * GIB}):
        assert raced(as_predicted, make=partial(make, **given))[2] == []


def test_a_runner_up_for_which_there_is_no_room_any_more_does_not_run():
    profile = transformer()
    first = make(profile)
    short = profile.corrected(first.micro_batch, 100 * GIB)
    begun = Verified(first.with_measurement(first.peak, 1.0), short, first.peak)
    assert fastest_in_reality(begun, make, pytest.fail, lambda plan: plan.measured.seconds) is begun


def test_a_preference_for_what_is_not_among_the_fastest_changes_nothing():
    profile = transformer()
    assert make(profile, prefer=1024) == make(profile)
