"""What happens to a job on several machines when cables are pulled and machines go: one scenario per call, as JSON."""

import json
import os
import signal
import sys
from pathlib import Path

from tests.chaos.live import children
from tests.jobs.starting import ROOT
from tests.launch.hosts import Hosts, address
from tests.waiting import GUARD, wait_for

JOB = ROOT / "tests" / "jobs" / "chaos_worker.py"


class Run:
    """A job on `count` hosts that trains until `steps`, and notes each step."""

    def __init__(self, folder, count, *options, steps=40, slow="0.05"):
        self.folder = folder
        self.hosts = Hosts(count)
        self.options = ["--master", f"{address(0)}:6170", "--nproc_per_node", "1", *options]
        self.script = [JOB, folder, "--steps", str(steps), "--slow", slow, "--save-every", "5"]
        self.slow = folder / "slow"
        self.slow.touch()
        self.jobs = {}

    def start(self, *numbers, **environment):
        for number in numbers:
            self.jobs[number] = self.hosts.start(
                number, self.folder, *self.options, "--rank", str(number), *self.script, **environment
            )

    def steps(self):
        try:
            return (self.folder / "steps.0").read_text().split()
        except FileNotFoundError:
            return []

    def until_step(self, count):
        wait_for(lambda: len(self.steps()) >= count, lambda: f"{count} steps; {self.texts()}")

    def end(self):
        """Exit codes, and what each launcher printed."""
        codes = {number: job.wait(GUARD) for number, job in self.jobs.items()}
        return {"codes": codes, "texts": self.texts()}

    def texts(self):
        return {number: Path(job.output).read_text() for number, job in self.jobs.items()}

    def result(self, **facts):
        ended = self.end()
        return facts | ended | {"attempts": [step.split(":")[0] for step in self.steps()], "world": self.worlds()}

    def worlds(self):
        return [step.split(":")[2] for step in self.steps()]


def undisturbed(folder):
    run = Run(folder, 2, "--nnodes", "2", steps=10)
    run.start(0, 1)
    return run.result()


def cable_cut(folder):
    run = Run(folder, 2, "--nnodes", "2", "--max_restart", "1", "--join_timeout", "20")
    run.start(0, 1)
    run.until_step(3)
    run.hosts.cut(1)
    return run.result()


def host_gone_and_the_others_go_on(folder):
    run = Run(folder, 3, "--nnodes", "2:3", "--max_restart", "2", steps=60)
    run.start(0, 1, 2)
    run.until_step(5)
    run.jobs[2].kill()
    return run.result()


def host_comes_back(folder):
    run = Run(folder, 2, "--nnodes", "1:2", "--max_restart", "2", steps=600, slow="0.2")
    run.start(0, 1)
    run.until_step(5)
    run.jobs[1].kill()
    run.jobs[1].wait()
    wait_for(lambda: run.worlds()[-1:] == ["1"], "step of the one that is left")
    run.start(1)
    wait_for(lambda: run.worlds()[-1:] == ["2"], "step of both")
    run.slow.unlink()
    return run.result()


def leader_gone(folder):
    run = Run(folder, 2, "--nnodes", "2")
    run.start(0, 1)
    run.until_step(3)
    run.jobs[0].kill()
    return run.result()


def somebody_never_comes(folder):
    run = Run(folder, 3, "--ips", ",".join(map(address, range(3))), "--join_timeout", "20")
    run.start(0, 1)
    return run.result()


def worker_fails_elsewhere(folder):
    run = Run(folder, 2, "--nnodes", "2")
    plan = folder / "plan.json"
    plan.write_text(json.dumps([{"kind": "raise", "rank": 1, "step": 3}]))
    run.script += ["--plan", plan]
    run.start(0, 1)
    return run.result()


def strangers(folder):
    """A host with another secret is not let in; the job goes on without noticing more than a line."""
    run = Run(folder, 3, "--nnodes", "2", steps=10)
    run.start(0)
    run.jobs[2] = run.hosts.start(
        2, folder, *run.options, "--rank", "1", *run.script, secret="not the secret of this job"
    )
    run.jobs[2].wait(GUARD)
    run.start(1)
    return run.result()


def stopped_by_a_member(folder):
    """Ctrl-C on a machine that does not lead stops the whole job; all workers save."""
    run = Run(folder, 2, "--nnodes", "2", steps=1000)
    run.start(0, 1)
    run.until_step(3)
    run.jobs[1].send_signal(signal.SIGTERM)
    return run.result() | {"saved": [path.name for path in (folder / "saved").glob("save-*")]}


def worker_stops_elsewhere(folder):
    run = Run(folder, 2, "--nnodes", "2", "--progress_timeout", "10", steps=1000)
    run.start(0, 1)
    run.until_step(3)
    (nursery,) = children(run.jobs[1].pid)
    (worker,) = children(nursery)
    os.kill(worker, signal.SIGSTOP)
    return run.result()


SCENARIOS = {
    play.__name__: play
    for play in (
        undisturbed,
        cable_cut,
        host_gone_and_the_others_go_on,
        host_comes_back,
        leader_gone,
        somebody_never_comes,
        worker_fails_elsewhere,
        strangers,
        stopped_by_a_member,
        worker_stops_elsewhere,
    )
}


# Exit codes, and what a launcher must have said last.
EXPECTED = {
    "undisturbed": ({"0": 0, "1": 0}, "0", ""),
    "cable_cut": ({"0": 1, "1": 1}, "0", "missing: host1 (10.77.0.2), which was lost"),
    "host_gone_and_the_others_go_on": ({"0": 0, "1": 0, "2": -9}, "0", "host host2 with worker 2 is lost: "),
    "host_comes_back": ({"0": 0, "1": 0}, "0", "host host1 with worker 1 is lost: "),
    "leader_gone": ({"0": -9, "1": 1}, "1", "the leading machine at 10.77.0.1:6170 is lost: "),
    "somebody_never_comes": ({"0": 1, "1": 1}, "0", "missing: 10.77.0.3. "),
    "worker_fails_elsewhere": ({"0": 1, "1": 1}, "0", "worker 1 failed with exit code 1 (host host1): ValueError: "),
    "stopped_by_a_member": ({"0": 143, "1": 143}, "0", "stopped by SIGTERM."),
    "worker_stops_elsewhere": ({"0": 124, "1": 124}, "0", "worker 1 made no progress: no step for "),
    "strangers": ({"0": 0, "1": 0, "2": 1}, "2", "The secret must be the same on all machines."),
}


def wrong(name, found):
    """What is not as it should be; empty if all is."""
    codes, speaker, words = EXPECTED[name]
    problems = [] if found["codes"] == codes else [f"exit codes {found['codes']}"]
    if words not in found["texts"][speaker]:
        problems.append(f"no {words!r} in {found['texts'][speaker][-600:]!r}")
    return "; ".join(problems)


def main():
    name, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    print(json.dumps(SCENARIOS[name](folder)))


if __name__ == "__main__":
    main()
