"""A model's names mean the same with and without DistributedDataParallel, DataParallel or compile around it."""

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fleetx as X
from fleetx import memory, names
from fleetx.amp.precision import _named_modules
from fleetx.memory.names import find_cuts
from fleetx.memory.states import Segment
from fleetx.optim import Lamb, Lars, Muon
from fleetx.wrapped_names import modules_called, unwrapped, unwrapped_pattern


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make():
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    parts = {"first": nn.Linear(4, 8), "norm": nn.LayerNorm(8), "head": head, "last": nn.Linear(8, 2)}
    return nn.Sequential(OrderedDict(parts))


WRAPPERS = {
    "plain": lambda net: net,
    "ddp": DistributedDataParallel,
    "data parallel": nn.DataParallel,
    "compiled": lambda net: torch.compile(net, backend="eager"),
    "ddp of compiled": lambda net: DistributedDataParallel(torch.compile(net, backend="eager")),
}
wrapped = pytest.mark.parametrize(
    "wrapper",
    [pytest.param(one, id=name, marks=[pytest.mark.middle] * ("compiled" in name)) for name, one in WRAPPERS.items()],
)


def excluded(optimizer):
    return [decays for group in optimizer.param_groups for decays in group["decays"]]


@wrapped
@pytest.mark.parametrize("pattern", ["head.*", "first.weight", "*.bias"])
def test_patterns_take_the_same_parameters(wrapper, pattern):
    plain = excluded(Lamb(make().named_parameters(), lr=0.1, exclude_from_weight_decay=[pattern]))
    assert len(set(plain)) == 2
    model = wrapper(make())
    for prefix in ("", "module.", "_orig_mod.", "module._orig_mod."):
        given = Lamb(model.named_parameters(), lr=0.1, exclude_from_weight_decay=[prefix + pattern])
        assert excluded(given) == plain
        names.record(model)
        assert excluded(Lars(model.parameters(), lr=0.1, exclude_from_weight_decay=[prefix + pattern])) == plain


@wrapped
def test_what_takes_nothing_takes_nothing_wrapped(wrapper):
    """`module` is no part of the model's own names, so it is no pattern that takes them all."""
    for pattern in ("module", "module.missing.*", "_orig_mod"):
        with pytest.raises(ValueError, match=f"{pattern}.* matches no parameter.*nearest names are: (?!module)"):
            Lamb(wrapper(make()).named_parameters(), lr=0.1, exclude_from_weight_decay=[pattern])


def test_a_module_of_the_models_own_that_is_called_module_counts():
    own = ["module.weight", "other.weight"]
    assert unwrapped(own) == own
    assert unwrapped_pattern("module.*", own) == "module.*"
    assert unwrapped_pattern("module.", ["a"]) == "module."
    parameters = [(name, nn.Parameter(torch.ones(2, 2))) for name in own]
    assert excluded(Lamb(parameters, lr=0.1, exclude_from_weight_decay=["module.*"])) == [False, True]


@wrapped
def test_an_optimizers_state_goes_on_with_and_without(wrapper):
    def optimizer(model):
        names.record(model)
        return Muon(model.named_parameters(), lr=0.1, adamw_lr=0.1, exclude_from_weight_decay=["head.*"])

    saved = optimizer(wrapper(make())).state_dict()
    mine = optimizer(make())
    mine.load_state_dict(saved)
    optimizer(wrapper(make())).load_state_dict(mine.state_dict())
    other = wrapper(make())
    turned = Muon(list(other.named_parameters())[::-1], lr=0.1, adamw_lr=0.1, exclude_from_muon=[])
    with pytest.raises(ValueError, match="of another order of parameters"):
        turned.load_state_dict(saved)


@pytest.mark.parametrize("wrapper", [WRAPPERS["plain"], WRAPPERS["ddp"]], ids=["plain", "ddp"])
@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("pattern", ["head", "head.*", "**.0"])
def test_recompute_cuts_at_the_same_modules(wrapper, prefix, pattern):
    batch, found = torch.randn(3, 4), []
    for cut in (None, [prefix + pattern]):
        model = wrapper(make())
        if cut:
            until = {name.removeprefix("module.") for name in find_cuts(model, [Segment(*cut)]).modules}
            assert until == {"head": {"head"}, "head.*": {"head.0", "head.1"}, "**.0": {"head.0"}}[pattern]
            memory.apply(model, cut)
        model(batch).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@wrapped
def test_modules_are_called_by_either_name(wrapper):
    model, plain = wrapper(make()), make()
    for pattern in ("head.0", "head.*", "*"):
        expected = [type(part) for part in _named_modules(plain, [pattern], "custom_black_list")]
        for prefix in ("", "module.", "_orig_mod."):
            found = _named_modules(model, [prefix + pattern], "custom_black_list")
            assert [type(part) for part in found] == expected


def test_a_wrapper_itself_is_called_where_nothing_else_is_meant():
    equal = str.__eq__
    assert modules_called("module", ["", "module", "module.a"], equal) == ["module"]
    assert modules_called("module", ["", "a"], equal) == []
    assert modules_called("", [""], equal) == [""]


@wrapped
def test_checkpoints_go_on_with_and_without(wrapper, tmp_path):
    for number, (first, then) in enumerate([(make(), wrapper(make())), (wrapper(make()), make())]):
        with torch.no_grad():
            next(first.parameters()).fill_(7.0)
        place = tmp_path / str(number)
        saving = X.Checkpoints(place, model=first)
        saving.save(step=1)
        saving.wait()
        assert X.Checkpoints(place, model=then).resume().step == 1
        assert next(then.parameters()).eq(7.0).all()
