"""Every named form against its restatement, and what may be said about forms."""

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from fleetx.optim import Lamb, Lars

from . import scenarios


@settings(max_examples=200)
@given(scenarios.scenarios())
def test_every_form_is_its_formula_in_every_precision_and_with_every_skip(scenario):
    scenarios.check(scenario, fused=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: Lars(p, lr=0.1, form="nvlamb"), "form of LARS must be one of 'fleet', .* got 'nvlamb'"),
        (lambda p: Lamb(p, form="tim"), "got 'tim': did you mean 'timm'"),
        (lambda p: Lamb(p, form="NVLAMB"), "got 'NVLAMB': did you mean 'nvlamb'"),
        (lambda p: Lamb(p, form="apex"), "got 'apex': apex's is 'timm', and with use_nvlamb 'nvlamb'"),
        (lambda p: Lars(p, lr=0.1, form="apex"), "got 'apex': apex's is 'mlperf'"),
        (lambda p: Lamb(p, form=None), "got None: 'fleet' is the default"),
        (lambda p: Lamb(p, max_grad_norm=0), r"max_grad_norm must be a number above 0, got 0: 1\.0 is usual"),
        (lambda p: Lars(p, lr=0.1, max_grad_norm="form"), "max_grad_norm must be a number above 0, got 'form'"),
        (lambda p: Lars(p, lr=0.1, skip_nonfinite=1), "skip_nonfinite must be True or False, got 1"),
        (lambda p: Lamb(p, fused="yes"), "fused must be True or False, got 'yes'"),
        (lambda p: Lamb(p, bias_correction=0), "bias_correction must be True or False, got 0"),
    ],
)
def test_wrong_forms_and_switches(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make([nn.Parameter(torch.ones(2))])


def test_clipping_is_said_once_for_all_groups():
    groups = [{"params": [nn.Parameter(torch.ones(2))], "max_grad_norm": limit} for limit in (1.0, 2.0)]
    with pytest.raises(ValueError, match=r"max_grad_norm is said once for all groups, got 1\.0 and 2\.0: give it to"):
        Lamb(groups)


def test_fused_on_the_host_is_refused_with_the_remedy():
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    with pytest.raises(ValueError, match="fused=True needs parameters that kernels can serve, and .*leave fused out"):
        Lars([weight], lr=0.1, fused=True).step()


def test_a_list_for_adaptation_decides_alone_in_every_form():
    for form in ("fleet", "mlperf", "paper", "timm", "nvlamb"):
        weight = nn.Parameter(torch.full((4,), 3.0, dtype=torch.float64))
        optimizer = Lamb([("w", weight)], lr=0.1, form=form, exclude_from_adaptation=["w"], max_grad_norm=None)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        # Adam's first step is lr long, and decay adds to it.
        torch.testing.assert_close(weight, torch.full_like(weight, 3.0 - 0.1 * (1 + 0.01 * 3)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("make", [lambda p: Lars(p, lr=0.1), lambda p: Lamb(p)])
def test_a_scaler_of_torch_skips_and_unscales(make):
    """The first step overflows and changes nothing; the second is that of the unscaled gradient."""
    ours, plain = nn.Parameter(torch.linspace(1, 2, 8)), nn.Parameter(torch.linspace(1, 2, 8))
    optimizer, twin = make([ours]), make([plain])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(ours.square().sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    plain.square().sum().backward()
    twin.step()
    torch.testing.assert_close(ours, plain)


def test_replacing_takes_all_settings_but_those_of_the_wrapped_one():
    weight = nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
    with pytest.raises(TypeError, match="momentum is the wrapped SGD's: give it to SGD, and leave it out here"):
        Lars.replacing(sgd, momentum=0.5)
    optimizer = Lars.replacing(sgd, form="timm", max_grad_norm=1.0)
    assert optimizer.param_groups[0]["lr_in_momentum"] is False
    assert optimizer.param_groups[0]["fused"] is None
    weight.grad = torch.ones(2)
    optimizer.step()


# The form "timm" against timm itself, where it is installed.


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_lars_of_timm(decay):
    timm = pytest.importorskip("timm.optim", exc_type=ImportError)
    ours, theirs = beside_timm(
        lambda p: Lars(p, lr=0.1, lars_coeff=0.02, lars_weight_decay=decay, epsilon=1e-8, form="timm"),
        lambda p: timm.Lars(p, lr=0.1, momentum=0.9, weight_decay=decay, trust_coeff=0.02, eps=1e-8),
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("form", ["timm", "nvlamb"])
def test_lamb_of_timm(decay, form):
    timm = pytest.importorskip("timm.optim", exc_type=ImportError)
    ours, theirs = beside_timm(
        lambda p: Lamb(p, lr=0.1, lamb_weight_decay=decay, form=form),
        lambda p: timm.Lamb(p, lr=0.1, weight_decay=decay, always_adapt=form == "nvlamb"),
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def beside_timm(*makers):
    """The weights after six steps at changing rates, by each optimizer."""
    outcomes = []
    for make in makers:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((4, 3), (5,))]
        optimizer = make(parameters)
        for step in range(6):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            optimizer.step()
        outcomes.append([parameter.detach() for parameter in parameters])
    return outcomes
