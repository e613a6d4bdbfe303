import json
import signal

import pytest

from tests.jobs.starting import ROOT, start

# In one process of the runner, which starts the job once.
pytestmark = [pytest.mark.middle, pytest.mark.xdist_group("guards")]

SCRIPT = ROOT / "tests" / "jobs" / "guards_worker.py"


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.full)])
def found(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("guards")
    done = start(SCRIPT, folder, workers=request.param, check=False)
    # Worker 1 gets SIGTERM, and not by the launcher, to which that is a job that was not done.
    assert done.returncode == 128 + signal.SIGTERM, done.stderr[-3000:]
    assert "worker 1 was asked to stop (SIGTERM) by somebody other than fleetrun" in done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(request.param)]


@pytest.mark.parametrize("way", ["uneven", "items"])
def test_workers_whose_data_ends_at_different_times_end_the_epoch_together(found, way):
    """No batch is lost, none counts twice, and each window is averaged by what it holds."""
    for worker in found:
        (weights, windows), (expected, count) = worker[way], worker["reference"]
        assert windows == count
        assert weights == found[0][way][0]
        for ours, theirs in zip(weights, expected, strict=True):
            assert flat(ours) == pytest.approx(flat(theirs), rel=0, abs=1e-12)


def flat(values):
    return [number for value in values for number in flat(value)] if isinstance(values, list) else [values]


def test_evenly_ends_with_the_first_that_runs_out(found):
    assert all(worker["evenly"] == [0, 1, 2] for worker in found)


def test_a_single_bit_on_one_worker_is_found_and_named(found):
    for worker in found:
        kind, message, seen = worker["drifting"]
        assert kind == "WorkersDifferError"
        assert seen == 10  # the sixth window, after the change in the fourth, compared every third
        assert "after 6 windows" in message
        assert "1 of 2 parameters (weight" in message
        assert "compare_every=0" in message
        if len(found) > 2:
            assert "worker 1 differs from most of the others" in message


def test_a_worker_that_forgets_items_in_a_later_window_is_noticed_before_the_update(found):
    for worker in found:
        number, message = worker["mixed"]
        assert number == 3  # the end of the second window
        assert f"{len(found) - 1} of {len(found)} workers gave items= to minimize" in message


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("lr", "lr 0.2"),
        ("momentum", "momentum 0.8"),
        ("clip_norm", "clip_norm 1.0"),
        ("compare_every", "compare_every 50"),
        ("loss scale", "worker 0 has loss scale 1024.0"),
        ("no loss scale", "worker 1 has no loss scale"),
        ("schedule", "schedule MultiStepLR with "),
        ("state", "state of group 0: momentum_buffer; none"),
    ],
)
def test_settings_and_state_that_differ_are_found_in_the_first_window(found, what, said):
    for worker in found:
        number, message = worker["differing"][what]
        assert number == 0
        assert "the workers differ in what a window reduces" in message
    assert said in found[1]["differing"][what][1]


def test_a_worker_that_would_reduce_something_else_is_found_in_that_window(found):
    for worker in found:
        changing = worker["changing"]
        assert [changing[what][0] for what in ("added", "frozen", "names")] == [0, 0, 0]
        for what in ("added", "frozen"):
            assert f"1 of {len(found)} workers added, froze or freed parameters" in changing[what][1]
        assert "the workers differ in what a window reduces" in changing["names"][1]
        assert changing["all"] is None


def test_weights_that_differ_are_found_by_a_flush_and_by_a_save(found):
    for worker in found:
        kind, message = worker["drifted"]["flush"]
        assert kind == "WorkersDifferError"
        assert "1 of 2 parameters (bias" in message
        for way in ("save", "saved beside"):
            kind, message = worker["drifted"][way]
            assert kind == "CheckpointError"
            assert "worker 1 differs from worker 0 in 1 of 2 parameters (bias)" in message


def test_all_workers_see_the_same_stop(found):
    assert [worker["stopping"] for worker in found] == [11] * len(found)


def test_workers_of_one_machine_listen_on_loopback_alone(found):
    for worker in found:
        assert worker["listeners"]
        assert all(address.startswith("0100007F") for address in worker["listeners"])
