"""The static door on this worker: what came out of each case, saved for the test to compare."""

import sys
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fleetx import fleet, static
from tests.static.making import Classifier, sgd

K_STEPS, UPDATES, ROWS = 2, 3, 5
HEAD = "net.head.weight"


def global_batches():
    """One for each update; every worker has its share of K_STEPS feeds."""
    generator = torch.Generator().manual_seed(3)
    size = ROWS * K_STEPS * fleet.worker_num()
    return [
        {
            "images": torch.randn(size, 6, generator=generator, dtype=torch.float64),
            "labels": torch.randint(0, 3, (size,), generator=generator),
        }
        for _ in range(UPDATES)
    ]


def my_feeds(batches):
    for batch in batches:
        first = fleet.worker_index() * K_STEPS
        for number in range(first, first + K_STEPS):
            yield {name: tensor[number * ROWS : (number + 1) * ROWS] for name, tensor in batch.items()}


def merging(**more):
    return fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": K_STEPS}, **more)


def state(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def started():
    """Weights right after the startup program, of a model that it makes and of one that came with its own."""
    exe, made = static.Executor(), static.Program(static.build(Classifier), seed=5)
    exe.run(static.StartupProgram(made))
    own = static.Program(Classifier(seed=fleet.worker_index()))
    exe.run(static.StartupProgram(own))
    return {"made": state(made.model), "own": state(own.model)}


def by_executor(*, make=sgd, compile=False, clip_norm=None, strategy=None, model=None):
    # Workers start from different weights: the first one's must win.
    model = model or Classifier(seed=fleet.worker_index())
    main = static.Program(model, make, strategy or merging(), clip_norm=clip_norm, compile=compile)
    exe = static.Executor()
    exe.run(static.StartupProgram(main))
    fetched = [exe.run(main, feed, ["loss", f"{HEAD}@GRAD", HEAD]) for feed in my_feeds(global_batches())]
    return state(model), [[None if v is None else torch.as_tensor(v) for v in values] for values in fetched]


def by_minimize(clip_norm=None):
    model = fleet.distributed_model(Classifier(seed=fleet.worker_index()), strategy := merging())
    optimizer = fleet.distributed_optimizer(sgd(model.parameters()), strategy, clip_norm=clip_norm)
    for feed in my_feeds(global_batches()):
        optimizer.minimize(model(**feed)["loss"])
    return state(model)


class Linear(nn.Module):
    """Small enough to be compiled in a few seconds."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(OrderedDict(head=nn.Linear(6, 3, dtype=torch.float64)))

    def forward(self, images, labels):
        return {"loss": nn.functional.cross_entropy(self.net(images), labels)}


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def compiled():
    return by_executor(compile=True, make=plain_sgd, model=Linear(seed=fleet.worker_index()))


def compiled_by_hand():
    """The compiled plain step of a user: torch.compile, an all-reduce for each gradient, SGD."""
    model = Linear(seed=0)
    forward, optimizer = torch.compile(model.forward), plain_sgd(model.parameters())
    feeds = list(my_feeds(global_batches()))
    for start in range(0, len(feeds), K_STEPS):
        optimizer.zero_grad()
        for feed in feeds[start : start + K_STEPS]:
            (forward(**feed)["loss"] / K_STEPS).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= fleet.worker_num()
        optimizer.step()
    return state(model)


class Lowered(Classifier):
    """In fp32, for a strategy that scales the loss."""

    def __init__(self):
        super().__init__()
        self.float()

    def forward(self, images, labels):
        return super().forward(images.float(), labels)


def scaled():
    """The gradient of a window whose loss was scaled by 1024, in fp16."""
    scaling = merging(amp=True, amp_configs={"init_loss_scaling": 1024.0})
    _, fetched = by_executor(clip_norm=1e-3, strategy=scaling, model=Lowered())
    return fetched[K_STEPS - 1][1]


def main():
    fleet.init()
    results = {
        "started": started(),
        "eager": by_executor(),
        "clipped": by_executor(clip_norm=0.05),
        "dynamic": by_minimize(),
        "dynamic clipped": by_minimize(clip_norm=0.05),
        "scaled": scaled(),
        "compiled": compiled(),
        "compiled by hand": compiled_by_hand(),
        "batches": global_batches(),
    }
    torch.save(results, Path(sys.argv[1]) / f"{fleet.worker_index()}.pt")


if __name__ == "__main__":
    main()
