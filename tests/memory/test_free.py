"""Segments that keep everything: once it is known that nobody needs to watch them, they run as if they were not cut."""

import pytest
import torch
from torch import nn

from fleetx import memory
from fleetx.memory import Segment
from fleetx.memory.running import Run, active_run


class Block(nn.Module):
    def __init__(self, width=8, norm=False):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.drop = nn.Dropout(0.3)
        self.fails = False

    def forward(self, hidden):
        if self.fails:
            raise ValueError("as asked")
        return hidden + self.drop(torch.tanh(self.norm(self.linear(hidden))))


class Adding(Block):
    """Writes to what it is given."""

    def forward(self, hidden):
        return super().forward(hidden.add_(1))


def stack(*blocks):
    torch.manual_seed(0)
    return nn.Sequential(*[make() for make in blocks], nn.Linear(8, 1)).double()


def normed():
    return Block(norm=True)


def trained(model, segments, steps=5):
    if segments:
        memory.apply(model, segments)
    torch.manual_seed(1)
    seen = []
    for _ in range(steps):
        loss = model(torch.randn(4, 8, dtype=torch.double)).square().mean()
        loss.backward()
        seen.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return seen, {name: value.clone() for name, value in model.state_dict().items()}


def asked(monkeypatch):
    """How often autograd asks what to do with a tensor."""
    counts = []
    pack = Run.pack
    monkeypatch.setattr(Run, "pack", lambda run, tensor: (counts.append(1), pack(run, tensor))[1])
    return counts


@pytest.mark.parametrize("make", [Block, normed])
def test_nobody_is_asked_about_what_is_kept(monkeypatch, make):
    model = stack(make, make, make)
    memory.apply(model, [Segment(str(i), "everything") for i in range(3)])
    sample = torch.randn(4, 8, dtype=torch.double)
    model(sample).sum().backward()
    counts = asked(monkeypatch)
    model[:3](sample)  # not the model itself: this is not cut
    assert not counts
    model(sample).sum().backward()
    assert len(counts) <= 2  # by what follows the last cut


@pytest.mark.parametrize(
    "blocks", [(Block,) * 4, (normed,) * 4, (Block, Adding, Block, Adding), (Adding, Block, normed, Block)]
)
@pytest.mark.parametrize("kept", [(0, 1, 2, 3), (0, 2), (1, 3), (2, 3)])
def test_all_bits_are_those_of_the_plain_run(blocks, kept):
    segments = [Segment(str(i), "everything" if i in kept else "inputs") for i in range(4)]
    plain, ours = trained(stack(*blocks), []), trained(stack(*blocks), segments)
    assert plain[0] == ours[0]
    assert all(torch.equal(ours[1][name], value) for name, value in plain[1].items())


def test_an_error_inside_leaves_nothing_behind(monkeypatch):
    model = stack(Block, Block, Block)
    memory.apply(model, [Segment("0"), Segment("1", "everything"), Segment("2")])
    sample = torch.randn(4, 8, dtype=torch.double)
    for _ in range(2):
        model(sample).sum().backward()
    model[1].fails = True
    with pytest.raises(ValueError, match="as asked"):
        model(sample)
    model[1].fails = False
    assert active_run() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch._C._len_torch_function_stack() == 0
    model(sample).sum().backward()


def test_an_interrupt_inside_leaves_nothing_behind():
    """Torch calls no hooks then."""
    model = stack(Block, Block, Block)
    memory.apply(model, [Segment("0"), Segment("1", "everything"), Segment("2")])
    sample = torch.randn(4, 8, dtype=torch.double)
    for _ in range(2):
        model(sample).sum().backward()
    interrupting = model[1].linear.register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        model(sample)
    interrupting.remove()
    for _ in range(2):
        model(sample).sum().backward()
    assert active_run() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch._C._len_torch_function_stack() == 0


class Branching(nn.Module):
    """Runs its first block or not."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = Block(), Block(), Block()
        self.skips = False

    def forward(self, hidden):
        return self.third(self.second(hidden if self.skips else self.first(hidden)))


def test_a_forward_that_goes_another_way_keeps_what_it_cannot_repeat():
    def made(segments):
        torch.manual_seed(0)
        model = Branching().double()
        if segments:
            memory.apply(model, segments)
        torch.manual_seed(1)
        for skips in (False, False, True, False, True, True):
            model.skips = skips
            model(torch.randn(4, 8, dtype=torch.double)).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    ours = made([Segment("first", "everything"), Segment("second"), Segment("third", "everything")])
    assert all(torch.equal(a, b) for a, b in zip(ours, made([]), strict=True))
