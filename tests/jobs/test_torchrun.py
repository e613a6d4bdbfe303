"""What other launchers leave undone, and fleet.init() does: restarts without traces of attempts before, no orphans."""

import shutil
import signal
import socket

import pytest

from tests.jobs.engines import DISTURBED, MPIRUN, TORCHRUN, weights
from tests.jobs.running import is_alive
from tests.waiting import wait_for

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("torchrun")]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def agents(kind):
    """The commands of a job of two workers that may be restarted once, one for each machine."""
    again = [*TORCHRUN, "--max_restarts", "1"]
    if kind == "standalone":
        return [[*again, "--standalone", "--nproc_per_node", "2", DISTURBED]]
    port = free_port()
    if kind == "static":
        return [[*again, "--nproc_per_node", "2", "--master_addr", "127.0.0.1", "--master_port", str(port), DISTURBED]]
    options = ["--nnodes", "2", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}"]
    return [[*again, *options, "--local_addr", "127.0.0.1", DISTURBED]] * 2


@pytest.mark.parametrize("kind", ["standalone", "static", "two machines"])
def test_workers_that_torchrun_restarts_find_each_other_and_resume(disturbed, by_fleetrun, kind):
    """torchrun keeps the store, where the addresses of workers that have ended still stand."""
    job = disturbed("die 1 18")
    job.start(*agents(kind))
    assert set(job.end()) == {0}, job.log
    assert weights(job.log) == by_fleetrun
    assert "resumed after 12 batches" in job.log


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_workers_of_a_launcher_that_is_killed_save_and_end(disturbed, by_fleetrun, launcher):
    if launcher == "mpirun" and not shutil.which(launcher):
        pytest.skip("mpirun is not installed (scripts/install_engines.sh)")
    command = [*MPIRUN, DISTURBED] if launcher == "mpirun" else agents("standalone")[0]
    job = disturbed("hold 6")
    job.start(command)
    workers = job.wait_until_held()
    assert len(workers) == 2
    job.launchers[0].kill()
    assert job.end() == [-signal.SIGKILL]
    wait_for(lambda: not any(map(is_alive, workers)), lambda: f"end of workers without a launcher: {job.log}")
    assert job.saved == ["save-000001-step-8"]
    job.start(command)
    assert job.end() == [0], job.log
    assert weights(job.log) == by_fleetrun
    assert "resumed after 8 batches" in job.log
