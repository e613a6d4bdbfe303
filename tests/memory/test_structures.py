"""What goes into and out of modules: any structure, any number, any kind of object."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import memory
from tests.memory.comparing import STATES, Example, assert_exact, cycled, some_states, sum_of_squares
from tests.memory.zoo import normal


def linear(width=4):
    return nn.Linear(width, width)


class Layered(nn.Module):
    """Modules `a`, `b`, `c`, `d` for a forward that is given as a function."""

    def __init__(self, forward, **modules):
        super().__init__()
        for name in "abcd":
            self.add_module(name, modules.get(name) or linear())
        for name, module in modules.items():
            self.add_module(name, module)
        self.run = forward

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


def example(forward, *shape, loss=None, **modules):
    torch.manual_seed(0)
    return Example(Layered(forward, **modules), lambda step: (normal(step, *(shape or (3, 4))),), loss=loss)


def in_each_state(make, cuts, **options):
    for states in some_states():
        assert_exact(make(), cycled(cuts, states), **options)


class Many(nn.Module):
    """Takes and gives a bit of everything."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, first, pair, *, named, scale: float, mode: str, nothing=None, flag=True):
        assert nothing is None
        assert mode == "wide"
        assert flag
        left, (right, text) = pair
        assert text == "text"
        hidden = self.linear(first) * scale + left * named["x"] + right
        return {"hidden": hidden, "rest": [hidden.relu(), (None, 3, "kept"), {"deep": left.exp()}]}


def test_nested_structures_keyword_arguments_and_values_that_are_no_tensors():
    def forward(model, x):
        y = model.a(x)
        out = model.many(y, (x, (model.b(y), "text")), named={"x": y.sigmoid()}, scale=0.5, mode="wide")
        z = model.c(out["hidden"] + out["rest"][0])
        out = model.many(z, (out["rest"][2]["deep"], (y, "text")), named={"x": z}, scale=2.0, mode="wide", flag=True)
        assert out["rest"][1] == (None, 3, "kept")
        return out

    in_each_state(lambda: example(forward, many=Many()), ["a", "many", "c"])


@dataclass
class Record:
    hidden: Tensor
    extra: dict
    count: int = 0


class Plain:
    """An object that torch knows nothing of."""

    def __init__(self, tensors, name):
        self.tensors = tensors
        self.name = name


class GivesRecord(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear = linear()
        self.kind = kind

    def forward(self, x):
        hidden = self.linear(x).tanh()
        if self.kind == "dataclass":
            return Record(hidden, {"twice": hidden * 2}, 3)
        return Plain([hidden, hidden * 2], "plain")


class TakesRecord(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, record):
        if isinstance(record, Record):
            return self.linear(record.hidden * record.count + record.extra["twice"].sin())
        return self.linear(record.tensors[0] + record.tensors[1].sin())


@pytest.mark.parametrize("kind", ["dataclass", "plain"])
def test_objects_that_hold_tensors_go_in_and_out(kind):
    def forward(model, x):
        record = model.gives(model.a(x).relu())
        y = model.takes(record)
        z = model.b(y * (record.hidden if kind == "dataclass" else record.tensors[0]))
        return model.takes(record) + z, model.c(z)

    make = lambda: example(forward, gives=GivesRecord(kind), takes=TakesRecord())  # noqa: E731
    for cuts in (["a", "gives", "takes", "b"], ["takes"], ["b", "c"]):
        in_each_state(make, cuts)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


def test_named_tuples_and_a_model_that_gives_an_object():
    class Splits(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 8)

        def forward(self, x):
            return Pair(*self.linear(x).chunk(2, -1))

    def forward(model, x):
        pair = model.splits(x)
        assert isinstance(pair, Pair)
        return Record(model.a(pair.left * pair.right), {"right": model.b(pair.right)})

    def loss(record):
        return sum_of_squares([record.hidden, record.extra["right"]])

    in_each_state(lambda: example(forward, splits=Splits(), loss=loss), ["splits", "a"])


class TakesPacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, packed):
        output, _ = self.lstm(packed)
        return output


def test_packed_sequences():
    def forward(model, x):
        packed = nn.utils.rnn.pack_padded_sequence(model.a(x), torch.tensor([5, 3, 2]), batch_first=True)
        padded, lengths = nn.utils.rnn.pad_packed_sequence(model.lstm(model.first(packed)), batch_first=True)
        assert lengths.tolist() == [5, 3, 2]
        return model.b(padded)

    make = lambda: example(forward, 3, 5, 4, first=TakesPacked(), lstm=TakesPacked())  # noqa: E731
    in_each_state(make, ["a", "first", "lstm"])
    in_each_state(make, ["lstm"])


def test_a_module_that_is_called_twice_ends_a_segment_each_time():
    def forward(model, x):
        return model.a(model.b(model.a(model.b(x).relu())).sigmoid())

    in_each_state(lambda: example(forward), ["a"])
    applied = assert_exact(example(forward), ["a", "b"])
    assert str(applied).splitlines() == [f"until {name}: saves inputs on the device" for name in "baba"]


def test_a_module_under_two_names_is_one_module():
    shared = nn.Sequential(linear(), nn.Tanh())

    def forward(model, x):
        return model.d(model.x(model.a(x)) + model.y(model.b(x)))

    for cuts in (["x"], ["y"], ["a", "x"], ["x.1"], ["y.0", "d"]):
        in_each_state(lambda: example(forward, x=shared, y=shared), cuts)
    assert_exact(example(forward, x=shared, y=shared), ["x", "y"])


def test_frozen_parameters_get_no_gradient():
    def make():
        made = example(lambda model, x: model.d(model.c(model.b(model.a(x).relu()).relu()).relu()))
        made.model.a.requires_grad_(False)
        made.model.c.requires_grad_(False)
        made.model.d.bias.requires_grad_(False)
        return made

    for cuts in (["a", "b", "c"], ["b"], ["a"]):
        in_each_state(make, cuts)


def test_a_model_of_which_only_the_last_part_is_trained():
    def make():
        made = example(lambda model, x: model.d(model.c(model.b(model.a(x).relu()).relu()).relu()))
        for frozen in (made.model.a, made.model.b, made.model.c):
            frozen.requires_grad_(False)
        return made

    in_each_state(make, ["a", "b", "c"])


def test_inputs_that_require_gradients():
    def make():
        made = example(lambda model, x, y: (model.d(model.b(model.a(x) * y).relu()), x.sin() * y))
        made.batch = lambda step: (normal(step, 3, 4).requires_grad_(), normal(step + 9, 3, 4).requires_grad_())
        return made

    in_each_state(make, ["a", "b"])
    in_each_state(make, ["b"])


def test_inputs_by_name_and_with_defaults():
    def make():
        made = example(lambda model, x, *, scale=2.0, mask=None: model.b(model.a(x) * scale) if mask is None else None)
        made.batch = lambda step: {"x": normal(step, 3, 4), "scale": 0.5}
        return made

    in_each_state(make, ["a"])


def test_several_outputs_of_which_some_are_not_used():
    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(linear() for _ in range(3))

        def forward(self, x):
            return tuple(part(x).sigmoid() for part in self.parts)

    def forward(model, x):
        first, unused, third = model.three(model.a(x))
        del unused
        return model.b(first), third

    in_each_state(lambda: example(forward, three=Three(), loss=lambda out: sum_of_squares(out[0])), ["three", "b"])


def test_a_module_that_gives_its_input_back():
    def forward(model, x):
        y = model.same(model.a(x))
        return model.b(model.same(y)) + y

    for cuts in (["same"], ["a", "same", "b"]):
        in_each_state(lambda: example(forward, same=nn.Identity()), cuts)


def test_modules_that_take_or_give_nothing():
    class Position(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self):
            return self.weight

    class Quiet(nn.Module):
        def forward(self, _):
            return None

    def forward(model, x):
        model.quiet(x)
        return model.b(model.a(x + model.position()).sigmoid() * model.position())

    make = lambda: example(forward, position=Position(), quiet=Quiet())  # noqa: E731
    for cuts in (["position"], ["quiet", "a"], ["a"]):
        in_each_state(make, cuts)


def test_a_module_that_hands_results_over_by_an_attribute_or_by_a_dict():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()
            self.seen = None

        def forward(self, x, notes):
            hidden = self.linear(x)
            self.seen = hidden.square()
            notes["also"] = hidden.sin()
            return hidden

    def forward(model, x):
        notes = {}
        y = model.writes(model.a(x), notes)
        return model.b(y + model.writes.seen) + notes["also"]

    for cuts in (["a", "writes", "b"], ["b"], ["writes"]):
        in_each_state(lambda: example(forward, writes=Writes()), cuts)


def test_what_a_module_keeps_of_its_forward_is_not_replaced_when_it_is_repeated():
    class Notes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()
            self.count = 0
            self.penalty = None

        def forward(self, x):
            self.count += 1
            hidden = self.linear(x)
            self.penalty = hidden.square().mean()
            return hidden.tanh()

    def forward(model, x):
        return model.b(model.notes(model.a(x)))

    made = example(forward, notes=Notes())
    applied = memory.apply(made.model, ["a", "notes", "b"])
    output = made.model(*made.batch(0))
    penalty = made.model.notes.penalty
    output.sum().backward(retain_graph=True)
    assert made.model.notes.count == 1
    assert made.model.notes.penalty is penalty
    before = made.model.a.weight.grad.clone()
    penalty.backward()
    assert not torch.equal(before, made.model.a.weight.grad)
    applied.remove()


def test_a_forward_that_counts_and_depends_on_its_count():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()
            self.count = 0

        def forward(self, x):
            self.count += 1
            return self.linear(x) ** 2 * self.count

    def forward(model, x):
        return model.b(model.counts(model.counts(model.a(x))))

    in_each_state(lambda: example(forward, counts=Counts()), ["a", "counts", "b"])


def test_sparse_tensors():
    adjacency = torch.eye(5).to_sparse_coo() * 2

    class Spreads(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()
            self.register_buffer("adjacency", adjacency.clone())

        def forward(self, x, other):
            return torch.sparse.mm(self.adjacency, self.linear(x)) + torch.sparse.mm(other, x)

    def forward(model, x):
        y = torch.sparse.mm(adjacency, model.a(x))
        return model.b(model.spreads(y.relu(), adjacency))

    for cuts in (["a", "spreads"], ["spreads", "b"]):
        for states in some_states():
            assert_exact(example(forward, 5, 4, spreads=Spreads()), cycled(cuts, states))


def test_sparse_gradients_of_an_embedding():
    def forward(model, x):
        return model.b(model.words(x.abs().mul(3).long().clamp(max=9)).mean(1))

    for states in some_states():
        assert_exact(example(forward, words=nn.Embedding(10, 4, sparse=True)), cycled(["words", "b"], states))


def test_complex_numbers():
    def forward(model, x):
        spectrum = torch.fft.rfft(model.a(x))
        return model.b(torch.fft.irfft(spectrum * model.filter, n=4))

    class Complex(Layered):
        def __init__(self):
            super().__init__(forward)
            self.filter = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def make():
        torch.manual_seed(0)
        return Example(Complex(), lambda step: (normal(step, 3, 4),))

    in_each_state(make, ["a", "b"])
    in_each_state(make, [":fft_rfft", "b"])


@pytest.mark.parametrize("layout", ["sliced", "transposed", "expanded", "channels_last"])
def test_layouts_of_memory_survive(layout):
    strides = []

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x):
            strides.append(x.stride())
            return self.conv(x)

    def forward(model, x):
        return model.looks(model.other(x) * x)

    def batch(step):
        images = normal(step, 2, 4, 6, 6)
        if layout == "sliced":
            images = normal(step, 2, 8, 6, 12)[:, ::2, :, ::2]
        if layout == "transposed":
            images = images.transpose(2, 3)
        if layout == "expanded":
            images = images[:1].expand(2, -1, -1, -1)
        if layout == "channels_last":
            images = images.to(memory_format=torch.channels_last)
        return (images.requires_grad_(),)

    for states in some_states():
        made = example(forward, looks=Looks(), other=Looks())
        made.batch = batch
        if layout == "channels_last":
            made.model.to(memory_format=torch.channels_last)
        strides.clear()
        assert_exact(made, cycled(["other", "looks"], states), steps=2)
        assert set(strides) <= {strides[0], strides[1]}


def test_batches_of_no_samples():
    def make(size):
        made = example(lambda model, x: model.c(model.b(model.a(x).relu()).sigmoid()), loss=lambda out: out.sum())
        made.batch = lambda step: (normal(step, [0, size, 0][step], 4),)
        return made

    for states in some_states():
        assert_exact(make(3), cycled(["a", "b"], states))


@pytest.mark.parametrize("state", STATES)
def test_batch_sizes_and_lengths_may_change_from_step_to_step(state):
    made = example(lambda model, x: model.d(model.c(model.b(model.a(x).relu()).sigmoid()).tanh()))
    made.batch = lambda step: (normal(step, [4, 2, 9, 1, 9][step], [3, 7, 2, 2, 5][step], 4),)
    applied = assert_exact(made, cycled(["a", "b", "c"], STATES[state]), steps=5)
    assert applied.statistics()["host_reserved"] <= 2**25


@pytest.mark.filterwarnings("ignore:the forward did not come to c")
@pytest.mark.parametrize("state", STATES)
def test_control_flow_may_change_from_step_to_step(state):
    def forward(model, x, way):
        hidden = model.a(x)
        for _ in range(way % 3 + 1):
            hidden = hidden + model.b(hidden).relu()
        hidden = model.c(hidden) if way % 2 else F.relu(hidden, inplace=True)
        if way == 3:
            hidden += model.b(x)
        return model.d(hidden)

    made = example(forward)
    made.batch = lambda step: (normal(step, 3, 4), [0, 3, 1, 2, 5, 3][step])
    assert_exact(made, cycled(["a", "b", "c"], STATES[state]), steps=6)


def test_loops_that_fill_a_tensor():
    def forward(model, x):
        hidden = model.a(x)
        output = torch.zeros(4, *hidden.shape)
        for index in range(4):
            hidden = model.b(hidden).sigmoid()
            output[index] = hidden
        output[:, 0].mul_(2)
        return model.c(output) + output.sin()

    for cuts in (["a"], ["a", "b"], ["c"], [":zeros", "c"]):
        in_each_state(lambda: example(forward), cuts)
