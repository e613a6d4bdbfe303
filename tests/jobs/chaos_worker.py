"""A small training job that can be disturbed in many ways, and shows by its end whether that changed anything.

It saves, resumes, leaves when asked to, and notes each step as `attempt:step:workers:time` in `steps.RANK`.
"""

import argparse
import ctypes
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional

import fleetx as X
from fleetx import fleet
from fleetx.data import Loader, ShardedBatches


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--plan", type=Path, help="a list of failures, one for each attempt: kind, rank and step")
    parser.add_argument("--slow", type=float, default=0.0, help="pause after each step while there is a file `slow`")
    return parser.parse_args()


class Samples:
    def __init__(self, width):
        self.width = width

    def __len__(self):
        return 96

    def sample(self, index, epoch):
        picture = torch.from_numpy(epoch.rng(index).standard_normal(self.width, dtype="float32"))
        return picture, index % 4


def planned(options, attempt, rank):
    """The failure that this worker must have in this attempt: its kind, and at which step of the attempt."""
    plan = json.loads(options.plan.read_text()) if options.plan else []
    mine = plan[attempt] if attempt < len(plan) else None
    return (mine["kind"], mine["step"]) if mine and mine["rank"] == rank else (None, -1)


def hoard():
    """Memory until the kernel ends this process, in a control group of its own so that nobody else is hit."""
    group = Path("/sys/fs/cgroup/memory", os.environ["CHAOS_CGROUP"])
    (group / "cgroup.procs").write_text(str(os.getpid()))
    held = []
    while True:
        held.append(b"x" * (32 << 20))


def fail(kind):
    if kind == "raise":
        raise ValueError("made to fail")
    if kind == "exit":
        sys.exit(41)
    if kind == "hang":
        time.sleep(3600)
    if kind == "spin":
        while True:
            pass
    if kind == "segfault":
        ctypes.string_at(0)
    if kind == "memory":
        hoard()
    if kind == "import":
        import a_module_that_is_not_there  # noqa: F401
    os.kill(os.getpid(), getattr(signal, kind))
    time.sleep(3600)  # stopped


def main():
    options = parse()
    folder, attempt = options.folder, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    kind, moment = planned(options, attempt, int(os.environ.get("RANK", "0")))
    if kind == "import":
        fail(kind)
    fleet.init()
    rank, workers = fleet.worker_index(), fleet.worker_num()
    torch.manual_seed(0)
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    layers = [torch.nn.Linear(options.width, options.width), torch.nn.ReLU(), torch.nn.Dropout(0.1)]
    model = fleet.distributed_model(torch.nn.Sequential(*layers, torch.nn.Linear(options.width, 4)), strategy)
    wrapped = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = fleet.distributed_optimizer(wrapped, strategy, compare_every=10)
    loader = Loader(Samples(options.width), ShardedBatches(96, 12, seed=3), num_workers=0)
    checkpoints = X.Checkpoints(folder / "saved", model=model, optimizer=optimizer, loader=loader, keep=2, timeout=60)
    torch.manual_seed(rank)
    start = checkpoints.resume()
    number = start.step if start else 0
    notes = (folder / f"steps.{rank}").open("a", buffering=1)
    begun = number
    while number < options.steps:
        for inputs, labels in loader:
            if number - begun == moment:
                fail(kind)
            out = optimizer.minimize(functional.cross_entropy(model(inputs), labels))
            number += 1
            notes.write(f"{attempt}:{number}:{workers}:{time.time():.3f}\n")
            time.sleep(options.slow if (folder / "slow").exists() else options.pause)
            if fleet.stop_requested() and out.closed:
                checkpoints.save(number, extra={"why": "asked to stop"})
                print(f"saved at {number} and left")
                return
            if number >= options.steps:
                break
            if number % options.save_every == 0 and loader.state_dict()["batches"]:
                checkpoints.save(number, asynchronous=options.asynchronous)
    checkpoints.wait()
    optimizer.flush()
    digest = hashlib.sha256()
    for value in [*model.state_dict().values(), *(state["momentum_buffer"] for state in optimizer.state.values())]:
        digest.update(value.detach().numpy().tobytes())
    result = {"hash": digest.hexdigest(), "drawn": torch.rand(1).item(), "attempt": attempt, "workers": workers}
    (folder / f"result.{rank}").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
