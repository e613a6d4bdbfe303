"""What cannot be repeated as it was is kept, or refused in the first backward: never wrong without a word."""

import random
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fleetx import memory
from fleetx.memory import randomness
from tests.memory.comparing import assert_equal_outcomes, descend, step, sum_of_squares
from tests.memory.zoo import normal

pytestmark = pytest.mark.usefixtures("bits")
STATES = [(save, home) for save in ("inputs", "dear") for home in ("device", "host")]


class OwnDict(dict):
    pass


class OwnList(list):
    pass


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


class OwnNew:
    def __new__(cls, *_):
        return super().__new__(cls)

    def __init__(self, x):
        self.x = x


def deep(x):
    for _ in range(5):
        x = SimpleNamespace(x=x)
    return x


def get(holder):
    if isinstance(holder, OwnDict):
        return holder["x"]
    if isinstance(holder, OwnList):
        return holder[0]
    return get(holder.x) if isinstance(holder.x, SimpleNamespace) else holder.x


def put(holder, x):
    if isinstance(holder, OwnDict):
        holder["x"] = x
    elif isinstance(holder, OwnList):
        holder[0] = x
    elif isinstance(holder.x, SimpleNamespace):
        put(holder.x, x)
    else:
        holder.x = x


class Changes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, holder):
        put(holder, torch.tanh(self.linear(get(holder))))
        return holder


class Reads(Changes):
    def forward(self, holder):
        return type(holder)(torch.tanh(self.linear(get(holder))))


class Passing(nn.Module):
    """Blocks that hand something on, into which nobody can look."""

    def __init__(self, make, block):
        super().__init__()
        self.make = make
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x):
        holder = self.make(x)
        for block in self.blocks:
            holder = block(holder)
        return get(holder)


def compared(make, cuts, save, home="device", steps=3, drive=None):
    """Outcomes of some steps with and without states."""
    drive = drive or step
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    ours = make()
    memory.apply(ours, [memory.Segment(name, save, home) for name in cuts])
    for number in range(steps):
        outcomes = []
        for model in (ours, plain):
            torch.manual_seed(number)
            outcomes.append(drive(model, (normal(number, 3, 4),), sum_of_squares))
        assert_equal_outcomes(*outcomes)


@pytest.fixture(params=["same bits", "rounding"])
def bits(request, monkeypatch):
    """Also as on devices whose kernels may round differently each time."""
    if request.param == "rounding":
        monkeypatch.setattr("fleetx.memory.checking.gives_same_bits", lambda _device: False)
    monkeypatch.setattr("fleetx.memory.offload.SMALLEST", 1)


@pytest.mark.filterwarnings("ignore:the segment that ends at .* into which nobody can look")
@pytest.mark.parametrize(("save", "home"), STATES)
@pytest.mark.parametrize(
    "make",
    [lambda x: OwnDict(x=x), lambda x: OwnList([x]), Slotted, OwnNew, deep],
    ids=["dict", "list", "slots", "new", "deep"],
)
def test_what_is_changed_where_nobody_can_look_is_not_repeated_with_what_it_became(make, save, home):
    compared(lambda: Passing(make, Changes), ["blocks.0", "blocks.1"], save, home)


@pytest.mark.parametrize(("save", "home"), STATES)
def test_what_is_only_read_there_is_repeated(save, home):
    compared(lambda: Passing(Slotted, Reads), ["blocks.0", "blocks.1"], save, home)


CALLS = [0]


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        CALLS[0] += 1
        return self.linear(x * CALLS[0]).tanh()


@pytest.mark.parametrize(("save", "home"), STATES)
def test_what_depends_on_something_else_is_refused_in_the_first_backward(save, home):
    CALLS[0] = 0
    model = nn.Sequential(Counts(), Counts())
    memory.apply(model, [memory.Segment(name, save, home) for name in ("0", "1")])
    with pytest.raises(RuntimeError, match="gave something else .*when it was repeated"):
        step(model, (normal(1, 3, 4),), sum_of_squares)


class Around(nn.Module):
    """Something happens between two blocks that draw random numbers."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.third = nn.Linear(4, 4)
        self.between = between

    def forward(self, x):
        x = self.between(functional.dropout(self.first(x), 0.5))
        return self.third(functional.dropout(self.second(x), 0.5)).sin()


def seeded(x):
    torch.manual_seed(5)
    return x


def forked(x):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return x * torch.rand(4)


def drawn_in_vmap(x):
    return x + torch.vmap(torch.rand_like, randomness="different")(x)


@pytest.mark.filterwarnings("ignore:in the segment that ends at .* is called between modules, or vmap")
@pytest.mark.parametrize(("save", "home"), STATES)
@pytest.mark.parametrize("between", [seeded, forked, drawn_in_vmap])
def test_generators_that_somebody_moves_between_modules(between, save, home):
    compared(lambda: Around(between), [":sin"], save, home)


class WritesInVmap(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x) + 1
        torch.vmap(lambda row: row.mul_(2))(x)
        return self.second(x).sin()


@pytest.mark.filterwarnings("ignore:the segment that ends at .* inside of vmap")
@pytest.mark.filterwarnings("ignore:in the segment that ends at .* is called between modules, or vmap")
@pytest.mark.parametrize(("save", "home"), STATES)
def test_what_is_written_to_inside_of_vmap(save, home):
    compared(WritesInVmap, [":sin"], save, home)


class MapsModules(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        return torch.vmap(self.second)(self.first(x)).sin()


@pytest.mark.filterwarnings("ignore:in the segment that ends at .* is called between modules, or vmap")
@pytest.mark.filterwarnings("ignore:the forward did not come to second")
@pytest.mark.parametrize("cuts", [["first", "second"], [":sin"]])
@pytest.mark.parametrize(("save", "home"), STATES)
def test_modules_inside_of_vmap(cuts, save, home):
    compared(MapsModules, cuts, save, home)


class RefusesAll(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(func)


def test_where_generators_are_is_compared_without_torch():
    before, device = randomness.state(torch.device("cpu")), torch.device("cpu")
    with RefusesAll():
        assert before.is_same(before)
    torch.rand(1)
    after = randomness.state(device)
    with RefusesAll():
        assert not before.is_same(after)


class DrawsElsewhere(nn.Module):
    """From generators that torch does not know."""

    def __init__(self, generator):
        super().__init__()
        self.linear, self.generator, self.again = nn.Linear(4, 4), generator, [generator]

    def forward(self, x):
        assert self.again[0] is self.generator
        return self.linear(x * self.generator.random() + self.again[0].random()).tanh()


class NumpysOld(np.random.RandomState):
    def random(self):
        return self.random_sample()


@pytest.mark.parametrize(("save", "home"), STATES)
@pytest.mark.parametrize("make", [random.Random, np.random.default_rng, NumpysOld])
def test_generators_of_other_libraries(make, save, home):
    compared(lambda: nn.Sequential(DrawsElsewhere(make(3)), DrawsElsewhere(make(4))), ["0", "1"], save, home)


class GivesGenerators(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Given() for _ in range(2))

    def forward(self, x):
        generator = np.random.default_rng(3)
        for block in self.blocks:
            x = block(x, generator)
        return x


class Given(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, generator):
        return self.linear(x * generator.random()).tanh()


@pytest.mark.parametrize(("save", "home"), STATES)
def test_generators_of_other_libraries_that_modules_are_given(save, home):
    compared(GivesGenerators, ["blocks.0", "blocks.1"], save, home)


class Easy(dict):
    """Items that are attributes too."""

    def __init__(self, **items):
        super().__init__()
        for name, value in items.items():
            setattr(self, name, value)

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        super().__setitem__(name, value)

    __setitem__ = __setattr__


class Merged(dict):
    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


class Ordered(OrderedDict):
    pass


class ReadsItem(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, held):
        held["seen"] = held["x"] * 2
        return torch.tanh(self.linear(held["x"] + held["seen"]))


class ChangesItems(nn.Module):
    """The container itself changes what it hands on."""

    def __init__(self, make):
        super().__init__()
        self.make = make
        self.blocks = nn.ModuleList(ReadsItem() for _ in range(3))

    def forward(self, x):
        held = self.make(x=x)
        for block in self.blocks:
            held["x"] = held["x"] + block(held)
        return (held["x"] * held["seen"]).sin()


@pytest.mark.parametrize(("save", "home"), STATES)
@pytest.mark.parametrize("cuts", [["blocks.0", "blocks.1", "blocks.2"], [":sin"]])
@pytest.mark.parametrize("make", [dict, OwnDict, Easy, Merged, Ordered])
def test_dicts_of_classes_of_their_own_are_looked_into(make, cuts, save, home):
    compared(lambda: ChangesItems(make), cuts, save, home)


class Refills(nn.Module):
    """A container changes an object into which nobody can look, at once or at the end."""

    def __init__(self, *, at_once):
        super().__init__()
        self.blocks = nn.ModuleList(ReadsSlot() for _ in range(3))
        self.at_once = at_once

    def forward(self, x):
        held = Slotted(x)
        for block in self.blocks:
            x = x + block(held)
            if self.at_once:
                held.x = x
        held.x = x
        return x


class ReadsSlot(Changes):
    def forward(self, holder):
        return torch.tanh(self.linear(holder.x))


@pytest.mark.filterwarnings("ignore:the segment that ends at .* into which nobody can look")
@pytest.mark.parametrize(("save", "home"), STATES)
def test_an_object_that_is_changed_in_a_segment_makes_it_keep_everything(save, home):
    compared(lambda: Refills(at_once=True), ["blocks.2"], save, home)


@pytest.mark.parametrize(("save", "home"), STATES)
def test_an_object_that_is_changed_after_a_segment_is_refused(save, home):
    model = Refills(at_once=False)
    memory.apply(model, [memory.Segment("blocks.0", save, home)])
    loss = sum_of_squares(model(normal(1, 3, 4)))
    with pytest.raises(
        RuntimeError, match=r"a Slotted, which a module .* holds other tensors now .* Hand tensors on in"
    ):
        loss.backward()


class Draw(nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.linear, self.generator = nn.Linear(4, 4), generator

    def forward(self, x):
        return self.linear(x * torch.rand(x.shape, generator=self.generator)).tanh()


class MadeLate(Draw):
    def forward(self, x):
        if self.generator is None:
            self.generator = {"cpu": torch.Generator().manual_seed(1)}
        return self.linear(x * torch.rand(x.shape, generator=self.generator["cpu"])).tanh()


def sharing():
    generator = torch.Generator().manual_seed(3)
    return nn.Sequential(nn.Sequential(Draw(generator), Draw(generator)), nn.Linear(4, 4))


@pytest.mark.parametrize(("save", "home"), STATES)
@pytest.mark.parametrize("make", [sharing, lambda: nn.Sequential(MadeLate(None), nn.Linear(4, 4))])
def test_generators_are_shared_again_and_found_in_containers(make, save, home):
    compared(make, ["0", "1"], save, home)


@pytest.mark.parametrize(("save", "home"), STATES)
@pytest.mark.parametrize("change", [lambda *_: None, lambda _m, _a, output: output * 1.5], ids=["quiet", "changing"])
def test_a_hook_that_is_taken_off_before_a_later_backward_still_counts(change, save, home):
    def drive(model, batch, loss_of):
        step(model, batch, loss_of)
        handle = model[0][0].register_forward_hook(change)
        loss = loss_of(model(*batch))
        handle.remove()
        loss.backward()
        descend(model)
        return step(model, batch, loss_of)

    def make():
        return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))

    compared(make, ["0"], save, home, drive=drive)


class Maps(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        places = torch.arange(3)
        mask = torch.vmap(lambda row: torch.vmap(lambda column: column <= row)(places))(places)
        attended = functional.scaled_dot_product_attention(self.first(x)[None], x[None], x[None], attn_mask=mask)[0]
        return self.second(torch.vmap(torch.sin)(attended))


@pytest.mark.filterwarnings("ignore:in the segment that ends at .* is called between modules, or vmap")
@pytest.mark.parametrize(("save", "home"), STATES)
def test_vmap_between_modules(save, home):
    compared(Maps, ["first", "second"], save, home)


class Fresh(nn.Module):
    """Memory that is made and then filled: what was in it first is nobody's business."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        noise = torch.empty(3, 4).normal_() + x.new_empty(3, 4).fill_(2)
        return self.linear(x * noise).sin()


@pytest.mark.parametrize(("save", "home"), STATES)
def test_fresh_memory_between_modules_is_not_compared(save, home):
    compared(Fresh, [":sin"], save, home)


class Fills(nn.Module):
    """Each time one more in an empty holder, and what they do depends on how many there are."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, held):
        place = len(held)
        if isinstance(held, dict):
            held[place] = x
        else:
            held.append(x)
        return torch.tanh(self.linear(x) * (1 + len(held)))


class FillsAll(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.blocks, self.make = nn.ModuleList(Fills() for _ in range(3)), make

    def forward(self, x):
        held = self.make()
        for block in self.blocks:
            x = block(x, held)
        return x


@pytest.mark.parametrize(("save", "home"), STATES)
@pytest.mark.parametrize("make", [dict, list, OwnDict, OwnList, Ordered])
def test_holders_that_start_empty_are_empty_again(make, save, home):
    compared(lambda: FillsAll(make), ["blocks.0", "blocks.1", "blocks.2"], save, home)


class GivesPart(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x):
        return self.linear(x)[:, :4]


class WritesToPart(nn.Module):
    """A view with gaps, which is written to after it was read: it is kept as a copy without gaps."""

    def __init__(self):
        super().__init__()
        self.first, self.last = GivesPart(), nn.Linear(4, 4)
        self.second = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).requires_grad_(False)

    def forward(self, x):
        part = self.first(x)
        other = self.second(part)
        part.mul_(2)
        return self.last(part + other)


@pytest.mark.parametrize(("save", "home"), STATES)
@pytest.mark.parametrize("cuts", [["first", "second"], ["second"]])
def test_views_with_gaps_that_are_written_to_later(cuts, save, home):
    compared(WritesToPart, cuts, save, home)


@pytest.mark.filterwarnings("ignore:the segment that ends at blocks.0 keeps everything, .* is changed later")
@pytest.mark.parametrize(("save", "home"), STATES)
def test_after_a_refusal_the_segment_keeps_everything(save, home):
    model = Refills(at_once=False)
    memory.apply(model, [memory.Segment("blocks.0", save, home)])
    with pytest.raises(RuntimeError, match="From the next forward on this segment keeps everything"):
        sum_of_squares(model(normal(1, 3, 4))).backward()
    for number in range(3):
        sum_of_squares(model(normal(number, 3, 4))).backward()
