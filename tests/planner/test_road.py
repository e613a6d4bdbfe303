"""The one road from a model to its plan: what is measured, tried and noted on it."""

from functools import partial

import pytest
import torch
from torch import nn

from fleetx.planner import cache
from fleetx.planner.feeding import Feeding
from fleetx.planner.fitting import DoesNotFit
from fleetx.planner.making import plan_for
from fleetx.planner.plan import Plan, fingerprint_of
from fleetx.planner.road import Road, with_curve
from fleetx.planner.tryout import Tryout
from tests.planner.profiles import transformer

make = partial(plan_for, memory=2**20, global_batch=4, curve=False)


def started(**settings):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    return Road(Feeding(model), (torch.randn(2, 4),), bandwidth=0.0, **settings)


def taking(monkeypatch, factor):
    """A real step takes so many times the predicted seconds."""
    monkeypatch.setattr(Tryout, "run", lambda _, plan: plan.with_measurement(plan.peak, plan.seconds * factor))


def test_a_plan_that_is_not_tried_is_the_first_prediction():
    road = started()
    plan, profile, first_peak, *_ = road.first_plan(road.ways(), make, verify=False)
    assert not plan.verified
    assert profile is road.profile_at(["0", "1", "2"])
    assert first_peak == plan.peak
    assert plan.fingerprint == fingerprint_of(road.feeding.model)


def test_the_first_way_to_cut_that_has_a_plan_is_taken(monkeypatch):
    taking(monkeypatch, 1)
    road, seen = started(), []

    def picky(profile):
        seen.append([segment.name for segment in profile.segments])
        if len(profile.segments) > 1:
            raise DoesNotFit("nothing fits", 1, 1)
        return make(profile)

    plan = road.first_plan([["0", "1"], ["0"], ["1"]], picky).plan
    assert plan.names == ("0",)
    assert seen == [["0", "1"], ["0"]]


def test_what_only_this_training_has_is_part_of_the_plan(monkeypatch):
    taking(monkeypatch, 1)
    road = started()
    plain = road.first_plan(road.ways(), make)
    more = road.first_plan(road.ways(), make, complete=lambda profile: profile.corrected(1, 1000))
    assert more.first_peak > plain.first_peak
    assert road.profile_at(["0", "1", "2"]) is plain.profile


@pytest.mark.parametrize(("races", "wins"), [(True, 1), (False, 0), (None, 0)])  # None: not without a GPU
def test_close_plans_race_where_times_can_be_told(monkeypatch, races, wins):
    road = started(races=races)
    profile = transformer()
    monkeypatch.setattr(Road, "profile_at", lambda _self, _cuts: profile)
    asked = partial(plan_for, memory=32 * 2**30, global_batch=1024, curve=False)
    first = asked(profile)
    places = [first.k_steps, *(one.k_steps for one in first.runners_up)]

    def tried(_tryout, plan):
        return plan.with_measurement(plan.peak, plan.seconds * (1.2 if plan.k_steps == first.k_steps else 1.0))

    monkeypatch.setattr(Tryout, "run", tried)
    monkeypatch.setattr(Plan, "of", lambda plan, _model: plan)
    assert road.first_plan([["0"]], asked).plan.k_steps == places[wins]


@pytest.mark.middle
@pytest.mark.parametrize(("here", "elsewhere"), [(1.0, 2.0), (2.0, 1.0), (0.5, 2.0)])
def test_workers_doubt_the_times_together_by_the_slowest_of_them(monkeypatch, here, elsewhere):
    """Else one of them would have notes that the others have not."""
    notes = []
    for factor in (here, elsewhere):
        taking(monkeypatch, factor)
        of_both = max(here, elsewhere) / factor
        # Peaks are alike; what is larger are nanoseconds.
        road = started(largest=lambda number, of_both=of_both: int(number * of_both) if number > 10**5 else number)
        notes.append(road.first_plan(road.ways(), make).plan.notes)
        assert list(cache.folder().iterdir()) == []
    assert ["2.00 times as long as predicted" in " ".join(said) for said in notes] == [True, True]


def test_what_is_not_kept_on_disk_is_not_forgotten_there(monkeypatch):
    kept = started()
    kept.profile_at(["0", "1", "2"])
    taking(monkeypatch, 2)
    started(cached=False).first_plan([["0", "1", "2"]], make)
    assert len(list(cache.folder().iterdir())) == 1
    started().first_plan([["0", "1", "2"]], make)
    assert list(cache.folder().iterdir()) == []


def test_where_no_other_budget_can_be_asked_for_nothing_is_said_of_them(monkeypatch):
    taking(monkeypatch, 1)
    road = started()
    found = road.first_plan(road.ways(), make)

    def nothing(_profile, prefer=None):
        raise DoesNotFit("nothing fits", 1, 1)

    assert with_curve(found, nothing) == found
    assert with_curve(found, partial(plan_for, memory=2**20, global_batch=4)).plan.curve
