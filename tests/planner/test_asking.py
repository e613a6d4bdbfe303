"""Questions to the planner that cannot be meant, or are doubtful."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import fleetx


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


def asked(model=None, **settings):
    sample = (torch.randn(4, 16), torch.randn(4, 16))
    settings = {"loss_fn": functional.mse_loss, "memory": "1MiB", "bandwidth": 0.0} | settings
    return fleetx.plan(model or net(), sample, **settings)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"checkpoints": [0]}, TypeError, "must be a list of names or .* got \\[0\\]: write for example"),
        ({"checkpoints": 5}, TypeError, "must be a list of names or .* got 5: write for example"),
        ({"checkpoints": []}, ValueError, "at least one module, got none"),
        ({"checkpoints": "0"}, ValueError, "got '0': write \\['0'\\]"),
        ({"checkpoints": ["nope"]}, ValueError, "no module 'nope' to cut at: model.named_modules"),
        ({"checkpoints": ["0", "00"]}, ValueError, "no module '00' to cut at: did you mean '0"),
        ({"optimizer": torch.optim.AdamW}, TypeError, "got the class AdamW: make one with the model's parameters"),
        ({"optimizer": "adam"}, TypeError, "must be a torch optimizer or None, got 'adam'"),
        ({"precision": "bf16"}, TypeError, "got 'bf16': write for example precision=torch.bfloat16"),
        ({"precision": torch.int8}, ValueError, "got torch.int8: autocast knows no other"),
        ({"loss_fn": None}, TypeError, "without loss_fn the model is called with all of the sample, got 2 parts"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_remedy(settings, error, message):
    with pytest.raises(error, match=message):
        asked(**settings)


def test_what_is_doubtful_is_noted():
    assert asked().notes == ()
    other = torch.optim.SGD(net().parameters(), lr=0.1)
    first, second = asked(net().eval(), optimizer=other).notes
    assert "eval() mode" in first
    assert "none of this model's parameters" in second
