"""Measuring where memory is scarce, or is so on another worker only: what is tried, what is left out, what is said."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fleetx.planner import allocator, profile, timing
from fleetx.planner.agreement import ALONE
from fleetx.planner.blocks import find_blocks
from fleetx.planner.chain import State
from fleetx.planner.counting import EVERYTHING, Counting
from fleetx.planner.feeding import Feeding
from fleetx.planner.making import plan_for
from fleetx.planner.observing import Figures, Watch
from fleetx.planner.profile import measure
from fleetx.planner.timing import Timing, kinds_of
from fleetx.planner.tracing import Trace, trace
from fleetx.planner.trials import Pinned, Trials
from fleetx.planner.tryout import Tryout
from fleetx.slicing import batch_size
from tests.planner.drivers import Others

INPUTS = State("inputs")
STATES = (EVERYTHING, INPUTS)
CUTS = ["0", "1", "2", "3"]


def linears():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.randn(4, 64)


def measured(cuts=CUTS, **others):
    model, sample = linears()
    settings = {"cached": False, "bandwidth": 0.0, "states": STATES} | others
    if settings.pop("adam", False):
        settings["optimizer"] = torch.optim.Adam(model.parameters())
    return measure(Feeding(model), sample, cuts, **settings)


def trials_of(agreement=ALONE):
    model, sample = linears()
    return Trials(Feeding(model), sample, CUTS, agreement=agreement)


def timing_on_a_device(monkeypatch, agreement=ALONE, counted=None):
    """Timing that believes in a GPU with plenty of memory."""
    trials = trials_of(agreement)
    trials.on_gpu = True
    monkeypatch.setattr(trials, "has_room", lambda size: True)
    return Timing(trials, trace(trials.feeding, trials.sample), counted or measured(), STATES)


def states_in(found):
    return {option.state for segment in found.segments for option in segment.options}


def running_out(monkeypatch, is_too_much):
    """Steps run out of memory in timing, if their states and their samples are too much."""
    rounds, watched = timing._timed_rounds, Trials.watched
    states = []

    def watching(self, chosen):
        states[:] = chosen
        return watched(self, chosen)

    def limited(watch, batch, segments, count):
        if is_too_much(list(states), batch_size(batch)):
            raise torch.OutOfMemoryError("out of memory")
        return rounds(watch, batch, segments, count)

    monkeypatch.setattr(Trials, "watched", watching)
    monkeypatch.setattr(timing, "_timed_rounds", limited)


@pytest.mark.parametrize("room", [-1, 20_000])
def test_what_could_be_counted_is_timed_though_there_is_little_room(monkeypatch, room):
    monkeypatch.setattr(Trials, "has_room", lambda self, size: size <= room)
    found = measured(adam=True)
    assert states_in(found) == ({INPUTS} if room < 0 else set(STATES))
    assert all(option.seconds.at(4) > 0 for segment in found.segments for option in segment.options)


def test_the_update_of_the_weights_is_no_part_of_a_trial(monkeypatch):
    chosen = [EVERYTHING] * len(CUTS)
    with_adam, without = measured(adam=True), measured()
    needed = [timing_on_a_device(monkeypatch, counted=one)._needed(chosen, 4) for one in (with_adam, without)]
    assert with_adam.update_bytes > max(needed)
    assert needed[0] == needed[1]


def test_if_nothing_could_be_timed_that_is_said(monkeypatch):
    running_out(monkeypatch, lambda states, samples: True)
    with pytest.raises(torch.OutOfMemoryError, match="measuring needs memory for 2 samples with recompute"):
        measured()


def test_states_that_could_not_be_timed_are_left_out_and_noted(monkeypatch):
    running_out(monkeypatch, lambda states, samples: EVERYTHING in states)
    found = measured()
    assert states_in(found) == {INPUTS}
    assert any("everything on the device could not be timed: 4 samples do not fit" in note for note in found.notes)


def test_forwards_are_those_of_the_state_that_does_nothing_else(monkeypatch):
    slow = {INPUTS: 3.0, EVERYTHING: 1.0}

    def seconds(self, state, size):
        return timing.Seconds({0: slow[state]}, {0: slow[state]}, (slow[state], slow[state]))

    monkeypatch.setattr(Timing, "_seconds", seconds)
    monkeypatch.setattr(timing, "kinds_of", lambda seen, cuts: [0] * len(cuts))
    found = measured(states=(INPUTS, EVERYTHING))
    assert found.tail_forward_seconds.at(2) == 1
    assert found.segments[0].forward_seconds.at(2) == 1


def test_a_step_that_does_not_fit_ends_the_growth(monkeypatch):
    found = timing_on_a_device(monkeypatch)
    monkeypatch.setattr(timing, "_ALMOST_TWICE", 1e9)  # never busy
    running_out(monkeypatch, lambda states, samples: samples > 20)
    assert found.sizes() == (2, 8, 16)


@pytest.mark.parametrize(("most", "sizes"), [(64, (16, 32)), (16, (8, 16)), (4, (2, 4))])
def test_compiled_segments_are_timed_at_two_sizes_found_without_the_compiler(monkeypatch, most, sizes):
    found = timing_on_a_device(monkeypatch)
    found.trials.compile = True
    monkeypatch.setattr(Trials, "_applied", forbidding_compilers(Trials._applied))
    monkeypatch.setattr(found, "_waits_at", lambda size: size < 16)
    monkeypatch.setattr(found, "_members", lambda state, size: [0] if size <= most else None)
    assert found.sizes() == sizes


def forbidding_compilers(applied):
    def checked(trials, segments):
        assert not trials.compile
        return applied(trials, segments)

    return checked


def test_a_step_that_does_not_fit_on_another_worker_ends_the_growth_too(monkeypatch):
    asked = []

    def everywhere(here):
        asked.append(here)
        return False

    found = timing_on_a_device(monkeypatch, Others(everywhere=everywhere))
    monkeypatch.setattr(found, "_members", lambda state, size: [0])
    assert found.sizes() == (2, 4)
    # Both steps fitted here: the other worker was asked after each of them, and whether the first one took long.
    assert asked == [True, False, True]


@pytest.mark.parametrize(("seconds", "longest", "count"), [(0.1, 0.1, 3), (0.3, 0.1, 3), (0.3, 0.3, 2)])
def test_long_steps_are_timed_less_often_if_they_are_long_on_all_workers(monkeypatch, seconds, longest, count):
    found = timing_on_a_device(monkeypatch, Others(everywhere=lambda here: here and longest > 0.2))
    found._frugal_rounds[8] = [Figures([seconds], [0.0], (0.0, 0.0))]
    assert found._count(8) == count
    assert found._count(16) == 3  # of which nothing is known


def test_members_are_all_at_once_if_all_do_the_same_anyway(monkeypatch):
    found = timing_on_a_device(monkeypatch)
    asked = []
    monkeypatch.setattr(found.trials, "has_room", asked.append)
    assert found._members(INPUTS, 64) is None
    assert len(asked) == 1
    assert found._members(EVERYTHING, 4) == [0, 1, 2, 3]  # it was counted so
    assert len(asked) == 1


def counting_with(monkeypatch, *answers):
    """Counting whose questions are answered so by all workers together; and the steps that ran."""
    left, steps, step = list(answers), [], Watch.step
    monkeypatch.setattr(Watch, "step", lambda *given: steps.append(1) or step(*given))
    return Counting(trials_of(Others(everywhere=lambda here: left.pop(0))), 0.0, 0.0, sends=True), steps


def test_what_did_not_fit_on_another_worker_is_not_sent_to_the_host(monkeypatch):
    counting, steps = counting_with(monkeypatch, False)
    assert counting._counted(INPUTS, 2) is None
    assert len(steps) == 2  # both on the device


@pytest.mark.parametrize("answer", [True, False])
def test_what_could_not_be_sent_on_another_worker_is_not_sent_here(monkeypatch, answer):
    counting, steps = counting_with(monkeypatch, True, answer)
    counted = counting._counted(INPUTS, 2)
    assert counted.here.tail_bytes >= 0
    assert (counted.away is not None) == answer
    assert len(steps) == 5


def test_without_cuts_there_is_nothing_but_to_try(monkeypatch):
    monkeypatch.setattr(Trials, "has_room", lambda self, size: False)
    found = measured(cuts=[])
    assert found.segments == ()
    assert found.tail_bytes.at(4) > 0
    assert found.tail_forward_seconds.at(4) > 0
    monkeypatch.setattr(Counting, "_bytes", lambda *_: None)
    with pytest.raises(torch.OutOfMemoryError, match="needs memory for 2 samples, and the device"):
        measured(cuts=[])


@pytest.mark.parametrize(
    ("few", "more", "growth"),
    [
        ([100, 20, 8], [100, 40, 16], 10),  # the first are a weight's copy
        ([100, 20], [8, 100, 160], 30),  # what is what cannot be told
        ([], [], 0),
        ([100], [100, 8], 0),
        ([100], [8, 60], 0),
    ],
)
def test_the_largest_block_grows_with_the_samples(few, more, growth):
    assert profile.largest_growth(Trace(samples=2, blocks=few), Trace(samples=4, blocks=more)) == growth


def test_gaps_between_blocks_are_a_part_of_the_peak(monkeypatch):
    cuda, asked = torch.device("cuda"), []
    monkeypatch.setattr(profile, "gaps_on", lambda _, largest: asked.append(largest) or allocator.gaps_on(cuda, 1000.0))
    plan = plan_for(measured(), memory=2**30, global_batch=8, one_forward=True, curve=False)
    assert asked == [0.0]  # this is no such device
    assert plan.peak_by_kind["gaps"] == allocator.gaps_on(cuda, 1000.0).bytes_at(8) == 8 * 800
    assert sum(plan.peak_by_kind.values()) == plan.peak


def test_progress_never_goes_beyond_its_end(monkeypatch):
    told = []
    monkeypatch.setattr(profile.Progress, "update", lambda self, task, **given: told.append(given["completed"]))
    model, sample = linears()
    feeding = Feeding(model)
    measuring = profile._Measuring(feeding, sample, find_blocks(feeding, sample), False, STATES)
    with measuring._progress() as say:
        for number in range(6):  # two too many: timing began again
            say(str(number))
    assert told == [0, 1, 2, 3, 3, 3]


class InChunks(nn.Module):
    """A loss whose memory grows up to eight samples, and no further."""

    def forward(self, outputs):
        return torch.stack([self.of_chunk(part) for part in outputs.split(8)]).sum()

    def of_chunk(self, part):
        with torch.no_grad():
            return (part[:, :, None] * torch.ones(512)).square().sum() + 0 * part.sum()


def test_the_tail_is_counted_with_many_samples_too(monkeypatch):
    model, _ = linears()
    sample, loss = (torch.randn(4, 64), torch.zeros(4)), InChunks()
    trials = Trials(Feeding(model, lambda outputs, _: loss(outputs) + outputs.sum()), sample, CUTS)
    counting = Counting(trials, 0.0, 0.0, sends=False)
    counting.segments([EVERYTHING, INPUTS], (4, 8), lambda _: None)
    real = counting._bytes(INPUTS, 64).tail_bytes
    few, many = counting.tail((4, 8)), counting.tail_of_many((4, 8), 32, INPUTS)
    assert few.at(64) > 4 * real
    assert real <= many.at(64) <= 1.25 * real
    assert many.at(4) >= few.at(4)  # never less than what was counted
    monkeypatch.setattr(Counting, "_bytes", lambda *_: None)  # as on a worker that has no room
    assert counting.tail_of_many((4, 8), 32, INPUTS) == few


def test_frozen_segments_are_of_another_kind():
    model, sample = linears()
    model[:2].requires_grad_(False)
    assert kinds_of(trace(Feeding(model), sample), CUTS) == [0, 0, 1, 2]  # the third has nobody to tell
    model[3].eval()
    model[:2].requires_grad_(True)
    assert len(set(kinds_of(trace(Feeding(model), sample), CUTS))) == 3  # the first one is given no gradient to pass on


@pytest.fixture
def arenas(monkeypatch):
    """The host memory that is given back after each trial."""
    seen = []
    take_back = Pinned.take_back

    def taken_back(pinned, applied):
        take_back(pinned, applied)
        seen.append(pinned._arena)

    monkeypatch.setattr(Pinned, "take_back", taken_back)
    return seen


def test_host_memory_of_one_trial_serves_the_next(arenas):
    measured(bandwidth=1e9)
    assert len({id(arena) for arena in arenas if arena is not None}) == 1
    assert arenas[-1].in_use == 0


@pytest.mark.middle
def test_plans_that_are_tried_share_host_memory(arenas):
    model, sample = linears()
    feeding = Feeding(model)
    profile = measure(feeding, sample, CUTS, bandwidth=1e9, cached=False)
    arenas.clear()
    plan = plan_for(profile, memory=2**40, global_batch=4, curve=False)
    sending = replace(plan, states=(State("inputs", "host"), *plan.states[1:]), host_bytes=1)
    tryout = Tryout(feeding, sample)
    for one in (plan, sending, plan, sending):
        tryout.run(one)
    assert arenas[0] is None
    assert len({id(arena) for arena in arenas[1:]}) == 1
    assert arenas[-1].reserved > arenas[-1].in_use == 0


def test_host_memory_with_a_limit_is_not_shared(arenas):
    """What another plan left there would count: this one might not have its own."""
    model, sample = linears()
    feeding = Feeding(model)
    profile = measure(feeding, sample, CUTS, bandwidth=1e9, cached=False)
    arenas.clear()
    plan = plan_for(profile, memory=2**40, global_batch=4, curve=False, host_memory=2**20)
    sending = replace(plan, states=(State("inputs", "host"), *plan.states[1:]), host_bytes=1)
    tryout = Tryout(feeding, sample)
    for _ in range(2):
        tryout.run(sending)
    assert len({id(arena) for arena in arenas}) == 2
