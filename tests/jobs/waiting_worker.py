"""Plans a model whose workers wait for each other in every forward; one of them has lost what it had measured."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from fleetx import fleet
from tests.fleet.planned import Net, batches, by_step, strategy
from tests.planner.work_clock import WorkClock


class Waiting(Net):
    """As batch norms over all workers do."""

    forwards = 0

    def forward(self, x):
        Waiting.forwards += 1
        if fleet.worker_num() > 1:
            dist.all_reduce(torch.ones(3))
        return super().forward(x)


def planned():
    """How many forwards it took, and the plan."""
    made = strategy({})
    torch.manual_seed(0)
    model = fleet.distributed_model(Waiting(), made)
    optimizer = fleet.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), made)
    before = Waiting.forwards
    by_step(model, optimizer, batches(1))
    return Waiting.forwards - before, repr((optimizer.plan.states, optimizer.plan.k_steps))


def main():
    own = os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(dir=sys.argv[1])
    fleet.init()
    found = [planned(), planned()]
    if fleet.worker_index() == 1:
        shutil.rmtree(own)
    found += [planned(), planned()]
    torch.save(found, Path(sys.argv[1]) / f"{fleet.worker_index()}.pt")


if __name__ == "__main__":
    with WorkClock():
        main()
