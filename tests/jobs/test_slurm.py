"""The batch script that users copy, on two machines under SLURM: it saves, goes back into the queue, and goes on."""

import os
import subprocess
import sys
import uuid

import pytest

from tests.chaos.live import MARK, marked
from tests.jobs import slurm_cluster
from tests.jobs.engines import CLUSTERS, DISTURBED, weights
from tests.jobs.starting import ROOT
from tests.waiting import GUARD, wait_for

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("slurm")]

BATCH = CLUSTERS / "slurm" / "train.sbatch"
# What users change too: the machines here have no GPU.
OPTIONS = ["--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-task=0"]


class Job:
    """A job of the batch file, in a folder that looks like a checkout; `disturb` says what happens to its script."""

    def __init__(self, slurm, folder, disturb, *options, **environment):
        self.slurm, self.folder, self.notes = slurm, folder, folder / "notes"
        self.notes.mkdir(exist_ok=True)
        script = folder / "examples" / "clusters" / "train.py"
        if not script.exists():
            script.parent.mkdir(parents=True)
            script.symlink_to(DISTURBED)
        environment |= {"DISTURB": disturb, "NOTES": str(self.notes), "PYTHONPATH": str(ROOT / "src")}
        arguments = ["--parsable", *OPTIONS, *options, BATCH]
        self.number = int(slurm.run("sbatch", *arguments, folder=folder, **environment))

    @property
    def log(self):
        path = self.folder / f"train-{self.number}.log"
        return path.read_text() if path.exists() else ""

    @property
    def saved(self):
        return sorted(path.name for path in (self.folder / "checkpoints" / str(self.number)).glob("save-*"))

    def wait_until_held(self):
        wait_for(lambda: len(list(self.notes.glob("held.*"))) == 2, lambda: f"pause of both workers: {self.log}")

    def end(self):
        """Wait for success; gives the weights."""
        restarts = self.slurm.wait_for_job(self.number, "COMPLETED")["Restarts"]
        return weights(self.log), int(restarts)


@pytest.fixture
def submit(slurm, tmp_path):
    jobs = []

    def submit(*arguments, **environment):
        jobs.append(Job(slurm, tmp_path, *arguments, **environment))
        return jobs[-1]

    yield submit
    for job in jobs:  # what a failed test has left
        slurm.run("scancel", "--quiet", job.number)


def test_a_killed_worker_sends_the_job_back_into_the_queue(slurm, submit, by_fleetrun):
    job = submit("die 1 18", MAX_RESTARTS="0")  # it has saved since it began
    slurm.start_again(job.number)
    assert job.end() == (by_fleetrun, 1), job.log
    assert "resumed after 12 batches" in job.log


def by_signal(slurm, job):
    slurm.run("scancel", "--signal=TERM", job.number)


def by_requeue(slurm, job):
    slurm.run("scontrol", "requeue", job.number)


def by_preemption(slurm, job):
    slurm.run("srun", "--partition=high", "--nodes=2", "--exclusive", "true")


def by_preemption_with_grace(slurm, job):
    slurm.run("scontrol", "update", "PartitionName=low", "GraceTime=300")
    by_preemption(slurm, job)
    slurm.run("scontrol", "update", "PartitionName=low", "GraceTime=0")


def by_time_limit(slurm, job):
    wait_for((job.notes / "released").exists, "signal before the end of the time", guard=2 * GUARD)


@pytest.mark.parametrize("ask", [by_signal, by_requeue, by_preemption, by_preemption_with_grace, by_time_limit])
def test_workers_that_are_asked_to_leave_save_at_one_update_and_the_job_goes_on(slurm, submit, by_fleetrun, ask):
    # SLURM sends the signal a minute before the time is up, or up to a minute earlier.
    job = submit("hold 6", *(["--time=3", "--signal=TERM@60"] if ask is by_time_limit else []))
    job.wait_until_held()
    ask(slurm, job)
    slurm.start_again(job.number)
    assert job.saved == ["save-000001-step-8"]  # the first update after six batches
    assert job.end() == (by_fleetrun, 1), job.log
    assert "resumed after 8 batches" in job.log
    assert "Traceback" not in job.log


def test_a_cancelled_job_saves_and_stays_cancelled_and_another_one_resumes(slurm, submit, by_fleetrun):
    job = submit("hold 6")
    job.wait_until_held()
    slurm.run("scancel", job.number)
    assert slurm.wait_for_job(job.number, "CANCELLED")["Restarts"] == "0"
    wait_for(lambda: job.saved == ["save-000001-step-8"], "checkpoint of the cancelled job")
    checkpoints = job.folder / "checkpoints" / str(job.number)
    other = submit("hold 6", CHECKPOINTS=str(checkpoints))
    assert other.end() == (by_fleetrun, 0)
    assert "resumed after 8 batches" in other.log


def test_a_job_that_fails_and_saves_nothing_ends_as_failed(slurm, submit):
    job = submit("die 0 2", MAX_RESTARTS="0")
    assert slurm.wait_for_job(job.number, "FAILED", "NonZeroExitCode")["Restarts"] == "0"
    assert "host0: task 0: Killed" in job.log


def test_a_lost_machine_sends_the_job_back_into_the_queue(slurm, submit, by_fleetrun):
    job = submit("hold 18")
    job.wait_until_held()
    slurm.run("ip", "link", "set", "cable1", "down")
    slurm.wait_for_job(job.number, "PENDING", "BeginTime")
    slurm.run("ip", "link", "set", "cable1", "up")
    slurm.start_again(job.number)
    assert job.end() == (by_fleetrun, 1), job.log
    assert "resumed after 12 batches" in job.log


HOLDER = """
import sys, time
from pathlib import Path
from tests.jobs.slurm_cluster import SlurmCluster
SlurmCluster(Path(sys.argv[1]))
print("up", flush=True)
time.sleep(600)
"""


def test_nothing_of_the_cluster_outlives_tests_that_are_killed(tmp_path):
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    mark = uuid.uuid4().hex
    command = [sys.executable, "-c", HOLDER, tmp_path]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {MARK: mark}, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"up\n"
        assert len(marked(mark)) > 4  # the holder, the namespace, munged, slurmctld and two slurmd
        holder.kill()
    wait_for(lambda: not marked(mark), lambda: f"end of {marked(mark)}")
