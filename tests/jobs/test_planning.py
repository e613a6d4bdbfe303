"""Workers that plan together: the same plan on all, and the same update when one of them runs out of memory."""

import pytest
import torch

from tests.fleet.planned import same
from tests.jobs.starting import ROOT, start


@pytest.mark.middle
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.full), 2])
def test_workers_agree_on_plans_and_on_smaller_ones(workers, tmp_path):
    start(ROOT / "tests" / "jobs" / "planning_worker.py", tmp_path, workers=workers)
    found = [torch.load(tmp_path / f"{workers}-{rank}.pt", weights_only=False) for rank in range(workers)]
    for one in found:
        for ending in ("None", "forward", "backward"):
            same(one[ending][0], one["plain"][0])
        assert one["None"][1][0] == one["None"][1][-1] != ""
        for ending in ("forward", "backward"):
            plans = one[ending][1]
            assert plans[0] != plans[1] == plans[2]
    for name in found[0]:
        assert len({tuple(one[name][1]) for one in found}) == 1  # the same plans on all workers
        assert all(torch.equal(one[name][0][1][key], value) for one in found for key, value in weights(found, name))


def weights(found, name):
    """Batch statistics are a worker's own."""
    return [(key, value) for key, value in found[0][name][0][1].items() if ".norm." not in key or "running" not in key]


@pytest.mark.middle
def test_workers_that_wait_for_each_other_in_a_forward_measure_together(tmp_path):
    start(ROOT / "tests" / "jobs" / "waiting_worker.py", tmp_path, workers=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))
    assert first == second  # as many forwards, and the same plans
    forwards = [count for count, _ in first]
    assert forwards[0] == forwards[2] > forwards[1] == forwards[3]  # what one has not, both measure anew
