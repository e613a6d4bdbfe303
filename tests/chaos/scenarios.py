"""What is done to jobs, and what must come out: each scenario is a generator of trials, one dict each, `ok` or not."""

import itertools
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

from tests.chaos.live import LiveJob
from tests.jobs.starting import ROOT, start
from tests.launch import host_scenarios, hosts
from tests.waiting import GUARD

WIDTH = 1600  # 10 MB of weights
BIG = ["--width", WIDTH, "--save-every", 4]


def _undisturbed(folder, workers, *script):
    """What a job gives that nobody disturbs; made once."""
    place = Path(folder) / f"undisturbed-{workers}-{'-'.join(map(str, script)).replace('/', '')}"
    if not (place / "result.0").exists():
        shutil.rmtree(place, ignore_errors=True)
        with LiveJob(place, workers, *script) as job:
            assert job.end(600) == 0, job.tail()
    return LiveJob.results(_Folder(place, workers))


class _Folder:
    def __init__(self, folder, workers):
        self.folder, self.workers = folder, workers


def kills(folder, rng, span=10.0, per_job=10):
    """Kill a random worker at any time of an attempt's life: imports, meeting and saves included. Exactly one restart
    must follow, which trains on; and the job must end as if undisturbed."""
    for number in itertools.count():
        workers = 2 + number % 3
        place = folder / f"kills-{number}-{rng.random():.9f}"
        place.mkdir(parents=True)
        (place / "slow").touch()
        script = ["--steps", int(4 * span * per_job) + 50, *BIG]  # more than the job can make in that time
        with LiveJob(place, workers, *script, "--slow", 0.25, options=["--max_restart", 10 * per_job]) as job:
            job.wait_for(lambda job=job: job.nursery() is not None, what="nursery")
            rows = _recoveries(job, [_kill(job, rng, span) for _ in range(per_job)])
            (place / "slow").unlink()
            code = job.end()
            equal = code == 0 and job.results() == _undisturbed(folder, workers, *script)
        shutil.rmtree(place)
        for row in rows:
            yield row | {"ok": row["ok"] and equal, "equal": equal}


def _kill(job, rng, span):
    """One kill, at most `span` seconds after the attempt has begun; gives its moment, and which attempt comes next."""
    time.sleep(rng.uniform(0.0, span))
    while True:
        before, trained = len(job.restarts()), bool(job.steps())
        moment = job.hit(rng, signal.SIGKILL) or job.hit_nursery()
        if moment is not None:
            break
        time.sleep(0.01)
    job.wait_for(lambda: len(job.restarts()) > before, what="restart")
    return {"moment": moment, "next": before + 1, "trained": trained}


def _recoveries(job, killed):
    """For each kill: was one restart enough, and how long until worker 0 had made a step; if another kill came before
    that, the next attempt must have lived until then."""
    job.wait_for(lambda: any(attempt >= killed[-1]["next"] for attempt, *_ in job.steps()), what="step")
    firsts = {}
    for attempt, _, _, moment in job.steps():
        firsts.setdefault(attempt, moment)
    after = [*(kill["next"] for kill in killed[1:]), len(job.restarts()) + 1]
    rows = []
    for kill, following in zip(killed, after, strict=True):
        row = {"ok": following == kill["next"] + 1, "workers": job.workers, "trained before": kill["trained"]}
        if kill["next"] in firsts:
            row["seconds"] = firsts[kill["next"]] - kill["moment"]
        rows.append(row)
    return rows


def kills_during_saves(folder, rng, per_job=25):
    """Kill a worker of a job in the middle of a save; what is resumed must be whole and not older than reported."""
    scenarios = ROOT / "tests" / "jobs" / "checkpoint_scenarios.py"
    for number in itertools.count():
        workers, seed = 1 + number % 3, rng.randrange(1 << 30)
        place = folder / f"saves-{number}-{seed}"
        done = start(scenarios, place, "kills", workers, per_job, 0, seed, launcher=None)
        found = json.loads(done.stdout.splitlines()[-1])
        shutil.rmtree(place)
        bad = sum(found[kind] for kind in ("lost", "mixed", "hung", "unexplained"))
        whole = found["whole at the end"] and not bad
        # Kills between two saves must do no harm either, but they are not what is counted.
        for _ in range(found["during a save"]):
            yield {"ok": whole, "workers": workers}


def damage(folder, rng, per_job=100):
    """Damage the newest checkpoint in one of eleven ways: it must be found, and the one before must be used."""
    from tests.chaos.damaged import damaged_once
    from tests.checkpoint import damaging

    kinds = itertools.cycle(damaging.KINDS)
    for seed in itertools.count(rng.randrange(1 << 30)):
        kind = next(kinds)
        yield {"kind": kind} | damaged_once(folder / "damage", kind, seed)


def resumes(folder, rng, steps=60):
    """SIGTERM at a random time: all workers save and leave; the job that goes on ends bit for bit as undisturbed."""
    for number in itertools.count():
        workers = 2 + number % 3
        place = folder / f"resumes-{number}-{rng.random():.9f}"
        script = ["--steps", steps, "--save-every", 1000, "--pause", 0.02]
        with LiveJob(place, workers, *script) as job:
            job.wait_for_step(0)
            time.sleep(rng.uniform(0.0, 1.0))
            job.launcher.send_signal(signal.SIGTERM)
            began = time.monotonic()
            code = job.end()
            seconds = time.monotonic() - began
            saved = sorted(path.name for path in (place / "saved").glob("save-*"))
            left = job.survivors()
        # The signal may come when the last step is made: nothing is left to save, and all have ended as they should.
        finished = all((place / f"result.{rank}").exists() for rank in range(workers)) and not left
        left_well = bool(saved) and code == 128 + signal.SIGTERM and not left
        with LiveJob(place, workers, *script) as job:
            equal = job.end() == 0 and job.results() == _undisturbed(folder, workers, *script)
        shutil.rmtree(place)
        yield {"ok": (finished or left_well) and equal, "workers": workers, "seconds": seconds, "saved": saved}


def orphans(folder, rng, span=8.0):
    """Kill the launcher with SIGKILL at a random time, imports included: nothing of the job may live on."""
    for number in itertools.count():
        place = folder / f"orphans-{number}-{rng.random():.9f}"
        with LiveJob(place, 2, "--steps", 100000, "--pause", 0.01) as job:
            time.sleep(rng.uniform(0.0, span))
            began = time.monotonic()
            job.kill_launcher()
            left = job.survivors()
            seconds = time.monotonic() - began
        trained = bool(job.steps())
        shutil.rmtree(place)
        yield {"ok": not left, "left": left, "seconds": seconds, "trained": trained}


KINDS = {
    "raise": "worker {rank} failed with exit code 1 (host {host}): ValueError: made to fail.",
    "exit": "worker {rank} failed with exit code 41 (host {host}).",
    "import": "worker {rank} failed with exit code 1 (host {host}): ModuleNotFoundError: ",
    "segfault": "worker {rank} was ended by SIGSEGV (host {host}).",
    "SIGKILL": "worker {rank} was ended by SIGKILL (host {host}).",
    "SIGABRT": "worker {rank} was ended by SIGABRT (host {host}).",
    "SIGBUS": "worker {rank} was ended by SIGBUS (host {host}).",
    "hang": "worker {rank} made no progress: ",
    "spin": "worker {rank} made no progress: ",
    "memory": "worker {rank} was ended by SIGKILL: the machine or its memory limit ran out of memory",
}


def causes(folder, rng, per_job=20, kinds=None, workers=3, limit=6):
    """Each attempt fails in a planned way; the launcher must name the right worker and the right reason."""
    group = MemoryGroup()
    known = [kind for kind in kinds or KINDS if kind != "memory" or group.exists]
    host = os.uname().nodename
    for number in itertools.count():
        place = folder / f"causes-{number}-{rng.random():.9f}"
        place.mkdir(parents=True)
        order = [known[(number * per_job + index) % len(known)] for index in range(per_job)]
        plan = [{"kind": kind, "rank": rng.randrange(workers), "step": rng.randrange(4)} for kind in order]
        (place / "plan.json").write_text(json.dumps(plan))
        options = ["--max_restart", per_job, "--progress_timeout", limit]
        script = ["--steps", 30, "--plan", place / "plan.json", "--pause", 0.01, "--save-every", 1000]
        with LiveJob(place, workers, *script, options=options, CHAOS_CGROUP=group.name) as job:
            code = job.end(GUARD + per_job * 20)
            lines = job.restarts()
        for index, planned in enumerate(plan):
            expected = "fleetrun: " + KINDS[planned["kind"]].format(rank=planned["rank"], host=host)
            said = lines[index] if index < len(lines) else f"(nothing; exit code {code})"
            yield {"ok": said.startswith(expected), "kind": planned["kind"], "said": said}
        shutil.rmtree(place)


class MemoryGroup:
    """A control group with little memory, for processes that shall be ended for lack of it; where that is permitted."""

    name = "fleetx-chaos"
    root = Path("/sys/fs/cgroup/memory")

    def __init__(self):
        try:
            (self.root / self.name).mkdir(exist_ok=True)
            (self.root / self.name / "memory.limit_in_bytes").write_text(str(700 << 20))
            self.exists = True
        except OSError:
            self.exists = False


def stopped(folder, rng, limit=3.0, per_job=10):
    """Stop a random worker with SIGSTOP: it must be named with its stack, and the job must go on."""
    for number in itertools.count():
        workers = 2 + number % 3
        place = folder / f"stopped-{number}-{rng.random():.9f}"
        place.mkdir(parents=True)
        (place / "slow").touch()
        rows = []
        options = ["--max_restart", per_job + 1, "--progress_timeout", limit]
        with LiveJob(place, workers, "--steps", 600, "--slow", 0.1, options=options) as job:
            for attempt in range(per_job):
                job.wait_for_step(attempt)
                job.wait_for_workers()
                time.sleep(rng.uniform(0.0, 1.0))
                pids = sorted(job.pids())  # forked in the order of their ranks
                rank = rng.randrange(workers)
                os.kill(pids[rank], signal.SIGSTOP)
                began = time.monotonic()
                job.wait_for(lambda a=attempt, job=job: len(job.restarts()) > a, "restart")
                seconds = time.monotonic() - began
                said = job.restarts()[attempt]
                named = re.match(rf"fleetrun: worker {rank} made no progress: .* it is stopped .*, in File ", said)
                rows.append({"ok": bool(named), "seconds": seconds, "said": said})
            (place / "slow").unlink()
            code = job.end()
        shutil.rmtree(place)
        for row in rows:
            yield row | {"ok": row["ok"] and code == 0}


FAULTS = ["SIGKILL", "SIGKILL", "SIGSTOP", "SIGSEGV", "SIGABRT", "nursery", "damage"]


def long_run(folder, rng, faults=300, workers=3, limit=2):
    """One run with faults of all kinds, which must end bit for bit as if nothing had happened. One trial per fault."""
    from tests.checkpoint import damaging

    while True:
        place = folder / f"long-{rng.random():.9f}"
        place.mkdir(parents=True)
        (place / "slow").touch()
        script = ["--steps", 12 * faults + 60, "--save-every", 3, "--asynchronous"]
        options = ["--max_restart", 10 * faults, "--progress_timeout", limit]
        seen = []
        with LiveJob(place, workers, *script, "--slow", 0.1, options=options) as job:
            while len(seen) < faults:
                kind = rng.choice(FAULTS)
                time.sleep(rng.uniform(0.0, 1.2))
                if kind == "damage":
                    saved = sorted((place / "saved").glob("save-*"))
                    if len(saved) < 2:
                        continue
                    try:
                        damaging.damage(saved[-1], rng.choice(list(damaging.KINDS)), rng.randrange(1 << 30))
                    except (OSError, IndexError, ValueError):
                        continue  # it was just being replaced
                    if job.hit(rng, signal.SIGKILL) is None:  # a reason to read it
                        continue
                elif kind == "nursery":
                    if job.nursery() is None or rng.random() < 0.8:
                        continue
                    os.kill(job.nursery(), signal.SIGKILL)
                elif job.hit(rng, getattr(signal, kind)) is None:
                    continue
                seen.append(kind)
                if job.launcher.poll() is not None:
                    raise AssertionError(f"the job ended with {job.launcher.returncode}: {job.tail()}")
            (place / "slow").unlink()
            code = job.end(900)
            equal = code == 0 and job.results() == _undisturbed(folder, workers, *script)
        for kind in seen:
            yield {"ok": equal, "kind": kind}
        shutil.rmtree(place)


def machines(folder, rng, names=None):
    """Two or three hosts in namespaces: links are cut and hosts go; the job goes on, or ends and names the host."""
    reason = hosts.why_not()
    if reason:
        yield {"skipped": reason}
        return
    for name in itertools.cycle(names or EXPECTED):
        place = folder / f"machines-{name}-{rng.random():.9f}"
        began = time.monotonic()
        done = hosts.play("tests.launch.host_scenarios", name, place)
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout.splitlines()[-1])
        shutil.rmtree(place, ignore_errors=True)
        wrong = host_scenarios.wrong(name, found)
        yield {"ok": not wrong, "kind": name, "seconds": time.monotonic() - began, "wrong": wrong}


EXPECTED = list(host_scenarios.EXPECTED)
