"""What cannot be repeated as it was is kept, or refused in the first backward: never wrong without a word."""

import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from fleetx import memory
from tests.memory.comparing import assert_equal_outcomes, step, sum_of_squares
from tests.memory.zoo import normal

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


@pytest.fixture(autouse=True)
def _small_tensors_move(monkeypatch):
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


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.random = nn.Linear(4, 4), random.Random(3)

    def forward(self, x):
        return self.linear(x * self.random.random()).tanh()


class Seeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        torch.manual_seed(5)
        return self.second(functional.dropout(x, 0.5).sin())


@pytest.mark.parametrize(("save", "home"), STATES)
@pytest.mark.parametrize(
    ("make", "cuts"),
    [
        (lambda: nn.Sequential(Counts(), Counts()), ["0", "1"]),
        (lambda: nn.Sequential(Draws(), nn.Linear(4, 4)), ["0"]),
        (Seeds, [":sin"]),
    ],
    ids=["a counter", "a generator of Python's", "a seed"],
)
def test_what_depends_on_something_else_is_refused_in_the_first_backward(make, cuts, save, home):
    CALLS[0] = 0
    model = make()
    memory.apply(model, [memory.Segment(name, save, home) for name in cuts])
    with pytest.raises(RuntimeError, match="gave something else when it was repeated"):
        step(model, (normal(1, 3, 4),), sum_of_squares)


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
def test_a_hook_that_is_taken_off_before_a_later_backward_is_noticed_if_it_changed_something(save, home):
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))
    memory.apply(model, [memory.Segment("0", save, home)])
    for number in range(2):
        step(model, (normal(number, 3, 4),), sum_of_squares)
    for change, is_refused in ((lambda *_: None, False), (lambda _m, _a, output: output * 1.5, True)):
        handle = model[0][0].register_forward_hook(change)
        loss = sum_of_squares(model(normal(3, 3, 4)))
        handle.remove()
        if is_refused:
            with pytest.raises(RuntimeError, match="gave something else"):
                loss.backward()
        else:
            loss.backward()


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
