"""The noise scale over two workers: what each measures is that of all micro-batches together."""

import pytest
import torch

from tests.convergence.test_noise_scale import by_definition, loss_of, make, micro_batches
from tests.jobs.noise_worker import WAYS, WINDOWS
from tests.jobs.starting import ROOT, start

pytestmark = [pytest.mark.middle, pytest.mark.xdist_group("noise scale")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("noise-scale")
    start(ROOT / "tests" / "jobs" / "noise_worker.py", folder, workers=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("way", WAYS)
def test_each_worker_knows_the_noise_of_all(found, way):
    model, optimizer = make()
    expected = []
    for seed in range(WINDOWS):
        expected.append(by_definition(model, micro_batches(seed=seed)))
        for batch in micro_batches(seed=seed):
            optimizer.minimize(loss_of(model, batch), items=len(batch[1]))
    model.load_state_dict(found[0][way]["weights"])
    expected.append(by_definition(model, micro_batches(seed=9)[:2]))
    tolerance = 0.05 if way == "compressed" else 1e-9
    for worker in found:
        for name, moments in worker[way]["moments"].items():
            truth = torch.tensor([window[name or None] for window in expected], dtype=moments.dtype)
            torch.testing.assert_close(moments, truth, rtol=tolerance, atol=tolerance)
