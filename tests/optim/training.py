"""A small network, and steps on it, for the tests of both optimizers."""

import io

import torch
from torch import nn

from fleetx import names
from fleetx.optim import Lamb, Lars

MAKERS = {
    "lars": lambda params, **more: Lars(params, lr=0.3, lars_coeff=0.05, **more),
    "lamb": lambda params, **more: Lamb(params, lr=0.02, **more),
}


def network(dtype=torch.float32):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)
    names.record(model)
    return model


def train(model, optimizer, steps):
    """Steps with gradients that depend on the step and the weights."""
    for step in steps:
        optimizer.zero_grad()
        parameters = list(model.parameters())
        x = torch.cos(torch.arange(20.0) + step).reshape(5, 4).to(parameters[0].device, parameters[0].dtype)
        model(x).square().sum().backward()
        optimizer.step()


def values(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_bit_equal(one, other):
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def through_a_file(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
