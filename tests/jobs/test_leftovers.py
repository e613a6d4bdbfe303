"""Nothing of a job lives longer than the job, whichever of its processes is stopped or killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

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
    assert "Traceback" not in job.errors


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


# A program that runs a job, and starts processes of its own meanwhile; also one that its own children have left behind.
PROGRAM = """
import os, pathlib, signal, subprocess, sys, threading, time
from fleetx.launch import crew, parting, run
from tests.waiting import wait_for

how, seen = sys.argv[2], set()
glance = getattr(crew, "children_at_a_glance", None)
if glance:
    def children_at_a_glance():
        seen.update(found := glance())
        return found
    crew.children_at_a_glance = children_at_a_glance
parting.adopt_orphans()
sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
twice = "import subprocess as s, sys; print(s.Popen(sys.argv[1:], start_new_session=True, stdout=s.DEVNULL).pid)"
before, during = subprocess.Popen(sleeps), []

def live():
    wait_for(lambda: pathlib.Path("began").exists(), "start")
    during.append(subprocess.Popen(sleeps))
    failing = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    during.append(failing)
    os.waitid(os.P_PID, failing.pid, os.WEXITED | os.WNOWAIT)
    left = subprocess.run([sys.executable, "-c", twice, *sleeps], stdout=subprocess.PIPE).stdout
    during.append(int(left))
    if glance:
        wait_for(lambda: seen >= {during[0].pid, failing.pid, int(left)}, "look at the children")
    if how == "killed":
        os.kill(int(pathlib.Path("began").read_text()), signal.SIGKILL)
    pathlib.Path("go").touch()

thread = threading.Thread(target=live)
thread.start()
code = run.launch([sys.argv[1]], workers=1)
thread.join()
own, failing, left = during
print("alive", before.poll(), own.poll(), failing.wait(), os.path.exists(f"/proc/{left}"), "exit", code,
      "adopts", parting.adopt_orphans())
for pid in (before.pid, own.pid, left):
    os.kill(pid, signal.SIGKILL)
"""
WAITS = """
import os, pathlib, sys
from tests.waiting import wait_for
pathlib.Path("began.new").write_text(str(os.getppid()))
pathlib.Path("began.new").rename("began")
wait_for(pathlib.Path("go").exists, "go")
"""


@pytest.mark.middle
@pytest.mark.parametrize(("how", "code"), [("ends", 0), ("killed", 128 + signal.SIGKILL)])
def test_a_program_that_runs_a_job_keeps_its_own_children(script, tmp_path, how, code):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    command = [sys.executable, program, script(WAITS), how]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert f"alive None None 7 True exit {code} adopts True" in done.stdout, done.stdout + done.stderr
