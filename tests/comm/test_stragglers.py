"""Who is named as slow, and who is not; clocks are set by hand. In a job: tests/jobs/test_stragglers.py."""

import pytest
import torch

from fleetx import notices
from fleetx.comm import beats
from fleetx.comm.stragglers import LEAST_SECONDS, SLOWER, WINDOWS, OwnTime, Stragglers
from tests.hand_clock import HandClock

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    monkeypatch.setattr(notices, "_told", set())


def windows(count, *times):
    """As many windows, in which workers take (seconds, items)."""
    return [torch.tensor(times, dtype=torch.float32).t()] * count


def told(caplog, *parts, workers=3):
    watch = Stragglers([f"host{rank}" for rank in range(workers)])
    caplog.clear()
    for part in parts:
        for times in part:
            watch.note(times)
    return caplog.messages


SLOW = windows(WINDOWS, (1.0, 8), (1.5, 8), (1.0, 8))
EVEN = windows(1, (1.0, 8), (1.0, 8), (1.0, 8))


def test_a_slow_worker_is_named_once_with_its_host_and_times(caplog):
    (message,) = told(caplog, SLOW, SLOW, EVEN, SLOW)
    assert message.startswith(
        f"worker 1 on host1 was slow in the last {WINDOWS} windows: 1.5 s of its own in the latest, and the median of "
        "the 3 workers is 1 s. The others wait for it in each update: look for"
    )


def test_each_slow_worker_is_named(caplog):
    others = [(1.0, 8)] * 3
    messages = told(caplog, windows(WINDOWS, (1.5, 8), (1.6, 8), *others), workers=5)
    assert [message.split(" was")[0] for message in messages] == ["worker 0 on host0", "worker 1 on host1"]


@pytest.mark.parametrize(
    "parts",
    [
        [SLOW[:-1], EVEN, SLOW[:-1]],  # as where one compiles longer, or loads a cache
        [windows(3 * WINDOWS, (1.0, 8), (1.0 * SLOWER, 8), (1.0, 8))],
        [windows(3 * WINDOWS, (1.0, 8), (2.0, 16), (1.0, 8))],  # has more to do
        [windows(3 * WINDOWS, (1.0, 8), (1.0, 2), (1.0, 8))],  # has less to do, and nobody waits
        [windows(3 * WINDOWS, (0.001, 8), (0.001 + LEAST_SECONDS, 8), (0.001, 8))],
        [windows(3 * WINDOWS, (1.0, 8), (0.0, 0), (0.0, 0))],  # alone at an uneven end
        [windows(3 * WINDOWS, (0.0, 8), (9.0, 8), (0.0, 8))],  # not known yet
        [windows(3 * WINDOWS, (1.0, 8), (9.0, 0), (1.0, 8))],  # its items were all masked
        [windows(3 * WINDOWS, (0.1, 8), (1.0, 8), (1.0, 8))],  # one is quick, and most are as usual
    ],
)
def test_nobody_is_named(caplog, parts):
    assert told(caplog, *parts) == []


def test_of_two_workers_the_quicker_one_is_the_measure(caplog):
    (message,) = told(caplog, windows(WINDOWS, (1.4, 8), (1.0, 8)), workers=2)
    assert message.startswith("worker 0 on host0")


def test_windows_without_a_worker_neither_count_for_it_nor_break_the_row(caplog):
    half, without = SLOW[: WINDOWS // 2], windows(WINDOWS, (1.0, 8), (0.0, 0), (1.0, 8))
    assert told(caplog, half, without) == []
    assert len(told(caplog, half, without, half)) == 1


def test_more_to_do_and_slow_as_well_is_named(caplog):
    assert len(told(caplog, windows(WINDOWS, (1.0, 8), (3.0, 16), (1.0, 8)))) == 1


@pytest.mark.parametrize("workers", [2, 5, 16])
def test_noise_names_nobody_and_hides_nobody(caplog, workers):
    """Windows that vary by a tenth; then one worker takes half as long again."""
    torch.manual_seed(workers)
    times = torch.stack([torch.empty(500, workers).log_normal_(0, 0.1), torch.full((500, workers), 8.0)], dim=1)
    assert told(caplog, times, workers=workers) == []
    times[:, 0, workers - 1] *= 1.5
    (message,) = told(caplog, times, workers=workers)
    assert message.startswith(f"worker {workers - 1} on host{workers - 1}")


def test_a_workers_own_time_is_what_it_did_not_wait_for_others(monkeypatch):
    clock, own = HandClock().install(monkeypatch), OwnTime()
    assert own.latest() == (0.0, 0.0)
    clock.now = 5.0
    own.end(CPU, 4)  # in the first window there is no end of a reduction yet
    assert own.latest() == (0.0, 0.0)
    own.begin(CPU)
    clock.now = 6.0
    with beats.waiting(), beats.waiting():
        clock.now = 16.0
    clock.now = 17.0
    own.end(CPU, 4)
    assert own.latest() == (2.0, 4)
    assert own.latest() == (0.0, 0.0)
    own.begin(CPU)
    own.begin(CPU)  # a window in which it held nothing
    assert own.latest() == (0.0, 0.0)


class LateEvent:
    """A moment of a GPU that is far behind the host."""

    over = 0

    def __init__(self, number):
        self.number = number

    def query(self):
        return self.number < LateEvent.over

    def elapsed_time(self, other):
        assert other.query()
        return 1e3 * (other.number - self.number)


def test_on_a_gpu_the_latest_time_that_is_known_is_told_and_nothing_is_waited_for(monkeypatch):
    marks = iter(map(LateEvent, range(100)))
    monkeypatch.setattr("fleetx.comm.stragglers.moment", lambda _device: next(marks))
    own, gpu = OwnTime(), torch.device("cuda", 0)
    for items in (10, 11, 12):
        own.begin(gpu)
        own.end(gpu, items)
    assert own.latest() == (0.0, 0.0)
    LateEvent.over = 4
    assert own.latest() == (1.0, 11)
    LateEvent.over = 6
    assert own.latest() == (1.0, 12)


class OnDevice:
    """A HostValue of a GPU."""

    on_device = True

    def __init__(self, times):
        self.tolist = times.tolist


def test_on_a_gpu_the_window_before_is_looked_at(monkeypatch, caplog):
    monkeypatch.setattr("fleetx.comm.stragglers.HostValue", OnDevice)
    assert told(caplog, SLOW) == []
    assert len(told(caplog, SLOW, EVEN)) == 1
