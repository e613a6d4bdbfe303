"""Trust ratios: what they are, that they wait for nothing, and what is told of layers without length."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

import fleetx as X
from fleetx import fleet, notices
from fleetx.optim import Lamb, Lars

from .training import network, train


def norm(tensor):
    return float(np.linalg.norm(tensor.detach().double().numpy().ravel()))


def stepped(optimizer, weights, steps):
    for step in range(steps):
        for number, weight in enumerate(weights):
            weight.grad = torch.cos(torch.arange(float(weight.numel())) + step + number).reshape(weight.shape)
        optimizer.step()


def test_every_layers_least_median_and_greatest_of_so_many_steps():
    weights = [nn.Parameter(torch.linspace(1, 2, n)) for n in (4, 6, 5)]
    optimizer = Lars(zip("abc", weights, strict=True), lr=0.1, lars_weight_decay=0.0, exclude_from_weight_decay=["c"])
    optimizer.observe_trust_ratios(every=3)
    seen = []
    for step in range(7):
        stepped_ratios = {}
        for number, weight in enumerate(weights):
            weight.grad = torch.full_like(weight, 1.0 + step + number)
            stepped_ratios["abc"[number]] = 0.001 * norm(weight) / norm(weight.grad)
        seen.append(stepped_ratios)
        optimizer.step()
        assert (optimizer.trust_ratios is None) == (step < 2)
    found = optimizer.trust_ratios.per_layer()
    assert found.keys() == {"a", "b"}  # c has no ratio
    for name, spread in found.items():
        of_three = [ratios[name] for ratios in seen[3:6]]
        assert spread == pytest.approx((min(of_three), sorted(of_three)[1], max(of_three)), rel=1e-5)
    assert optimizer.trust_ratios.metrics() == pytest.approx(
        {
            "trust_ratio_min": min(spread.min for spread in found.values()),
            "trust_ratio_median": sum(spread.median for spread in found.values()) / 2,
            "trust_ratio_max": max(spread.max for spread in found.values()),
        }
    )
    assert repr(optimizer.trust_ratios) == "TrustRatios(steps=3, layers=2)"
    assert optimizer.trust_ratios.ready


def test_lambs_ratio_is_the_length_of_weights_by_that_of_steps():
    weight = nn.Parameter(torch.linspace(1, 2, 8, dtype=torch.float64))
    optimizer = Lamb([weight], lr=0.5)
    optimizer.observe_trust_ratios(every=1)
    before = weight.detach().clone()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert norm(weight - before) == pytest.approx(0.5 * norm(before))
    (spread,) = optimizer.trust_ratios.per_layer().values()
    assert set(optimizer.trust_ratios.per_layer()) == {"parameter 0"}
    assert spread.min == spread.max == pytest.approx(norm(before) / norm(torch.ones(8) + 0.01 * before), rel=1e-5)


def test_layers_without_gradients_and_steps_left_out_are_not_among_them():
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    optimizer = Lars(zip("ab", weights, strict=True), lr=0.1, skip_nonfinite=True)
    optimizer.observe_trust_ratios(every=3)
    for grads in [(1.0, None), (float("nan"), 1.0), (2.0, 1.0)]:
        for weight, value in zip(weights, grads, strict=True):
            weight.grad = None if value is None else torch.full_like(weight, value)
        optimizer.step()
    found = optimizer.trust_ratios.by_number()
    assert [len(found[0]), len(found[1])] == [2, 1]


def test_it_can_be_stopped_and_wrong_numbers_are_refused():
    weight = nn.Parameter(torch.ones(3))
    optimizer = Lars([weight], lr=0.1)
    optimizer.observe_trust_ratios(every=1)
    stepped(optimizer, [weight], 1)
    optimizer.observe_trust_ratios(None)
    stepped(optimizer, [weight], 1)
    assert optimizer.trust_ratios is None
    with pytest.raises(ValueError, match="every must be a whole number of at least 1, got 0: 100 is usual"):
        optimizer.observe_trust_ratios(0)


def test_observing_changes_nothing():
    outcomes = []
    for every in (None, 2):
        model = network()
        optimizer = Lamb(model.parameters(), lr=0.02)
        optimizer.observe_trust_ratios(every)
        train(model, optimizer, range(4))
        outcomes.append([parameter.detach() for parameter in model.parameters()])
    for one, other in zip(*outcomes, strict=True):
        assert torch.equal(one, other)


def test_a_strategy_asks_for_them_every_so_many_windows():
    strategy = fleet.DistributedStrategy(
        lars=True, lars_configs={"trust_ratios_every": 2}, gradient_merge=True, gradient_merge_configs={"k_steps": 2}
    )
    model = nn.Linear(4, 2)
    step = X.Step(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), nn.functional.mse_loss, strategy)
    batch = torch.randn(8, 4), torch.randn(8, 2)
    step(batch)
    assert step.optimizer.trust_ratios is None
    step(batch)
    assert step.optimizer.trust_ratios.steps == 2
    assert {"weight", "bias"} == set(step.optimizer.trust_ratios.per_layer())


# Layers without length.


@pytest.fixture
def told(caplog, monkeypatch):
    monkeypatch.setattr(notices, "_told", set())
    caplog.set_level(logging.WARNING, "fleetx")
    return caplog


def with_a_zero_layer():
    weights = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))]
    return weights, list(zip(("first", "new", "last"), weights, strict=True))


@pytest.mark.parametrize("make", [lambda p, **m: Lars(p, lr=2.0, **m), lambda p, **m: Lamb(p, lr=0.1, **m)])
def test_a_layer_of_zeros_moves_at_the_rate_itself_or_at_its_own(make):
    for own, share in ((None, 1.0), (0.01, None)):
        weights, named = with_a_zero_layer()
        optimizer = make(named, zero_norm_lr=own)
        lr = optimizer.param_groups[0]["lr"]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        # The first step of either is as long as its rate, in each of the four directions.
        torch.testing.assert_close(weights[1].detach(), torch.full((4,), -(lr * share if own is None else own)))


def test_a_raw_rate_far_above_the_others_is_told_once(told):
    weights, named = with_a_zero_layer()
    optimizer = Lars(named, lr=2.0)
    stepped(optimizer, weights, 3)
    (message,) = told.messages
    assert message.startswith("1 layers (new first) have weights or gradients of length zero and moved at the learning")
    assert "times that of the median layer. Give zero_norm_lr" in message


def test_nothing_is_told_where_nothing_stands_out(told):
    weights, named = with_a_zero_layer()
    stepped(Lars(named, lr=2.0, zero_norm_lr=0.002), weights, 3)
    weights, named = with_a_zero_layer()
    stepped(Lars(named, lr=2.0, exclude_from_adaptation=["new"]), weights, 3)
    weights, named = with_a_zero_layer()
    stepped(Lars([named[1]], lr=2.0), weights[1:2], 3)
    assert told.messages == []


def test_a_first_step_that_was_left_out_tells_nothing_and_the_next_does(told):
    weights, named = with_a_zero_layer()
    optimizer = Lars(named, lr=2.0, skip_nonfinite=True)
    for weight in weights:
        weight.grad = torch.full_like(weight, float("inf"))
    optimizer.step()
    assert told.messages == []
    stepped(optimizer, weights, 1)
    assert len(told.messages) == 1
