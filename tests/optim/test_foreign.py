"""States of timm's and apex's optimizers, loaded and continued as if nothing had happened."""

import pytest
import torch
from torch import nn

from fleetx.optim import Lamb, Lars

from . import foreigners
from .training import MAKERS, network, train, values

SHAPES = [(4, 3), (5,), (3, 2, 2), (6,)]
GROUPS = [{"params": [1, 3], "weight_decay": 0.0}, {"params": [0, 2]}]  # as timm orders them


def gradients(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in SHAPES]


def continued(theirs, make, steps=4):
    """Ours from the foreigner's state on; both move on, and must stay together."""
    for step in range(3):
        theirs.step(gradients(step))
    ours = [nn.Parameter(weight.clone()) for weight in theirs.weights]
    optimizer = make([{"params": [(str(number), ours[number]) for number in g["params"]]} for g in theirs.groups])
    optimizer.load_state_dict(theirs.saved())
    for step in range(3, 3 + steps):
        for weight, gradient in zip(ours, gradients(step), strict=True):
            weight.grad = gradient
        optimizer.step()
        theirs.step(gradients(step))
    for weight, other in zip(ours, theirs.weights, strict=True):
        torch.testing.assert_close(weight.detach(), other, rtol=1e-12, atol=1e-12)
    return optimizer


@pytest.mark.parametrize("form", ["timm", "fleet"])
@pytest.mark.parametrize("lr_in_momentum", [True, False])
@pytest.mark.parametrize("kind", [foreigners.TimmLars, foreigners.ApexLars])
def test_lars_continues_wherever_the_learning_rate_stands(kind, form, lr_in_momentum):
    skipped = [{**GROUPS[0], **({"is_skipped": True} if kind is foreigners.ApexLars else {})}, GROUPS[1]]
    theirs = kind(SHAPES, skipped)
    # In Fleet's form a list says who has no ratio.
    more = {"exclude_from_weight_decay": ["1", "3"]} if form == "fleet" else {}
    optimizer = continued(theirs, lambda p: Lars(p, lr=7.0, form=form, lr_in_momentum=lr_in_momentum, **more))
    group = optimizer.param_groups[1]
    assert (group["lr"], group["lars_weight_decay"], group["lars_coeff"]) == (0.1, 0.05, 0.02)
    assert group["lr_in_momentum"] is lr_in_momentum
    assert not {"trust_coeff", "trust_coefficient", "weight_decay", "foreach", "is_skipped"} & set(group)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (foreigners.TimmLamb, "timm"),
        (foreigners.TimmLamb, "fleet"),
        (foreigners.ApexLamb, "timm"),
        (foreigners.ApexNvLamb, "nvlamb"),
        (foreigners.ApexMixedLamb, "timm"),
        (foreigners.LambOfStates, "timm"),
    ],
)
def test_lamb_continues_wherever_its_steps_were_counted(kind, form):
    theirs = kind(SHAPES, GROUPS)
    optimizer = continued(theirs, lambda p: Lamb(p, lr=7.0, form=form, max_grad_norm=3.0))
    group = optimizer.param_groups[1]
    assert (group["betas"], group["lamb_weight_decay"], group["max_grad_norm"]) == ((0.9, 0.99), 0.05, 1.0)
    states = [optimizer.state[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    assert all(state["step"].shape == () and state["step"] == 7 for state in states)
    assert "grad_averaging" not in group


def test_a_lamb_that_always_adapts():
    theirs = foreigners.TimmLamb(SHAPES, GROUPS, always_adapt=True)
    assert continued(theirs, lambda p: Lamb(p, form="timm")).param_groups[0]["always_adapt"] is True


def test_half_precision_states_become_full():
    theirs = foreigners.ApexLamb([(3,)], [{"params": [0]}])
    theirs.step([torch.ones(3, dtype=torch.float64)])
    theirs.state[0] = {name: value.half() for name, value in theirs.state[0].items()}
    weight = nn.Parameter(torch.ones(3).half())
    optimizer = Lamb([weight], form="timm")
    optimizer.load_state_dict(theirs.saved())
    assert optimizer.state[weight]["exp_avg"].dtype == torch.float32
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert optimizer.state[weight]["master"].dtype == torch.float32


@pytest.mark.parametrize(
    ("kind", "more", "make", "message"),
    [
        (foreigners.TimmLars, {"nesterov": True}, Lars, "group 0 .*nesterov=True, which our LARS does not have"),
        (foreigners.TimmLars, {"trust_clip": True}, Lars, "trust_clip=True"),
        (foreigners.TimmLamb, {"grad_averaging": False}, Lamb, "grad_averaging=False, which our LAMB does not have"),
        (foreigners.TimmLars, {"always_adapt": True}, Lars, r"had a trust ratio, .* none .*_adaptation=\[\]"),
        (foreigners.TimmLars, {}, Lamb, "has no 'decays', so no Lamb saved it: load a state that a Lamb saved, or tim"),
        (foreigners.TimmLamb, {}, Lars, "has no 'decays', so no Lars saved it"),
    ],
)
def test_what_means_something_else_is_refused(kind, more, make, message):
    theirs = kind(SHAPES, GROUPS, **more)
    theirs.step(gradients(0))
    groups = [{"params": [nn.Parameter(theirs.weights[number]) for number in g["params"]]} for g in theirs.groups]
    with pytest.raises(ValueError, match=message):
        make(groups, lr=0.1, form="timm").load_state_dict(theirs.saved())


def test_other_exclusions_are_refused_with_the_remedy():
    theirs = foreigners.ApexLars([(3,)], [{"params": [0], "is_skipped": True}])
    theirs.step([torch.ones(3, dtype=torch.float64)])
    weight = nn.Parameter(theirs.weights[0].clone())
    with pytest.raises(ValueError, match=r"had no trust ratio, and here it has one .*exclude_from_adaptation, a list"):
        Lars([weight], lr=0.1).load_state_dict(theirs.saved())
    with pytest.raises(ValueError, match="had weight decay for all its parameters, and 'w' is excluded from it here"):
        Lars([("w", weight)], lr=0.1, exclude_from_weight_decay=["w"]).load_state_dict(theirs.saved())
    optimizer = Lars([("w", weight)], lr=0.1, exclude_from_adaptation=["w"])
    optimizer.load_state_dict(theirs.saved())
    torch.testing.assert_close(optimizer.state[weight]["momentum_buffer"], -theirs.state[0]["momentum_buffer"])


def test_a_rate_of_zero_cannot_convert_a_buffer():
    theirs = foreigners.TimmLars([(3,)], [{"params": [0]}])
    theirs.step([torch.ones(3, dtype=torch.float64)])
    saved = theirs.saved()
    saved["param_groups"][0]["lr"] = 0.0
    weight = nn.Parameter(theirs.weights[0].clone())
    with pytest.raises(ValueError, match=r"converted by the learning rate .* is 0 here: .*lr_in_momentum=False"):
        Lars([weight], lr=0.1).load_state_dict(saved)
    Lars([weight], lr=0.1, form="timm").load_state_dict(saved)


def test_a_lamb_without_counts_is_refused():
    theirs = foreigners.ApexLamb([(3,)], [{"params": [0]}])
    theirs.step([torch.ones(3, dtype=torch.float64)])
    saved = theirs.saved()
    del saved["param_groups"][0]["step"]
    with pytest.raises(ValueError, match="needs the number of its steps.*write it into the saved group"):
        Lamb([nn.Parameter(theirs.weights[0])]).load_state_dict(saved)


@pytest.mark.parametrize("missing", ["exp_avg", "exp_avg_sq"])
def test_a_lamb_of_one_moment_is_refused(missing):
    theirs = foreigners.TimmLamb([(3,)], [{"params": [0]}])
    theirs.step([torch.ones(3, dtype=torch.float64)])
    saved = theirs.saved()
    del saved["state"][0][missing]
    with pytest.raises(
        ValueError, match=rf"has no '{missing}', and Lamb continues from 'exp_avg', .*load a whole state"
    ):
        Lamb([nn.Parameter(theirs.weights[0])], form="timm").load_state_dict(saved)


def test_what_was_loaded_is_not_written_to():
    theirs = foreigners.TimmLars([(3,)], [{"params": [0]}])
    theirs.step([torch.ones(3, dtype=torch.float64)])
    saved = theirs.saved()
    weight = nn.Parameter(theirs.weights[0].clone())
    optimizer = Lars([weight], lr=0.1, form="timm")
    optimizer.load_state_dict(saved)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert torch.equal(saved["state"][0]["momentum_buffer"], theirs.state[0]["momentum_buffer"])


@pytest.mark.parametrize("name", MAKERS)
def test_a_state_of_ours_from_before_there_were_two_lists_loads(name):
    model, twin = network(), network()
    optimizer, other = (MAKERS[name](m.parameters(), exclude_from_weight_decay=["bias"]) for m in (model, twin))
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        for later in ("adapts", "exclude_from_adaptation", "form", "zero_norm_lr", "max_grad_norm", "fused"):
            del group[later]
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(saved)
    for one, optim in ((model, optimizer), (twin, other)):
        train(one, optim, range(2, 4))
    for one, two in zip(values(model), values(twin), strict=True):
        assert torch.equal(one, two)


# timm itself, where it is installed.


@pytest.mark.parametrize("name", ["Lars", "Lamb"])
def test_a_state_of_timm_itself(name):
    timm = pytest.importorskip("timm.optim", exc_type=ImportError)
    torch.manual_seed(0)
    theirs = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES]
    settings = {"momentum": 0.9} if name == "Lars" else {}
    optimizer = getattr(timm, name)(theirs, lr=0.1, weight_decay=0.05, **settings)
    ours = None
    for step in range(6):
        if step == 3:
            ours = [nn.Parameter(weight.detach().clone()) for weight in theirs]
            loaded = {"Lars": Lars, "Lamb": Lamb}[name](ours, lr=1.0, form="timm")
            loaded.load_state_dict(optimizer.state_dict())
        for own, optim in ((theirs, optimizer), (ours, loaded if ours else None)):
            if own:
                for weight, gradient in zip(own, gradients(step), strict=True):
                    weight.grad = gradient.clone()
                optim.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
