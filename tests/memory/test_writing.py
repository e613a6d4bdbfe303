"""Operations that write to their inputs: at a segment's start, inside, across cuts, and to buffers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fleetx import memory
from tests.memory.comparing import STATES, Example, assert_exact, cycled, some_states
from tests.memory.test_structures import Layered, example, in_each_state, linear
from tests.memory.zoo import normal


def relu_module(model, x):
    return model.c(model.relu(model.b(model.relu(model.a(x)))))


def relu_function(model, x):
    return model.c(F.relu(model.b(F.relu(model.a(x), inplace=True)), True))


def augmented(model, x):
    hidden = model.a(x)
    hidden += x
    hidden *= 2
    return model.b(hidden) + model.c(hidden)


def assigned(model, x):
    hidden = model.a(x)
    hidden[:, 0] = 0
    hidden[:, 1:2] = model.b(x)[:, 1:2]
    return model.c(hidden).sin()


def through_a_view(model, x):
    hidden = model.a(x)
    part = hidden[:, :2]
    part.mul_(3)
    return model.c(hidden) + model.b(hidden + 1)


def read_before_and_after(model, x):
    hidden = model.a(x)
    before = hidden * 2
    hidden.add_(1)
    between = model.b(before + hidden)
    hidden.mul_(0.5)
    return model.c(between) + hidden


def two_views_of_one_memory(model, x):
    left, right = model.a(x).chunk(2, -1)
    whole = model.b(torch.cat([left, right], -1))
    left = whole[:, :2].detach()
    both = whole + 0
    left.add_(1)
    return model.c(both * whole.detach() + whole.detach()[:, :1] * left[:, 1:])


def with_out(model, x):
    hidden = model.a(x).detach()
    other = torch.empty_like(hidden)
    torch.mul(hidden, 2, out=other)
    y = model.b(x * other)
    torch.mul(other, 3, out=other)
    return model.c(y * other)


def later_segment_writes_what_an_earlier_one_read(model, x):
    time = torch.zeros(3, 1)
    x = model.a(x)
    for _ in range(4):
        x = model.b(x * torch.cos(time))
        time += 0.5
    return model.c(x) * time


def a_module_of_a_later_segment_writes(model, x):
    shift = model.a(x).detach() * 1
    y = model.b(x + shift)
    model.adds(shift)
    y = model.c(y + shift)
    model.adds(shift)
    return model.d(y * shift)


def without_gradient(model, x):
    y = model.a(x)
    with torch.no_grad():
        y.clamp_(-0.5, 0.5)
    return model.c(model.b(y) * y)


def to_the_input(model, x):
    y = model.a(x * 2)
    x.add_(1)
    y = model.b(y + x)
    x.mul_(2)
    return model.c(y + x)


class Adds(nn.Module):
    def forward(self, x):
        x.add_(1)


FORWARDS = [
    relu_module,
    relu_function,
    augmented,
    assigned,
    through_a_view,
    read_before_and_after,
    two_views_of_one_memory,
    with_out,
    later_segment_writes_what_an_earlier_one_read,
    a_module_of_a_later_segment_writes,
    without_gradient,
    to_the_input,
]


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("cuts", [["a"], ["b"], ["a", "b", "c"], ["a", "c"]], ids="-".join)
def test_writing_in_place(forward, cuts):
    in_each_state(lambda: example(forward, relu=nn.ReLU(inplace=True), adds=Adds()), cuts)


def test_a_block_that_begins_by_writing_to_its_input():
    def block():
        return nn.Sequential(nn.ReLU(inplace=True), linear(), nn.Dropout(0.3, inplace=True))

    def forward(model, x):
        hidden = model.a(x)
        for name in ("first", "second", "third"):
            hidden = model.get_submodule(name)(hidden)
        return model.b(hidden)

    blocks = {name: block() for name in ("first", "second", "third")}
    for cuts in (["first", "second", "third"], ["a", "second"], ["first.1", "second.0", "third.2"]):
        in_each_state(lambda: example(forward, **blocks), cuts)


def test_a_convolution_that_is_cut_off_from_the_activation_that_writes_to_it():
    def make():
        torch.manual_seed(0)
        layers = [nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1)]
        layers += [nn.BatchNorm2d(4), nn.ReLU6(inplace=True), nn.Conv2d(4, 2, 1), nn.Hardswish(inplace=True)]
        return Example(nn.Sequential(*layers), lambda step: (normal(step, 2, 2, 6, 6),))

    in_each_state(make, ["0", "2", "5"])
    in_each_state(make, ["1", "3", "4"])


class Wrong(nn.Module):
    """Writes to what autograd saved: plain torch refuses the backward."""

    def __init__(self, right):
        super().__init__()
        self.linear = linear()
        nn.init.eye_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.right = right

    def forward(self, x):
        hidden = self.linear(x).exp()
        hidden = hidden.clone() if self.right else hidden
        hidden.add_(1)
        return hidden * 2


@pytest.mark.parametrize("where", ["in a module", "between modules"])
def test_writing_to_what_autograd_saved_never_gives_wrong_gradients(where):
    """Plain torch refuses. A repetition that has the values from before the write may give the right ones."""

    def between(model, x, right):
        hidden = model.a(x).sigmoid()
        hidden = hidden.clone() if right else hidden
        hidden.mul_(2)
        return model.b(hidden) * 2

    def inside(model, x, right):
        model.wrong.right = right
        return model.b(model.wrong(model.a(x)))

    forward = inside if where == "in a module" else between
    right = example(forward, wrong=Wrong(True))
    right.loss(right.model(*right.batch(0), True)).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        right.loss(right.model(*right.batch(0), False)).backward()
    refused = 0
    for cuts in (["a"], ["b"], ["a", "b"], ["wrong"] if forward is inside else [":sigmoid"]):
        for states in some_states():
            made = example(forward, wrong=Wrong(False))
            memory.apply(made.model, cycled(cuts, states))
            for _ in range(2):
                made.model.zero_grad()
                try:
                    made.loss(made.model(*made.batch(0), False)).backward()
                except RuntimeError as error:
                    assert "modified by an inplace operation" in str(error)  # noqa: PT017
                    refused += 1
                else:
                    assert torch.equal(made.model.a.weight.grad, right.model.a.weight.grad)
    assert refused > 5


@pytest.mark.parametrize("state", STATES)
def test_a_container_that_writes_to_its_own_buffers(state):
    class Own(Layered):
        def __init__(self):
            super().__init__(Own.run)
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("var", torch.ones(4))
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
            self.register_buffer("scale", torch.ones(4))
            self.register_buffer("replaced", torch.ones(4))

        def run(self, x):
            hidden = self.a(x * self.scale)
            self.scale.mul_(1.1)
            hidden = F.batch_norm(hidden, self.mean, self.var, training=self.training)
            self.count += 1
            hidden = self.b(hidden) + self.mean
            self.replaced = 0.9 * self.replaced + 0.1 * hidden.detach().mean(0)
            return self.c(hidden * self.replaced) / self.count

    for cuts in (["a"], ["b"], ["a", "b", "c"], [":batch_norm"], [":mul", ":batch_norm", ":mul_1"]):
        torch.manual_seed(0)
        made = Example(Own(), lambda step: (normal(step, 3, 4),))
        made.model.run = made.model.run.__func__ if hasattr(made.model.run, "__func__") else made.model.run
        assert_exact(made, cycled(cuts, STATES[state]))


@pytest.mark.middle
@pytest.mark.parametrize("state", STATES)
def test_a_buffer_that_one_module_changes_and_others_read(state):
    class Book(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()
            self.register_buffer("codes", torch.ones(4))

        def forward(self, x):
            hidden = self.linear(x) * self.codes.clone()
            self.codes.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
            return hidden

    class Shares(nn.Module):
        def __init__(self, codes):
            super().__init__()
            self.linear = linear()
            self.register_buffer("codes", codes)

        def forward(self, x):
            return self.linear(x) + self.codes

    def forward(model, x):
        hidden = model.a(x) * model.norm.running_mean.exp().clone() + model.book.codes
        hidden = model.norm(model.book(hidden))
        hidden = model.shares(hidden) + model.book.codes * model.norm.running_mean
        return model.b(model.norm(hidden))

    for cuts in (["a"], ["book"], ["a", "book", "norm", "shares"], ["shares"], ["norm"]):
        torch.manual_seed(0)
        book = Book()
        made = example(forward, book=book, shares=Shares(book.codes), norm=nn.BatchNorm1d(4))
        assert_exact(made, cycled(cuts, STATES[state]))


def test_parameters_that_are_written_to_between_forward_and_backward_are_noticed():
    """Plain torch notices only what it saved, which a bias is not. With another bias gradients would be wrong."""
    made = example(lambda model, x: model.c(model.b(model.a(x).relu()).relu()))
    memory.apply(made.model, ["a", "b"])
    loss = made.loss(made.model(*made.batch(0)))
    with torch.no_grad():
        made.model.a.bias += 1
    with pytest.raises(RuntimeError, match="changed between the forward and the backward"):
        loss.backward()


def test_inputs_that_are_written_to_between_forward_and_backward_are_noticed():
    made = example(lambda model, x: model.c(model.b(model.a(x * 2).relu()).relu()))
    memory.apply(made.model, ["a", "b"])
    (inputs,) = made.batch(0)
    loss = made.loss(made.model(inputs))
    inputs.add_(1)
    with pytest.raises(RuntimeError, match="written in place between its forward and its backward"):
        loss.backward()


@pytest.mark.parametrize("state", ["inputs", "dear-host"])
def test_a_module_that_changes_its_own_parameters_keeps_everything_and_says_so(state):
    class Shrinks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, x):
            with torch.no_grad():
                self.linear.weight.mul_(0.9)
            return self.linear(x).tanh()

    made = example(lambda model, x: model.b(model.shrinks(model.a(x)).sin()), shrinks=Shrinks())
    with pytest.warns(UserWarning, match="ends at shrinks keeps everything.*a Shrinks changed its parameters") as seen:
        assert_exact(made, cycled(["a", "shrinks", "b"], STATES[state]), steps=5)
    assert len(seen) == 1


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(8, 16), kind(16, 16), nn.Linear(16, 1)

    def forward(self, x):
        hidden = self.cell(self.first(x))
        return self.last(hidden[0] if isinstance(hidden, tuple) else hidden)


@pytest.mark.parametrize("kind", [nn.GRU, nn.GRUCell, nn.LSTM, nn.LSTMCell, nn.RNN])
def test_dear_outputs_that_are_written_to_unseen_are_computed_again(kind):
    """A GRU cuts what it multiplied into parts that do not share a version with it, and writes to these."""

    def made(save):
        torch.manual_seed(0)
        model = Recurrent(kind)
        if save:
            memory.apply(model, [memory.Segment("cell", save=save)])
        torch.manual_seed(1)
        for _ in range(6):
            model(torch.randn(*((3,) if kind in (nn.GRUCell, nn.LSTMCell) else (5, 3)), 8)).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(made("dear"), made(None), strict=True))


class WritesOn(nn.Module):
    def forward(self, x):
        x += 1
        return x


def test_memory_to_which_a_module_and_then_its_container_write_in_one_segment():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.same, self.writes = nn.Linear(4, 4), nn.Identity(), WritesOn()
            self.last = nn.Linear(4, 4)

        def forward(self, x):
            x = self.same(self.first(x))
            y = self.writes(x)
            y *= 2
            return self.last(y)

    assert_exact(Example(Both(), lambda step: (normal(step, 3, 4),)), ["first", "last"])
