"""Who reads the running statistics of batch norms."""

import pytest
import torch
from torch import nn

from fleetx import memory
from fleetx.memory import Segment
from fleetx.memory.statistics import is_counting, may_read_statistics


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(x).relu()


def helper(norm):
    return norm.running_var


class ByHelper(Plain):
    def forward(self, x):
        return super().forward(x) * helper(self.norm)


class ByName(Plain):
    def forward(self, x):
        name = "running_mean"
        return super().forward(x) * self.norm.__getattr__(name)


class ByAll(Plain):
    def scale(self):
        return next(self.norm.buffers())

    def forward(self, x):
        return super().forward(x) * self.scale()


class InALambda(Plain):
    def forward(self, x):
        return (lambda y: y - self.norm.running_mean)(super().forward(x))


@pytest.mark.parametrize("module", [ByHelper, ByName, ByAll, InALambda])
def test_code_that_may_read_them_is_found(module):
    assert may_read_statistics([*module().modules()])


@pytest.mark.parametrize("module", [Plain(), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.SyncBatchNorm(4)])
def test_torchs_own_and_plain_modules_do_not(module):
    assert not may_read_statistics([*module.modules()])


def test_a_norm_with_a_forward_of_its_own_does_not_only_count():
    class Own(nn.BatchNorm1d):
        def forward(self, input):
            return super().forward(input)

    assert is_counting(nn.BatchNorm1d(4))
    assert not is_counting(Own(4))
    given = nn.BatchNorm1d(4)
    given.forward = lambda x: x - given.running_mean
    assert not is_counting(given)
    assert not is_counting(nn.BatchNorm1d(4).eval())


class ReadsBetween(nn.Module):
    """The container reads what a norm counted, in a segment that is repeated."""

    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second, self.last = nn.BatchNorm1d(4), *(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = self.first(self.norm(x))
        return self.last(self.second(torch.tanh((x - self.norm.running_mean) * x)))


@pytest.mark.parametrize("save", ["everything", "inputs"])
def test_another_forward_may_count_before_the_backward(save):
    found = []
    for cut in (True, False):
        torch.manual_seed(0)
        model = ReadsBetween().double()
        if cut:
            memory.apply(model, [Segment("first", save), Segment("second")])
        for _ in range(4):
            x = torch.randn(5, 4, dtype=torch.double) + 3
            (model(x).square().sum() + model(2 * x).square().sum()).backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(ours, plain) for ours, plain in zip(*found, strict=True))
