"""Gradients that are still scaled are refused where that can be known."""

import pytest
import torch
from torch import nn

from fleetx.optim import Lamb, Lars, Muon

MAKERS = [lambda p: Lars(p, lr=0.1), lambda p: Lamb(p, lr=0.1), lambda p: Muon(p, lr=0.1, exclude_from_muon=[])]


@pytest.mark.parametrize("make", MAKERS)
def test_a_scaled_loss_and_a_step_of_ones_own_is_refused(make):
    weight = nn.Parameter(torch.ones(3))
    optimizer, scaler = make([weight]), torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(weight.square().sum()).backward()
    with pytest.raises(
        RuntimeError,
        match=r"must be unscaled .* a GradScaler with scale 256 .*before it and scaler\.update\(\) after it",
    ):
        optimizer.step()
    assert torch.equal(weight, torch.ones(3))
    for _ in range(2):  # as the message says
        scaler.unscale_(optimizer)
        optimizer.step()
        scaler.update()
    assert not torch.equal(weight, torch.ones(3))


def test_a_trainers_scaler_is_seen_too():
    class Trainer:
        def __init__(self):
            self.weight = nn.Parameter(torch.ones(3))
            self.optimizer = Lars([self.weight], lr=0.1)
            self.scaler = torch.amp.GradScaler("cpu")

        def train(self):
            self.scaler.scale(self.weight.square().sum()).backward()
            self.optimizer.step()

    with pytest.raises(RuntimeError, match="a GradScaler with scale 65536 scaled a loss but unscaled nothing"):
        Trainer().train()


@pytest.mark.parametrize("make", MAKERS)
def test_the_scalers_own_step_is_not(make):
    weight = nn.Parameter(torch.ones(3))
    optimizer, scaler = make([weight]), torch.amp.GradScaler("cpu", init_scale=256.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(weight.square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("used", ["not at all", "switched off", "in a run before", "for another optimizer"])
def test_a_scaler_that_says_nothing_of_these_gradients_is_no_obstacle(used):
    other, weight = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=used != "switched off")
    if used != "not at all":
        scaler.scale(other.square().sum()).backward()
    if used in ("in a run before", "for another optimizer"):
        scaler.step(torch.optim.SGD([other], lr=0.1))
    if used == "in a run before":
        scaler.update()
    weight.square().sum().backward()
    Lars([weight], lr=0.1).step()
