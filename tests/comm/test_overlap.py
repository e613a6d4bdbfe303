"""How much of the communication was hidden: by hand-set clocks, of the host and of a GPU. In jobs: tests/jobs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fleetx.comm import overlap
from fleetx.comm.groups import Message
from fleetx.comm.overlap import Overlap, overlap_on
from fleetx.comm.reducer import Reducer, ReducerSettings
from tests.hand_clock import HandClock

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    return HandClock().install(monkeypatch)


class Work:
    """Complete at a time of the clock; waiting for it takes until then."""

    def __init__(self, clock, ends):
        self._clock, self._ends = clock, ends

    def is_completed(self):
        return self._clock.now >= self._ends

    def wait(self):
        self._clock.now = max(self._clock.now, self._ends)


def play(clock, messages, backward_ends):
    """Messages of (leaves, is summed); gradients arrive at each whole second of the backward."""
    found, sent = Overlap(CPU), []
    for clock.now in range(backward_ends + 1):
        for leaves, ends in messages:
            if leaves == clock.now:
                sent.append(Message(torch.zeros(1), [lambda _tensor, ends=ends: Work(clock, ends)]))
                found.sent(sent[-1])
        found.look()
    for message in sent:
        with found.waiting():
            message.wait()
    return found.hidden()


@pytest.mark.parametrize(
    ("messages", "backward_ends", "hidden"),
    [
        ([(0, 4), (5, 8)], 6, 1 - 2 / 7),  # a pause between them counts for nothing
        ([(0, 4), (2, 8)], 6, 1 - 2 / 8),
        ([(0, 9), (2, 7)], 6, 1 - 3 / 9),  # the second one is there before the first
        ([(0, 3), (1, 4)], 6, 1.0),
        ([(6, 9)], 6, 0.0),
        ([(6, 6)], 6, None),  # no time passed
        ([], 6, None),
    ],
)
def test_hidden_is_what_nobody_waited_for(clock, messages, backward_ends, hidden):
    assert play(clock, messages, backward_ends) == (hidden if hidden is None else pytest.approx(hidden))


class FakeStream:
    def __init__(self, *_device):
        self.now = 0.0


class FakeCuda:
    """A device whose streams have times of their own; asking for a moment that was not waited for fails."""

    def __init__(self, patch):
        self.compute = self.current = FakeStream()
        self.synchronized = 0
        cuda = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing
                self._is_over = False

            def record(self):
                self._at = cuda.current.now

            def synchronize(self):
                cuda.synchronized += 1
                self._is_over = True

            def elapsed_time(self, other):
                assert self._is_over
                assert other._is_over
                return 1e3 * (other._at - self._at)

        class Within:
            def __init__(self, stream):
                self._stream = stream

            def __enter__(self):
                cuda.current = self._stream

            def __exit__(self, *_):
                cuda.current = cuda.compute

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "stream", Within)
        patch.setattr(torch.cuda, "Stream", FakeStream)


class NcclWork:
    """Lets the current stream wait, never the host."""

    def __init__(self, cuda, ends):
        self._cuda, self._ends = cuda, ends

    def wait(self):
        self._cuda.current.now = max(self._cuda.current.now, self._ends)


def test_on_a_gpu_nothing_waits_until_somebody_asks(monkeypatch):
    overlap._side_stream.cache_clear()
    cuda = FakeCuda(monkeypatch)
    found, sent = Overlap(torch.device("cuda", 0)), []
    for leaves, ends in [(0.0, 4.0), (5.0, 8.0)]:
        cuda.compute.now = leaves
        sent.append(Message(torch.zeros(1), [lambda _tensor, ends=ends: NcclWork(cuda, ends)]))
        found.sent(sent[-1])
        found.look()
        assert cuda.compute.now == leaves  # the stream that computes does not wait either
    cuda.compute.now = 6.0
    for message in sent:
        with found.waiting():
            message.wait()
    assert (cuda.compute.now, cuda.synchronized) == (8.0, 0)
    assert found.hidden() == pytest.approx(1 - 2 / 7)
    overlap._side_stream.cache_clear()


def test_where_following_a_message_would_hold_up_the_host_there_is_no_figure(monkeypatch):
    gpu = torch.device("cuda", 0)
    assert overlap_on(CPU) is not None
    monkeypatch.setattr(overlap, "backend_of", lambda _device: "gloo")
    assert overlap_on(gpu) is None
    monkeypatch.setattr(overlap, "backend_of", lambda _device: "nccl")
    assert overlap_on(gpu) is not None
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    assert overlap_on(gpu) is None


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_each_window_has_a_figure_of_its_own_and_an_aborted_one_has_none(group, wire):
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    reducer = Reducer(parameters, 0, ReducerSettings(fuse=False, wire_dtype=wire))
    assert reducer.overlap is None
    figures = []
    for _ in range(2):
        with reducer.overlapping(()):
            sum(p.sum() for p in parameters).backward()
        reducer.finish()
        figures.append(reducer.overlap)
        assert len(reducer.overlap._waits) == len(reducer.overlap._arrived) == reducer.bucket_count
        assert not reducer.overlap._under_way
        assert 0 <= reducer.overlap.hidden() <= 1
    assert figures[0] is not figures[1]
    with pytest.raises(KeyError), reducer.overlapping(()):
        raise KeyError
    assert reducer.overlap is None
