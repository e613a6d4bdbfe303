import pytest

from tests.jobs import slurm_cluster
from tests.jobs.engines import Disturbed, fleetrun, weights
from tests.jobs.running import Running


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
