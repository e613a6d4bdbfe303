import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleetx import fleet
from fleetx.optim import Lars, schedules

from .reference import paddle_cosine_rule

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "fleet_golden.json").read_text())
GOLDEN_LRS = GOLDEN["lr_schedules_first_12"]

SCHEDULES = {
    "PolynomialDecay(0.1,decay_steps=8,end_lr=0.001,power=2,cycle=False)": schedules.polynomial_decay(
        0.1, 8, end_lr=0.001, power=2
    ),
    "LinearWarmup(0.5,warmup_steps=4,start_lr=0.0,end_lr=0.5)": schedules.linear_warmup(0.5, 4, 0.0, 0.5),
    "LinearWarmup(PolynomialDecay(0.5,8,0,power=1),4,0,0.5)": schedules.linear_warmup(
        schedules.polynomial_decay(0.5, 8, 0, power=1), 4, 0, 0.5
    ),
    "NoamDecay(d_model=512,warmup_steps=4000,lr=1.0)": schedules.noam_decay(512, 4000),
    "PiecewiseDecay([3,6],[0.1,0.01,0.001])": schedules.piecewise_constant([3, 6], [0.1, 0.01, 0.001]),
}
COSINE = "CosineAnnealingDecay(0.5,T_max=10)"


@pytest.mark.parametrize("name", SCHEDULES)
def test_fleets_numbers(name):
    assert [SCHEDULES[name](step) for step in range(12)] == pytest.approx(GOLDEN_LRS[name], abs=5e-7)


def test_every_golden_list_is_tested():
    assert set(GOLDEN_LRS) == {*SCHEDULES, COSINE}


def test_fleets_cosine_numbers():
    """The recorded cosine list is Paddle's ``get_lr()`` called once more after each ``step()``.

    Its ``get_lr`` computes the next rate from the last one, so the call after the step applies the rule a second
    time to the same step; what Paddle trains with (``scheduler()``, ``last_lr``) is the plain cosine. So
    one more application of the rule to our values must give the recorded ones, and Paddle's own recurrence,
    applied once per step, must give ours, also past the lowest point, where the rate climbs again.
    """
    ours = schedules.cosine_annealing(0.5, 10)
    once_more = [paddle_cosine_rule(step, ours(step), lr=0.5, t_max=10) for step in range(12)]
    assert once_more == pytest.approx(GOLDEN_LRS[COSINE], abs=5e-7)

    last = None
    for step in range(25):
        last = paddle_cosine_rule(step, last, lr=0.5, t_max=10)
        assert ours(step) == pytest.approx(last, abs=1e-12)
    assert ours(11) == pytest.approx(0.25 * (1 + math.cos(1.1 * math.pi)))


def test_polynomial_decay_can_cycle():
    schedule = schedules.polynomial_decay(1.0, 4, end_lr=0.0, cycle=True)
    assert [schedule(step) for step in (0, 2, 4, 5, 6, 8)] == pytest.approx([1, 0.5, 0, 1 - 5 / 8, 0.25, 0])


def test_a_warmup_reaches_what_follows():
    schedule = schedules.linear_warmup(schedules.constant(0.8), 2, start_lr=0.4)
    assert [schedule(step) for step in range(4)] == pytest.approx([0.4, 0.6, 0.8, 0.8])
    assert schedules.linear_warmup(schedules.cosine_annealing(0.3, 5), 0)(0) == pytest.approx(0.3)


def test_a_cosine_decay_ends_where_it_came_down():
    schedule = schedules.linear_warmup(schedules.cosine_decay(0.8, 4, end_lr=0.2), 2)
    assert [schedule(step) for step in (0, 1, 2, 4, 6, 7, 60)] == pytest.approx([0, 0.4, 0.8, 0.5, 0.2, 0.2, 0.2])


def test_a_step_decay_falls_by_a_factor_after_so_many_updates():
    schedule = schedules.linear_warmup(schedules.step_decay(0.8, every=2, factor=0.5), 1)
    assert [schedule(step) for step in range(7)] == pytest.approx([0, 0.8, 0.8, 0.4, 0.4, 0.2, 0.2])


def test_a_schedule_counts_windows_and_skipped_ones_too():
    strategy = fleet.DistributedStrategy(lars=True, gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    model = fleet.distributed_model(torch.nn.Linear(3, 1), strategy)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = schedules.linear_warmup(schedules.polynomial_decay(0.5, 4, 0.0, power=2), 2)
    scheduler = schedules.as_scheduler(sgd, schedule)
    optimizer = fleet.distributed_optimizer(sgd, strategy, scheduler=scheduler)
    lrs = []
    for number in range(12):
        factor = float("nan") if number == 5 else 1.0  # in the third window
        out = optimizer.minimize(model(torch.ones(2, 3)).square().mean() * factor)
        if out.closed:
            lrs.append(float(out.lr))
            assert out.skipped == (number == 5)
    assert lrs == pytest.approx([schedule(window) for window in range(6)])


@given(st.integers(1, 20), st.integers(1, 50), st.floats(0.1, 3), st.integers(0, 200))
def test_warmup_then_decay_stays_between_its_ends(warmup, decay, power, step):
    schedule = schedules.linear_warmup(schedules.polynomial_decay(1.0, decay, 0.1, power), warmup)
    assert 0 <= schedule(step) <= 1
    if step >= warmup + decay:
        assert schedule(step) == pytest.approx(0.1)


def optimizer_of(*lrs):
    return Lars([{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in lrs], lr=1.0)


def run(optimizer, scheduler, steps):
    lrs = []
    for _ in range(steps):
        lrs.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return lrs


def test_the_first_group_gets_the_schedule_and_the_others_their_share():
    optimizer = optimizer_of(0.5, 0.25)
    schedule = schedules.linear_warmup(schedules.polynomial_decay(3.0, 4, 0.0), 2)
    lrs = run(optimizer, schedules.as_scheduler(optimizer, schedule), 6)
    assert lrs == [pytest.approx([schedule(step), schedule(step) / 2]) for step in range(6)]


def test_a_tensor_lr_is_filled_in_place():
    lr = torch.tensor(0.5, dtype=torch.float64)
    optimizer = Lars([torch.nn.Parameter(torch.ones(2))], lr=lr)
    lrs = run(optimizer, schedules.as_scheduler(optimizer, schedules.constant(0.125)), 2)
    assert lrs == [[0.125], [0.125]]
    assert optimizer.param_groups[0]["lr"] is lr


def test_a_schedule_may_end_a_rounding_below_zero():
    optimizer = optimizer_of(0.5)
    schedules.as_scheduler(optimizer, lambda step: -1e-17)
    assert optimizer.param_groups[0]["lr"] == -1e-17


def test_a_scheduler_resumes():
    schedule = schedules.cosine_annealing(0.7, 9)
    through = run(optimizer := optimizer_of(0.5), schedules.as_scheduler(optimizer, schedule), 8)
    first = optimizer_of(0.5)
    scheduler = schedules.as_scheduler(first, schedule)
    run(first, scheduler, 3)
    second = optimizer_of(0.5)
    resumed = schedules.as_scheduler(second, schedule)
    resumed.load_state_dict(scheduler.state_dict())
    second.load_state_dict(first.state_dict())
    assert run(second, resumed, 5) == through[3:]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.constant(-1), "lr must be a number at least 0, got -1"),
        (lambda: schedules.constant("0.1"), "lr must be a number at least 0, got '0.1'"),
        (lambda: schedules.polynomial_decay(0.1, 0), "decay_steps must be a whole number of at least 1, got 0"),
        (lambda: schedules.polynomial_decay(0.1, 2.5), "decay_steps must be a whole number of at least 1, got 2.5"),
        (lambda: schedules.polynomial_decay(0.1, 5, power=0), "power must be a number above 0, got 0: 1 is linear"),
        (lambda: schedules.polynomial_decay(0.1, 5, math.inf), "end_lr must be a number at least 0, got inf"),
        (lambda: schedules.linear_warmup(0.1, -1), "warmup_steps must be a whole number of at least 0, got -1"),
        (lambda: schedules.linear_warmup(0.1, 2, start_lr=-0.5), "start_lr must be a number at least 0, got -0.5"),
        (lambda: schedules.cosine_annealing(0.1, True), "half_period must be a whole number of at least 1, got True"),
        (lambda: schedules.cosine_decay(0.1, 0), "decay_steps must be a whole number of at least 1, got 0"),
        (lambda: schedules.step_decay(0.1, 0), "every must be a whole number of at least 1, got 0: give the number"),
        (lambda: schedules.step_decay(0.1, 5, 0), "factor must be a number above 0, got 0: 0.1 is usual"),
        (lambda: schedules.noam_decay(0, 10), "d_model must be a whole number of at least 1, got 0: give the width"),
        (lambda: schedules.piecewise_constant([3, 3], [1, 2, 3]), r"boundaries must rise, got \[3, 3\]: sort them"),
        (lambda: schedules.piecewise_constant([3], [1]), "one more than boundaries, got 1 for 1: give one rate"),
        (lambda: schedules.piecewise_constant([0], [1, 2]), "each of boundaries must be a whole number of at least 1"),
        (lambda: schedules.as_scheduler(optimizer_of(0.0), schedules.constant(1)), "first group's lr must be above 0"),
        (lambda: schedules.as_scheduler(optimizer_of(0.1), 0.1), r"must be a function .*got 0.1: use constant\(0.1\)"),
        (
            lambda: schedules.as_scheduler(optimizer_of(0.1), lambda step: -1.0),
            r"at least 0, got -1\.0 at update 0: cor",
        ),
        (lambda: schedules.as_scheduler(optimizer_of(0.1), lambda step: None), "at least 0, got None at update 0"),
        (lambda: schedules.as_scheduler(optimizer_of(0.1), lambda step: math.nan), "at least 0, got nan at update 0"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()
