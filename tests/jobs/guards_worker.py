"""What guards a job of several workers: uneven data, weights that drift apart, a stop that all see at once."""

import json
import os
import signal
import sys
from pathlib import Path

import torch

from fleetx import fleet

EPOCHS, K_STEPS = 2, 2
BATCHES = {0: 9, 1: 6, 2: 0}  # of each worker, per epoch


def batch(rank, epoch, number):
    generator = torch.Generator().manual_seed(1000 * rank + 100 * epoch + number)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def build(**options):
    torch.manual_seed(0)
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": K_STEPS})
    model = fleet.distributed_model(torch.nn.Linear(3, 2).double(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, fleet.distributed_optimizer(optimizer, strategy, **options)


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
        "stopping": stopping(rank),
    }
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
