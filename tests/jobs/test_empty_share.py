"""A worker without samples in the last batch of an epoch: the update is that of a worker alone."""

import pytest
import torch

from tests.jobs.empty_share_worker import train
from tests.jobs.starting import ROOT, start

STEP = pytest.param(
    "step",
    marks=pytest.mark.xfail(raises=AssertionError, reason="Step rejects an empty batch where other workers have one"),
)


@pytest.mark.middle
@pytest.mark.parametrize("entry_point", ["minimize", STEP])
def test_a_worker_without_samples_adds_nothing(entry_point, tmp_path):
    start(ROOT / "tests" / "jobs" / "empty_share_worker.py", entry_point, tmp_path, workers=2, timeout=90)
    expected = train(entry_point)
    for rank in range(2):
        got = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12)
