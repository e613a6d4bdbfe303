"""Several workers: collectives in a forward are repeated in order, and gradients are those of the plain run."""

import pytest

from tests.jobs.starting import ROOT, start

SCRIPT = ROOT / "tests" / "memory" / "workers.py"
SHARDED = ROOT / "tests" / "memory" / "sharded_worker.py"


@pytest.mark.middle
def test_two_workers_equal_the_plain_run_with_and_without_torchs_data_parallel(tmp_path):
    start(SCRIPT, tmp_path, workers=2)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2])
def test_sharded_parameters_equal_the_plain_run(tmp_path, workers):
    start(SHARDED, tmp_path, workers=workers)
    assert {path.name for path in tmp_path.iterdir()} == {str(rank) for rank in range(workers)}
