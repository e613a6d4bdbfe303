"""Real times decide between plans that are predicted to be almost equally fast, or if the first is far slower."""

from functools import partial

import pytest

from fleetx.planner import racing
from fleetx.planner.making import plan_for
from fleetx.planner.plan import Plan
from fleetx.planner.racing import fastest_in_reality
from fleetx.planner.verify import Tried, Verified
from tests.planner.drivers import FakeDriver
from tests.planner.profiles import transformer

GIB = 2**30
make = partial(plan_for, memory=32 * GIB, global_batch=1024, curve=False)


def raced(seconds, make=make, peak=lambda plan: plan.peak, profile=None):
    """The first plan, what came of it, and how often others were cut; `seconds` and `peak` are a plan's in reality."""
    profile = profile or transformer()
    ran = []

    def run(plan):
        ran.append(plan.k_steps)
        measured = plan.with_measurement(peak(plan), seconds(plan))
        return Tried(max(0.0, peak(plan) / plan.memory - 1), plan.seconds, peak(plan), measured, profile)

    first = make(profile)
    begun = run(first).verified(first.peak)
    del ran[:]
    return first, fastest_in_reality(begun, FakeDriver(make, run=run)), ran


def as_predicted(plan):
    return plan.seconds


def slow(slow_one, times=1.2):
    return lambda plan: plan.seconds * (times if plan.k_steps == slow_one.k_steps else 1.0)


def test_what_is_as_predicted_stays():
    first, (winner, *_, prefer), ran = raced(as_predicted)
    assert winner.k_steps == first.k_steps
    assert winner.reason == first.reason
    assert prefer is None
    assert ran == [one.k_steps for one in first.runners_up[:2]]


def test_a_runner_up_that_is_faster_in_reality_is_taken_and_says_so():
    first, found, _ = raced(slow(make(transformer())))
    winner, second = found.plan, first.runners_up[0]
    assert (winner.micro_batch, winner.k_steps) == (second.micro_batch, second.k_steps)
    assert winner.samples_per_s == pytest.approx(second.samples_per_s)
    assert f"{first.micro_batch:,} × {first.k_steps:,} was predicted to be the fastest, but real" in winner.reason
    assert "as fast as" not in winner.reason
    assert found.prefer == winner.k_steps
    assert found.first_peak == winner.peak
    assert first.k_steps in [one.k_steps for one in winner.runners_up]
    assert winner.peak <= winner.memory
    assert Plan.from_json(winner.to_json()) == winner


def test_little_is_no_reason():
    first = make(transformer())
    for little in (1.005, 1.015):
        seconds = slow(first, little * first.samples_per_s / first.runners_up[0].samples_per_s)
        assert raced(seconds)[1].prefer is None


@pytest.mark.parametrize(
    ("times", "room", "is_taken"), [(1.001, 0.96, True), (0.999, 0.96, False), (1.001, 0.9, False)]
)
def test_a_runner_up_that_leaves_more_room_is_taken_if_it_takes_no_longer(monkeypatch, times, room, is_taken):
    first = make(transformer())
    smaller = first.runners_up[0]
    assert 0.9 * first.peak < smaller.peak < 0.96 * first.peak
    monkeypatch.setattr(racing, "_LEAVES_ROOM", room)
    seconds = {first.k_steps: times, smaller.k_steps: 1.0}
    found = raced(lambda plan: seconds.get(plan.k_steps, 2.0))[1]
    assert found.plan.k_steps == (smaller if is_taken else first).k_steps
    said = f"but was no faster in reality, and takes {first.peak / smaller.peak - 1:.1%} more memory."
    assert found.plan.reason.endswith(said) == is_taken


def test_a_plan_that_was_unlucky_runs_again_before_another_one_takes_its_place():
    first, times = make(transformer()), []

    def unlucky_once(plan):
        times.append(plan.k_steps)
        return plan.seconds * (1.2 if times == [first.k_steps] else 1.0)

    _, found, ran = raced(unlucky_once)
    assert found.prefer is None
    assert ran == [first.runners_up[0].k_steps, first.k_steps, first.runners_up[1].k_steps]
    assert found.plan.measured.seconds == first.seconds  # else it would be said to be far slower than predicted


def test_a_plan_that_is_slower_when_it_runs_again_is_as_fast_as_it_was():
    first, times = make(transformer()), []

    def slower_each_time(plan):
        times.append(plan.k_steps)
        return slow(first, 1.2 + times.count(first.k_steps))(plan)

    _, found, _ = raced(slower_each_time)
    gain = found.plan.samples_per_s * 2.2 / first.samples_per_s - 1
    assert f"but real micro-batches took {gain:.1%} longer" in found.plan.reason


def test_a_plan_runs_again_only_once_and_not_if_it_took_more_than_the_budget():
    first = make(transformer())
    others = [one.k_steps for one in first.runners_up[:2]]

    def faster_and_faster(plan):
        return {first.k_steps: 3.0, others[0]: 2.0, others[1]: 1.0}[plan.k_steps]

    _, found, ran = raced(faster_and_faster)
    assert ran == [others[0], first.k_steps, others[1]]
    assert found.prefer == others[1]

    def beyond(plan):
        return plan.memory + 1 if plan.k_steps == first.k_steps else plan.peak

    assert raced(faster_and_faster, peak=beyond)[2] == others


def test_a_plan_that_has_no_room_when_it_runs_again_is_as_fast_as_it_was():
    first, slower = make(transformer()), []

    def fast_later(plan):
        slower.append(plan.k_steps)
        return slow(first, 1.2 if slower == [first.k_steps] else 1.0)(plan)

    def short_later(plan):
        return plan.memory + 1 if slower.count(first.k_steps) > 1 and plan.k_steps == first.k_steps else plan.peak

    _, found, ran = raced(fast_later, peak=short_later)
    assert ran.count(first.k_steps) == 1
    assert found.prefer == first.runners_up[0].k_steps


def test_what_takes_more_than_the_budget_does_not_win():
    first = make(transformer())

    def beyond(*slicings):
        return lambda plan: plan.memory + 1 if plan.k_steps in slicings else plan.peak

    others = [one.k_steps for one in first.runners_up]
    assert raced(slow(first), peak=beyond(others[0]))[1].prefer == others[1]
    assert raced(slow(first), peak=beyond(*others))[1].prefer is None
    _, found, _ = raced(as_predicted, peak=beyond(first.k_steps))  # though it is slower
    assert found.prefer == others[0]
    assert "took more than the budget" in found.plan.reason
    assert found.beyond == 0


def test_what_the_winner_took_more_is_known_afterwards():
    first = make(transformer())
    _, found, _ = raced(slow(first), peak=lambda plan: int(plan.peak * 1.04))
    assert found.plan.peak >= int(1.04 * first.runners_up[0].peak) - 1
    assert found.profile.unexplained.per_sample > 0


def test_that_the_winner_took_far_less_is_said():
    first = make(transformer())
    _, found, _ = raced(slow(first), peak=lambda plan: int(plan.peak * 0.95))
    assert found.prefer == first.runners_up[0].k_steps
    assert "real micro-batches took 5.0% less memory than predicted" in found.plan.notes[-1]


def test_only_close_ones_run():
    profile = transformer(overhead=0.1)  # launches are all that counts: twice as many micro-batches take twice as long
    first, found, ran = raced(slow(make(profile)), profile=profile)
    assert first.runners_up
    assert not ran
    assert found.prefer is None


def test_of_a_plan_that_is_far_slower_than_predicted_others_are_tried_that_are_not_close():
    profile = transformer(overhead=0.02)
    first = make(profile)
    gap = first.samples_per_s / first.runners_up[0].samples_per_s
    assert 1.1 < gap < 1.4
    assert not raced(slow(first, 1.05), profile=profile)[2]
    _, found, ran = raced(slow(first, 1.05 * gap), profile=profile)
    assert ran[0] == found.prefer == first.runners_up[0].k_steps


@pytest.mark.parametrize(("overhead", "expected"), [(0.02, 2), (0.1, 1)])
def test_what_is_predicted_to_be_far_slower_does_not_run_however_slow_the_first_is(overhead, expected):
    profile = transformer(overhead=overhead)
    first, _, ran = raced(slow(make(profile), 9.0), profile=profile)
    times = [first.samples_per_s / one.samples_per_s for one in first.runners_up]
    assert sum(time < 1.5 for time in times) == expected < len(times)
    assert [one for one in ran if one != first.k_steps] == [one.k_steps for one in first.runners_up[:expected]]


def test_there_is_nothing_to_decide_where_the_slicing_is_given():
    for given in ({"k_steps": 16}, {"one_forward": True, "memory": 64 * GIB}):
        assert raced(as_predicted, make=partial(make, **given))[2] == []


def test_a_runner_up_for_which_there_is_no_room_any_more_does_not_run():
    profile = transformer()
    first = make(profile)
    short = profile.corrected(first.micro_batch, 100 * GIB)
    begun = Verified(first.with_measurement(first.peak, 1.0), short, first.peak)
    assert fastest_in_reality(begun, FakeDriver(make, run=pytest.fail)) is begun


def test_a_preference_for_what_is_not_among_the_fastest_changes_nothing():
    profile = transformer()
    assert make(profile, prefer=1024) == make(profile)
