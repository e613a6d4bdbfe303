import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleetx import notices
from fleetx.amp import LossScaler

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "fleet_golden.json").read_text())["loss_scaling"]


@pytest.mark.parametrize("case", ["fleet_ratios_small_n", "floor_at_one"])
def test_fleets_own_trace(case):
    golden = GOLDEN[case]
    scaler = LossScaler(
        init_loss_scaling=golden["init"],
        **{k: golden[k] for k in ("incr_every_n_steps", "decr_every_n_nan_or_inf", "incr_ratio", "decr_ratio")},
    )
    for line in golden["trace"]:
        scaler.update(line["found_inf"])
        assert scaler.scale == line["scale"]
        assert (scaler.good_windows, scaler.bad_windows) == (line["good"], line["bad"])


@given(
    overflows=st.lists(st.booleans(), max_size=60),
    init=st.sampled_from([1.0, 2.0, 32768.0, 2.0**126]),
    n=st.integers(1, 4),
    m=st.integers(1, 4),
)
def test_the_rule_restated(overflows, init, n, m):
    scaler = LossScaler(init, incr_every_n_steps=n, decr_every_n_nan_or_inf=m, incr_ratio=2.0, decr_ratio=0.5)
    scale, good, bad = init, 0, 0
    for overflow in overflows:
        scaler.update(torch.tensor(overflow))
        if overflow:
            good, bad = 0, bad + 1
            if bad == m:
                scale, bad = max(scale * 0.5, 1.0), 0
        else:
            bad, good = 0, good + 1
            if good == n:
                scale, good = (scale * 2 if scale * 2 < 2.0**128 else scale), 0
        assert scaler.scale == scale
        assert math.isfinite(scaler.scale)


def test_a_static_scale_stays():
    scaler = LossScaler(8.0, use_dynamic_loss_scaling=False, decr_every_n_nan_or_inf=1)
    scaler.update(True)
    assert scaler.scale == 8.0


def test_state_survives_in_the_middle_of_a_streak():
    first = LossScaler(1024.0, decr_every_n_nan_or_inf=2, decr_ratio=0.5)
    first.update(True)
    second = LossScaler(1024.0, decr_every_n_nan_or_inf=2, decr_ratio=0.5)
    second.load_state_dict(first.state_dict())
    second.update(True)
    assert second.scale == 512.0


def test_a_constant_scale_is_a_setting_and_a_saved_one_does_not_replace_it(caplog, monkeypatch):
    monkeypatch.setattr(notices, "_told", set())
    saved = LossScaler(1024.0).state_dict()
    constant = LossScaler(8.0, use_dynamic_loss_scaling=False)
    constant.load_state_dict(saved)
    assert constant.scale == 8.0
    dynamic = LossScaler(8.0)
    dynamic.load_state_dict(saved)
    assert dynamic.scale == 1024.0
    told = caplog.text
    assert "the loss scale is 8, as set here and constant; the saved run had 1024" in told
    assert "goes on from the saved 1024: init_loss_scaling, 8 here and 1024 in the saved run" in told


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"init_loss_scaling": 0.5}, "init_loss_scaling must be >= 1, not 0.5"),
        ({"init_loss_scaling": float("inf")}, "init_loss_scaling"),
        ({"incr_every_n_steps": 0}, "incr_every_n_steps must be >= 1, not 0"),
        ({"decr_every_n_nan_or_inf": 0}, "decr_every_n_nan_or_inf"),
        ({"incr_ratio": 1.0}, "incr_ratio must be > 1, not 1.0"),
        ({"decr_ratio": 2.0}, "decr_ratio must be between 0 and 1, not 2.0"),
    ],
)
def test_wrong_values_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        LossScaler(**wrong)
