"""Segments that keep all that they save: once it is known that nobody needs to watch them, they run as if not cut."""

import gc
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fleetx import memory
from fleetx.memory import Segment, offload
from fleetx.memory.offload import Offloader
from fleetx.memory.recompute import frames_alive
from fleetx.memory.running import Run
from fleetx.memory.underway import active_run
from tests.memory.comparing import Census


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


def assert_same_gradients(make, segments, prepare=lambda model, number: None, steps=6):
    """Gradients that add up over steps are those of the plain run; `prepare` is called before each."""
    found = []
    for cut in (True, False):
        torch.manual_seed(0)
        model = make().double()
        if cut:
            memory.apply(model, segments)
        torch.manual_seed(1)
        for number in range(steps):
            prepare(model, number)
            model(torch.randn(4, 8, dtype=torch.double)).square().mean().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_forward_that_goes_another_way_keeps_what_it_cannot_repeat():
    def prepare(model, number):
        model.skips = number in (2, 4, 5)

    segments = [Segment("first", "everything"), Segment("second"), Segment("third", "everything")]
    assert_same_gradients(Branching, segments, prepare)


class Reader(nn.Module):
    """Needs its input to be repeated, but not for the backward."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(8))

    def forward(self, hidden):
        return torch.tanh(hidden + self.bias)


class Skipping(nn.Module):
    """`first` reads a tensor that `writer` is given next."""

    def __init__(self, writer):
        super().__init__()
        self.start, self.first, self.writer, self.last = Block(), Reader(), writer, Block()

    def forward(self, hidden):
        hidden = self.start(hidden)
        seen = self.first(hidden)
        seen = seen + self.writer(hidden)
        return self.last(seen)


class Later(nn.Module):
    """Writes to its input from some call on."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def forward(self, hidden):
        self.calls -= 1
        return hidden.add_(1) if self.calls < 0 else hidden + 1


def run_skipping(writer, segments, modes=(True,) * 8):
    """The gradients of each step; None where the backward was refused."""
    torch.manual_seed(0)
    model = Skipping(writer).double()
    if segments:
        memory.apply(model, segments)
    found = []
    for number, mode in enumerate(modes):
        model.train(mode)
        torch.manual_seed(number)
        model.zero_grad()
        try:
            model(torch.randn(4, 8, dtype=torch.double)).square().mean().backward()
        except RuntimeError:
            found.append(None)
            continue
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    return found


MIXED = [Segment("start"), Segment("first"), Segment("writer", "everything"), Segment("last")]


@pytest.mark.parametrize(
    ("writer", "modes", "refused"),
    [
        (lambda: Later(0), (True,) * 8, 0),
        (lambda: Later(4), (True,) * 8, 1),
        (lambda: nn.Dropout(0.5, inplace=True), (False,) * 3 + (True,) * 5, 1),
    ],
    ids=["always", "later", "in training only"],
)
def test_a_module_that_writes_after_all_is_watched_from_then_on(writer, modes, refused):
    """What an earlier segment needs again is gone once, which is said; then it is known."""
    plain, ours = run_skipping(writer(), [], modes), run_skipping(writer(), MIXED, modes)
    assert sum(one is None for one in ours) <= refused
    for theirs, mine in zip(plain, ours, strict=True):
        assert mine is None or all(torch.equal(a, b) for a, b in zip(theirs, mine, strict=True))
    assert ours[-1] is not None


class OneForTwo(nn.Module):
    """A module that writes in one call and not in another."""

    def __init__(self):
        super().__init__()
        self.start, self.first, self.add, self.last = Block(), Reader(), Flagged(), Block()

    def forward(self, hidden):
        hidden = self.start(hidden)
        seen = self.first(hidden)
        return self.add(self.last(seen + self.add(hidden, True)), False)


class Flagged(nn.Module):
    def forward(self, hidden, in_place):
        return hidden.add_(1) if in_place else hidden + 1


def test_a_module_that_writes_in_one_of_its_calls_is_always_watched():
    assert_same_gradients(OneForTwo, [Segment("start"), Segment("first"), Segment("last", "everything")])


class Leaving(nn.Module):
    """Runs as many blocks as it is told to."""

    def __init__(self, count=8):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(8, 1)

    def forward(self, hidden, count, first=0):
        for block in self.blocks[first:count]:
            hidden = block(hidden)
        return self.head(hidden)


def kept_after(model, *arguments):
    with Census() as census:
        loss = model(torch.randn(64, 8), *arguments).sum()
    found = census.in_use(memory.applied_to(model))
    loss.backward()
    return found


@pytest.mark.parametrize("states", [("inputs",), ("everything", "inputs")])
@pytest.mark.parametrize("other", [(2,), (8, 1)], ids=["a short one", "one that leaves out the first"])
def test_a_forward_after_another_one_keeps_no_more_than_before(states, other):
    model = Leaving()
    memory.apply(model, [Segment(f"blocks.{i}", states[i % len(states)]) for i in range(8)])
    usual = max(kept_after(model, 8) for _ in range(4))
    most = 0
    for _ in range(3):
        kept_after(model, *other)
        most = max(most, kept_after(model, 8))
    assert most <= usual * 1.02


def test_hooks_that_a_module_leaves_open_do_not_become_ours():
    opened = []

    class Opening(Block):
        def forward(self, hidden):
            opened.append(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
            opened[-1].__enter__()
            return super().forward(hidden)

    class Closing(Block):
        def forward(self, hidden):
            hidden = super().forward(hidden)
            opened.pop().__exit__(None, None, None)
            return hidden

    def made(cut):
        model = stack(Block, Opening, Closing, Block)
        if cut:
            memory.apply(model, [Segment(str(i), "everything" if i in (1, 2) else "inputs") for i in range(4)])
        torch.manual_seed(1)
        for _ in range(4):
            model(torch.randn(4, 8, dtype=torch.double)).sum().backward()
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        return [parameter.grad for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(made(True), made(False), strict=True))


def test_a_plan_that_is_removed_after_an_interrupt_leaves_nothing_behind():
    model = stack(Block, Block, Block)
    applied = memory.apply(model, [Segment("0"), Segment("1", "everything"), Segment("2")])
    sample = torch.randn(4, 8, dtype=torch.double)
    for number in (0, 1):
        for _ in range(2):
            model(sample).sum().backward()
        interrupting = model[number].linear.register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            model(sample)
        interrupting.remove()
    applied.remove()
    assert active_run() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch._C._len_torch_function_stack() == 0


def test_a_plan_is_not_removed_while_its_model_runs():
    model = stack(Block, Block)
    applied = memory.apply(model, ["0", "1"])
    handle = model[0].register_forward_hook(lambda *_: applied.remove())
    with pytest.raises(RuntimeError, match="after the forward"):
        model(torch.randn(4, 8, dtype=torch.double))
    handle.remove()
    model(torch.randn(4, 8, dtype=torch.double)).sum().backward()


class Reading(nn.Module):
    """Reads a buffer before and after a module changes it."""

    def __init__(self):
        super().__init__()
        self.linear, self.counter = nn.Linear(8, 8), Counter()

    def forward(self, hidden):
        changed = self.counter(self.linear(hidden) * (1 + self.counter.count))
        return torch.tanh(changed * (1 + self.counter.count)) + hidden


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(8))

    def forward(self, hidden):
        with torch.no_grad():
            self.count.add_(1)
        return hidden * 1


def test_a_buffer_that_is_read_before_and_after_it_changes_is_both_when_repeated():
    def made(cut):
        torch.manual_seed(0)
        model = Reading().double()
        if cut:
            memory.apply(model, [Segment(memory.outputs(model, torch.randn(2, 8, dtype=torch.double))[-1])])
        torch.manual_seed(1)
        for _ in range(3):
            model(torch.randn(4, 8, dtype=torch.double)).square().mean().backward()
        return model.linear.weight.grad

    assert torch.equal(made(True), made(False))


@pytest.mark.filterwarnings("ignore:the forward did not come to")
def test_a_segment_that_ran_freely_and_should_have_been_repeated_keeps_everything_this_once():
    """The cut that comes is not the one that was expected."""

    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept, self.repeated, self.shared = Block(), Block(), Block()
            self.other = False

        def forward(self, hidden):
            hidden = self.shared(hidden)
            return self.repeated(hidden) if self.other else self.kept(hidden)

    def prepare(model, number):
        model.other = number in (3, 4)

    assert_same_gradients(Either, [Segment("kept", "everything"), Segment("repeated")], prepare)


@pytest.mark.middle
@pytest.mark.parametrize("options", [{}, {"compile": True, "backend": "aot_eager"}], ids=["eager", "compiled"])
@pytest.mark.filterwarnings("ignore:::torch")
def test_what_is_on_the_host_is_asked_for_ahead_also_where_nobody_is_asked(monkeypatch, options):
    monkeypatch.setattr(offload, "SMALLEST", 1)
    model = stack(*[Block] * 6)
    segments = [Segment("0", home="host", lead=3), *[Segment(str(i), "everything") for i in range(1, 6)]]
    memory.apply(model, segments, **options)
    for _ in range(3):
        model(torch.randn(4, 8, dtype=torch.double)).sum().backward()
    reached = []
    prefetch = Offloader.prefetch
    monkeypatch.setattr(
        Offloader, "prefetch", lambda self, number: (reached.append(number % 7), prefetch(self, number))[1]
    )
    loss = model(torch.randn(4, 8, dtype=torch.double)).sum()
    loss.backward()
    assert list(dict.fromkeys(reached)) == [6, 5, 4, 3, 2, 1, 0]  # the seventh is what follows the last cut
    del loss
    gc.collect()
    assert not frames_alive()


class Inner(nn.Module):
    """Begins to run one more block."""

    def __init__(self):
        super().__init__()
        self.more, self.first, self.second = Block(), Block(), Block()
        self.runs_more = False

    def forward(self, hidden):
        return self.second(self.first(self.more(hidden) if self.runs_more else hidden))


COMPILED = {"compile": True, "backend": "aot_eager"}


@pytest.mark.parametrize("options", [{}, COMPILED], ids=["eager", "compiled"])
@pytest.mark.filterwarnings("ignore:::torch")
def test_a_part_with_a_plan_of_its_own_is_repeated_as_it_ran(options):
    found = []
    for cut in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Inner(), Block()).double()
        if cut:
            memory.apply(model[1], [Segment("first", "everything"), Segment("second", "everything")], **options)
            memory.apply(model, [Segment("0"), Segment("1"), Segment("2")])
        torch.manual_seed(1)
        for number in range(6):
            model[1].runs_more = number >= 3
            model(torch.randn(4, 8, dtype=torch.double)).square().sum().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-14)


@pytest.mark.middle
@pytest.mark.parametrize("save", ["everything", "dear", "inputs"])
@pytest.mark.parametrize("options", [{}, COMPILED], ids=["eager", "compiled"])
@pytest.mark.filterwarnings("ignore:::torch")
def test_a_checkpoint_around_the_model_is_exact(save, options):
    found = []
    for cut in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block(), nn.Linear(8, 8)).double()
        if cut:
            memory.apply(model, [Segment("0", save), Segment("1", save)], **options)
        torch.manual_seed(1)
        for _ in range(3):
            sample = torch.randn(4, 8, dtype=torch.double, requires_grad=True)
            checkpoint(lambda x, model=model: torch.sin(model(x)).exp(), sample, use_reentrant=False).sum().backward()
        found.append([p.grad for p in model.parameters()])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-14)


class Passing(nn.Module):
    """Hands on one of its inputs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden, scale):
        return hidden + self.linear(torch.tanh(hidden * scale)), scale


class Handing(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.blocks = nn.Linear(8, 8), nn.ModuleList(Passing() for _ in range(6))

    def forward(self, hidden):
        scale = self.scale(hidden)
        for block in self.blocks:
            hidden, scale = block(hidden, scale)
        return hidden


def test_what_is_handed_on_asks_for_nothing(monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST", 1)
    model = Handing()
    states = [("everything", "device"), ("inputs", "host")] * 3
    applied = memory.apply(model, [Segment(f"blocks.{i}", *state) for i, state in enumerate(states)])
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
    before = applied.statistics()
    model(torch.randn(4, 8)).sum().backward(retain_graph=True)
    after = applied.statistics()
    sent, brought = (after[name] - before[name] for name in ("bytes_to_host", "bytes_to_device"))
    assert brought <= sent


class Identity(torch.autograd.Function):
    """Notes whether what it saved is what it is given back."""

    same: ClassVar[list[tuple[bool, bool, str | None]]] = []

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.x, ctx.weight = x, weight
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        Identity.same.append((x is ctx.x, weight is ctx.weight, getattr(x, "tag", None)))
        return grad * weight, (grad * x).sum()


class Tagged(nn.Module):
    def __init__(self, writes):
        super().__init__()
        self.linear, self.weight = nn.Linear(4, 4), nn.Parameter(torch.ones(()))
        self.writes, self.calls = writes, 0

    def forward(self, x):
        hidden = self.linear(x)
        hidden.tag = "mine"
        if self.writes:  # so that it is watched in each forward
            self.calls += 1
        return Identity.apply(hidden, self.weight)


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("others", ["everything", "inputs"])
def test_where_everything_is_kept_a_function_is_given_its_own_tensors(writes, others):
    model = nn.Sequential(Tagged(writes), nn.Tanh(), Tagged(writes), nn.Linear(4, 1))
    segments = [Segment("0", save="everything"), Segment("1", save=others), Segment("2", save="everything")]
    memory.apply(model, segments)
    Identity.same.clear()
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
    assert Identity.same == [(True, True, "mine")] * 6
