"""What a user hands over: parameters, groups and arguments that nobody would read are refused with a remedy."""

import pytest
import torch
from torch import nn

from fleetx.optim import Lamb, Lars, Muon, as_scheduler, constant

from .training import network


@pytest.mark.parametrize(
    ("make", "setting", "remedy"),
    [
        (lambda groups: Lars(groups, lr=1.0), {"weight_decay": 0.0}, "did you mean 'lars_weight_decay'"),
        (lambda groups: Lars(groups, lr=1.0), {"lars_coef": 9}, "did you mean 'lars_coeff'"),
        (lambda groups: Lars(groups, lr=1.0), {"trust_coeff": 9}, "did you mean 'lars_coeff'"),
        (lambda groups: Lamb(groups), {"weight_decay": 0.0}, "did you mean 'lamb_weight_decay'"),
        (lambda groups: Muon(groups), {"use_muon": False}, "did you mean 'exclude_from_muon'"),
        (lambda groups: Muon(groups), {"zzz": 1}, "valid names: lr, adamw_lr"),
    ],
)
def test_a_group_that_says_what_nobody_reads_is_refused(make, setting, remedy):
    (name,) = setting
    first, *rest = network().parameters()
    message = rf"has no setting '{name}', so .* would change nothing \(a note .* 'name'\): {remedy}"
    with pytest.raises(ValueError, match=message):
        make([{"params": [first]}, {"params": rest, **setting}])
    optimizer = make([first])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": rest, **setting})
    assert len(optimizer.param_groups) == 1


def test_notes_and_what_schedulers_write_are_no_settings():
    first, *rest = network().parameters()
    optimizer = Lars([{"params": [first], "name": "stem", "lr_scale": 0.5}], lr=0.1)
    as_scheduler(optimizer, constant(0.1))
    optimizer.param_groups[0]["written by a scheduler"] = 1
    optimizer.add_param_group({"params": rest})
    torch.optim.lr_scheduler.OneCycleLR(Lars(rest, lr=0.1), max_lr=1.0, total_steps=3)


def test_groups_of_a_replaced_optimizer_may_say_its_settings_and_ours_and_no_others():
    first, *rest = network().parameters()
    sgd = torch.optim.SGD([{"params": [first], "lars_coeff": 0.5}, {"params": rest}], lr=0.1, momentum=0.9)
    optimizer = Lars.replacing(sgd)
    assert [group["lars_coeff"] for group in optimizer.param_groups] == [0.5, 0.001]
    sgd = torch.optim.SGD([{"params": rest, "lars_coef": 0.5}], lr=0.1, momentum=0.9)
    before = dict(sgd.param_groups[0])
    with pytest.raises(ValueError, match="Lars has no setting 'lars_coef'.*did you mean 'lars_coeff'"):
        Lars.replacing(sgd)
    assert sgd.param_groups[0] == before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda p: Lars(p, lr=1.0, weight_decay=0.1),
            "Lars has no argument 'weight_decay': did you mean 'lars_weight_",
        ),
        (lambda p: Lamb(p, exclude_from_decay=[]), "Lamb has no argument .* did you mean 'exclude_from_weight_decay'"),
        (lambda p: Muon(p, adam_lr=1.0), "Muon has no argument 'adam_lr': did you mean 'adamw_lr'"),
        (
            lambda p: Lars.replacing(torch.optim.SGD(p, lr=1.0, momentum=0.9), weight_decay=0.1),
            "Lars has no argument 'weight_decay'",
        ),
    ],
)
def test_an_unknown_argument_is_refused_with_the_nearest(make, message):
    with pytest.raises(TypeError, match=message):
        make(network().parameters())


@pytest.mark.parametrize("kind", [Lars, Lamb, Muon])
def test_a_module_and_an_empty_list_are_refused_with_the_remedy(kind):
    with pytest.raises(
        TypeError, match=rf"{kind.__name__} takes parameters, got the module Linear: give model\.named_p"
    ):
        kind(nn.Linear(2, 2), lr=0.1)
    used_up = iter([nn.Parameter(torch.ones(2))])
    list(used_up)
    with pytest.raises(
        ValueError, match=r"needs at least one parameter, got an empty list: call model\.parameters\(\) an"
    ):
        kind(used_up, lr=0.1)
    with pytest.raises(TypeError, match="should be an iterable of Tensors or dicts"):
        kind(nn.Parameter(torch.ones(2)), lr=0.1)


def test_a_subclass_may_take_more_arguments():
    class Mine(Lars):
        def __init__(self, params, **more):
            super().__init__(params, lr=more.pop("rate"))

    assert Mine(network().parameters(), rate=0.7).param_groups[0]["lr"] == 0.7
