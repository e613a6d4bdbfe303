"""What several workers do to checkpoints, and what killing them does.

Run as a script, this process imports everything once and forks workers, so that a job starts in a fraction of a second:
`checkpoint_scenarios.py FOLDER NAME [ARGUMENTS]` plays one scenario, or all of them, and prints what came out as JSON.
"""

import errno
import json
import mmap
import os
import random
import shutil
import signal
import sys
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

import fleetx as X
from fleetx import fleet
from fleetx.checkpoint import CheckpointError, survey
from fleetx.data import Loader, ShardedBatches
from tests.jobs import checkpoint_worker
from tests.waiting import GUARD, wait_for

torch.set_num_threads(1)
# Seconds for which workers wait for each other: longer than this process waits for them, which sees those that hang.
LIMIT = 600


class Forked:
    """Workers of one job, each a process of its own that calls `play(rank, workers)`."""

    def __init__(self, folder, workers, play):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.answers = [self.folder / f"answer-{time.monotonic_ns()}-{rank}" for rank in range(workers)]
        store = self.folder / f"store-{time.monotonic_ns()}"
        self.pids = []
        for rank in range(workers):
            pid = os.fork()
            if pid == 0:
                self._be(rank, workers, store, play)
            self.pids.append(pid)

    def _be(self, rank, workers, store, play):
        code = 1
        try:
            if workers > 1:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{store}",
                    rank=rank,
                    world_size=workers,
                    timeout=timedelta(seconds=LIMIT),
                )
                fleet.init()
            answer = play(rank, workers)
            self.answers[rank].write_text(json.dumps(answer), encoding="utf-8")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def kill(self, rank):
        os.kill(self.pids[rank], signal.SIGKILL)

    def has_ended(self):
        """Whether a worker has; it is waited for later."""
        return any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in self.pids)

    def wait(self, limit=GUARD):
        """Exit status of each worker; those that outlive the limit are killed and give None."""
        statuses = {}
        end = time.monotonic() + limit
        while len(statuses) < len(self.pids) and time.monotonic() < end:
            for pid in self.pids:
                if pid not in statuses:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        statuses[pid] = os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        for pid in self.pids:
            if pid not in statuses:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        return [statuses.get(pid) for pid in self.pids]

    def results(self):
        statuses = self.wait()
        assert statuses == [0] * len(self.pids), statuses
        return [json.loads(answer.read_text(encoding="utf-8")) for answer in self.answers]


# A run whose samples can be counted -------------------------------------------------------------------------

SAMPLES, GLOBAL_BATCH, K_STEPS = 40, 8, 3


class Counted:
    """Trains in fp64 on samples that are their own numbers, and notes which of them moved the weights."""

    def __init__(self, folder, k_steps=K_STEPS):
        torch.manual_seed(0)
        strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": k_steps})
        net = torch.nn.Sequential(torch.nn.Linear(1, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()
        net.register_buffer("seen", torch.zeros(SAMPLES, dtype=torch.int64))
        self.net = fleet.distributed_model(net, strategy)
        wrapped = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.optimizer = fleet.distributed_optimizer(wrapped, strategy)
        self.loader = Loader(list(range(SAMPLES)), ShardedBatches(SAMPLES, GLOBAL_BATCH, seed=1), num_workers=0)
        self.checkpoints = X.Checkpoints(
            folder, model=self.net, optimizer=self.optimizer, loader=self.loader, timeout=LIMIT
        )
        self.windows = []
        self._open = []

    def train(self, batches):
        for _ in range(batches):
            numbers = next(iter(self.loader))
            self.net.seen[numbers] += 1
            inputs = numbers.double().reshape(-1, 1) / SAMPLES
            out = self.optimizer.minimize(functional.mse_loss(self.net(inputs), inputs.sin()), items=len(numbers))
            self._open += numbers.tolist()
            if out.closed:
                self.windows.append(sorted(self._open))
                self._open = []
        return self

    def weights(self):
        return torch.cat([p.detach().reshape(-1) for p in self.net.parameters()]).tolist()


def changing_workers(folder):
    """2 workers, then 1, then 2, then 3, each stopped in the middle of a window."""

    def play(rank, workers, batches, last):
        run = Counted(folder / "run")
        start = run.checkpoints.resume()
        stood = run.loader.state_dict() | {"plan": None}
        run.train(batches)
        if not last:
            run.checkpoints.save(batches)
        start = None if start is None else {"replayed": start.replayed, "workers": start.workers}
        seen = run.net.seen.tolist()
        return {"start": start, "stood": stood, "windows": run.windows, "weights": run.weights(), "seen": seen}

    answers = []
    for workers, batches, last in ((2, 4, False), (1, 5, False), (2, 8, False), (3, 9, True)):
        job = Forked(folder, workers, lambda rank, size, b=batches, e=last: play(rank, size, b, e))
        answers.append(job.results())
    # 3 windows of 3 + 6 more batches: the same samples without any interruption, on one worker.
    whole = Forked(folder, 1, lambda rank, size: _uninterrupted(folder)).results()[0]
    return {"parts": answers, "whole": whole}


def _uninterrupted(folder):
    run = Counted(folder / "whole").train(21)
    return {"windows": run.windows, "weights": run.weights()}


# What one worker does wrong ---------------------------------------------------------------------------------


def one_without_room(folder):
    """Worker 1 finds no space: nobody saves, everybody says so, and the next save succeeds."""

    def play(rank, workers):
        run = Counted(folder / "run").train(1)
        run.checkpoints.save(1)
        original = os.write

        def full(descriptor, data):
            if rank == 1 and str(folder) in os.readlink(f"/proc/self/fd/{descriptor}"):  # noqa: PTH115
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(descriptor, data)

        messages = []
        for asynchronous in (False, True):
            os.write = full
            try:
                run.checkpoints.save(2, asynchronous=asynchronous)
                run.train(1)
                run.checkpoints.wait()
            except CheckpointError as error:
                messages.append(str(error))
            os.write = original
        left = sorted(entry.name for entry in (folder / "run").iterdir())
        dist.barrier()
        run.checkpoints.save(3)
        return {"messages": messages, "left": left, "latest": run.checkpoints.latest.name}

    return Forked(folder, 2, play).results()


def one_with_a_strange_value(folder):
    """Worker 1 cannot collect its state: the others must not wait for it."""

    def play(rank, workers):
        run = Counted(folder / "run")
        messages = []
        for asynchronous in (False, True):
            try:
                run.checkpoints.save(1, extra={"a": object() if rank == 1 else 1}, asynchronous=asynchronous)
                run.checkpoints.wait()
            except (TypeError, CheckpointError) as error:
                messages.append(f"{type(error).__name__}: {error}")
        run.checkpoints.save(2)
        return messages

    return Forked(folder, 2, play).results()


def steps_that_differ(folder):
    def play(rank, workers):
        run = Counted(folder / "run")
        try:
            run.checkpoints.save(1 + rank)
        except CheckpointError as error:
            return str(error)
        return None

    return Forked(folder, 2, play).results()


def only_the_first(folder):
    """Worker 0 saves alone: it is told so when the time is up."""

    def play(rank, workers):
        net = torch.nn.Linear(2, 2)
        checkpoints = X.Checkpoints(folder / "run", model=net, timeout=10.0)
        message = None
        if rank == 0:
            try:
                checkpoints.save(1)
            except CheckpointError as error:
                message = str(error)
        dist.barrier()
        return message

    return Forked(folder, 2, play).results()


def folders_of_their_own(folder):
    """Workers that do not share a file system neither save nor resume half of something."""

    def play(rank, workers):
        net = torch.nn.Linear(2, 2)
        place = folder / "run" if rank == 0 else folder / "elsewhere"
        messages = []
        checkpoints = X.Checkpoints(place, model=net, timeout=LIMIT)
        for attempt in ("save", "resume"):
            if attempt == "resume" and rank == 0:
                shutil.copytree(folder / "other", folder / "run", dirs_exist_ok=True)
            dist.barrier()
            try:
                checkpoints.save(1) if attempt == "save" else checkpoints.resume()
            except CheckpointError as error:
                messages.append(str(error))
        return messages

    def prepare(rank, workers):
        X.Checkpoints(folder / "other", model=torch.nn.Linear(2, 2)).save(1)

    Forked(folder, 2, prepare).results()
    return Forked(folder, 2, play).results()


def damaged_for_nobody(folder):
    """A file of a worker that there is no more is damaged: it is found all the same."""

    def prepare(rank, workers):
        run = Counted(folder / "run").train(4)
        run.checkpoints.save(4)
        run.checkpoints.save(5)

    Forked(folder, 4, prepare).results()
    answers = {}
    for number in range(4):
        shutil.copytree(folder / "run", folder / str(number))
        file = folder / str(number) / "save-000002-step-5" / f"rank-{number:05d}.safetensors"
        contents = bytearray(file.read_bytes())
        contents[-1] ^= 1
        file.write_bytes(contents)

        def play(rank, workers, place=folder / str(number)):
            return Counted(place).checkpoints.resume().step

        answers[number] = Forked(folder, 2, play).results()
    return answers


def damaged_for_one(folder):
    """A file that only worker 1 needs is damaged: both take the checkpoint before."""

    def prepare(rank, workers):
        run = Counted(folder / "run").train(4)
        run.checkpoints.save(4)
        run.train(1)
        run.checkpoints.save(5)

    def play(rank, workers):
        start = Counted(folder / "run").checkpoints.resume()
        return {"step": start.step, "reasons": [one.reason for one in start.passed_over]}

    Forked(folder, 2, prepare).results()
    file = folder / "run" / "save-000002-step-5" / "rank-00001.safetensors"
    contents = bytearray(file.read_bytes())
    contents[-1] ^= 1
    file.write_bytes(contents)
    return Forked(folder, 2, play).results()


# Killing ----------------------------------------------------------------------------------------------------


class Filled:
    """A model of 10 MB, whose every number says at which step it was saved."""

    def __init__(self, folder, rank):
        self.rank = rank
        net = torch.nn.Linear(1600, 1600, bias=False)
        net.register_buffer("own", torch.zeros(1000, dtype=torch.int64))
        self.net = fleet.distributed_model(net)
        wrapped = torch.optim.SGD(self.net.parameters(), lr=0.0, momentum=0.9)
        self.optimizer = fleet.distributed_optimizer(wrapped)
        wrapped.state[self.net.weight] = {"momentum_buffer": torch.zeros(1600, 1600)}
        self.checkpoints = X.Checkpoints(folder, model=self.net, optimizer=self.optimizer, keep=2, timeout=LIMIT)

    @torch.no_grad()
    def fill(self, step):
        self.net.weight.fill_(step)
        self.optimizer.state[self.net.weight]["momentum_buffer"].fill_(step)
        self.net.own.fill_(step * 10 + self.rank)

    def is_all_of(self, step):
        return bool(
            (self.net.weight == step).all()
            and (self.optimizer.state[self.net.weight]["momentum_buffer"] == step).all()
            and (self.net.own == step * 10 + self.rank).all()
        )


def kills(folder, workers, count, during, seed):
    """Kill a random worker of a job that saves again and again; what is resumed must be whole, and not older than the
    last save that was reported as done. At least `count` times, and `during` times in the middle of a save."""
    rng = random.Random(seed)
    # [0:8] the last step reported as saved, [8] whether a save is in progress, [16:] which workers have met the others.
    shared = mmap.mmap(-1, 4096)

    def last_reported():
        return int.from_bytes(shared[0:8], "big")

    def play(rank, size):
        run = Filled(folder / "run", rank)
        shared[16 + rank] = 1
        start = run.checkpoints.resume()
        step = 0 if start is None else start.step
        if start is not None and not (run.is_all_of(step) and start.extra == {"step": step}):
            os._exit(42)
        if step < last_reported():
            os._exit(43)
        while True:
            step += 1
            run.fill(step)
            asynchronous = step % 3 == 0
            if rank == 0:
                shared[8] = 1
            run.checkpoints.save(step, extra={"step": step}, asynchronous=asynchronous)
            if asynchronous:
                run.fill(-1)  # what is written must be what was there at the call
                run.checkpoints.wait()
            if rank == 0:
                shared[0:8] = step.to_bytes(8, "big")
                shared[8] = 0

    found = {"kills": 0, "during a save": 0, "lost": 0, "mixed": 0, "hung": 0, "unexplained": 0, "last step": 0}
    while found["kills"] < count or found["during a save"] < during:
        shared[8:32] = bytes(24)
        job = Forked(folder, workers, play)
        saves = rng.choice((None, 0, 1, 3))
        if saves is not None:  # else it is killed while it begins
            least = last_reported() + saves
            wait_for(lambda j=job, n=least: (shared[8] and last_reported() >= n) or j.has_ended(), "save")
        time.sleep(rng.uniform(0.0, 0.1))
        victim = rng.randrange(workers)
        job.kill(victim)
        found["kills"] += 1
        found["during a save"] += shared[8]
        # Workers that had not met yet wait for each other as long as torch lets them: that is not ours to judge.
        have_met = sum(shared[16:32]) == workers
        statuses = job.wait(limit=GUARD if have_met else 0)
        found["mixed"] += 42 in statuses
        found["lost"] += 43 in statuses
        # The others are told by the connection that breaks, and end by themselves.
        found["hung"] += have_met and None in statuses
        found["unexplained"] += any(code not in (1, -9, 42, 43, None) for code in statuses)

    def look(rank, size):
        run = Filled(folder / "run", rank)
        start = run.checkpoints.resume()
        return [start.step, run.is_all_of(start.step), start.step >= last_reported()]

    answers = Forked(folder, workers, look).results()
    found["last step"] = answers[0][0]
    found["whole at the end"] = all(whole and new for _, whole, new in answers)
    found["good ones left"] = sum(one.problem is None for one in survey(folder / "run"))
    return found


def interrupted_until_done(folder):
    """Kill a job again and again, then let it run to its end; it must end as if nothing had happened."""
    name = "adam, loading process, asynchronous"
    case = replace(checkpoint_worker.CASES[name], num_workers=0)
    rng = random.Random(5)

    reached = mmap.mmap(-1, 1)

    def play(place):
        def work(rank, workers):
            parts = checkpoint_worker.build(case, folder / place, seed=1)
            random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
            start = parts[-1].resume()
            number = 0 if start is None else start.step
            while number < checkpoint_worker.BATCHES:
                checkpoint_worker.train(case, parts, number, until=number + 1)
                number += 1
                if rank == 0:
                    reached[0] = number
                parts[-1].save(number, asynchronous=bool(number % 2))
            parts[-1].wait()
            parts[1].flush()
            return checkpoint_worker.fingerprint(parts)

        return work

    undisturbed = Forked(folder, 2, play("undisturbed")).results()
    (folder / "disturbed").mkdir()
    saved = []
    for limit in (2, 5, 8, 11, 14):
        reached[0] = 0
        job = Forked(folder, 2, play("disturbed"))
        while reached[0] < limit:
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.02))
        job.kill(rng.randrange(2))
        job.wait()
        saved.append(max((one.manifest.step for one in survey(folder / "disturbed")), default=0))
    disturbed = Forked(folder, 2, play("disturbed")).results()
    return {"saved by then": saved, "undisturbed": undisturbed, "disturbed": disturbed}


SCENARIOS = {
    play.__name__: play
    for play in (
        changing_workers,
        one_without_room,
        one_with_a_strange_value,
        steps_that_differ,
        only_the_first,
        folders_of_their_own,
        damaged_for_one,
        damaged_for_nobody,
        interrupted_until_done,
    )
}


def main():
    folder, name, *arguments = sys.argv[1:]
    folder = Path(folder)
    Counted(folder / "warm").train(K_STEPS)  # imports what torch puts off, once and not in each worker
    if name == "kills":
        print(json.dumps(kills(folder / "kills", *map(int, arguments))))
        return
    results = {}
    for name, play in SCENARIOS.items():
        began = time.perf_counter()
        results[name] = play(folder / name)
        print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
