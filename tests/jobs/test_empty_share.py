"""A worker without samples in the last batch of an epoch: the update is that of a worker alone."""

import pytest
import torch

from tests.jobs.empty_share_worker import UNEVEN, WAYS, refused, train, train_unevenly
from tests.jobs.starting import ROOT, start

# In one process of the runner, which starts the job once.
pytestmark = [pytest.mark.middle, pytest.mark.xdist_group("empty share")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("empty-share")
    start(ROOT / "tests" / "jobs" / "empty_share_worker.py", folder, workers=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("way", WAYS)
def test_a_worker_without_samples_adds_nothing(found, way):
    expected, losses = train(way)
    tolerance = 0.02 if way == "compressed" else 1e-12
    for worker in found:
        got, reported = worker[way]
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=tolerance, atol=tolerance)
            assert torch.equal(got[name], found[0][way][0][name])
        if way != "minimize":  # whose last loss, the mean of nothing, is not the window's
            assert [sorted(step) for step in reported] == [sorted(step) for step in losses]
            for ours, theirs in zip(reported, losses, strict=True):
                assert ours == pytest.approx(theirs, rel=tolerance)


@pytest.mark.parametrize("way", UNEVEN)
def test_a_worker_that_has_come_to_flush_takes_part_in_the_steps_of_the_others(found, way):
    expected = train_unevenly(way)
    for worker in found:
        for name, value in expected.items():
            torch.testing.assert_close(worker["uneven"][way][name], value, rtol=1e-12, atol=1e-12)


def test_where_all_must_step_all_are_told_who_does_not(found):
    for worker in found:
        assert "SyncBatchNorm layers" in worker["refused unevenly"]
        assert "1 of 2 have come to flush() before the others" in worker["refused unevenly"]


def test_a_batch_that_is_empty_everywhere_is_refused(found):
    for message in (refused(), *(worker["refused"] for worker in found)):
        assert message is not None
        assert "the batch is empty" in message
        assert "Leave it out" in message
