"""FleetX under Ray Train: workers and machines fail, and Ray starts the workers again. All tests share one cluster."""

import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.jobs.engines import run, weights
from tests.jobs.starting import ROOT

pytestmark = [
    pytest.mark.full,
    pytest.mark.xdist_group("engines"),
    pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="ray is not installed (requirements/engines.txt)"),
]


@pytest.fixture(scope="module")
def seen(ray_apart, tmp_path_factory):
    """What the workers of all scenarios have left."""
    folder = tmp_path_factory.mktemp("ray")
    run([sys.executable, str(ROOT / "tests" / "jobs" / "ray_scenarios.py"), str(folder)], folder)
    return folder


def attempts(seen, name, rank):
    return [path.read_text() for path in sorted(seen.glob(f"{name}-{rank}-*"))]


def test_a_killed_worker_and_a_lost_machine_cost_no_bit(seen, by_fleetrun):
    killed, lost, drained, last = attempts(seen, "example", rank=0)
    assert killed == ""
    assert lost == drained == "resumed after 12 batches\n"
    assert weights(last) == by_fleetrun


def test_a_machine_that_is_about_to_go_stops_all_workers_after_the_same_update(seen):
    """In the 4th update of 6; a save refuses workers that have come to different steps."""
    assert attempts(seen, "example", rank=0)[3].startswith("resumed after 20 batches\n")


def test_ray_resumes_from_a_checkpoint_it_has_copied(seen):
    for rank in range(2):
        first, second = attempts(seen, "report", rank)
        assert first == ""
        assert Path(second).name.startswith("checkpoint_")
        assert Path(second).parent == seen / "report"


def test_a_checkpoint_that_ray_knows_holds_the_weights_of_an_undisturbed_run(seen, by_fleetrun):
    metrics, path = json.loads((seen / "report.json").read_text())
    assert metrics == {"batches": 24}
    assert path == str(seen / "report" / "checkpoints" / "save-000003-step-24")
    tensors = load_file(Path(path) / "model.safetensors")
    parts = [tensors[name].numpy().tobytes() for name in ("1.weight", "1.bias", "3.weight", "3.bias")]
    assert hashlib.sha256(b"".join(parts)).hexdigest()[:16] == by_fleetrun[1]


def test_ray_removes_what_it_knows_and_nothing_else(seen):
    assert [path.name for path in (seen / "report").glob("checkpoint_2*")] == []
    saved = sorted(path.name for path in (seen / "report" / "checkpoints").glob("save-*"))
    assert saved == ["save-000001-step-12", "save-000003-step-24"]


@pytest.mark.parametrize("rank", range(2))
def test_data_of_ray_make_the_update_of_one_big_batch(seen, rank):
    """Of `minimize` with uneven shards, of `Step` with `evenly`, of `Step` with all rows: how many, and the error."""
    rows, errors = zip(*json.loads((seen / f"data-{rank}").read_text()), strict=True)
    assert rows == (21, 8, 26)
    assert max(errors) < 1e-12
