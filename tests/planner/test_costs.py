"""Profiles: floors of launches, and what real steps corrected."""

import json

import pytest

from fleetx.planner.costs import Profile, Reserve
from fleetx.planner.making import plan_for
from fleetx.planner.plan import Plan
from tests.planner.profiles import MIB, transformer

GIB = 2**30


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
