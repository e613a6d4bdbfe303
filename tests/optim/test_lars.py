import doctest

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fleetx import names
from fleetx.optim import Lars, lars

from . import jobs
from .reference import lars_step


@pytest.mark.parametrize("name", jobs.GOLDEN["lars"])
def test_fleets_numbers(name):
    case = jobs.GOLDEN["lars"][name]
    hyper = dict(case["hyper"])
    lr = hyper.pop("learning_rate")
    steps = jobs.golden_steps(case, lambda params: Lars(params, lr=lr, **hyper), {"velocity": "momentum_buffer"})
    for fleet, ours in steps:
        np.testing.assert_allclose(ours, fleet, rtol=0, atol=5e-7)


STEPS = 3
hypers = st.fixed_dictionaries(
    {
        "momentum": st.sampled_from([0.0, 0.5, 0.9, 0.99]),
        "lars_coeff": st.sampled_from([0.001, 0.02, 1.0]),
        "lars_weight_decay": st.sampled_from([0.0, 0.0005, 0.1]),
        "epsilon": st.sampled_from([0.0, 1e-8, 0.5]),
    }
)


@settings(max_examples=150)
@given(st.data(), jobs.groups(STEPS), st.booleans(), st.booleans(), st.sampled_from([None, 0.0, 0.03]))
def test_the_formula(data, groups, lr_in_momentum, adapt_excluded, excluded_lr):
    group_hypers = [data.draw(hypers) for _ in groups]
    lrs = data.draw(st.lists(st.sampled_from([0.0, 0.01, 0.4, 2.0]), min_size=STEPS, max_size=STEPS))
    tensors = [[parameter.tensor() for parameter in group] for group in groups]
    optimizer = Lars(
        [
            {"params": [(p.name, t) for p, t in zip(group, own, strict=True)], **hyper}
            for group, own, hyper in zip(groups, tensors, group_hypers, strict=True)
        ],
        lr=0.1,
        exclude_from_weight_decay=jobs.patterns_of(groups),
        exclude_from_adaptation=[] if adapt_excluded else None,
        excluded_lr=excluded_lr,
        lr_in_momentum=lr_in_momentum,
    )
    expected = [[(p.value, np.zeros_like(p.value)) for p in group] for group in groups]
    for step, lr in enumerate(lrs):
        for group, own, param_group in zip(groups, tensors, optimizer.param_groups, strict=True):
            jobs.set_gradients(group, own, step)
            param_group["lr"] = lr
        optimizer.step()
        for g, (group, hyper) in enumerate(zip(groups, group_hypers, strict=True)):
            for i, parameter in enumerate(group):
                if parameter.gradients[step] is not None:
                    expected[g][i] = lars_step(
                        expected[g][i][0],
                        parameter.gradients[step],
                        expected[g][i][1],
                        lr=lr,
                        momentum=hyper["momentum"],
                        coeff=hyper["lars_coeff"],
                        weight_decay=hyper["lars_weight_decay"],
                        epsilon=hyper["epsilon"],
                        decays=not parameter.excluded,
                        adapts=adapt_excluded or not parameter.excluded,
                        lr_in_momentum=lr_in_momentum,
                        excluded_lr=None if excluded_lr is None else excluded_lr * lr / 0.1,
                    )
                value, velocity = expected[g][i]
                tensor = tensors[g][i]
                np.testing.assert_allclose(tensor.detach().numpy(), value, rtol=1e-12, atol=1e-12)
                if tensor.numel() and optimizer.state[tensor]:
                    buffer = optimizer.state[tensor]["momentum_buffer"].numpy()
                    np.testing.assert_allclose(buffer, velocity, rtol=1e-12, atol=1e-12)


def stepped(lr, **settings):
    weight = nn.Parameter(torch.linspace(-1, 2, 6, dtype=torch.float64))
    optimizer = Lars([("w", weight)], lr=lr, **settings)
    for step in range(3):
        weight.grad = torch.cos(torch.arange(6.0, dtype=torch.float64) + step)
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("lr_in_momentum", [True, False])
@pytest.mark.parametrize("excluded", [True, False])
def test_lr_as_a_tensor(lr_in_momentum, excluded):
    settings = {"lr_in_momentum": lr_in_momentum, "lars_coeff": 0.1}
    if excluded:
        settings["exclude_from_adaptation"] = ["w"]
    with_tensor = stepped(torch.tensor([0.3], dtype=torch.float64), **settings)
    torch.testing.assert_close(with_tensor, stepped(0.3, **settings), rtol=1e-12, atol=0)


def test_no_decay_does_not_switch_adaptation_off():
    longer = stepped(0.1, lars_weight_decay=0.0, lars_coeff=0.02)
    assert not torch.allclose(longer, stepped(0.1, lars_weight_decay=0.0, lars_coeff=0.01))


def test_excluded_is_torchs_sgd():
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    ours = Lars(model.named_parameters(), lr=0.1, exclude_from_weight_decay=["*"])
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        for net, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            net(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_excluded_lr_follows_the_schedule():
    model = nn.Linear(2, 2)
    optimizer = Lars(
        model.named_parameters(), lr=0.4, momentum=0.0, exclude_from_weight_decay=["bias"], excluded_lr=0.1
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    moves = []
    for _ in range(2):
        before = model.bias.detach().clone()
        model.weight.grad, model.bias.grad = torch.ones(2, 2), torch.ones(2)
        optimizer.step()
        scheduler.step()
        moves.append((before - model.bias.detach()).tolist())
    assert moves == [pytest.approx([0.1, 0.1]), pytest.approx([0.05, 0.05])]


# Taking an SGD's place.


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    names.record(model)
    return model


def test_it_shares_the_groups_and_obeys_the_schedulers_of_the_wrapped_one():
    model = network()
    sgd = torch.optim.SGD(
        [{"params": model[0].parameters()}, {"params": model[1:].parameters(), "lr": 0.2, "momentum": 0.5}],
        lr=0.4,
        momentum=0.9,
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
    optimizer = Lars.replacing(sgd, lars_coeff=0.01, exclude_from_weight_decay=["batch_norm", ".b_0"])
    assert optimizer.param_groups is sgd.param_groups
    assert optimizer.param_groups[1]["momentum"] == 0.5
    assert [(row.pattern, row.count) for row in optimizer.exclusion_rows()] == [("batch_norm", 2), (".b_0", 3)]

    twin = network()
    groups = [{"params": twin[0].parameters()}, {"params": twin[1:].parameters(), "lr": 0.2, "momentum": 0.5}]
    direct = Lars(groups, lr=0.4, lars_coeff=0.01, exclude_from_weight_decay=["batch_norm", ".b_0"])
    for step in range(3):
        for net, opt in ((model, optimizer), (twin, direct)):
            opt.zero_grad()
            net(torch.full((5, 4), 0.1) + torch.arange(5.0)[:, None]).square().sum().backward()
        for group, lr in zip(direct.param_groups, (0.4, 0.2), strict=True):
            group["lr"] = lr * 0.5**step
        optimizer.step()
        direct.step()
        scheduler.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def test_loading_keeps_the_schedulers_of_the_wrapped_one_bound():
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    optimizer = Lars.replacing(sgd)
    group = optimizer.param_groups[0]
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.125
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups is sgd.param_groups
    assert optimizer.param_groups[0] is group
    assert sgd.param_groups[0]["lr"] == 0.125


def test_a_group_added_through_the_wrapped_one_is_taken_up():
    model = network()
    sgd = torch.optim.SGD(model[0].parameters(), lr=0.4, momentum=0.9)
    optimizer = Lars.replacing(sgd, exclude_from_weight_decay=["bias"])
    sgd.add_param_group({"params": list(model[3].parameters())})
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    assert optimizer.param_groups[1]["decays"] == [True, False]
    assert "momentum_buffer" in optimizer.state[model[3].weight]


def sgd_with(**settings):
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, **{"momentum": 0.9, **settings})


def used_sgd():
    sgd = sgd_with()
    sgd.param_groups[0]["params"][0].grad = torch.ones(2)
    sgd.step()
    return sgd


def replaced_sgd():
    sgd = sgd_with()
    Lars.replacing(sgd)
    return sgd


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.optim.Adam([nn.Parameter(torch.ones(2))]), r"replaces torch\.optim\.SGD .*got Adam: build"),
        (lambda: sgd_with(momentum=0.0), r"group 0 momentum must be above 0, got 0\.0: give momentum=0\.9"),
        (lambda: sgd_with(weight_decay=1e-4), r"weight_decay must be 0 .*twice, got 0\.0001: give it as lars_weight"),
        (lambda: sgd_with(nesterov=True), "nesterov must be False, which LARS does not have, got True: leave it out"),
        (lambda: sgd_with(differentiable=True), "differentiable must be False"),
        (lambda: sgd_with(dampening=0.1), r"dampening must be 0, which is LARS's, got 0\.1: leave it out"),
        (used_sgd, "before its first step, and this SGD has state of 1 parameters: replace it first"),
        (replaced_sgd, "replaced once, and this SGD was already: build a new SGD"),
    ],
)
def test_what_cannot_be_replaced(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Lars.replacing(make())


def test_a_second_groups_fault_is_named_and_nothing_is_changed():
    sgd = torch.optim.SGD(
        [{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(2))], "weight_decay": 0.1}],
        lr=0.1,
        momentum=0.9,
    )
    with pytest.raises(ValueError, match="in group 1 weight_decay"):
        Lars.replacing(sgd)
    sgd.param_groups[1]["weight_decay"] = 0
    before = [dict(group) for group in sgd.param_groups]
    with pytest.raises(ValueError, match="lars_coeff must be a number above 0, got -1"):
        Lars.replacing(sgd, lars_coeff=-1)
    assert sgd.param_groups == before
    Lars.replacing(sgd)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -0.1}, r"lr must be a number at least 0, got -0\.1: give a number"),
        ({"lr": "0.1"}, r"lr must be a number at least 0, got '0\.1'"),
        ({"lr": float("nan")}, "lr must be a number at least 0, got nan"),
        ({"lr": torch.ones(2)}, r"lr must be one number, got a tensor of shape \(2,\): give torch\.tensor"),
        ({"lr": torch.tensor(-0.5)}, r"lr must be a number at least 0, got -0\.5: give a number"),
        ({"momentum": 1.0}, r"momentum must be a number at least 0 and below 1, got 1\.0: 0\.9 is usual"),
        ({"lars_coeff": 0}, r"lars_coeff must be a number above 0, got 0: 0\.001 is usual"),
        ({"lars_weight_decay": -1}, "lars_weight_decay must be a number at least 0, got -1"),
        ({"epsilon": None}, "epsilon must be a number at least 0, got None: 0 is usual"),
        ({"lr_in_momentum": 1}, "lr_in_momentum must be True or False, got 1"),
        ({"excluded_lr": -0.1}, r"excluded_lr must be a number at least 0, got -0\.1: leave it out"),
        ({"lr": 0.0, "excluded_lr": 0.1}, r"excluded_lr=0\.1 follows .*lr is 0: give the peak"),
        ({"exclude_from_weight_decay": "bias"}, "exclude_from_weight_decay must be a list of patterns, got 'bias'"),
        ({"exclude_from_adaptation": [1]}, "exclude_from_adaptation must hold strings, got 1"),
        ({"exclude_from_weight_decay": ["bias"]}, r"1 of 1 parameters have none: give .*named_parameters\(\)"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Lars([nn.Parameter(torch.ones(2))], **{"lr": 0.1, **arguments})


def test_a_groups_own_settings_are_checked_too():
    with pytest.raises(ValueError, match=r"momentum must be .* got 2"):
        Lars([{"params": [nn.Parameter(torch.ones(2))], "momentum": 2}], lr=0.1)


def test_the_example_in_the_docstring_runs():
    results = doctest.testmod(lars)
    assert results.attempted > 5
    assert not results.failed
