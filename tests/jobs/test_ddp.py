"""Against DistributedDataParallel on the same job. Its speed: `python -m benchmarks reduce`."""

import pytest
import torch

from tests.jobs.starting import ROOT, start

# In one process of the runner, which starts the job once.
pytestmark = [pytest.mark.middle, pytest.mark.xdist_group("ddp")]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.full)])
def job(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    start(ROOT / "tests/jobs/ddp_worker.py", folder, workers=request.param)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(request.param)]


def furthest(ours, theirs):
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


@pytest.mark.parametrize("way", ["fleetx", "unfused"])
def test_the_same_numbers_as_ddp(job, way):
    for results in job:
        assert furthest(results[way], results["ddp"]) < 1e-15
        assert furthest(results[way], job[0][way]) == 0


@pytest.mark.parametrize(("way", "tolerance"), [("bf16_allreduce", 2e-2), ("fp16_allreduce", 2e-3)])
def test_compressed_gradients_differ_by_their_rounding_and_no_more(job, way, tolerance):
    for results in job:
        assert 0 < furthest(results[way], results["ddp"]) < tolerance
        assert furthest(results[way], job[0][way]) == 0
