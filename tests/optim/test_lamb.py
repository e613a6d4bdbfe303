import doctest

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fleetx import names
from fleetx.optim import Lamb, lamb

from . import jobs
from .reference import lamb_step


def golden_lamb(hyper):
    return lambda params: Lamb(
        params,
        lr=hyper["learning_rate"],
        betas=(hyper["beta1"], hyper["beta2"]),
        eps=hyper["epsilon"],
        lamb_weight_decay=hyper["lamb_weight_decay"],
        exclude_from_weight_decay=[f"*{ending}" for ending in hyper["exclude_endswith"] or []],
    )


@pytest.mark.parametrize("name", jobs.GOLDEN["lamb"])
def test_fleets_numbers(name):
    case = jobs.GOLDEN["lamb"][name]
    state_names = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}
    for fleet, ours in jobs.golden_steps(case, golden_lamb(case["hyper"]), state_names):
        np.testing.assert_allclose(ours, fleet, rtol=0, atol=5e-7)


def test_fleets_step_count():
    case = jobs.GOLDEN["lamb"]["basic_fp64"]
    beta2 = case["hyper"]["beta2"]
    counts = []
    for fleet, ours in jobs.golden_steps(case, golden_lamb(case["hyper"]), {"beta2_pow_acc": "step"}):
        if isinstance(ours, float):
            counts.append(ours)
            assert fleet == pytest.approx([beta2 ** (ours + 1)], abs=5e-7)
    assert counts == [1, 1, 2, 2, 3, 3]


STEPS = 4
hypers = st.fixed_dictionaries(
    {
        "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.9), (0.5, 0.0)]),
        "eps": st.sampled_from([1e-6, 1e-3, 0.5]),
        "lamb_weight_decay": st.sampled_from([0.0, 0.01, 0.3]),
        "always_adapt": st.booleans(),
    }
)


@settings(max_examples=150)
@given(st.data(), jobs.groups(STEPS))
def test_the_formula(data, groups):
    group_hypers = [data.draw(hypers) for _ in groups]
    lrs = data.draw(st.lists(st.sampled_from([0.0, 0.001, 0.1]), min_size=STEPS, max_size=STEPS))
    tensors = [[parameter.tensor() for parameter in group] for group in groups]
    optimizer = Lamb(
        [
            {"params": [(p.name, t) for p, t in zip(group, own, strict=True)], **hyper}
            for group, own, hyper in zip(groups, tensors, group_hypers, strict=True)
        ],
        exclude_from_weight_decay=jobs.patterns_of(groups),
    )
    expected = [[(p.value, np.zeros_like(p.value), np.zeros_like(p.value)) for p in group] for group in groups]
    counts = [[0 for _ in group] for group in groups]
    for step, lr in enumerate(lrs):
        for group, own, param_group in zip(groups, tensors, optimizer.param_groups, strict=True):
            jobs.set_gradients(group, own, step)
            param_group["lr"] = lr
        optimizer.step()
        for g, (group, hyper) in enumerate(zip(groups, group_hypers, strict=True)):
            for i, parameter in enumerate(group):
                if parameter.gradients[step] is not None:
                    counts[g][i] += 1
                    value, mean, square = expected[g][i]
                    expected[g][i] = lamb_step(
                        value,
                        parameter.gradients[step],
                        mean,
                        square,
                        counts[g][i],
                        lr=lr,
                        betas=hyper["betas"],
                        eps=hyper["eps"],
                        weight_decay=hyper["lamb_weight_decay"],
                        decays=not parameter.excluded,
                        always_adapt=hyper["always_adapt"],
                    )
                compare(expected[g][i], tensors[g][i], optimizer.state[tensors[g][i]])


def compare(expected, tensor, state):
    value, mean, square = expected
    np.testing.assert_allclose(tensor.detach().numpy(), value, rtol=1e-12, atol=1e-12)
    if state:
        np.testing.assert_allclose(state["exp_avg"].numpy(), mean, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(state["exp_avg_sq"].numpy(), square, rtol=1e-12, atol=1e-12)


def test_without_decay_it_is_torchs_adam():
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    ours = Lamb(model.parameters(), lr=0.1, eps=1e-6, lamb_weight_decay=0.0)
    theirs = torch.optim.Adam(twin.parameters(), lr=0.1, eps=1e-6)
    for _ in range(4):
        for net, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            net(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_lr_as_a_tensor(decay):
    results = []
    for lr in (0.3, torch.tensor(0.3, dtype=torch.float64)):
        parameter = nn.Parameter(torch.linspace(-1, 2, 6, dtype=torch.float64))
        optimizer = Lamb([parameter], lr=lr, lamb_weight_decay=decay)
        for step in range(3):
            parameter.grad = torch.cos(torch.arange(6.0, dtype=torch.float64) + step)
            optimizer.step()
        results.append(parameter.detach())
    torch.testing.assert_close(*results, rtol=1e-12, atol=0)


def test_bias_correction_counts_each_parameters_own_steps():
    late, always = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    optimizer = Lamb([late, always], lr=0.1, lamb_weight_decay=0.0)
    for step in range(3):
        always.grad = torch.ones_like(always)
        late.grad = torch.ones_like(late) if step == 2 else None
        optimizer.step()
    assert (optimizer.state[late]["step"], optimizer.state[always]["step"]) == (1, 3)
    assert late.tolist() == pytest.approx([0.9] * 3, abs=1e-6)  # Adam's first step is lr long


# Taking an Adam's place.


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    names.record(model)
    return model


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_it_shares_the_groups_and_obeys_the_schedulers_of_the_wrapped_one(kind):
    model = network()
    adam = kind(model.parameters(), lr=0.2, betas=(0.8, 0.95), eps=1e-4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(adam, 0.5)
    optimizer = Lamb.replacing(adam, exclude_from_weight_decay=["layer_norm", "bias"])
    assert optimizer.param_groups is adam.param_groups
    twin = network()
    direct = Lamb(twin.parameters(), 0.2, (0.8, 0.95), 1e-4, 0.01, ["layer_norm", "bias"])
    for step in range(3):
        direct.param_groups[0]["lr"] = 0.2 * 0.5**step
        for net, opt in ((model, optimizer), (twin, direct)):
            opt.zero_grad()
            net(torch.arange(20.0).reshape(5, 4)).square().sum().backward()
            opt.step()
        scheduler.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def adam_with(kind=torch.optim.Adam, **settings):
    return kind([nn.Parameter(torch.ones(2))], lr=0.1, **settings)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: adam_with(torch.optim.SGD), r"replaces torch\.optim\.Adam or AdamW, got SGD: build"),
        (lambda: adam_with(torch.optim.NAdam), "got NAdam"),
        (lambda: adam_with(weight_decay=0.01), r"weight_decay must be 0 since .*twice, got 0\.01: give Adam weight_"),
        (
            lambda: adam_with(torch.optim.AdamW, weight_decay=0.1),
            r"must be 0 or lamb_weight_decay \(0\.01\) .*got 0\.1: give AdamW weight_decay=0 and say the decay as lamb",
        ),
        (lambda: adam_with(amsgrad=True), "group 0 amsgrad must be False, which LAMB does not have, got True: leave"),
        (lambda: adam_with(differentiable=True), "differentiable must be False"),
        (lambda: adam_with(eps=0.0), r"eps must be a number above 0, got 0\.0: 1e-6 is usual"),
    ],
)
def test_what_cannot_be_replaced(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Lamb.replacing(make())


def test_a_capturable_adam_is_refused():
    adam = adam_with()
    adam.param_groups[0]["capturable"] = True  # torch refuses the argument itself without a GPU
    with pytest.raises(ValueError, match="capturable must be False"):
        Lamb.replacing(adam)


def test_adamw_of_no_or_equal_decay_is_replaced():
    Lamb.replacing(adam_with(torch.optim.AdamW, weight_decay=0), lamb_weight_decay=0.3)
    optimizer = Lamb.replacing(adam_with(torch.optim.AdamW, weight_decay=0.3), lamb_weight_decay=0.3)
    assert optimizer.param_groups[0]["lamb_weight_decay"] == 0.3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1}, "lr must be a number at least 0, got -1"),
        ({"betas": 0.9}, r"betas must be two numbers, got 0\.9: \(0\.9, 0\.999\) is usual"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] must be a number at least 0 and below 1, got 1\.0"),
        ({"eps": 0}, "eps must be a number above 0, got 0"),
        ({"lamb_weight_decay": "no"}, "lamb_weight_decay must be a number at least 0, got 'no': 0.01 is usual"),
        ({"always_adapt": None}, "always_adapt must be True or False, got None"),
        (
            {"always_adapt": True, "exclude_from_adaptation": ["bias"]},
            r"always_adapt=True gives everybody a .* exclude_from_adaptation=\['bias'\] takes .*leave one of them out",
        ),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Lamb([nn.Parameter(torch.ones(2))], **arguments)


def test_the_example_in_the_docstring_runs():
    results = doctest.testmod(lamb)
    assert results.attempted > 5
    assert not results.failed
