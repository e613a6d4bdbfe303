"""What modules keep in attributes, and what they write to their parameters, behind torch's back or not."""

import copy
from typing import NamedTuple

import pytest
import torch
from torch import nn

from fleetx import memory
from tests.memory.comparing import STATES, Census, assert_exact, cycled, some_states, step
from tests.memory.test_structures import example, in_each_state, linear
from tests.memory.zoo import normal


class Stateful(nn.Module):
    """What it gives depends on what it gave before."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def state(self, x):
        raise NotImplementedError

    def keep(self, y):
        raise NotImplementedError

    def forward(self, x):
        state = self.state(x)
        y = (self.linear(x) + state).tanh() * state.add(1)
        self.keep(y)
        return y


class Replacing(Stateful):
    def __init__(self):
        super().__init__()
        self.h = torch.zeros(3, 4)

    def state(self, x):
        return self.h

    def keep(self, y):
        self.h = y.detach()


class Private(Stateful):
    def state(self, x):
        return getattr(self, "_h", torch.ones_like(x))

    def keep(self, y):
        self._h = y.detach()


class Writing(Replacing):
    def keep(self, y):
        self.h.copy_(y.detach())


class WritingData(Replacing):
    def keep(self, y):
        self.h.data.copy_(y.detach())


class Pair(NamedTuple):
    h: torch.Tensor
    c: torch.Tensor


class InTuple(Stateful):
    def __init__(self):
        super().__init__()
        self.pair = Pair(torch.zeros(3, 4), torch.ones(3, 4))

    def state(self, x):
        return self.pair.h * self.pair.c

    def keep(self, y):
        self.pair = Pair(y.detach(), y.detach().sin())


class InDict(Stateful):
    def __init__(self):
        super().__init__()
        self.cache = {"steps": [torch.zeros(3, 4)]}

    def state(self, x):
        return sum(self.cache["steps"]) / len(self.cache["steps"])

    def keep(self, y):
        self.cache["steps"].append(y.detach())


class WithGraph(Replacing):
    """A graph through two calls of a step, not through steps."""

    def keep(self, y):
        self.h = y if self.h.grad_fn is None else y.detach()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4)
        self.state = None

    def forward(self, x):
        hidden, state = self.lstm(x.unsqueeze(1), self.state)
        self.state = tuple(one.detach() for one in state)
        return hidden.squeeze(1)


KINDS = [Replacing, Private, Writing, WritingData, InTuple, InDict, WithGraph, Recurrent]


@pytest.mark.middle
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_outlives_a_forward(kind):
    def forward(model, x):
        return model.c(model.state(model.b(model.state(model.a(x)))).tanh())

    for cuts in (["a", "state", "b"], ["b"], ["c"]):
        in_each_state(lambda: example(forward, state=kind()), cuts, steps=4)


def test_a_state_with_a_graph_is_not_kept_alive_by_what_reads_it():
    def forward(model, x):
        return model.c(model.state(model.b(model.state(model.a(x)))).tanh())

    made = example(forward, state=WithGraph())
    applied = memory.apply(made.model, ["a", "state", "b"])
    for _ in range(2):
        with Census() as census:
            made.model(*made.batch(0))  # and no backward
        made.model.state.h = torch.zeros(3, 4)
        assert census.in_use(applied) == 0


class Moody(nn.Module):
    """Depends on whether it is trained, and on a scale that somebody sets."""

    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.scale = 1.0

    def forward(self, x):
        return (self.linear(x) * self.scale * (2 if self.training else 1)).tanh()


def evaluate(model):
    model.eval()


def set_scale(model):
    for module in model.modules():
        if isinstance(module, Moody):
            module.scale *= 2


def replace_state(model):
    for module in model.modules():
        if isinstance(module, Replacing):
            module.h = torch.full((3, 4), 7.0)


@pytest.mark.parametrize(
    ("make", "between"),
    [
        (Moody, evaluate),
        (Moody, set_scale),
        (lambda: nn.Dropout(0.5), evaluate),
        (lambda: nn.BatchNorm1d(4), evaluate),
        (Replacing, replace_state),
    ],
)
def test_modules_may_change_between_forward_and_backward(make, between):
    def forward(model, x):
        return model.c(model.one(model.b(model.other(model.a(x)))).sin())

    for states in some_states():
        made = example(forward, one=make(), other=make())
        plain = copy.deepcopy(made.model)
        memory.apply(made.model, cycled(["a", "one", "other", "b"], states))
        for number in range(3):
            found = []
            for model in (plain, made.model):
                model.train()
                model.zero_grad()
                torch.manual_seed(number)
                loss = made.loss(model(*made.batch(number)))
                between(model)
                loss.backward()
                found.append([*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()])
                assert [m.training for m in model.modules()].count(True) in (0, len(list(model.modules())))
            assert all(map(torch.equal, *found))


def test_a_tensor_in_an_attribute_that_is_written_to_between_forward_and_backward_is_noticed():
    def forward(model, x):
        return model.b(model.state(model.a(x)))

    made = example(forward, state=Replacing())
    memory.apply(made.model, ["a", "state"])
    for number in range(2):
        before = made.model.state.h
        loss = made.loss(made.model(*made.batch(number)))
        before.add_(1)
        with pytest.raises(
            RuntimeError, match="'h' of a Replacing was written to between the forward and the backward"
        ):
            loss.backward()


class Normed(nn.Module):
    """Changes its weight by `change` in each forward."""

    def __init__(self, change):
        super().__init__()
        self.weight = nn.Parameter(normal(1, 4, 4))
        self.change = change

    def forward(self, x):
        self.change(self.weight)
        return nn.functional.linear(x, self.weight).tanh()


def replace_data(weight):
    weight.data = weight.data * 0.9


def decay(weight):
    weight.data.mul_(0.9)


def decay_without_gradient(weight):
    with torch.no_grad():
        weight.mul_(0.9)


@pytest.mark.filterwarnings("ignore:the segment that ends at .* keeps everything")
@pytest.mark.parametrize("change", [replace_data, decay, decay_without_gradient])
def test_a_module_that_writes_to_its_weight_writes_once(change):
    def forward(model, x):
        return model.c(model.normed(model.b(model.a(x).tanh())).sin())

    def trained(*args):
        outcome = step(*args)
        outcome.buffers |= {name: p.detach().clone() for name, p in args[0].named_parameters()}
        return outcome

    for cuts in (["a", "normed"], ["c"]):
        for states in some_states():
            assert_exact(example(forward, normed=Normed(change)), cycled(cuts, states), step=trained, steps=4)


@pytest.mark.parametrize("state", STATES)
def test_weights_that_are_not_numbers_are_not_taken_for_changed(state):
    def forward(model, x):
        return model.c(model.b(model.a(x).tanh()))

    made = example(forward)
    with torch.no_grad():
        made.model.b.weight[0, 0] = float("nan")
    assert_exact(made, cycled(["a", "b"], STATES[state]))  # warnings are errors


def test_other_memory_for_a_weight_between_forward_and_backward_is_noticed():
    def forward(model, x):
        return model.c(model.b(model.a(x).tanh()).tanh())

    made = example(forward)
    memory.apply(made.model, ["a", "b"])
    for number in range(2):
        loss = made.loss(made.model(*made.batch(number)))
        made.model.b.weight.data = made.model.b.weight.data * 2
        with pytest.raises(RuntimeError, match="'weight' of a Linear was changed between the forward and the backward"):
            loss.backward()
