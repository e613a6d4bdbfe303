"""What a model is trained with is left as it was, too."""

import random

import numpy as np
import torch
from torch import nn

import fleetx
from fleetx.planner.untouched import untouched


class Loss(nn.Module):
    """One that learns, counts and changes its mode."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output, target):
        self.calls += 1
        self.eval()
        return (self.scale * (output - target)).square().mean()


def test_a_loss_that_is_a_module_is_left_as_it_was():
    model, loss_fn, told = nn.Linear(2, 2), Loss(), []
    loss_fn.scale.grad = torch.full((), 7.0)
    loss_fn.scale.register_post_accumulate_grad_hook(told.append)
    with untouched(model, loss_fn):
        loss_fn(model(torch.ones(1, 2)), torch.ones(1, 2)).backward()
        assert loss_fn.calls == 1
    assert (loss_fn.calls, loss_fn.scale.grad, loss_fn.training, told) == (0, 7.0, True, [])
    assert model.weight.grad is None


def test_a_sample_is_left_without_gradients_or_with_its_own():
    model = nn.Linear(2, 2)
    inputs, target = torch.ones(1, 2, requires_grad=True), torch.ones(1, 2, requires_grad=True)
    target.grad = torch.full((1, 2), 3.0)
    with untouched(model, nn.functional.mse_loss, (inputs, {"target": target})):
        nn.functional.mse_loss(model(inputs[:1].clone()), target).backward()
    assert inputs.grad is None
    assert torch.equal(target.grad, torch.full((1, 2), 3.0))


def test_parameters_that_loss_and_model_share_have_one_gradient():
    model, loss_fn = nn.Linear(2, 2), Loss()
    loss_fn.part = model
    model.weight.grad = torch.ones(2, 2)
    with untouched(model, loss_fn):
        model(torch.ones(1, 2)).sum().backward()
        assert torch.equal(model.weight.grad, torch.ones(2, 2))  # from nothing
    assert torch.equal(model.weight.grad, torch.ones(2, 2))


class DrawsElsewhere(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.held = [random.Random(1), np.random.default_rng(2), np.random.RandomState(3)]
        self.first, self.second, self.third = self.held

    def forward(self, x):
        return self.block(x) * self.first.random() * self.second.random() * self.third.random_sample()


def test_generators_of_other_libraries_are_as_before_a_plan():
    model, same = DrawsElsewhere(), DrawsElsewhere()
    fleetx.plan(model, torch.randn(4, 4), memory="1MiB", cached=False)
    assert model.first.random() == same.first.random()
    assert model.second.random() == same.second.random()
    assert model.third.random_sample() == same.third.random_sample()
