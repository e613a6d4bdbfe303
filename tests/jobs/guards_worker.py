"""What guards a job of several workers: uneven data, weights that drift apart, a stop that all see at once."""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR

import fleetx as X
from fleetx import fleet

EPOCHS, K_STEPS = 2, 2
BATCHES = {0: 9, 1: 6, 2: 0}  # of each worker, per epoch


def batch(rank, epoch, number):
    generator = torch.Generator().manual_seed(1000 * rank + 100 * epoch + number)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def build(settings=(), amp=None, schedule=None, **options):
    torch.manual_seed(0)
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": K_STEPS})
    if amp is not None:
        strategy.amp, strategy.amp_configs = True, amp
    model = fleet.distributed_model(torch.nn.Linear(3, 2).double(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **dict(settings)})
    return model, fleet.distributed_optimizer(optimizer, strategy, schedule and schedule(optimizer), **options)


def loss_of(model, inputs):
    return model(inputs).square().mean()


def uneven(rank, workers, items):
    """Workers whose data ends at different times; each window counts what it holds."""
    model, optimizer = build()
    for epoch in range(EPOCHS):
        for number in range(BATCHES[rank]):
            optimizer.minimize(loss_of(model, batch(rank, epoch, number)), items=4 if items else None)
        optimizer.flush()
    assert optimizer.flush() is None
    return [p.tolist() for p in model.parameters()], optimizer.engine.window.reductions


def reference(workers):
    """The same in bare torch, in one process."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    windows = 0
    for epoch in range(EPOCHS):
        for start in range(0, max(BATCHES.values()), K_STEPS):
            held = [
                batch(rank, epoch, number)
                for rank in range(workers)
                for number in range(start, min(start + K_STEPS, BATCHES[rank]))
            ]
            optimizer.zero_grad()
            (sum(loss_of(model, inputs) for inputs in held) / len(held)).backward()
            optimizer.step()
            windows += 1
    return [p.tolist() for p in model.parameters()], windows


def drifting(rank):
    """One worker's weights are changed in a single bit, by nobody's optimizer."""
    model, optimizer = build(compare_every=3)
    seen = 0
    try:
        for number in range(20):
            optimizer.minimize(loss_of(model, batch(0, 0, number)))
            seen = number
            if number == 7 and rank == 1:
                model.weight.data.view(torch.int64)[1, 2] ^= 1 << 30
    except RuntimeError as error:
        return [type(error).__name__, str(error), seen]
    return None


def mixed(rank):
    """One worker forgets to count items, and not in the first window."""
    model, optimizer = build()
    try:
        for number in range(3 * K_STEPS):
            forgotten = rank == 1 and number >= K_STEPS
            optimizer.minimize(loss_of(model, batch(rank, 0, number)), items=None if forgotten else 4)
    except ValueError as error:
        return [number, str(error)]
    return None


def trained(model, optimizer, windows):
    """The number of the window that raised, and what it said; None if none did."""
    for number in range(windows):
        try:
            for _ in range(K_STEPS):
                optimizer.minimize(loss_of(model, batch(0, 0, number)))
        except ValueError as error:
            return [number, str(error)]
    return None


class Decay:
    """A schedule's state may hold what shows its address, other on each worker."""

    def __init__(self):
        self.parts = [object()]

    def __call__(self, window):
        return 0.9**window


def differing(rank):
    """One worker differs in a setting or in its optimizer's state: found in the first window."""
    different = rank == 1
    found = {
        "lr": trained(*build({"lr": 0.2 if different else 0.1}), 2),
        "momentum": trained(*build({"momentum": 0.8 if different else 0.9}), 2),
        "clip_norm": trained(*build(clip_norm=1.0 if different else 2.0), 2),
        "compare_every": trained(*build(compare_every=50 if different else 100), 2),
        "loss scale": trained(*build(amp={"init_loss_scaling": 512.0 if different else 1024.0}), 2),
        "no loss scale": trained(*build(amp={"dtype": "bfloat16"} if different else {}), 2),
        "schedule": trained(*build(schedule=partial(MultiStepLR, milestones=[2 if different else 3])), 2),
    }
    assert trained(*build(schedule=partial(LambdaLR, lr_lambda=Decay())), 2) is None
    model, optimizer = build()
    if different:
        optimizer.state[model.weight]["momentum_buffer"] = torch.ones_like(model.weight)
    return found | {"state": trained(model, optimizer, 2)}


def changing(rank):
    """Later one worker adds, freezes or names something else, and the others do not."""
    found = {}
    for what in ("added", "frozen", "names"):
        model, optimizer = build()
        extra = fleet.distributed_model(torch.nn.Linear(2, 2).double(), optimizer.strategy)
        assert trained(model, optimizer, 2) is None
        if rank == 1 and what == "added":
            optimizer.inner.add_param_group({"params": list(extra.parameters())})
        if rank == 1 and what == "frozen":
            model.bias.requires_grad_(False)
        if what == "names":
            names = ("a", "b" if rank == 1 else "c")
            step = X.Step(model, optimizer, compute=lambda m, b, names=names: {name: loss_of(m, b) for name in names})
            try:
                step(batch(0, 0, 0))
            except ValueError as error:
                found[what] = [0, str(error)]
        else:
            found[what] = trained(model, optimizer, 3)
    model, optimizer = build()
    assert trained(model, optimizer, 2) is None
    model.bias.requires_grad_(False)  # on all: nothing to say
    return found | {"all": trained(model, optimizer, 2)}


def drifted(rank, folder):
    """Weights that differ are found by a flush and by a save, long before it is time to compare."""
    found = {}
    for way in ("flush", "save", "saved beside"):
        model, optimizer = build()
        assert trained(model, optimizer, 1) is None
        if rank == 1:
            model.bias.data[0] += 1e-9
        checkpoints = X.Checkpoints(Path(folder, way), model=model, optimizer=optimizer)
        try:
            if way == "flush":
                optimizer.flush()
            else:
                checkpoints.save(1, asynchronous=way == "saved beside")
                checkpoints.wait()
        except RuntimeError as error:
            found[way] = [type(error).__name__, str(error)]
    return found


def stopping(rank):
    """One worker gets the signal first; all must see it at the same update."""
    model, optimizer = build()
    fleet.stop_requested()
    for number in range(40):
        if number == 11 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # as from a batch system and from the launcher
        optimizer.minimize(loss_of(model, batch(rank, 0, number)))
        if fleet.stop_requested():
            return number
    return None


def listeners():
    """Addresses that this process listens on, as the kernel writes them."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(str(entry.readlink()))
        except OSError:
            continue
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    lines += [line.split() for line in Path("/proc/self/net/tcp6").read_text().splitlines()[1:]]
    return sorted({line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in inodes})


def main():
    fleet.init()
    rank, workers = fleet.worker_index(), fleet.worker_num()
    found = {
        "uneven": uneven(rank, workers, items=False),
        "items": uneven(rank, workers, items=True),
        "reference": reference(workers),
        "evenly": list(fleet.evenly(range(3 + 2 * rank))),
        "listeners": listeners(),
        "drifting": drifting(rank),
        "mixed": mixed(rank),
        "differing": differing(rank),
        "changing": changing(rank),
        "drifted": drifted(rank, sys.argv[1]),
        "stopping": stopping(rank),
    }
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
