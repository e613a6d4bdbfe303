import contextlib
import tempfile
from pathlib import Path

import pytest

from tests.jobs import slurm_cluster
from tests.jobs.engines import Disturbed, fleetrun, weights
from tests.jobs.running import Running
from tests.waiting import wait_for


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def running(tmp_path):
    """Makes a `Running`, and leaves nothing of it behind."""
    jobs = []

    def begin(*args, **environment):
        jobs.append(Running(args[0], tmp_path, *args[1:], **environment))
        return jobs[0]

    yield begin
    for job in jobs:
        job.launcher.kill()
        job.launcher.wait()


@pytest.fixture(scope="session")
def by_fleetrun(tmp_path_factory):
    """The weights of two workers that nothing has disturbed."""
    return weights(fleetrun(2, tmp_path_factory.mktemp("fleetrun")))


@pytest.fixture
def disturbed(tmp_path):
    """Makes a `Disturbed`, and leaves nothing of it behind."""
    jobs = []

    def make(disturb):
        jobs.append(Disturbed(tmp_path, disturb))
        return jobs[0]

    yield make
    for job in jobs:
        job.kill()


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """Two machines under SLURM, for all tests of a process."""
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    cluster = slurm_cluster.SlurmCluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def ray_apart():
    """Ray for the tests of a module: on 127.0.0.1 alone, in a folder with a short path, and nothing of it stays."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_ADDRESS", "local")  # else scripts join any cluster that they find
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # on these systems Ray listens on 127.0.0.1
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        patch.setenv("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "0.5")
        yield
        wait_for(lambda: not processes_with(folder), lambda: f"end of Ray's processes {processes_with(folder)}")


def processes_with(text):
    """Processes that have the text among their variables."""
    found = []
    for variables in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if text.encode() in variables.read_bytes():
                found.append(int(variables.parent.name))
    return found
