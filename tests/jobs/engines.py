"""Jobs of launchers that are not ours, with the one script that users copy; also disturbed ones, which resume."""

import os
import re
import signal
import subprocess
import sys

from tests.chaos.live import children
from tests.jobs.starting import ROOT
from tests.waiting import GUARD, wait_for

CLUSTERS = ROOT / "examples" / "clusters"
SCRIPT = str(CLUSTERS / "train.py")
DISTURBED = str(ROOT / "tests" / "jobs" / "disturbed_train.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
MPIRUN = ("mpirun", "--oversubscribe", "-n", "2", sys.executable)


def environment(folder):
    """Variables for the launcher; no trainer writes into the user's home."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"HOME": str(folder), "HF_HOME": str(folder), "RAY_USAGE_STATS_ENABLED": "0", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    own |= {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **own}


def run(command, folder):
    """The job's output; it must succeed."""
    done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def weights(output):
    """How many workers a job had, and the checksum that it has printed."""
    (found,) = set(re.findall(r"(\d) workers, weights ([0-9a-f]{16})$", output, re.MULTILINE))
    return found


def fleetrun(workers, folder):
    return run([sys.executable, "-m", "fleetx.launch", "--nproc_per_node", str(workers), SCRIPT], folder)


class Disturbed:
    """A job of two workers that something happens to, as `tests/jobs/disturbed_train.py` says."""

    def __init__(self, folder, disturb):
        self.folder, self.notes, self.output = folder, folder / "notes", folder / "output.txt"
        self.notes.mkdir()
        self.variables = {"DISTURB": disturb, "NOTES": str(self.notes)}
        self.launchers = []

    def start(self, *commands, variables=()):
        """One launcher for each command, beside each other; `variables` are what each finds besides."""
        env = environment(self.folder) | self.variables
        with self.output.open("a") as output:
            self.launchers = [
                subprocess.Popen(command, cwd=self.folder, env=env | own, stdout=output, stderr=output)
                for command, own in zip(commands, variables or [{}] * len(commands), strict=True)
            ]

    def wait_until_held(self):
        """Until both workers wait for a signal; gives their processes."""
        wait_for(lambda: len(list(self.notes.glob("held.*"))) == 2, lambda: f"pause of both workers: {self.log}")
        return [worker for launcher in self.launchers for worker in children(launcher.pid)]

    def end(self):
        """The exit codes of the launchers, when all have ended."""
        return [launcher.wait(5 * GUARD) for launcher in self.launchers]

    def kill(self):
        for launcher in self.launchers:
            for pid in [*children(launcher.pid), launcher.pid] if launcher.poll() is None else []:
                os.kill(pid, signal.SIGKILL)
            launcher.wait()

    @property
    def log(self):
        return self.output.read_text()

    @property
    def saved(self):
        return sorted(path.name for path in (self.folder / "checkpoints").glob("save-*"))
