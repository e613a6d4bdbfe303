"""How much is kept between forward and backward: a segment is everything since the previous cut."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fleetx import memory
from fleetx.planner.meter import CountingMeter
from tests.memory.comparing import Census, cycled
from tests.memory.test_structures import example

LAYERS, WIDTH, BATCH = 12, 32, 64
ONE = WIDTH * BATCH * 4
"""Bytes of one layer's output."""
CUTS = ["2", "5", "8", "11"]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.narrow(F.gelu(self.wide(x)))


def stack(layer=Layer, layers=LAYERS):
    torch.manual_seed(0)
    return nn.Sequential(*(layer() for _ in range(layers)))


def kept(model, segments, forwards=3, **options):
    """Bytes in use between a forward and its backward, without the model's own, in units of a layer's output.

    The most of several forwards: what was learned from the first must not make it more.
    """
    applied = memory.apply(model, segments, **options)
    found = []
    for _ in range(forwards):
        with Census() as census:
            loss = model(torch.randn(BATCH, WIDTH)).square().mean()
        found.append(census.in_use(applied) / ONE)
        loss.backward()
        del loss
        model.zero_grad()
        assert census.in_use(applied) == 0
    applied.remove()
    return max(found)


def kept_by(model, forward=None):
    """The same of a model without a plan."""
    with Census() as census:
        loss = (forward or model)(torch.randn(BATCH, WIDTH)).square().mean()
    applied = memory.apply(model, ["*"])
    found = census.in_use(applied) / ONE
    applied.remove()
    loss.backward()
    return found


def test_segments_are_everything_since_the_previous_cut():
    """Four checkpoints and the input; what runs after the last cut is the loss."""
    model = stack()
    plain = kept_by(model)
    segments = kept(stack(), CUTS)

    def named_only(x):
        for index, layer in enumerate(model):
            x = checkpoint(layer, x, use_reentrant=False) if str(index) in CUTS else layer(x)
        return x

    only_named = kept_by(model, named_only)
    assert plain >= 9 * LAYERS
    assert only_named >= 9 * (LAYERS - len(CUTS))
    assert segments < len(CUTS) + 1 + 2  # the loss saves its input, and random states take their place
    assert segments < only_named / 10


def test_dear_outputs_are_between_nothing_and_everything():
    inputs = kept(stack(), CUTS)
    narrow = kept(stack(), [memory.Segment(cut, "dear", dear=("narrow_matmul",)) for cut in CUTS])
    named = kept(stack(), [memory.Segment(cut, "dear", dear=("*.narrow",)) for cut in CUTS])
    dear = kept(stack(), CUTS, save="dear")
    everything = kept(stack(), CUTS, save="everything")
    assert narrow == pytest.approx(inputs + LAYERS, abs=1)
    assert named == pytest.approx(inputs + LAYERS, abs=1)
    assert dear == pytest.approx(inputs + 5 * LAYERS, abs=1)
    assert everything == pytest.approx(kept_by(stack()), abs=1)
    assert inputs < narrow < dear < everything


@pytest.mark.parametrize("save", ["inputs", "dear", "everything"])
def test_the_host_takes_all_but_the_last_segment(save):
    on_device = kept(stack(), CUTS, save=save)
    on_host = kept(stack(), CUTS, save=save, home="host")
    assert on_host < on_device / len(CUTS) + 2  # the last one stays, from the second forward on


def test_one_segment_on_the_host_leaves_the_device_when_the_next_one_ends():
    states = [("everything", "host"), *[("inputs", "device")] * 3]
    found = kept(stack(), cycled(CUTS, states))
    assert found < len(CUTS) + 3


def test_operations_between_modules_are_no_more_than_modules():
    class Loose(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 6) for _ in range(LAYERS))

        def forward(self, x):
            for weight in self.weights:
                x = x + (x @ weight).tanh().sin().exp().sigmoid()
            return x

    cuts = [f":add_{index}" for index in (2, 5, 8, 11)]
    inputs, dear = kept(Loose(), cuts), kept(Loose(), cuts, save="dear")
    assert inputs < len(cuts) + 3
    assert dear == pytest.approx(inputs + LAYERS, abs=1)
    assert kept_by(nn.Sequential(Loose())) > 4 * LAYERS


def test_writing_in_place_costs_one_copy_per_segment():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(
                nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
            )

        def forward(self, x):
            return self.inner(x)

    assert kept(stack(Block), CUTS) < len(CUTS) + 3
    assert kept(stack(Block), [f"{cut}.inner.1" for cut in CUTS]) < 2 * len(CUTS) + 8


def test_the_first_forward_takes_no_more_than_the_others():
    model, peaks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))), []
    memory.apply(model, [str(number) for number in range(LAYERS)])
    batch = torch.randn(512, WIDTH)
    for _ in range(3):
        with CountingMeter() as meter:
            loss = model(batch).sum()
            peaks.append(meter.take_peak())
        loss.backward()
    assert peaks[0] < peaks[1] + batch.nbytes / 2
    assert peaks[1] == peaks[2]


def test_a_tensor_that_all_segments_read_is_kept_once():
    def forward(model, x):
        shared = model.a(x).tanh()
        hidden = shared
        for module in (model.b, model.c, model.d):
            hidden = module(hidden * shared + shared).tanh()
        return hidden

    made = example(forward, BATCH, WIDTH, **{name: nn.Linear(WIDTH, WIDTH) for name in "abcd"})
    assert kept(made.model, ["a", "b", "c"]) < 8


def test_outputs_that_nobody_uses_are_not_computed_into_memory():
    """What the backward will not ask for is not kept when the segment is repeated."""
    peak = []

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(20))

        def forward(self, x):
            return [part(x).sigmoid().sin() for part in self.parts]

    def forward(model, x):
        first, *_ = model.branches(x)
        return model.last(first)

    made = example(forward, BATCH, WIDTH, branches=Branches(), last=nn.Linear(WIDTH, WIDTH))
    applied = memory.apply(made.model, ["branches"])
    with Census() as census:
        output = made.model(torch.randn(BATCH, WIDTH))
        output.register_hook(lambda _: None)
        made.model.branches.parts[0].weight.register_hook(lambda _: peak.append(census.in_use(applied) / ONE))
        output.sum().backward()
    assert 0 < peak[0] < 14


def test_fetched_memory_is_let_go_when_it_was_used():
    """In the backward no more than a few segments are on the device at a time."""
    most = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            most.append(census.in_use(applied) / ONE)
            return grad

    class Looking(Layer):
        def forward(self, x):
            return super().forward(Looks.apply(x))

    model = stack(Looking)
    applied = memory.apply(model, [str(index) for index in range(LAYERS)], save="everything", home="host")
    for _ in range(3):
        most.clear()
        with Census() as census:
            model(torch.randn(BATCH, WIDTH)).square().mean().backward()
        model.zero_grad()
    assert max(most) < 5 * 11
    assert min(most) > 3


@pytest.mark.parametrize(
    ("states", "checkpoints", "activations"),
    [
        ([("inputs", "device")], 4, 0),
        ([("everything", "device")], 0, 4 * 27),
        ([("inputs", "device"), ("everything", "device")], 2, 2 * 27),
        ([("inputs", "host")], 1, 0),
    ],
)
def test_what_segments_hold_is_known_by_kind(states, checkpoints, activations):
    """Of those that keep everything, as long as they are watched: where others have hooks too."""
    memory.apply(model := stack(), cycled(CUTS, states))
    for _ in range(2 if ("inputs", "host") in states else 1):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            loss = model(torch.randn(BATCH, WIDTH)).sum()
        held = memory.resident_on(torch.device("cpu"))
        loss.backward()
    assert held.checkpoints / ONE == pytest.approx(checkpoints, abs=1)
    assert held.activations / ONE == pytest.approx(activations, abs=2)
    del loss
    assert memory.resident_on(torch.device("cpu")) == (0, 0)
