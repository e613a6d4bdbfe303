"""Several workers: collectives in a forward are repeated in order, and gradients are those of the plain run."""

from tests.jobs.starting import ROOT, start

SCRIPT = ROOT / "tests" / "memory" / "workers.py"


def test_two_workers_equal_the_plain_run_with_and_without_torchs_data_parallel(tmp_path):
    start(SCRIPT, tmp_path, workers=2, timeout=120)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
