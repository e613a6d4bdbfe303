"""BatchNorm over all workers equals one process over the whole batch. Here workers are threads; tests/jobs has jobs."""

import copy
import threading

import pytest
import torch
from torch import nn

from fleetx import memory
from fleetx.comm import batch_norms, exchanges, world
from fleetx.comm.batch_norms import synchronize

SHAPES = {nn.BatchNorm1d: (), nn.BatchNorm2d: (3, 2), nn.BatchNorm3d: (2, 1, 3)}
TOLERANCE = 1e-12


class Threads:
    """Workers that are threads, and what they send."""

    def __init__(self, monkeypatch):
        self.local, self.messages = threading.local(), []
        monkeypatch.setattr(world, "rank", lambda: self.local.rank)
        monkeypatch.setattr(world, "size", lambda: self.size)
        monkeypatch.setattr(batch_norms, "_group", lambda: None)
        monkeypatch.setattr(batch_norms, "_sum_over_workers", self._sum)

    def _sum(self, tensor):
        self.sent[self.local.rank] = tensor.clone()
        self.barrier.wait()
        total = sum(self.sent)
        self.barrier.wait()
        tensor.copy_(total)
        if self.local.rank == 0:
            self.messages.append(tuple(tensor.shape))

    def run(self, work, size):
        """What `work(rank)` gives on each worker; errors too."""
        self.size, self.sent, self.barrier = size, [None] * size, threading.Barrier(size, timeout=120)
        found = [None] * size

        def worker(rank):
            self.local.rank = rank
            try:
                found[rank] = work(rank)
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=worker, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.size = 1
        return found


@pytest.fixture
def workers(monkeypatch):
    return Threads(monkeypatch)


def made(kind, dtype=torch.float64, **options):
    torch.manual_seed(0)
    norm = kind(3, **options).to(dtype)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


def converted(norm):
    before = {name: id(tensor) for name, tensor in [*norm.named_parameters(), *norm.named_buffers()]}
    assert synchronize(norm) == 1
    assert {name: id(t) for name, t in [*norm.named_parameters(), *norm.named_buffers()]} == before
    return norm


def parts_of(x, sizes):
    return [part.detach().clone().requires_grad_() for part in x.split(sizes)]


def train(norm, parts, factors):
    """Two forwards and backwards; what came out."""
    outputs = []
    for x, factor in zip(parts, factors, strict=True):
        output = norm(x)
        (output.double().sin() * factor).sum().backward()
        outputs.append(output.detach())
    return outputs, [x.grad for x in parts], [p.grad for p in norm.parameters()], norm.state_dict()


def assert_close(ours, expected, tolerance=TOLERANCE):
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


def assert_equals_one_process(workers, norm, sizes, shape=(), dtype=torch.float64, tolerance=TOLERANCE):
    generator = torch.Generator().manual_seed(1)
    batches = [(5 + torch.randn(sum(sizes), 3, *shape, generator=generator)).to(dtype) for _ in range(2)]
    factors = [torch.randn(sum(sizes), 3, *shape, generator=generator).double() for _ in range(2)]
    expected = train(copy.deepcopy(norm), [parts_of(batch, [sum(sizes)])[0] for batch in batches], factors)

    def work(rank):
        own = converted(copy.deepcopy(norm))
        return train(own, [parts_of(batch, sizes)[rank] for batch in batches], [f.split(sizes)[rank] for f in factors])

    found = workers.run(work, len(sizes))
    for error in found:
        if isinstance(error, Exception):
            raise error
    for place in (0, 1):  # outputs, gradients of inputs
        for step in range(2):
            parts = [result[place][step] for result in found]
            assert all(part.dtype == dtype for part in parts)
            assert_close(torch.cat(parts), expected[place][step], tolerance)
    for index, gradient in enumerate(expected[2]):
        parts = [result[2][index] for result in found]
        if gradient is None:
            assert parts == [None] * len(sizes)
        else:
            assert_close(sum(parts), gradient, tolerance)
    for result in found:
        assert_close(result[3], expected[3], tolerance)
        assert all(torch.equal(result[3][name], found[0][3][name]) for name in expected[3])


@pytest.mark.parametrize("sizes", [(4, 4), (1, 6), (3, 1, 5, 2)], ids=str)
@pytest.mark.parametrize("kind", SHAPES, ids=lambda kind: kind.__name__)
def test_it_equals_one_process(workers, kind, sizes):
    assert_equals_one_process(workers, made(kind), sizes, SHAPES[kind])
    assert workers.messages == [(len(sizes), 7), (2, 3)] * 2  # one in each forward, one in each backward


@pytest.mark.parametrize(
    "options",
    [{"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.7, "eps": 0.3}],
    ids=str,
)
def test_each_setting_of_a_norm_equals_one_process(workers, options):
    assert_equals_one_process(workers, made(nn.BatchNorm2d, **options), (1, 4), (3, 2))


def test_frozen_parameters_equal_one_process(workers):
    norm = made(nn.BatchNorm1d)
    norm.weight.requires_grad_(False)
    assert_equals_one_process(workers, norm, (2, 3))


def test_a_worker_with_an_empty_batch_takes_part(workers):
    assert_equals_one_process(workers, made(nn.BatchNorm1d), (0, 4, 1))


def test_low_precision_inputs_have_statistics_in_fp32(workers):
    norm = made(nn.BatchNorm2d, torch.float32)
    assert_equals_one_process(workers, norm, (3, 5), (3, 2), torch.bfloat16, tolerance=0.05)
    x = 1000 + torch.randn(8, 3, 3, 2, generator=torch.Generator().manual_seed(2))

    def work(rank):
        own = converted(made(nn.BatchNorm2d, torch.float32, momentum=1.0))
        own(x.bfloat16().split((3, 5))[rank])
        return own.running_mean

    mean = x.bfloat16().float().mean((0, 2, 3))
    assert all(torch.allclose(found, mean, rtol=1e-6, atol=0) for found in workers.run(work, 2))


def test_in_eval_mode_nothing_is_sent(workers):
    norm = made(nn.BatchNorm1d).eval()
    x = torch.randn(5, 3, dtype=torch.float64)
    found = workers.run(lambda _: converted(copy.deepcopy(norm))(x), 2)
    assert all(torch.equal(output, norm(x)) for output in found)
    assert workers.messages == []


def test_an_input_without_gradient_sends_nothing_in_the_backward(workers):
    x = torch.randn(4, 3, dtype=torch.float64)
    workers.run(lambda _: converted(made(nn.BatchNorm1d))(x).sum().backward(), 2)
    assert workers.messages == [(2, 7)]


@pytest.mark.parametrize("sizes", [(1, 0), (0, 0)])
def test_too_few_values_are_refused_on_all_workers_alike(workers, sizes):
    errors = workers.run(lambda rank: converted(made(nn.BatchNorm1d))(torch.ones(sizes[rank], 3).double()), 2)
    for error in errors:
        assert f"more than 1 value per channel in training, over all workers, got {sum(sizes)}" in str(error)


def test_a_second_derivative_is_refused(workers):
    def work(_):
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad(converted(made(nn.BatchNorm1d))(x).sin().sum(), x, create_graph=True)
        grad.sum().backward()

    assert all("once_differentiable" in str(error) for error in workers.run(work, 2))


def test_another_dtype_is_refused_as_torch_does(workers):
    errors = workers.run(lambda _: converted(made(nn.BatchNorm1d))(torch.ones(4, 3)), 2)
    assert all("SyncBatchNorm1d of torch.float64 was given torch.float32" in str(error) for error in errors)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.norm(torch.tanh(self.second(self.first(x)))))


@pytest.fixture
def sent(monkeypatch):
    """What a worker sends to another one that always has the same."""
    shapes = []

    def add(tensor):
        shapes.append(tuple(tensor.shape))
        tensor[1:] += 1 + torch.arange(tensor.shape[1])

    monkeypatch.setattr(world, "size", lambda: 2)
    monkeypatch.setattr(batch_norms, "_group", lambda: None)
    monkeypatch.setattr(batch_norms, "_sum_over_workers", add)
    return shapes


@pytest.mark.parametrize("save", ["inputs", "dear", "everything"])
@pytest.mark.parametrize("home", ["device", "host"])
def test_a_segment_that_is_repeated_sends_nothing_again(sent, save, home):
    def run(cut):
        sent.clear()
        torch.manual_seed(0)
        net, x = Net().double(), torch.randn(6, 4, dtype=torch.float64)
        assert synchronize(net) == 4
        if cut:
            memory.apply(net, [memory.Segment(name, save, home) for name in ("first", "second", "norm")])
        for _ in range(3):
            loss = net(x).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        assert sent == ([(2, 7)] * 4 + [(2, 3)] * 8) * 3
        return [*(p.grad for p in net.parameters()), *net.buffers()]

    assert all(torch.equal(ours, plain) for ours, plain in zip(run(cut=True), run(cut=False), strict=True))


class NormsAgain(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        CALLS.append(None)
        x = self.norm(x)
        return self.linear(self.norm(x) if len(CALLS) > 1 else x)


CALLS = []


def test_more_statistics_than_before_are_refused(sent):
    net = nn.Sequential(NormsAgain(), nn.Linear(4, 4)).double()
    synchronize(net)
    memory.apply(net, ["0"])
    CALLS.clear()
    with pytest.raises(RuntimeError, match="more statistics when its forward was repeated.*Leave that module out of"):
        net(torch.randn(5, 4, dtype=torch.float64)).sum().backward()
    assert sent == [(2, 9)]


def test_what_a_model_with_a_plan_inside_of_another_exchanges_is_noted_for_both():
    with exchanges.noting() as outer:
        with exchanges.noting() as inner:
            first = exchanges.exchanged(lambda: torch.ones(1))
        second = exchanges.exchanged(lambda: torch.ones(2))
    assert [*map(id, inner)] == [id(first)]
    assert [*map(id, outer)] == [id(first), id(second)]
    with exchanges.giving(outer), exchanges.noting() as again:
        assert exchanges.exchanged(pytest.fail) is first
        with exchanges.giving(inner):
            assert exchanges.exchanged(pytest.fail) is first
        assert exchanges.exchanged(pytest.fail) is second
    assert len(again) == 3


def test_a_norm_stays_the_module_that_it_was(workers):
    net = Net()
    names, norm, seen = list(net.state_dict()), net.norm, []
    norm.register_forward_hook(lambda *_: seen.append(True))
    workers.size = 1
    synchronize(net)
    assert net.norm is norm
    assert list(net.state_dict()) == names
    assert isinstance(norm, nn.BatchNorm1d)
    again = copy.deepcopy(net)
    again(torch.ones(3, 4))  # one worker: torch's own
    assert seen == [True]
    assert type(again.norm) is type(norm) is batch_norms.SyncBatchNorm1d


def test_a_norm_with_a_forward_of_its_own_is_refused_by_name():
    class Activated(nn.BatchNorm2d):
        def forward(self, input):
            return super().forward(input).relu()

    net = nn.Sequential(nn.BatchNorm2d(3), Activated(3))
    with pytest.raises(TypeError, match="'1' is another one, Activated, whose forward.*sync_batch_norm = False"):
        synchronize(net)
    assert type(net[0]) is nn.BatchNorm2d
    given = nn.BatchNorm1d(3)
    given.forward = lambda x: x
    with pytest.raises(TypeError, match="'the model' is another one, BatchNorm1d"):
        synchronize(given)
    with pytest.raises(TypeError, match="LazyBatchNorm1d"):
        synchronize(nn.LazyBatchNorm1d())
