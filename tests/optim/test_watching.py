"""Trust ratios: what they are, that they wait for nothing, and what is told of layers without length."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

import fleetx as X
from fleetx import fleet, notices
from fleetx.optim import Lamb, Lars
from fleetx.runs import MetricsLog, read_metrics

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


def test_what_was_collected_before_it_was_stopped_is_dropped():
    weight = nn.Parameter(torch.ones(3))
    optimizer = Lars([weight], lr=0.1)
    optimizer.observe_trust_ratios(every=3)
    stepped(optimizer, [weight], 2)
    optimizer.observe_trust_ratios(None)
    stepped(optimizer, [weight], 5)
    optimizer.observe_trust_ratios(every=2)
    stepped(optimizer, [weight], 1)
    assert optimizer.trust_ratios is None
    stepped(optimizer, [weight], 1)
    assert optimizer.trust_ratios.steps == 2


def test_steps_of_excluded_layers_alone_are_counted_too():
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    optimizer = Lars(zip("ab", weights, strict=True), lr=0.1, exclude_from_weight_decay=["b"])
    optimizer.observe_trust_ratios(every=2)
    stepped(optimizer, weights, 1)
    weights[0].grad = None
    optimizer.step()
    assert [len(ratios) for ratios in optimizer.trust_ratios.by_number().values()] == [1]


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
    outcomes = [step(batch)]
    assert step.optimizer.trust_ratios is None
    outcomes += [step(batch) for _ in range(4)]
    assert [out.trust_ratios is not None for out in outcomes] == [False, True, False, True, False]
    assert outcomes[3].trust_ratios is step.optimizer.trust_ratios
    assert outcomes[3].trust_ratios.steps == 2
    assert {"weight", "bias"} == set(step.optimizer.trust_ratios.per_layer())


def test_a_log_of_metrics_has_them_per_layer_and_of_all(tmp_path):
    strategy = fleet.DistributedStrategy(lamb=True, lamb_configs={"trust_ratios_every": 2})
    model = nn.Linear(4, 2)
    step = X.Step(model, torch.optim.Adam(model.parameters(), lr=0.1), nn.functional.mse_loss, strategy)
    batch = torch.randn(8, 4), torch.randn(8, 2)
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        for _ in range(3):
            log.window(0, step(batch))
    first, second, third = read_metrics(tmp_path / "metrics.jsonl")
    assert not any("trust" in name for name in {**first, **third})
    assert second["trust_ratios"].keys() == {"weight", "bias"}
    assert all(low <= middle <= high for low, middle, high in second["trust_ratios"].values())
    assert second["trust_ratio_min"] == min(low for low, _, _ in second["trust_ratios"].values())
    assert second["trust_ratio_min"] <= second["trust_ratio_median"] <= second["trust_ratio_max"]


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
    assert told.messages == []


def test_a_head_of_zeros_is_told_of_when_the_layers_below_have_ratios(told):
    """At the first step nothing below it has a gradient, so that there is no median yet."""
    body, head = nn.Linear(4, 6, bias=False), nn.Linear(6, 3, bias=False)
    nn.init.zeros_(head.weight)
    model = nn.Sequential(body, nn.Tanh(), head)
    optimizer = Lars(model.named_parameters(), lr=10.0)
    x, y = torch.linspace(-1, 1, 32).reshape(8, 4), torch.arange(8) % 3
    for step in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert len(told.messages) == (step > 0)
    assert told.messages[0].startswith("2 layers (0.weight first, 2.weight last) have weights or gradients of length")


def test_where_no_layer_ever_has_a_ratio_the_watch_ends(told):
    weight = nn.Parameter(torch.zeros(3))
    optimizer = Lars([("w", weight)], lr=1.0)
    for _ in range(20):
        weight.grad = torch.zeros(3)
        optimizer.step()
    assert not optimizer._watch.wants
    assert told.messages == []


def test_a_second_optimizer_is_told_of_too(told):
    for _ in range(2):
        weights, named = with_a_zero_layer()
        stepped(Lars(named, lr=2.0), weights, 2)
    assert len(told.messages) == 2


def test_a_rate_of_the_excluded_where_nobody_is_excluded_is_told_of(told):
    _, named = with_a_zero_layer()
    Lars(named, lr=2.0, excluded_lr=0.1, exclude_from_weight_decay=["new"])
    Lamb(named, excluded_lr=0.1, lamb_weight_decay=0.0)  # without decay nobody has a ratio
    assert told.messages == []
    Lars(named, lr=2.0, excluded_lr=0.1)
    (message,) = told.messages
    assert message.startswith("excluded_lr=0.1 is the learning rate of parameters without trust ratio, and here all")
    assert "give exclude_from_adaptation or exclude_from_weight_decay, or leave it out" in message


def test_a_first_step_that_was_left_out_tells_nothing_and_the_next_does(told):
    weights, named = with_a_zero_layer()
    optimizer = Lars(named, lr=2.0, skip_nonfinite=True)
    for weight in weights:
        weight.grad = torch.full_like(weight, float("inf"))
    optimizer.step()
    assert told.messages == []
    stepped(optimizer, weights, 1)
    assert len(told.messages) == 1
