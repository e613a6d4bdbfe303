"""Trains on 9 samples in global batches of 4: of two workers one has no samples in the last batch of an epoch."""

import sys
from pathlib import Path

import torch
from torch.nn import functional

import fleetx as X
from fleetx import fleet
from fleetx.data import Loader, ShardedBatches


def train(entry_point):
    generator = torch.Generator().manual_seed(3)
    samples = [(torch.randn(4, generator=generator, dtype=torch.float64), number % 2) for number in range(9)]
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()
    net = fleet.distributed_model(net)
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(net.parameters(), lr=0.05))
    step = X.Step(net, optimizer, functional.cross_entropy)
    loader = Loader(samples, ShardedBatches(9, 4, seed=1))
    for _ in range(2):
        for inputs, labels in loader:
            if entry_point == "step":
                out = step((inputs, labels))
            else:
                out = optimizer.minimize(functional.cross_entropy(net(inputs), labels), items=len(labels))
            assert out.updated
        optimizer.flush()
    return net.state_dict()


if __name__ == "__main__":
    fleet.init()
    trained = train(sys.argv[1])
    torch.save(trained, Path(sys.argv[2]) / f"{fleet.worker_index()}.pt")
