"""The peaks of mixed states, predicted from trials in which all segments had the same one."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional

from fleetx.planner.chain import State, evaluate
from fleetx.planner.feeding import Feeding
from fleetx.planner.making import plan_for
from fleetx.planner.profile import measure
from fleetx.planner.tryout import Tryout

STATES = (State("everything"), State("inputs"), State("dear"))
CUTS = ["down1", "down2", "up2", "up1"]


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.convolve, self.norm = nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)

    def forward(self, x):
        return functional.relu(self.norm(self.convolve(x)))


class Skipping(nn.Module):
    """Blocks are given what was put together for them: whoever calls them holds it, and in some states nobody else."""

    def __init__(self, width=8):
        super().__init__()
        self.down1, self.down2 = Block(3, width), Block(width, 2 * width)
        self.up2, self.up1 = Block(4 * width, 2 * width), Block(3 * width, width)
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x):
        wide = self.down1(x)
        deep = self.down2(functional.max_pool2d(wide, 2))
        deep = self.up2(torch.cat([deep, deep.roll(1)], 1))
        return self.out(self.up1(torch.cat([functional.interpolate(deep, scale_factor=2), wide], 1)))


@pytest.fixture(scope="module")
def measured():
    torch.manual_seed(0)
    model, sample = Skipping(), (torch.randn(4, 3, 32, 32), torch.randint(2, (4, 32, 32)))
    feeding = Feeding(model, functional.cross_entropy)
    return feeding, sample, measure(feeding, sample, CUTS, states=STATES, bandwidth=0.0, cached=False)


@pytest.mark.middle
@pytest.mark.parametrize("last", range(3))
@pytest.mark.parametrize("before", range(3))
def test_mixtures_take_what_is_predicted(measured, before, last):
    feeding, sample, profile = measured
    chain = profile.chain(16, merged=False)
    plan = plan_for(profile, memory=2**40, global_batch=16, one_forward=True, curve=False)
    for first, second in product((0, 1), (0, 2)):
        choice = [first, second, before, last]
        cost = evaluate(chain, choice)
        states = tuple(stage.options[number].state for stage, number in zip(chain.stages, choice, strict=True))
        mixed = replace(plan, states=states, timeline=cost.points, peak=cost.peak, fixed_bytes=chain.fixed_bytes)
        real = Tryout(feeding, sample).run(mixed).measured.peak
        assert 0.99 * real <= cost.peak <= 1.06 * real, [state.save for state in states]
