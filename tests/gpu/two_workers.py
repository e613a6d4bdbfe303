"""One exactness case on two workers that share a CUDA device."""

import sys
from pathlib import Path

import torch

import fleetx as X
from fleetx import fleet
from tests import plain
from tests.jobs.exactness_worker import my_part, strategy_for, wrapped_optimizer


def main():
    fleet.init(backend="gloo")
    case = plain.Case("adam", ragged=True)
    strategy = strategy_for(case)
    net = fleet.distributed_model(plain.make_net(seed=fleet.worker_index()).cuda(), strategy)
    optimizer = fleet.distributed_optimizer(wrapped_optimizer(case, net), strategy)
    step = X.Step(net, optimizer, torch.nn.functional.cross_entropy)
    losses = [step(my_part(batch)).loss.item() for batch in plain.batches(case, fleet.worker_num())]
    torch.save((net.state_dict(), losses), Path(sys.argv[1]) / f"{fleet.worker_index()}.pt")


if __name__ == "__main__":
    main()
