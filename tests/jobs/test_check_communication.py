"""The script that users with several GPUs run, on gloo."""

import pytest

from tests.jobs.starting import ROOT, start

SCRIPT = ROOT / "scripts" / "check_communication.py"


def lines_of(output):
    """Verdicts without their breaks, and what the launcher adds."""
    assert all(len(line) < 80 for line in output.splitlines())
    return output.replace("\n         ", " ").splitlines()


@pytest.mark.middle
def test_everything_holds_with_gloo_and_what_needs_gpus_is_skipped():
    lines = lines_of(start(SCRIPT, "--device", "cpu", workers=2, launcher="torchrun").stdout)
    assert lines[0].startswith("2 workers, gloo on the host, torch 2.")
    words = [line.split()[0] for line in lines[1:-1]]
    assert set(words) == {"ok", "skipped"}
    assert lines[-1] == f"{words.count('ok')} ok, 0 failed, 2 skipped"
    assert [line for line in lines if line.startswith("skipped")] == [
        "skipped  more workers than GPUs: the workers train on the host",
        next(line for line in lines if line.endswith("it is judged on GPUs only")),
    ]


WRONG = """
import sys
from fleetx.comm.reducer import Reducer
from scripts import check_communication

receive = Reducer._receive

def slightly_wrong(reducer, bucket):
    receive(reducer, bucket)
    bucket.payload.mul_(1 + 1e-6)

Reducer._receive = slightly_wrong
sys.exit(check_communication.main())
"""


@pytest.mark.full
@pytest.mark.parametrize("workers", [2, 4])
def test_what_does_not_hold_fails_with_figures_and_an_exit_code(tmp_path, workers):
    script = tmp_path / "wrong.py"
    script.write_text(WRONG)
    done = start(script, "--device", "cpu", workers=workers, launcher="torchrun", check=False)
    assert done.returncode == 1
    lines = lines_of(done.stdout)
    failed = [line for line in lines if line.startswith("FAILED")]
    assert any(line.startswith("FAILED   weights, nccl_comm_num = 3: ") for line in failed)
    assert any(line.startswith("FAILED   sync_batch_norm, gradients: ") for line in failed)
    assert not any("messages" in line or "output" in line for line in failed)
    assert lines[-1].split(", ")[1] == f"{len(failed)} failed"


RAISES = """
import sys
from scripts import check_communication

def check_that_raises(job):
    if job.rank == 1:
        raise KeyError("what is not there")
    yield job.held(True, "never")

check_communication.CHECKS = (check_that_raises,)
sys.exit(check_communication.main())
"""


@pytest.mark.full
def test_a_worker_that_raises_ends_the_job(tmp_path):
    script = tmp_path / "raises.py"
    script.write_text(RAISES)
    done = start(script, workers=2, launcher="torchrun", check=False)
    assert done.returncode == 1
    assert "FAILED   worker 1: check_that_raises: KeyError: 'what is not there'" in done.stdout


@pytest.mark.full
def test_one_worker_is_told_what_to_start():
    done = start(SCRIPT, launcher=None, check=False)
    assert done.returncode == 1
    assert "start it with torchrun --nproc_per_node 2, or fleetrun" in done.stderr
