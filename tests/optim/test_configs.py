"""What a strategy says about LARS and LAMB reaches them."""

import torch
from torch import nn

from fleetx import fleet, layerwise_configs
from fleetx.optim import forms


def inner(model_settings, kind=torch.optim.SGD, **more):
    strategy = fleet.DistributedStrategy(**model_settings)
    torch.manual_seed(0)
    model = fleet.distributed_model(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), strategy)
    return fleet.distributed_optimizer(kind(model.parameters(), lr=0.1, **more), strategy)


def test_a_strategy_knows_the_forms_that_there_are():
    assert {name: form.epsilon for name, form in forms.LARS_FORMS.items()} == layerwise_configs.LARS_FORMS
    assert tuple(forms.LAMB_FORMS) == layerwise_configs.LAMB_FORMS


def test_every_setting_of_lars_arrives():
    configs = {
        "lars_coeff": 0.02,
        "exclude_from_weight_decay": ["bias"],
        "exclude_from_adaptation": ["norm"],
        "excluded_lr": 0.05,
        "zero_norm_lr": 0.01,
        "form": "timm",
        "fused": False,
        "trust_ratios_every": 7,
    }
    optimizer = inner({"lars": True, "lars_configs": configs}, momentum=0.9)
    group = optimizer.inner.param_groups[0]
    assert {name: group[name] for name in configs if name != "trust_ratios_every"} == {
        name: value for name, value in configs.items() if name != "trust_ratios_every"
    }
    assert (group["lr_in_momentum"], group["epsilon"], group["excluded_lr_ratio"]) == (False, 1e-8, 0.5)
    assert optimizer.inner._watch.every == 7
    assert group["adapts"] == [True, True, False, False]


def test_every_setting_of_lamb_arrives():
    configs = {"form": "nvlamb", "bias_correction": False, "always_adapt": True, "excluded_lr": 0.02}
    optimizer = inner({"lamb": True, "lamb_configs": configs}, torch.optim.AdamW, weight_decay=0)
    group = optimizer.inner.param_groups[0]
    assert {name: group[name] for name in configs} == configs
    assert group["max_grad_norm"] == 1.0


def test_a_forms_epsilon_is_the_default_and_is_written_down():
    strategy = fleet.DistributedStrategy(lars_configs={"form": "timm"})
    assert strategy.lars_configs.epsilon == 1e-8
    again = fleet.DistributedStrategy.from_toml(strategy.to_toml())
    assert again.lars_configs.epsilon == 1e-8
    strategy.lars_configs.epsilon = 0.0
    assert strategy.lars_configs.epsilon == 0.0


def test_the_overview_prints_what_was_excluded():
    optimizer = inner(
        {"lars": True, "lars_configs": {"exclude_from_weight_decay": ["norm", "bias"], "exclude_from_adaptation": []}},
        momentum=0.9,
    )
    overview = optimizer.overview()
    assert "nobody" in overview
    assert overview.splitlines()[-6:] == [
        "Lars, form fleet",
        "without weight decay: 3 of 4 parameters",
        "  pattern  parameters  such as",
        "  norm              2  1.weight, 1.bias",
        "  bias              2  0.bias, 1.bias",
        "without trust ratio: 0 of 4 parameters",
    ]
