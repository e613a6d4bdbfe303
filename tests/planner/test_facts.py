"""What a profile is found again by."""

import pytest
import torch
from torch import nn

from fleetx.planner import cache, facts
from fleetx.planner.feeding import Feeding


class Base(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        for name, value in settings.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.conv(x)


class Inherits(Base):
    pass


class Config:
    def __init__(self, attention):
        self.attention = attention


class Loss:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, output, target):
        return self.scale * (output - target).square().mean()


def hooked(model):
    model.conv.register_forward_hook(lambda *_: None)
    return model


def with_a_forward_of_its_own(model):
    model.forward = lambda x: model.conv(x)
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda: {"model": Inherits().to(memory_format=torch.channels_last)},
        lambda: {"model": hooked(Inherits())},
        lambda: {"model": with_a_forward_of_its_own(Inherits())},
        lambda: {"model": Inherits(stages=(1, 2))},
        lambda: {"model": Inherits(stages=(1, 3))},
        lambda: {"model": Inherits(config=Config("eager"))},
        lambda: {"model": Inherits(config=Config("fused"))},
        lambda: {"model": Inherits(activation=nn.functional.relu)},
        lambda: {"loss": Loss(2.0)},
        lambda: {"loss": Loss(3.0)},
        lambda: {"sample": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)},
    ],
)
def test_what_costs_something_else_has_another_key_and_the_same_in_each_process(change):
    def key(model=None, loss=None, sample=None):
        sample = torch.randn(2, 3, 4, 4) if sample is None else sample
        return cache.key_of(Feeding(model or Inherits(), loss), sample, [], {})

    assert key() == key()
    assert key(**change()) == key(**change()) != key()


def test_code_of_a_base_class_counts(monkeypatch):
    key = cache.key_of(Feeding(Inherits()), torch.randn(2, 3, 4, 4), [], {})
    text = facts.inspect.getsource
    monkeypatch.setattr(facts.inspect, "getsource", lambda thing: text(thing) + ("#" if thing is Base else ""))
    assert cache.key_of(Feeding(Inherits()), torch.randn(2, 3, 4, 4), [], {}) != key


def test_threads_and_settings_of_torch_count():
    def key():
        return cache.key_of(Feeding(Inherits()), torch.randn(2, 3, 4, 4), [], {})

    before, threads = key(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert key() != before
    finally:
        torch.set_num_threads(threads)
    assert key() == before


def test_things_that_hold_themselves_or_much_are_described_shortly():
    circle = []
    circle.append(circle)
    assert len(facts.fact(circle)) < 1000
    assert len(facts.fact(list(range(10**6)))) < 1000
