"""Somebody compiles a model that has a plan: it says so, and how to have both."""

import pytest
import torch
from torch import nn

from fleetx import memory

pytestmark = pytest.mark.filterwarnings("ignore:::torch")


def compile_a_layer(model):
    model[0].compile(backend="eager")
    return model


def compile_in_place(model):
    model.compile(backend="eager")
    return model


def compile_a_function_around(model):
    return torch.compile(lambda x: model(x) * 2, backend="eager")


WAYS = {
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "model.compile": compile_in_place,
    "layer.compile": compile_a_layer,
    "a compiled function": compile_a_function_around,
}


@pytest.mark.middle
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_planned_model_is_not_compiled_from_outside(way):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    applied = memory.apply(model, ["0", "2"])
    call = way(model)
    with pytest.raises(RuntimeError, match=r"must not be compiled from outside.*memory.apply\(..., compile=True\)"):
        call(torch.randn(8, 4))
    applied.remove()
    call(torch.randn(8, 4)).sum().backward()
    assert model[0].weight.grad is not None


def test_other_models_may_be_compiled_beside_it():
    torch._dynamo.reset()
    other = torch.compile(nn.Linear(4, 4), backend="eager")
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    memory.apply(model, ["1"])
    model(other(torch.randn(8, 4))).sum().backward()
    assert model[0].weight.grad is not None
