"""Lines through measurements, and profiles that real steps corrected."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetx.planner.costs import Line, Profile, Reserve
from fleetx.planner.making import plan_for
from fleetx.planner.plan import Plan
from fleetx.planner.search import _Lines
from tests.planner.profiles import MIB, transformer

GIB = 2**30


def test_two_sizes_give_a_straight_line():
    values = [1.0, 1.2]
    assert Line.of_time((2, 4), values) == Line.through((2, 4), values)


def test_one_slow_step_at_the_smallest_size_is_no_floor_for_all():
    line = Line.of_time((2, 64, 128), [5.0, 1.0, 2.0])
    assert line.at(64) == pytest.approx(1.0)
    assert line.at(128) == pytest.approx(2.0)


def test_launches_are_no_floor_for_a_half_of_a_step_whose_other_half_is_long_enough():
    profile = transformer(2, launches=1e-3)
    stages = {size: profile.chain(size).stages[0] for size in (1, 64)}
    plain = {size: transformer(2).chain(size).stages[0] for size in (1, 64)}
    both = {size: stage.forward_seconds + stage.options[0].seconds for size, stage in stages.items()}
    assert both[1] == pytest.approx(3e-3)
    assert stages[64] == plain[64]
    assert stages[1].forward_seconds == plain[1].forward_seconds
    assert Profile.from_dict(json.loads(json.dumps(profile.as_dict()))) == profile


def unexplained(profile, micro_batch):
    return profile.chain(micro_batch).fixed["unexplained"]


def test_what_a_real_step_took_more_grows_with_the_samples():
    profile = transformer(4, reserve=Reserve(1.25, 0)).corrected(8, 80 * MIB)
    assert unexplained(profile, 8) == 64 * MIB
    assert unexplained(profile, 16) == 128 * MIB


def test_what_a_real_step_took_less_is_constant_and_not_all_of_it_is_believed():
    profile = transformer(4, reserve=Reserve(1.25, 0)).corrected(1, -80 * MIB)
    assert -64 * MIB < unexplained(profile, 1) < -48 * MIB
    assert unexplained(profile, 64) == unexplained(profile, 1)
    again = profile.corrected(1, -80 * MIB).corrected(1, 80 * MIB)
    assert unexplained(again, 1) == pytest.approx(2 * unexplained(profile, 1) + 64 * MIB, abs=2)


def test_a_step_never_takes_less_than_nothing():
    chain = transformer(4).corrected(64, -100 * GIB).chain(1)
    assert chain.fixed_bytes == 0


def test_what_was_overrated_is_kept_in_json_and_makes_room():
    profile = transformer(4)
    corrected = profile.corrected(8, -GIB)
    assert Profile.from_dict(json.loads(json.dumps(corrected.as_dict()))) == corrected != profile
    question = {"memory": 7 * GIB, "global_batch": 64, "curve": False}
    before, after = plan_for(profile, **question), plan_for(corrected, **question)
    assert after.seconds < before.seconds
    assert after.peak_by_kind["unexplained"] < 0
    assert sum(after.peak_by_kind.values()) == after.peak <= 7 * GIB
    assert "-921.6 MiB" in str(after)
    assert Plan.from_json(after.to_json()) == after


@given(
    values=st.lists(st.floats(0, 1e9), min_size=4, max_size=4),
    steps=st.tuples(*[st.integers(1, 300)] * 4),
    micro_batch=st.integers(1, 5000),
)
def test_bent_lines_go_through_what_was_measured_and_many_at_once_are_the_same(values, steps, micro_batch):
    sizes, values = list(itertools.accumulate(steps)), sorted(values)
    line = Line.bent(sizes, values)
    near = Line.through(sizes[:2], values[:2])
    for size, value in zip(sizes[2:], values[2:], strict=True):
        assert line.at(size) == pytest.approx(value, rel=1e-9, abs=1e-6)
    assert [line.at(size) for size in sizes[:2]] == [near.at(size) for size in sizes[:2]]
    assert Line.bent(sizes[:2], values[:2]) == near
    both = [line, near, Line(1, 2, 500)]
    expected = [one.at(micro_batch) for one in both]
    assert _Lines(both).at(micro_batch).tolist() == pytest.approx(expected, rel=1e-12)


@given(values=st.lists(st.floats(0, 1e9), min_size=4, max_size=4), pair=st.tuples(*[st.integers(4, 4000)] * 2))
def test_bent_lines_of_what_grows_never_fall(values, pair):
    line = Line.bent((2, 4, 64, 128), sorted(values))
    few, many = sorted(pair)
    assert line.at(few) <= line.at(many) * (1 + 1e-9) + 1e-6
