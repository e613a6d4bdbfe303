"""The driver, from a model to its plan: what is measured, tried and noted."""

import pytest
import torch
from torch import nn

from fleetx.planner import agreement, cache
from fleetx.planner.agreement import Agreement
from fleetx.planner.driver import Driver, Request
from fleetx.planner.feeding import Feeding
from fleetx.planner.fitting import DoesNotFit
from fleetx.planner.making import plan_for
from fleetx.planner.plan import Plan, fingerprint_of
from fleetx.planner.tryout import Tryout
from tests.planner.drivers import Others
from tests.planner.profiles import transformer

NAMES = ["0", "1", "2"]


def started(agreed=agreement.ALONE, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    asked = {"memory": 2**20, "global_batch": 4, "bandwidth": 0.0} | settings
    return Driver(Request(Feeding(model), (torch.randn(2, 4),), **asked), agreed)


def taking(monkeypatch, factor):
    """A real step takes so many times the predicted seconds."""
    monkeypatch.setattr(Tryout, "run", lambda _, plan: plan.with_measurement(plan.peak, plan.seconds * factor))


def test_a_plan_that_is_not_tried_is_the_first_prediction():
    made = started(verify=False)
    plan, profile, first_peak, *_ = made.plan()
    assert not plan.verified
    assert profile == made.measured(NAMES)
    assert first_peak == plan.peak
    assert plan.curve
    assert plan.fingerprint == fingerprint_of(made.request.feeding.model)


class Picky(Agreement):
    """Has plans for models of one segment alone."""

    def __init__(self):
        self.seen = []

    def first(self, names):
        return [["0", "1"], ["0"], ["1"]]

    def plan_for(self, profile, **question):
        self.seen.append(([segment.name for segment in profile.segments], question["curve"]))
        if len(profile.segments) > 1:
            raise DoesNotFit("nothing fits", 1, 1)
        return super().plan_for(profile, **question)


def test_the_first_way_to_cut_that_has_a_plan_is_taken(monkeypatch):
    taking(monkeypatch, 1)
    picky = Picky()
    assert started(picky).plan().plan.names == ("0",)
    assert picky.seen == [(["0", "1"], False), (["0"], False), (["0"], True)]


def test_what_only_this_training_has_is_part_of_the_plan(monkeypatch):
    taking(monkeypatch, 1)
    plain, more = started().plan(), started(more_bytes={"master weights": 1000}, notes=("a note",)).plan()
    assert more.first_peak == plain.first_peak + 1000
    assert more.plan.peak_by_kind["master weights"] == 1000
    assert more.plan.notes == (*plain.plan.notes, "a note")


@pytest.mark.parametrize(("races", "wins"), [(True, 1), (False, 0), (None, 0)])  # None: not without a GPU
def test_close_plans_race_where_times_can_be_told(monkeypatch, races, wins):
    profile = transformer()
    first = plan_for(profile, memory=32 * 2**30, global_batch=1024, curve=False)
    places = [first.k_steps, *(one.k_steps for one in first.runners_up)]

    def tried(_tryout, plan):
        return plan.with_measurement(plan.peak, plan.seconds * (1.2 if plan.k_steps == first.k_steps else 1.0))

    monkeypatch.setattr(Driver, "measured", lambda _self, _cuts: profile)
    monkeypatch.setattr(Tryout, "run", tried)
    monkeypatch.setattr(Plan, "of", lambda plan, _model: plan)
    found = started(races=races, memory=32 * 2**30, global_batch=1024, checkpoints=["0"]).plan()
    assert found.plan.k_steps == places[wins]


@pytest.mark.middle
@pytest.mark.parametrize(("here", "elsewhere"), [(1.0, 2.0), (2.0, 1.0), (0.5, 2.0)])
def test_workers_doubt_the_times_together_by_the_slowest_of_them(monkeypatch, here, elsewhere):
    """Else one of them would have notes that the others have not."""
    notes = []
    for factor in (here, elsewhere):
        taking(monkeypatch, factor)
        of_both = max(here, elsewhere) / factor
        # Peaks are alike; what is larger are nanoseconds.
        slower = Others(lambda number, of_both=of_both: int(number * of_both) if number > 10**5 else number)
        notes.append(started(slower).plan().plan.notes)
        assert list(cache.folder().iterdir()) == []
    assert ["2.00 times as long as predicted" in " ".join(said) for said in notes] == [True, True]


def test_what_is_not_kept_on_disk_is_not_forgotten_there(monkeypatch):
    started().measured(NAMES)
    taking(monkeypatch, 2)
    started(cached=False).plan()
    assert len(list(cache.folder().iterdir())) == 1
    started().plan()
    assert list(cache.folder().iterdir()) == []


class WithoutCurve(Agreement):
    """Finds nothing any more where other budgets are asked for."""

    def plan_for(self, profile, **question):
        if question["curve"]:
            raise DoesNotFit("nothing fits", 1, 1)
        return super().plan_for(profile, **question)


def test_where_no_other_budget_can_be_asked_for_nothing_is_said_of_them(monkeypatch):
    taking(monkeypatch, 1)
    assert started().plan().plan.curve
    assert started(WithoutCurve()).plan().plan.curve == ()
