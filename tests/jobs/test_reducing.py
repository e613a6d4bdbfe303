"""How gradients travel in whole jobs: how many messages, through which groups, and that sums stay the same."""

import pytest
import torch

from tests.jobs import reducing_worker
from tests.jobs.starting import ROOT, start

# In one process of the runner, which starts each job once.
pytestmark = [pytest.mark.middle, pytest.mark.xdist_group("reducing")]


@pytest.fixture(scope="module", params=[2, 4])
def job(request, tmp_path_factory):
    """What each worker saved, and the log of each."""
    folder = tmp_path_factory.mktemp("reducing")
    logs = folder / "logs"
    start(ROOT / "tests/jobs/reducing_worker.py", folder, workers=request.param, options=["--log_dir", logs])
    results = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(request.param)]
    return results, [(logs / f"workerlog.{rank}").read_text() for rank in range(request.param)]


def test_fusing_is_reported_once_per_job(job):
    _, logs = job
    assert [log.count("all-reduces, fused into") for log in logs] == [1] + [0] * (len(logs) - 1)
    assert "7 all-reduces, fused into 2 per update (984 B, " in logs[0]


@pytest.mark.parametrize("way", reducing_worker.SENDING_ALIKE)
def test_a_window_is_one_round_of_as_many_messages_as_reported(job, way):
    """Also with a frozen part, an unused parameter, recompute and offload."""
    results, _ = job
    for result in results:
        assert "7 all-reduces, fused into 2 per update (" in result[way]["overview"]
        assert result[way]["counts"] == [0, 0, 0, 2] * (reducing_worker.WINDOWS - 1)
        assert all(map(torch.equal, result[way]["weights"].values(), results[0]["merge"]["weights"].values()))
