"""Whole jobs that are saved, killed, damaged and resumed, with real processes."""

import json
from functools import cache

import pytest

from fleetx.checkpoint import survey
from tests.jobs import checkpoint_worker
from tests.jobs.checkpoint_scenarios import GLOBAL_BATCH, K_STEPS
from tests.jobs.starting import ROOT, start

# In one process of the runner, which starts each job once.
pytestmark = pytest.mark.xdist_group("checkpoints")

JOB = ROOT / "tests" / "jobs" / "checkpoint_worker.py"
SCENARIOS = ROOT / "tests" / "jobs" / "checkpoint_scenarios.py"


@pytest.mark.middle
@pytest.mark.parametrize("case", checkpoint_worker.CASES.values(), ids=list(checkpoint_worker.CASES))
def test_one_worker_resumes_bit_for_bit(tmp_path, case):
    whole = checkpoint_worker.play("through", tmp_path, case)
    assert checkpoint_worker.play("resume", tmp_path, case) == whole


@pytest.mark.parametrize(
    "workers", [2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)]
)
def test_workers_of_a_job_resume_bit_for_bit(tmp_path, workers):
    """In mid-window and mid-epoch, with dropout, low precision, LARS and LAMB; each case in new processes."""
    for mode in ("through", "resume"):
        start(JOB, mode, tmp_path, workers=workers)
    for rank in range(workers):
        through, resumed = (
            json.loads((tmp_path / f"{mode}-{workers}-{rank}.json").read_text(encoding="utf-8"))
            for mode in ("through", "resume")
        )
        assert through.keys() == checkpoint_worker.CASES.keys()
        for name in through:
            assert resumed[name] == through[name], (name, rank)


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory):
    @cache
    def run():
        folder = tmp_path_factory.mktemp("scenarios")
        return json.loads(start(SCENARIOS, folder, "all", launcher=None).stdout.splitlines()[-1])

    return run()


@pytest.mark.middle
def test_another_number_of_workers_goes_on_with_nothing_lost_or_doubled(scenarios):
    parts, whole = scenarios["changing_workers"]["parts"], scenarios["changing_workers"]["whole"]
    assert [len(part) for part in parts] == [2, 1, 2, 3]
    assert [answer["start"] for part in parts for answer in part[:1]] == [
        None,
        {"replayed": 1, "workers": 2},
        {"replayed": 2, "workers": 1},
        {"replayed": 2, "workers": 2},
    ]
    # The samples of each update, on all workers together, are those of the run that was never interrupted.
    windows = [
        sorted(sample for answer in part for sample in answer["windows"][number])
        for part in parts
        for number in range(len(part[0]["windows"]))
    ]
    assert windows == whole["windows"]
    assert len(windows) == 7
    for answer in parts[-1]:
        assert answer["weights"] == pytest.approx(whole["weights"], rel=0, abs=1e-14)


@pytest.mark.middle
def test_buffers_are_those_of_the_windows_start_where_a_window_is_taken_again(scenarios):
    """The first worker counts the samples it sees: none is counted twice."""
    first, second = scenarios["changing_workers"]["parts"][:2]
    own = K_STEPS * GLOBAL_BATCH // 2  # of the first window, with two workers
    assert sum(first[0]["seen"]) == own + GLOBAL_BATCH // 2
    assert sum(second[0]["seen"]) == own + 5 * GLOBAL_BATCH


@pytest.mark.middle
def test_a_worker_without_room_fails_the_save_on_all_and_nothing_is_lost(scenarios):
    first, second = scenarios["one_without_room"]
    assert len(first["messages"]) == len(second["messages"]) == 2
    assert all(message.startswith("worker 1: the checkpoint of step 2 was not saved") for message in first["messages"])
    assert all("No space left on device" in message for message in first["messages"] + second["messages"])
    assert first["left"] == [".lock", "save-000001-step-1"]
    assert first["latest"] == second["latest"] == "save-000002-step-3"


@pytest.mark.middle
def test_a_worker_whose_state_cannot_be_saved_keeps_nobody_waiting(scenarios):
    first, second = scenarios["one_with_a_strange_value"]
    assert all(message.startswith("CheckpointError: worker 1: ") and "'extra/a'" in message for message in first)
    assert all(message.startswith("TypeError: ") and "'extra/a'" in message for message in second)
    assert len(first) == len(second) == 2


@pytest.mark.middle
def test_workers_must_save_the_same_step(scenarios):
    assert scenarios["steps_that_differ"] == ["all workers must save the same step, and they save 1, 2."] * 2


@pytest.mark.middle
def test_a_save_on_the_first_worker_alone_ends_with_a_remedy(scenarios):
    message, _ = scenarios["only_the_first"]
    assert "heard nothing of the others within 10 s" in message
    assert "on every worker, not on the first alone" in message


@pytest.mark.middle
def test_workers_without_a_common_file_system_are_told_so(scenarios):
    for saving, resuming in scenarios["folders_of_their_own"]:
        assert "all workers must see one and the same folder" in saving
        assert "not all workers share the file system" in resuming


@pytest.mark.middle
def test_all_workers_take_the_same_checkpoint_where_one_of_them_finds_damage(scenarios):
    for answer in scenarios["damaged_for_one"]:
        assert answer["step"] == 4
        assert len(answer["reasons"]) == 1
        assert answer["reasons"][0].startswith("rank-00001.safetensors does not hold what was written")


@pytest.mark.middle
def test_damage_is_found_in_files_that_nobody_needs_any_more(scenarios):
    """Four workers saved, two resume, and the file of each of the four is damaged in turn."""
    assert scenarios["damaged_for_nobody"] == {str(number): [4, 4] for number in range(4)}


@pytest.mark.middle
def test_a_job_that_is_killed_again_and_again_ends_as_if_nothing_had_happened(scenarios):
    result = scenarios["interrupted_until_done"]
    assert result["saved by then"] == sorted(result["saved by then"])
    assert result["saved by then"][-1] >= 10
    assert result["disturbed"] == result["undisturbed"]


@pytest.mark.middle
def test_a_worker_that_fails_while_its_save_waits_for_others_ends_with_its_own_error(tmp_path):
    """And does not wait for the 600 s that workers wait for each other."""
    script = tmp_path / "lonely.py"
    script.write_text(LONELY, encoding="utf-8")
    done = start(script, tmp_path / "run", workers=2, check=False, timeout=250)
    assert done.returncode == 1
    assert "ValueError: over" in done.stderr
    assert "worker 0 failed with exit code 1" in done.stderr
    assert survey(tmp_path / "run") == []


LONELY = """
import sys
import torch
import torch.distributed as dist
import fleetx as X
from fleetx import fleet

fleet.init()
checkpoints = X.Checkpoints(sys.argv[1], model=torch.nn.Linear(2, 2))
if fleet.worker_index() == 0:
    checkpoints.folder.mkdir()
    checkpoints.save(1, asynchronous=True)
    raise ValueError("over")
dist.all_reduce(torch.ones(1))
"""


def kill(folder, workers, count, during, seed):
    done = start(SCENARIOS, folder, "kills", workers, count, during, seed, launcher=None)
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: found[name] for name in ("lost", "mixed", "hung", "unexplained")} == {
        "lost": 0,
        "mixed": 0,
        "hung": 0,
        "unexplained": 0,
    }
    assert found["whole at the end"]
    assert found["good ones left"] >= 2


@pytest.mark.middle
def test_kills_during_saves_lose_nothing_and_mix_nothing(tmp_path):
    kill(tmp_path, workers=2, count=10, during=3, seed=1)


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_many_kills_during_saves_lose_nothing_and_mix_nothing(tmp_path, workers):
    kill(tmp_path, workers, count=80, during=40, seed=workers)
