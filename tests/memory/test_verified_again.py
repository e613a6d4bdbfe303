"""Segments are verified again in turn, and are repeated with the hooks that they had."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from fleetx import memory
from fleetx.memory import experience
from tests.memory.comparing import assert_equal_outcomes, step, sum_of_squares
from tests.memory.zoo import normal

EVERY = 8


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(experience, "VERIFIED_EVERY", EVERY)


class Config:
    scale = 1.0


class Scaled(nn.Module):
    """Reads an object into which nobody looks."""

    def __init__(self, config):
        super().__init__()
        self.linear, self.config = nn.Linear(4, 4), config

    def forward(self, x):
        return torch.tanh(self.linear(x) * self.config.scale)


def chain(config, depth=4):
    torch.manual_seed(0)
    return nn.Sequential(*(Scaled(config) for _ in range(depth)), nn.Linear(4, 1))


def change_config(model):
    model[0].config.scale += 0.5


def change_weight(model):
    for layer in model[:4]:
        layer.linear.weight.data.mul_(1.1)


@pytest.mark.parametrize("save", ["inputs", "dear"])
@pytest.mark.parametrize("change", [change_config, change_weight])
def test_what_changes_between_forward_and_backward_is_found_in_time(change, save):
    model = chain(Config())
    memory.apply(model, ["*"], save=save)
    for _ in range(3):
        model(torch.randn(6, 4)).sum().backward()

    def train():
        for _ in range(EVERY):
            loss = model(torch.randn(6, 4)).sum()
            change(model)
            loss.backward()

    with pytest.raises(
        RuntimeError, match=r"last verified in forward [1-9]\d* under this plan, and this is forward \d"
    ):
        train()


def test_each_segment_is_verified_in_turn():
    model = chain(Config())
    applied = memory.apply(model, ["0", "1", "2", "3"])
    seen = [set() for _ in range(4)]
    for number in range(1, 4 * EVERY):
        model(torch.randn(6, 4)).sum().backward()
        for numbers, learned in zip(seen, applied.experience.segments, strict=True):
            numbers.add(learned.verified)
        if number > 1:
            assert sum(learned.verified == number for learned in applied.experience.segments) <= 1
    for numbers in seen:
        ordered = sorted(numbers)
        assert len(ordered) > 3
        assert max(later - before for before, later in pairwise(ordered)) <= EVERY


def test_a_forward_without_a_backward_postpones_it_to_the_next():
    model = chain(Config(), depth=1)
    applied = memory.apply(model, ["0"])
    model(torch.randn(6, 4)).sum().backward()
    for _ in range(2 * EVERY):
        model(torch.randn(6, 4))
    model(torch.randn(6, 4)).sum().backward()
    assert applied.experience.segments[0].verified == 2 * EVERY + 2


def doubled(_module, _args, output):
    return output * 2


@pytest.mark.parametrize("when", ["added", "removed"])
@pytest.mark.parametrize("save", ["inputs", "dear"])
def test_hooks_that_come_or_go_before_the_backward_change_nothing(when, save):
    def drive(model, batch, loss_of):
        handle = model[1].linear.register_forward_hook(doubled) if when == "removed" else None
        loss = loss_of(model(*batch))
        if handle is None:
            handle = model[1].linear.register_forward_hook(doubled)
        else:
            handle.remove()
        present = dict(model[1].linear._forward_hooks)
        loss.backward()
        assert model[1].linear._forward_hooks == present
        handle.remove()
        return step(model, batch, loss_of)

    plain, ours = chain(Config()), chain(Config())
    memory.apply(ours, ["*"], save=save)
    for number in range(4):
        outcomes = [drive(model, (normal(number, 6, 4),), sum_of_squares) for model in (ours, plain)]
        assert_equal_outcomes(*outcomes)


def test_a_hook_added_late_leaves_gradients_as_they_are():
    gradients = []
    for is_planned in (False, True):
        model = chain(Config())
        if is_planned:
            memory.apply(model, ["*"])
        for _ in range(3):
            model(torch.ones(6, 4)).sum().backward()
        model.zero_grad()
        loss = model(torch.ones(6, 4)).sum()
        model[1].linear.register_forward_hook(doubled)
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))
