"""Plans that are tried: which one is taken if none is as predicted, and that all workers take the same."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fleetx
from fleetx.planner import agreement, cache, tryout, verify
from fleetx.planner.agreement import ALONE
from fleetx.planner.feeding import Feeding
from fleetx.planner.fitting import DoesNotFit
from fleetx.planner.lines import Line
from fleetx.planner.making import plan_for
from fleetx.planner.observing import Watch
from fleetx.planner.plan import Moment
from fleetx.planner.profile import measure
from fleetx.planner.tryout import Tryout
from tests.planner.drivers import FakeDriver, Others
from tests.planner.profiles import transformer

GIB = 2**30
TRYOUT = Tryout(Feeding(nn.Linear(2, 2)), None)


def plans(*seconds):
    """Plans that take so long, one after the other; where there is None, and after the last, nothing fits."""
    base = plan_for(transformer(4), memory=16 * GIB, global_batch=8, curve=False)
    left = [
        one and replace(base, seconds=float(one), micro_batch=number + 1) for number, one in enumerate([*seconds, None])
    ]

    def make(_profile):
        plan = left.pop(0) if len(left) > 1 else left[0]
        if plan is None:
            raise DoesNotFit("nothing fits", 1, 1)
        return plan

    return base, make


def taking(monkeypatch, *took):
    """Each trial takes so many bytes and seconds; None: it runs out of memory."""
    left = list(took)

    def tried(_tryout, plan):
        one = left.pop(0)
        if one is None:
            raise torch.OutOfMemoryError("out of memory")
        return plan.with_measurement(*one)

    monkeypatch.setattr(Tryout, "run", tried)


def found(make, agreement=ALONE):
    return verify.until_verified(transformer(4), FakeDriver(make, TRYOUT, agreement)).plan


def test_a_plan_within_the_budget_is_kept_if_no_further_one_is_possible(monkeypatch):
    base, make = plans(5)
    taking(monkeypatch, (int(base.peak * 1.1), 5.0))
    assert base.peak * 1.1 < base.memory
    plan = found(make)
    assert plan.measured.peak == int(base.peak * 1.1)


def test_a_plan_that_is_kept_does_not_promise_less_than_it_took(monkeypatch):
    base, make = plans(5)
    taking(monkeypatch, (int(base.peak * 1.1), 5.0))
    plan = found(make)
    assert plan.peak == plan.measured.peak == sum(plan.peak_by_kind.values())
    assert plan.fixed_bytes - base.fixed_bytes == plan.peak_by_kind["unexplained"] == plan.peak - base.peak


@pytest.mark.parametrize(("part", "rest"), [(1.2, 0.001), (0.8, 0.03), (0.5, 0.03)])
def test_the_same_plan_is_not_tried_again_but_says_what_is_known(monkeypatch, part, rest):
    def make(profile):
        return plan_for(profile, memory=16 * GIB, global_batch=8, curve=False)

    base = make(transformer(4))
    moments = (Moment("end", "backward", GIB, 2 * GIB),)
    taking(monkeypatch, (int(base.peak * part), 5.0, moments))  # a second trial would fail
    plan, profile, first_peak, *_ = verify.until_verified(transformer(4), FakeDriver(make, TRYOUT))
    assert first_peak == base.peak
    assert plan.states == base.states
    assert plan.peak == pytest.approx(plan.measured.peak, rel=rest)
    assert plan.peak == sum(plan.peak_by_kind.values())
    assert plan.moments == moments
    assert make(profile).peak == plan.peak  # the profile goes with these figures


def test_an_update_that_was_not_tried_is_still_predicted(monkeypatch):
    """Micro-batches that took less than the update is to take say nothing of it."""
    profile = transformer(4, update_bytes=4 * GIB)

    def make(profile):
        return plan_for(profile, memory=16 * GIB, global_batch=8, curve=False)

    base = make(profile)
    assert base.peak_by_kind["update"] == 4 * GIB
    assert base.peak_of_trial < 0.9 * base.peak
    taking(monkeypatch, (base.peak_of_trial, 5.0))
    assert verify.until_verified(profile, FakeDriver(make, TRYOUT)).plan.peak == base.peak


@pytest.mark.parametrize("took", [None, (17 * GIB, 5.0)])
def test_a_plan_beyond_the_budget_is_not_kept_if_no_further_one_is_possible(monkeypatch, took):
    _, make = plans(5)
    taking(monkeypatch, took)
    with pytest.raises(DoesNotFit):
        found(make)


def test_if_there_is_no_room_with_all_caution_less_is_allowed_for(monkeypatch):
    """What a second plan took more than predicted is allowed for twice; that may be too much."""
    (base, make), heard = plans(4, 5, None, 6), []
    beyond, more = int(base.memory * 1.1), int(base.memory * 1.1) - base.peak
    taking(monkeypatch, (beyond, 4.0), (beyond, 5.0), (base.peak, 6.0))

    def listening(profile):
        heard.append(profile.unexplained.per_sample)
        return make(profile)

    chosen = verify.until_verified(transformer(4), FakeDriver(listening, TRYOUT))
    assert chosen.plan.seconds == 6
    assert chosen.profile.unexplained.per_sample == heard[3]
    assert heard[2] - heard[1] == pytest.approx(2 * more / 2, rel=0.2)  # the second one has two samples
    assert heard[3] - heard[1] == pytest.approx(more / 2, rel=0.2)


def test_of_plans_that_all_take_more_the_fastest_within_the_budget_is_taken(monkeypatch):
    base, make = plans(4, 5, 6, 7)
    more = int(base.peak * 1.1)
    taking(monkeypatch, (17 * GIB, 4.0), (more, 6.0), (more, 5.0), None)
    assert found(make).seconds == 5


@pytest.mark.parametrize(("part", "is_right"), [(0.96, False), (0.98, True), (1.0, True), (1.02, True), (1.04, False)])
def test_a_peak_is_right_if_it_differs_by_three_percent_at_most(part, is_right):
    plan = plans()[0]
    assert plan.peak * 1.04 < plan.memory
    assert verify.is_as_predicted(plan, int(plan.peak * part)) == is_right


def test_a_peak_beyond_the_budget_is_not_right_however_little_it_differs():
    plan = replace(plans()[0], memory=plans()[0].peak)
    assert verify.is_as_predicted(plan, plan.peak)
    assert not verify.is_as_predicted(plan, plan.peak + 1)


@pytest.mark.parametrize(("part", "sign"), [(0.8, -1), (1.2, 1)])
def test_what_differed_is_allowed_for_in_the_next_plan(monkeypatch, part, sign):
    (base, make), heard = plans(5, 4), []
    taking(monkeypatch, (int(base.peak * part), 5.0), (base.peak, 4.0))

    def listening(profile):
        heard.append(profile)
        return make(profile)

    chosen = verify.until_verified(transformer(4), FakeDriver(listening, TRYOUT))
    before, after = (profile.chain(1).fixed_bytes for profile in heard)
    assert (after - before) * sign > 0
    assert chosen.plan.seconds == 4
    assert chosen.profile == heard[1]


def test_a_plan_that_took_less_goes_with_the_profile_that_it_was_made_of(monkeypatch):
    """With the corrected one the same plan would pass for a smaller one, when memory runs out."""
    base, make = plans(5)
    taking(monkeypatch, (int(base.peak * 0.8), 5.0))
    assert verify.until_verified(transformer(4), FakeDriver(make, TRYOUT)).profile == transformer(4)


def test_a_plan_that_ran_out_of_memory_comes_last(monkeypatch):
    _, make = plans(4, 5, 6, 7)
    taking(monkeypatch, (20 * GIB, 4.0), None, (19 * GIB, 6.0), None)
    assert found(make).seconds == 6


def test_workers_whose_trials_differ_take_the_same_plan(monkeypatch):
    """The first one alone would take its second plan, and the second one its fourth."""
    more, beyond = int(plans()[0].peak * 1.1), 17 * GIB
    trials = [
        [(more, 9.0), (more, 1.0), (beyond, 9.0), (more, 9.0)],
        [(beyond, 9.0), None, (more, 9.0), (more, 1.0)],
    ]
    chosen, said = [], [[], []]
    for worker in (0, 1, 0):  # the first one once to say what it has, and once to hear what the other says
        taking(monkeypatch, *trials[worker])
        heard = iter(said[1 - worker])

        def largest(number, worker=worker, heard=heard):
            said[worker].append(number)
            return max(number, next(heard, 0))

        said[worker].clear()
        chosen.append(found(plans(4, 5, 6, 7)[1], Others(largest)).seconds)
    assert chosen[1:] == [7, 7]


@pytest.mark.middle
@pytest.mark.parametrize(("factor", "is_kept"), [(1.0, True), (1.4, True), (1.6, False), (0.5, False)])
def test_a_time_far_off_is_noted_and_its_profile_is_forgotten(monkeypatch, factor, is_kept):
    monkeypatch.setattr(Tryout, "run", lambda _, plan: plan.with_measurement(plan.peak, plan.seconds * factor))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    plan = fleetx.plan(model, (torch.randn(2, 4),), memory="1MiB", bandwidth=0.0, verify=True)
    assert len(list(cache.folder().iterdir())) == is_kept
    assert any("times as long as predicted" in note for note in plan.notes) != is_kept


def test_what_other_budgets_would_give_is_asked_once_however_many_plans_are_tried(monkeypatch):
    asked, made = [], agreement.plan_for
    monkeypatch.setattr(agreement, "plan_for", lambda *a, **k: asked.append(k.get("curve", True)) or made(*a, **k))
    monkeypatch.setattr(Tryout, "run", lambda _, plan: plan.with_measurement(int(plan.peak * 1.1), plan.seconds))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    plan = fleetx.plan(model, (torch.randn(2, 4),), memory="1MiB", bandwidth=0.0, verify=True)
    assert plan.curve
    assert asked.count(True) == 1
    assert asked.count(False) >= 1


def test_the_time_of_an_update_counts_slices_that_are_shorter_but_take_as_long(monkeypatch):
    """Where the device waits for launches, 8 slices of which most are a sample shorter take as long as 8 whole ones."""
    torch.manual_seed(0)
    model, sample = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (torch.randn(3, 4),)
    feeding = Feeding(model)
    profile = replace(
        measure(feeding, sample, ["0"], bandwidth=0.0, cached=False),
        tail_forward_seconds=Line(1.0, 0.0),
        tail_backward_seconds=Line(1.0, 0.0),
        update_seconds=3.0,
    )
    plan = plan_for(profile, memory=2**30, global_batch=17, k_steps=8, curve=False)
    assert plan.update_seconds == 3.0
    step_of = Watch.step
    monkeypatch.setattr(tryout, "_timed", lambda watch, batch, meter=None: (4.0, step_of(watch, batch, meter)))
    assert Tryout(feeding, sample).run(plan).measured.seconds == pytest.approx(8 * 4 + 3, rel=1e-3)


def test_on_a_device_slices_that_are_shorter_run_too(monkeypatch):
    """Their blocks do not fit where those of longer ones were, and a sample less may take longer."""
    fed, model = [], nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    feeding = Feeding(model, compute=lambda model, batch: (fed.append(len(batch)), model(batch))[1].sum())
    profile = measure(feeding, torch.randn(3, 4), ["0"], bandwidth=0.0, cached=False)
    plan = plan_for(profile, memory=2**30, global_batch=17, k_steps=6, curve=False)
    assert (plan.micro_batch, plan.shorter) == (3, 1)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 5000)
    monkeypatch.setattr(tryout, "moment", lambda _: fed[-1])
    monkeypatch.setattr(tryout, "seconds_between", lambda _, last: 10.0 if last == 3 else 2.0)
    tried = Tryout(feeding, torch.randn(3, 4))
    tried.on_gpu = True
    fed.clear()
    ran = tried.run(plan)
    assert ran.measured.seconds == pytest.approx(5 * 10 + 2 + plan.update_seconds)
    timed = [3, 3, 3, 3, 2, 2, 2]
    assert fed[-len(timed) :] == timed
    assert fed[-len(timed) - 2 : -len(timed)] == [2, 3]  # whose memory is measured comes after a shorter one
    fed.clear()
    tried.run(plan_for(profile, memory=2**30, global_batch=18, k_steps=6, curve=False))
    assert {*fed} == {3}
