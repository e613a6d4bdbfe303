"""Trains a model with BatchNorm layers on unequal parts of batches, with sync_batch_norm."""

import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import fleetx as X
from fleetx import fleet

PLAIN = ("step", "minimize", "items", "masked")  # those that bare torch can do too
WAYS = (*PLAIN, "recompute", "offload", "bf16", "bf16 recompute")
K_STEPS = 2
COUNTS = (3, 7, 4, 9)  # samples of each worker


class Net(nn.Module):
    """Its second norm has a way around it."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, momentum=None), nn.Conv2d(4, 4, 1))
        self.head = nn.Sequential(nn.Linear(16, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x):
        x = self.stem(x)
        x = torch.tanh(x + self.block(x))
        return self.head(x.flatten(1))


def made(way):
    torch.manual_seed(0)
    return Net() if "bf16" in way else Net().double()


def global_batches(way, workers):
    """For each update a part for each worker: images, labels, weights of samples."""
    generator = torch.Generator().manual_seed(7)
    dtype = torch.float32 if "bf16" in way else torch.float64
    for number in range(3):
        parts = []
        for count in COUNTS[:workers]:
            images = torch.randn(count, 2, 4, 4, generator=generator, dtype=dtype)
            labels = torch.randint(0, 3, (count,), generator=generator)
            parts.append((images, labels, torch.rand(count, generator=generator, dtype=dtype)))
        if way == "masked":  # the first worker has no labels in a micro-batch, and the mean over them is 0/0
            parts[0][1][: (len(parts[0][1]) + 1) // 2] = -100
            parts[-1][1][number] = -100
        yield parts


def loss_of(model, batch, way):
    if way == "items":
        losses = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return (losses * batch[2]).sum() / batch[2].sum()
    return functional.cross_entropy(model(batch[0]), batch[1])


def items_of(batch, way):
    return {"items": batch[2].sum(), "masked": (batch[1] != -100).sum()}.get(way, len(batch[1]))


def strategy_of(way):
    strategy = fleet.DistributedStrategy(sync_batch_norm=True, gradient_merge=True)
    strategy.gradient_merge_configs.k_steps = K_STEPS
    if "bf16" in way:
        strategy.amp = True
        strategy.amp_configs = {"dtype": "bfloat16"}
    strategy.compile = "compiled" in way
    if "recompute" in way or way == "offload":
        strategy.recompute = True
        strategy.recompute_configs = {"checkpoints": ["stem", "block", "head.2"], "enable_offload": way == "offload"}
    return strategy


def micro_batches(part):
    return list(zip(*(tensor.tensor_split(K_STEPS) for tensor in part), strict=True))


def train(way):
    """The model's state after some updates, and how often norms asked in the last one."""
    strategy = strategy_of(way)
    net = fleet.distributed_model(made(way), strategy)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.3), strategy)
    # A forward in eval mode asks nobody, so one worker may run it alone.
    if fleet.worker_index() == 0:
        net.eval()(next(iter(global_batches(way, 1)))[0][0])
        net.train()
    if way in ("items", "masked", "minimize"):

        def step(part):
            for micro in micro_batches(part):
                optimizer.minimize(loss_of(net, micro, way), items=items_of(micro, way))
    else:
        step = X.Step(net, optimizer, compute=lambda model, batch: loss_of(model, batch, way))
    for parts in global_batches(way, fleet.worker_num()):
        with Counting() as counting:
            step(parts[fleet.worker_index()])
    return net.state_dict(), counting.calls, optimizer.overview()


def train_in_bare_torch(way, workers):
    """Each micro-batch is that of all workers."""
    net = made(way)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    for parts in global_batches(way, workers):
        cut = [micro_batches(part) for part in parts]
        micros = [tuple(map(torch.cat, zip(*(one[index] for one in cut), strict=True))) for index in range(K_STEPS)]
        total = sum(items_of(micro, way) for micro in micros)
        optimizer.zero_grad()
        for micro in micros:
            (loss_of(net, micro, way) * items_of(micro, way) / total).backward()
        optimizer.step()
    return net.state_dict()


class Counting:
    """Counts the all-reduces of norms: those of gradients are of everyone's group."""

    def __enter__(self):
        self.calls, self.original = 0, dist.all_reduce
        dist.all_reduce = self
        return self

    def __call__(self, *args, **kwargs):
        self.calls += kwargs.get("group") is not None
        return self.original(*args, **kwargs)

    def __exit__(self, *_):
        dist.all_reduce = self.original


def refused(change, way="step"):
    """What a step says to a batch that one worker alone would hold up; no worker gets as far as a message."""
    strategy = strategy_of(way)
    net = fleet.distributed_model(made(way), strategy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = X.Step(net, optimizer, functional.cross_entropy, strategy)
    part = next(iter(global_batches(way, fleet.worker_num())))[fleet.worker_index()][:2]
    step(part)
    try:
        step(change(part))
    except ValueError as error:
        return str(error)
    return None


def planned():
    strategy = strategy_of("step")
    strategy.recompute = True
    strategy.recompute_configs = {"checkpoints": "auto", "memory_budget": "1GiB"}
    try:
        fleet.distributed_model(made("step"), strategy)
    except ValueError as error:
        return str(error)
    return None


def main():
    fleet.init()
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("fleetx").addHandler(handler)
    if len(sys.argv) > 2:
        torch.save({way: train(way) for way in sys.argv[2:]}, Path(sys.argv[1]) / f"{fleet.worker_index()}.pt")
        return
    found = {way: train(way) for way in WAYS}
    found["said"] = [message for message in said if "sync_batch_norm" in message]
    found["empty"] = refused(lambda part: tuple(tensor[:0] for tensor in part))
    found["short"] = refused(lambda part: tuple(tensor[:1] for tensor in part))
    found["planned"] = planned()
    torch.save(found, Path(sys.argv[1]) / f"{fleet.worker_index()}.pt")


if __name__ == "__main__":
    main()
