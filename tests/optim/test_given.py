"""What a user hands over: parameters, groups and arguments that nobody would read are refused with a remedy."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fleetx.optim import Lamb, Lars, Muon, as_scheduler, constant

from .training import network


@pytest.mark.parametrize(
    ("make", "setting", "remedy"),
    [
        (lambda groups: Lars(groups, lr=1.0), {"lars_coef": 9}, "did you mean 'lars_coeff'"),
        (lambda groups: Lars(groups, lr=1.0), {"trust_coeff": 9}, "did you mean 'lars_coeff'"),
        (lambda groups: Lamb(groups), {"lamb_decay": 0.0}, "did you mean 'lamb_weight_decay'"),
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


KINDS = {
    Lars: lambda params, **more: torch.optim.SGD(params, momentum=0.9, **more),
    Lamb: lambda params, **more: torch.optim.AdamW(params, eps=1e-6, weight_decay=0, **more),
}


def stepped(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.linspace(-1, 2, parameter.numel()).view_as(parameter)
    for _ in range(2):
        optimizer.step()
    return [parameter.tolist() for group in optimizer.param_groups for parameter in group["params"]]


def pair():
    return [nn.Parameter(torch.arange(1.0, 5.0)), nn.Parameter(torch.arange(2.0, 5.0))]


@pytest.mark.parametrize("kind", KINDS)
def test_weight_decay_of_a_group_is_ours_and_zero_excludes_the_group(kind):
    own = f"{kind.__name__.lower()}_weight_decay"

    def trained(first, second):
        one, other = pair()
        return stepped(kind([{"params": [one], **first}, {"params": [other], **second}], lr=0.1))

    said = trained({"weight_decay": 0.3}, {"weight_decay": 0.0})
    assert said == trained({own: 0.3}, {"exclude_from_weight_decay": ["*"]})
    assert said != trained({own: 0.3}, {own: 0.0, "exclude_from_adaptation": []})
    one, other = pair()
    optimizer = kind([one], lr=0.1)
    group = {"params": [other], "weight_decay": 0.0}
    optimizer.add_param_group(group)
    assert optimizer.param_groups[1]["decays"] == [False]
    assert optimizer.exclusion_rows() == [("*", 1, ("parameter 0",))]
    assert group == {"params": [other], "weight_decay": 0.0}  # may be given again
    with pytest.raises(ValueError, match=rf"weight_decay and {own} of a group are one setting, got 0.1 and 0.2"):
        kind([{"params": [one], "weight_decay": 0.1, own: 0.2}], lr=0.1)
    with pytest.raises(ValueError, match=r"weight_decay must be a number at least 0, got -1"):
        kind([{"params": [one], "weight_decay": -1}], lr=0.1)


def test_groups_that_adamw_does_not_decay_are_not_decayed_by_lamb():
    def replaced(**second):
        one, other = pair()
        groups = [{"params": [one], "weight_decay": 0.3}, {"params": [other], "weight_decay": 0.0, **second}]
        return Lamb.replacing(torch.optim.AdamW(groups, lr=0.1), lamb_weight_decay=0.3)

    assert [group["decays"] for group in replaced().param_groups] == [[True], [False]]
    assert [group["decays"] for group in replaced(lamb_weight_decay=0.1).param_groups] == [[True], [True]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_learning_rate_may_be_given_by_groups_alone(kind):
    one, other = pair()
    optimizer = kind([{"params": [one], "lr": 0.1}, {"params": [other], "lr": 0.2}], excluded_lr=0.1)
    assert [group["excluded_lr_ratio"] for group in optimizer.param_groups] == [1.0, 0.5]
    if kind is Lars:
        with pytest.raises(TypeError, match="lr must be a number at least 0, got None: give .* or to each group"):
            Lars([{"params": [one], "lr": 0.1}, {"params": [other]}])


@pytest.mark.parametrize(
    ("lr", "said"),
    [
        (torch.tensor(1), r"a number with a fraction, got a tensor of torch.int64, tensor\(1\).*give a float"),
        (torch.tensor([True]), r"a number with a fraction, got a tensor of torch.bool"),
        (torch.tensor(0.1 + 0j), r"a number with a fraction, got a tensor of torch.complex64"),
        (torch.tensor(0.1, requires_grad=True), r"lr must be a tensor without requires_grad, .*Give lr.detach\(\)"),
        (nn.Parameter(torch.tensor(0.1)), r"lr must be a tensor without requires_grad"),
    ],
)
@pytest.mark.parametrize("kind", [Lars, Lamb, lambda params, lr: Muon(params, lr=lr, exclude_from_muon=[])])
def test_a_learning_rate_that_no_schedule_could_write_is_refused(kind, lr, said):
    with pytest.raises((TypeError, ValueError), match=said):
        kind(network().parameters(), lr=lr)
    optimizer = kind(network().parameters(), lr=torch.tensor(0.5))
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = lr
    with pytest.raises((TypeError, ValueError), match=said):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("kind", KINDS)
def test_to_maximize_is_to_minimize_the_negative(kind):
    def trained(make, sign, **more):
        params = pair()
        optimizer = make(params, lr=0.1, **more)
        for parameter in params:
            parameter.grad = sign * torch.linspace(-1, 2, parameter.numel())
        optimizer.step()
        return [parameter.tolist() for parameter in params]

    down = trained(kind, -1)
    assert trained(kind, 1, maximize=True) == down
    assert trained(lambda params, **more: kind.replacing(KINDS[kind](params, **more)), 1, maximize=True) == down
    one, other = pair()
    with pytest.raises(ValueError, match="maximize is said once for all groups, got True and False"):
        kind([{"params": [one], "maximize": True}, {"params": [other]}], lr=0.1)


@pytest.mark.parametrize("kind", [Lars, Lamb, Muon])
def test_hooks_of_a_step_are_called_once(kind):
    seen = []
    handles = [
        register(lambda optimizer, *_: seen.append(type(optimizer)))
        for register in (
            register_optimizer_step_pre_hook,
            register_optimizer_step_post_hook,
        )
    ]
    try:
        stepped(kind(network().parameters(), lr=0.1, **({"exclude_from_muon": []} if kind is Muon else {})))
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [kind] * 4  # before and after each of two steps


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_a_replaced_optimizer_are_called(kind):
    seen = []
    wrapped = KINDS[kind](pair(), lr=0.1)
    wrapped.register_step_pre_hook(lambda optimizer, *_: seen.append(("before", type(optimizer))))
    optimizer = kind.replacing(wrapped)
    wrapped.register_step_post_hook(lambda optimizer, *_: seen.append(("after", type(optimizer))))
    stepped(optimizer)
    assert seen == [("before", kind), ("after", kind)] * 2


def test_a_subclass_may_take_more_arguments():
    class Mine(Lars):
        def __init__(self, params, **more):
            super().__init__(params, lr=more.pop("rate"))

    assert Mine(network().parameters(), rate=0.7).param_groups[0]["lr"] == 0.7
