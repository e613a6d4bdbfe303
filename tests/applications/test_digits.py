import itertools

import pytest
import torch

from fleetx.applications import digits


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_each_update_of_the_plain_run_has_the_threads_that_were_faster_last(two_threads, monkeypatch):
    """All threads are faster until the machine gets busy, in the fourth update."""
    seconds = iter([6, 5, 5, 40, 7, 7])
    clock = itertools.accumulate(itertools.chain.from_iterable((0, next(seconds)) for _ in range(6)))
    monkeypatch.setattr(digits.time, "perf_counter", lambda: next(clock))
    threads, chosen = digits.FastestThreads(), []
    for _ in range(6):
        with threads.update() as number:
            assert torch.get_num_threads() == number
            chosen.append(number)
        assert torch.get_num_threads() == 2
    assert chosen == [1, 2, 2, 2, 1, 1]
