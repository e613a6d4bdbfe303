"""A job under fleetrun that is alive, for tests that disturb it."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from tests.jobs.starting import ROOT
from tests.waiting import GUARD, wait_for

WORKER = ROOT / "tests" / "jobs" / "chaos_worker.py"
MARK = "CHAOS_MARK"


class LiveJob:
    """fleetrun with the chaos worker; its steps, its processes and what it says can be watched."""

    def __init__(self, folder, workers, *script_options, options=(), **environment):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.workers = workers
        self.mark = uuid.uuid4().hex
        self.errors = self.folder / f"errors.{self.mark[:6]}.txt"
        command = [sys.executable, "-m", "fleetx.launch", "--nproc_per_node", str(workers)]
        command += ["--log_dir", str(self.folder / "log"), *map(str, options)]
        command += [str(WORKER), str(self.folder), *map(str, script_options)]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", MARK: self.mark, **environment}
        with self.errors.open("w") as errors, (self.folder / "output.txt").open("a") as output:
            self.launcher = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=errors, env=variables)

    # Watching ------------------------------------------------------------------------------------------

    def said(self):
        """The launcher's own lines."""
        return [line for line in self.errors.read_text().splitlines() if line.startswith("fleetrun: ")]

    def restarts(self):
        """The lines that say why the job was restarted, one for each restart."""
        return [line for line in self.said() if " This is restart " in line]

    def steps(self, rank=0):
        """What the worker has noted: attempt, step, workers and time."""
        try:
            lines = (self.folder / f"steps.{rank}").read_text().splitlines()
        except FileNotFoundError:
            return []
        split = [line.split(":") for line in lines if line.count(":") == 3]
        return [(int(attempt), int(step), int(size), float(moment)) for attempt, step, size, moment in split]

    def pids(self):
        """Processes of the workers that live."""
        return [worker for nursery in children(self.launcher.pid) for worker in children(nursery)]

    def nursery(self):
        """The process that starts workers."""
        return (children(self.launcher.pid) or [None])[0]

    def wait_for(self, condition, what):
        """Until it holds; an error if the job ends before."""

        def holds():
            if condition():
                return True
            if self.launcher.poll() is not None and not condition():
                raise AssertionError(f"the job ended with {self.launcher.returncode} before {what}: {self.tail()}")
            return False

        wait_for(holds, lambda: f"{what}: {self.tail()}")

    def wait_for_workers(self):
        self.wait_for(lambda: len(self.pids()) == self.workers, what="all workers")

    def wait_for_step(self, attempt, steps=1):
        """Until worker 0 has made steps in this attempt or in a later one."""
        self.wait_for(lambda: sum(a >= attempt for a, *_ in self.steps()) >= steps, what=f"step in attempt {attempt}")

    def tail(self):
        return self.errors.read_text()[-3000:]

    # Disturbing ----------------------------------------------------------------------------------------

    def hit(self, rng, number):
        """Send a signal to a worker, whichever it is; gives the moment, or None if none was alive."""
        alive = self.pids()
        if not alive:
            return None
        try:
            os.kill(rng.choice(alive), number)
        except ProcessLookupError:
            return None
        return time.time()

    def hit_nursery(self):
        """Kill the process that becomes workers, while there are none yet; gives the moment, or None."""
        nursery = self.nursery()
        if nursery is None or children(nursery):
            return None
        try:
            os.kill(nursery, signal.SIGKILL)
        except ProcessLookupError:
            return None
        return time.time()

    def kill_launcher(self):
        self.launcher.kill()
        self.launcher.wait()

    # Ending --------------------------------------------------------------------------------------------

    def end(self, seconds=5 * GUARD):
        """Wait for the end; gives the exit code."""
        return self.launcher.wait(timeout=seconds)

    def results(self):
        """What each worker wrote at its end, without the number of its attempt."""
        results = [json.loads((self.folder / f"result.{rank}").read_text()) for rank in range(self.workers)]
        return [{key: value for key, value in result.items() if key != "attempt"} for result in results]

    def survivors(self):
        """Processes of this job that have not gone."""
        end = time.monotonic() + GUARD
        while (left := marked(self.mark)) and time.monotonic() < end:
            time.sleep(0.02)
        return left

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.launcher.poll() is None:
            self.launcher.send_signal(signal.SIGTERM)
            self.launcher.send_signal(signal.SIGTERM)
            try:
                self.launcher.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.kill_launcher()


def children(pid):
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def marked(mark):
    """Processes that were started with this mark in their environment, and are not just waiting to be reaped."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if mark.encode() in (entry / "environ").read_bytes() and (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
