"""A job under fleetrun that goes on until a test ends it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.jobs.starting import ROOT
from tests.waiting import GUARD, wait_for

# Worker and child: neither leaves when it is asked to.
STUBBORN = """
import os, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
child = os.fork()
if child == 0:
    os.setpgid(0, os.getpgid(os.getppid()))
    time.sleep(600)
open(sys.argv[1] + os.environ["RANK"], "w").write(f"{os.getpid()} {child}")
time.sleep(600)
"""


class Running:
    """A job that is alive, whose workers write their process ids."""

    def __init__(self, path, folder, *options, **environment):
        command = [sys.executable, "-m", "fleetx.launch", "--nproc_per_node", "2", "--log_dir", str(folder / "log")]
        command += ["--stop_timeout", "600", *options, str(path), str(folder / "pid")]
        self.files = [folder / "pid0", folder / "pid1"]
        self.output = folder / "errors.txt"
        with self.output.open("w") as errors:
            self.launcher = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors, env=os.environ | environment
            )

    @property
    def errors(self):
        return self.output.read_text()

    def wait_for_workers(self):
        wait_for(lambda: all(file.exists() and file.read_text() for file in self.files), "process ids of all workers")

    def wait_until_said(self, words):
        wait_for(lambda: words in self.errors, f"{words!r} of the launcher")

    def end(self):
        return self.launcher.wait(GUARD)

    def wait_for_the_end_of_all(self):
        """Of the workers and of what they have started; processes that wait to be reaped are gone."""
        pids = [int(pid) for file in self.files for pid in file.read_text().split()]
        wait_for(lambda: not any(is_alive(pid) for pid in pids), "end of all processes")


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
