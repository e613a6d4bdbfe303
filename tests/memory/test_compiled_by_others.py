"""Somebody compiles a model that has a plan: the hooks stay out of the compiler's sight, and the numbers the same."""

import copy

import pytest
import torch
from torch import nn

from fleetx import memory

pytestmark = pytest.mark.filterwarnings("ignore:::torch")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.dropout(self.linear(x).tanh())


def compile_layers(model):
    for layer in model[:3]:
        layer.compile(backend="eager")
    return model


def compile_in_place(model):
    model.compile(backend="eager")
    return model


WAYS = {"torch.compile": lambda model: torch.compile(model, backend="eager"), "model.compile": compile_in_place}


@pytest.mark.parametrize("way", [*WAYS.values(), compile_layers], ids=[*WAYS, "layer.compile"])
def test_a_planned_model_can_be_compiled_by_others(way):
    torch._dynamo.reset()
    torch.manual_seed(0)
    ours = nn.Sequential(Block(), Block(), Block(), nn.Linear(8, 1))
    plain = copy.deepcopy(ours)
    applied = memory.apply(ours, ["0", "1", "2"], home="host")
    compiled = way(ours)
    for seed in range(3):
        gradients = []
        for model, call in ((plain, plain), (ours, compiled)):
            torch.manual_seed(seed)
            model.zero_grad()
            call(torch.randn(5, 8)).square().sum().backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        for mine, theirs in zip(*gradients, strict=True):
            assert torch.equal(mine, theirs)
    assert applied.statistics()["bytes_to_host"] > 0
    assert len(applied.experience.segments) == 3
