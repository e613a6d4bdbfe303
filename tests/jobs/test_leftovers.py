"""Nothing of a job lives longer than the job, whichever of its processes is stopped or killed."""

import os
import signal

import pytest

from tests.chaos.live import children
from tests.jobs.running import STUBBORN, is_alive
from tests.jobs.starting import start

# Each worker starts two programs that have nothing to do with it any more: in sessions of their own, the second also
# without a parent.
DAEMONS = """
import os, subprocess, sys, time
mine = sys.argv[1] + os.environ["RANK"]
sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
daemon = subprocess.Popen(sleeps, start_new_session=True, env={})
twice = "import subprocess as s, sys; print(s.Popen(sys.argv[1:], start_new_session=True, stdout=s.DEVNULL).pid)"
orphan = subprocess.run([sys.executable, "-c", twice, *sleeps], stdout=subprocess.PIPE, env={}).stdout
"""
GOES_ON = """
with open(mine, "w") as file:
    file.write(f"{os.getpid()} {daemon.pid} {int(orphan)}")
time.sleep(600)
"""
ENDS = """
with open(mine, "a") as file:
    file.write(f"{daemon.pid} {int(orphan)} ")
sys.exit(int(sys.argv[2]) if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
"""


def nursery(job):
    (found,) = children(job.launcher.pid)
    return found


@pytest.mark.middle
@pytest.mark.parametrize("killed", ["launcher", "nursery"])
def test_daemons_of_a_script_end_with_the_launcher_and_with_the_nursery(script, running, killed):
    job = running(script(DAEMONS + GOES_ON))
    job.wait_for_workers()
    os.kill(job.launcher.pid if killed == "launcher" else nursery(job), signal.SIGKILL)
    assert job.end() == (-signal.SIGKILL if killed == "launcher" else 128 + signal.SIGKILL)
    job.wait_for_the_end_of_all()


@pytest.mark.middle
@pytest.mark.parametrize("code", [0, 3])
def test_daemons_of_a_script_end_with_the_attempt(script, tmp_path, code):
    options = ["--max_restart", "1", "--log_dir", tmp_path / "log"]
    start(script(DAEMONS + ENDS), tmp_path / "pid", code, workers=2, options=options)
    for rank in range(2):
        pids = [int(pid) for pid in (tmp_path / f"pid{rank}").read_text().split()]
        assert len(pids) in ((2, 4) if code else (2,))  # one of the workers may be ended before it has come so far
        assert not any(is_alive(pid) for pid in pids)


@pytest.mark.middle
def test_a_nursery_that_is_stopped_goes_on_and_passes_signals_on(script, running):
    job = running(script(STUBBORN))
    job.wait_for_workers()
    os.kill(nursery(job), signal.SIGSTOP)
    job.wait_until_said("the process that starts the workers was stopped")
    job.launcher.send_signal(signal.SIGINT)
    job.launcher.send_signal(signal.SIGTERM)
    assert job.end() == 128 + signal.SIGINT
    job.wait_for_the_end_of_all()


@pytest.mark.middle
def test_nothing_outlives_a_launcher_that_is_killed_while_the_nursery_is_stopped(script, running):
    job = running(script(STUBBORN))
    job.wait_for_workers()
    os.kill(job.launcher.pid, signal.SIGSTOP)  # else it would let the nursery go on
    os.kill(nursery(job), signal.SIGSTOP)
    job.launcher.kill()
    job.end()
    job.wait_for_the_end_of_all()
