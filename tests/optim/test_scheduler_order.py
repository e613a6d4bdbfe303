"""Rates that follow lr (`excluded_lr`, `zero_norm_lr`) under every scheduler of torch, made before and after."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR

from fleetx import fleet
from fleetx.optim import Lamb, Lars

SCHEDULERS = {
    "LambdaLR": lambda o: LambdaLR(o, lambda step: 0.1 * (step + 1)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.5),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.25),
    "LinearLR": lambda o: LinearLR(o, 0.1),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "SequentialLR": lambda o: SequentialLR(o, [LinearLR(o, 0.1), OneCycleLR(o, 0.2, total_steps=3)], [1]),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 3),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([LinearLR(o), lr_scheduler.ExponentialLR(o, 0.5)]),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o),
    "CyclicLR": lambda o: CyclicLR(o, 1e-3, 0.4, step_size_up=2, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: OneCycleLR(o, 0.4, total_steps=4),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 3),
}
WRAPPED = {
    Lars: lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    Lamb: lambda params, lr: torch.optim.Adam(params, lr=lr),
}
SHARES = {"exclude_from_weight_decay": ["bias"], "excluded_lr": 0.05, "zero_norm_lr": 0.01}


def trained(kind, lr, make, *, scheduler_first):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.weight)
    wrapped = WRAPPED[kind](model.named_parameters(), lr)
    if scheduler_first:
        scheduler = make(wrapped)
        optimizer = kind.replacing(wrapped, **SHARES)
    else:
        optimizer = kind.replacing(wrapped, **SHARES)
        scheduler = make(optimizer)
    for step in range(3):
        model.weight.grad, model.bias.grad = torch.ones(2, 3), torch.ones(2)
        optimizer.step()
        scheduler.step(*([step] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
    return [*model.weight.flatten().tolist(), *model.bias.tolist()]


@pytest.mark.middle
@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("name", [name for name in lr_scheduler.__all__ if name != "LRScheduler"])
def test_rates_that_follow_lr_do_not_depend_on_when_the_scheduler_was_made(name, kind):
    overwrites = name in ("OneCycleLR", "CyclicLR", "SequentialLR")
    for make_lr in (float,) if overwrites else (float, torch.tensor):
        before, after = (
            trained(kind, make_lr(0.4), SCHEDULERS[name], scheduler_first=first) for first in (True, False)
        )
        assert before == after


def test_at_the_peak_of_a_cycle_excluded_parameters_move_at_their_own_rate():
    strategy = fleet.DistributedStrategy(lars=True, lars_configs=SHARES)
    model = fleet.distributed_model(nn.Linear(3, 1), strategy)
    sgd = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    scheduler = OneCycleLR(sgd, 0.4, total_steps=10)
    optimizer = fleet.distributed_optimizer(sgd, strategy, scheduler=scheduler)
    (group,) = optimizer.param_groups
    assert group["max_lr"] * group["excluded_lr_ratio"] == pytest.approx(0.05)
    assert group["initial_lr"] == 0.4 / 25  # the scheduler's own, untouched
    assert scheduler.base_lrs == [0.4 / 25]


@pytest.mark.parametrize(
    ("lr", "scheduler"),
    [
        (None, lambda o: OneCycleLR(o, 0.4, total_steps=4)),  # SGD's own default, or rates of the groups
        (0.1, lambda o: OneCycleLR(o, [0.4, 0.2], total_steps=4)),
        (0.1, lambda o: CyclicLR(o, [0.01, 0.02], 0.4)),
        (torch.tensor(0.1), lambda o: OneCycleLR(o, 0.4, total_steps=4)),  # written into the tensor itself
    ],
)
def test_a_rate_that_the_scheduler_wrote_over_and_nothing_tells_is_refused(lr, scheduler):
    groups = [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(2)]
    sgd = torch.optim.SGD(groups, momentum=0.9, **({} if lr is None else {"lr": lr}))
    made = scheduler(sgd)
    with pytest.raises(ValueError, match=r"made before, wrote over it: make the (OneCycle|Cyclic)LR after"):
        Lars.replacing(sgd, excluded_lr=0.05)
    Lars.replacing(sgd)  # needs no such rate
    assert sgd.param_groups[0]["initial_lr"] == made.base_lrs[0]


def test_rates_that_groups_were_given_stay_theirs_under_other_schedulers():
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.4, 0.2)]
    sgd = torch.optim.SGD(groups, momentum=0.9)
    scheduler = SCHEDULERS["LinearLR"](sgd)
    optimizer = Lars.replacing(sgd, excluded_lr=0.05, exclude_from_adaptation=[])
    assert [group["excluded_lr_ratio"] for group in optimizer.param_groups] == pytest.approx([0.125, 0.25])
    assert scheduler.base_lrs == [0.4, 0.2]
