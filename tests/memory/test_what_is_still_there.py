"""What a module held in its last forward is not noted anew: unless something is different, of whatever kind."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from fleetx import memory
from fleetx.memory import structures
from fleetx.memory.attributes import is_unchanged
from fleetx.memory.tape import pointer_of
from tests.memory.comparing import STATES, assert_equal_outcomes, cycled, descend, step, sum_of_squares
from tests.memory.zoo import normal


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.low, self.high = 0.5, 2.0
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        extra = self.extra(x) if hasattr(self, "extra") else 0
        return self.linear(x).tanh() * self.low + self.high * self.shift + extra


def exchange(module):
    """The same objects under each other's names, in the same order of values."""
    low, high = module.low, module.high
    del module.low, module.high
    module.high, module.low = low, high


def other_weight(module):
    module.linear.weight = nn.Parameter(module.linear.weight.detach() * 2)


def other_memory(module):
    module.linear.weight.data = module.linear.weight.data * 2


def written(module):
    with torch.no_grad():
        module.linear.weight *= 2


def renamed(module):
    """Another buffer in its place, and the old one under another name."""
    module.register_buffer("before", module.shift)
    module.shift = torch.full((4,), 3.0)


CHANGES = {
    "a value": lambda module: setattr(module, "low", 0.25),
    "a new value": lambda module: setattr(module, "extra", torch.sin),
    "no value any more": lambda module: (delattr(module, "high"), setattr(module, "high", 5.0)),
    "exchanged values": exchange,
    "another mode": lambda module: module.eval(),
    "another weight": other_weight,
    "other memory": other_memory,
    "a weight that is written to": written,
    "a buffer that is written to": lambda module: module.shift.mul_(2),
    "another buffer": renamed,
    "one more module": lambda module: setattr(module, "extra", nn.Linear(4, 4, bias=False)),
    "another module": lambda module: setattr(module, "linear", nn.Linear(4, 4)),
}


def models():
    torch.manual_seed(0)
    plain = nn.Sequential(*(Scaled() for _ in range(3)))
    ours = copy.deepcopy(plain)
    memory.apply(ours, cycled(["0", "1"], STATES["inputs"]))
    return plain, ours


def outcome(model, number):
    torch.manual_seed(number)
    return step(model, (normal(number, 3, 4),), sum_of_squares)


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_after_some_steps_is_noticed(change):
    plain, ours = models()
    for number in range(8):
        if number in (4, 6):
            for model in (plain, ours):
                torch.manual_seed(number)
                CHANGES[change](model[1])
        assert_equal_outcomes(outcome(ours, number), outcome(plain, number))


@pytest.mark.parametrize("change", ["a value", "no value any more", "exchanged values", "another weight"])
def test_what_changes_between_a_later_forward_and_its_backward_is_as_it_was(change):
    plain, ours = models()
    for number in range(3):
        assert_equal_outcomes(outcome(ours, number), outcome(plain, number))
    gradients = []
    for model in (plain, ours):
        weights = [(name, weight) for name, weight in model.named_parameters() if not name.startswith("1.linear")]
        for _, weight in weights:
            weight.grad = None
        loss = sum_of_squares(model(normal(9, 3, 4)))
        CHANGES[change](model[1])
        loss.backward()
        gradients.append({name: weight.grad for name, weight in weights})
        descend(model)
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name
    assert_equal_outcomes(outcome(ours, 10), outcome(plain, 10))


def an_attribute(module):
    module.cache = torch.ones(3, requires_grad=True).exp()
    return lambda: (module.cache, delattr(module, "cache"))[0]


def a_weight(module):
    weight = nn.Parameter(torch.ones(4, 4))
    return lambda: (module.linear.weight, setattr(module.linear, "weight", weight))[0]


def a_buffer(module):
    return lambda: (module.shift, setattr(module, "shift", torch.zeros(4)))[0]


def a_module(module):
    return lambda: (module.linear.weight, setattr(module, "linear", nn.Linear(4, 4)))[0]


@pytest.mark.parametrize("is_in_another_mode", [False, True])
@pytest.mark.parametrize("thing", [an_attribute, a_weight, a_buffer, a_module])
def test_what_a_module_let_go_of_does_not_live_on(thing, is_in_another_mode):
    """Not even until the next forward: an attribute may hold what is large, and a whole graph."""
    _, ours = models()
    for number in range(4):
        outcome(ours, number)
    let_go = thing(ours[1])
    outcome(ours, 5)
    if is_in_another_mode:
        ours.eval()
        outcome(ours, 6)
    held = StorageWeakRef(let_go().untyped_storage())
    assert held.expired()


def test_a_module_that_is_exchanged_between_forward_and_backward_is_noticed():
    _, ours = models()
    for number in range(3):
        outcome(ours, number)
    loss = sum_of_squares(ours(normal(9, 3, 4)))
    ours[1].linear = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="a module was taken out of a Scaled, or exchanged, between the forward and"):
        loss.backward()


@pytest.mark.parametrize("is_written", [False, True])
def test_a_buffer_that_is_deleted_between_forward_and_backward_stays_deleted(is_written):
    plain, ours = models()
    for model in (plain, ours) if is_written else ():
        model[1].register_forward_pre_hook(lambda module, _: (module.shift.add_(1), None)[1])
    for number in range(3):
        assert_equal_outcomes(outcome(ours, number), outcome(plain, number))
    gradients = []
    for model in (plain, ours):
        model.zero_grad()
        loss = sum_of_squares(model(normal(9, 3, 4)))
        del model[1].shift
        loss.backward()
        assert "shift" not in dict(model[1].named_buffers(remove_duplicate=False))
        assert "shift" not in model[1]._buffers
        gradients.append([weight.grad for weight in model.parameters()])
    assert all(map(torch.equal, *gradients))


class Growing(nn.Module):
    """Makes what it needs when it is first called."""

    def forward(self, x):
        if not hasattr(self, "linear"):
            torch.manual_seed(1)
            self.linear = nn.Linear(4, 4)
        return self.linear(x).tanh()


def test_a_module_that_grows_in_its_first_forward():
    plain, ours = (nn.Sequential(Scaled(), Growing(), Scaled()) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    memory.apply(ours, cycled(["0", "1"], STATES["inputs"]))
    for number in range(4):
        assert_equal_outcomes(outcome(ours, number), outcome(plain, number))


def test_statistics_that_are_counted_from_now_on_are_counted_once():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)), nn.Linear(4, 4))
    ours = copy.deepcopy(plain)
    memory.apply(ours, cycled(["0", "1"], STATES["inputs"]))
    for number in range(6):
        for model in (plain, ours):
            model[1][0].track_running_stats = number > 2
        mine, theirs = (step(model, (normal(number, 3, 4),), sum_of_squares, update=False) for model in (ours, plain))
        assert_equal_outcomes(mine, theirs)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_scripted_modules_in_a_segment():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(torch.jit.script(nn.GELU()), nn.Linear(4, 4)), nn.Linear(4, 4))
    ours = nn.Sequential(*plain)
    applied = memory.apply(ours, cycled(["0", "1"], STATES["inputs"]))
    mine = [step(ours, (normal(number, 3, 4),), sum_of_squares, update=False) for number in range(4)]
    applied.remove()
    for number, one in enumerate(mine):
        assert_equal_outcomes(one, step(plain, (normal(number, 3, 4),), sum_of_squares, update=False))


def test_weights_whose_memory_comes_later_are_looked_after_from_then_on():
    """As those of sharded models: noted without memory once, they have some in the next forward."""
    _, ours = models()
    weight = ours[1].linear.weight
    for number in range(3):
        outcome(ours, number)
    filled = weight.data
    weight.data = torch.empty(0)
    fill = ours[1].register_forward_pre_hook(lambda *_: setattr(weight, "data", filled), prepend=False)
    outcome(ours, 3)
    fill.remove()
    outcome(ours, 4)
    loss = sum_of_squares(ours(normal(9, 3, 4)))
    weight.data = filled * 2
    with pytest.raises(RuntimeError, match="'weight' of a Linear was changed between the forward and the backward"):
        loss.backward()


def test_structures_with_names_that_are_no_text_are_not_remembered():
    before = len(structures._common)
    for number in range(100):
        structures.flatten(((), {number: 1}))
        structures.flatten(((1,), {f"name {number}": 1}))
    assert len(structures._common) - before <= 64


def test_attributes_are_the_same_if_names_and_objects_are():
    value = object()
    assert is_unchanged({"a": value, "b": 1}, {"a": value, "b": 1})
    assert not is_unchanged({"a": value}, {"a": value, "b": 1})
    assert not is_unchanged({"a": object()}, {"a": value})
    assert not is_unchanged({"b": value, "a": None}, {"a": value, "b": None})
    assert is_unchanged({}, {})


tensors = st.builds(torch.zeros, st.integers(0, 2))
atoms = st.one_of(tensors, st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=2))
nested = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    ),
    max_leaves=6,
)
arguments = st.tuples(st.lists(nested, max_size=3).map(tuple), st.dictionaries(st.text(max_size=2), nested, max_size=3))


@given(st.one_of(nested, arguments, st.lists(atoms, max_size=80).map(tuple)))
def test_common_structures_are_flattened_as_all_others(value):
    flat, structure = structures.flatten(value)
    expected, tree = pytree.tree_flatten(value)
    assert len(flat) == len(expected)
    assert all(one is other for one, other in zip(flat, expected, strict=True))
    assert structure.tree == tree
    again = structures.unflatten(flat, structure)
    assert pytree.tree_structure(again) == tree
    assert all(one is other for one, other in zip(pytree.tree_leaves(again), expected, strict=True))
    assert list(map(id, structures.tensors_in(value))) == [id(one) for one in expected if isinstance(one, Tensor)]


def test_where_memory_begins_is_known_without_asking_the_storage():
    whole = torch.zeros(6, 4)
    begins = whole.untyped_storage().data_ptr()
    parts = [whole, whole[2:], whole.t(), whole[1, 2:], whole[3:3], whole[1:].view(torch.int16), whole.detach()]
    assert [pointer_of(part) for part in parts] == [begins] * len(parts)
    assert pointer_of(torch.empty(0)) is None
    assert pointer_of(torch.empty(3, device="meta")) is None
    assert pointer_of(torch.eye(2).to_sparse()) is None
