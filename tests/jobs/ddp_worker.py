"""The same job by DistributedDataParallel and by FleetX, in fp64 on this worker; saves both results."""

import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import fleetx as X
from fleetx import fleet
from tests import plain


def my_parts():
    generator = torch.Generator().manual_seed(1)
    for _ in range(plain.UPDATES):
        n = 6 * fleet.worker_num()
        batch = torch.randn(n, 6, generator=generator).double(), torch.randint(0, 3, (n,), generator=generator)
        yield plain.part(batch, fleet.worker_index(), fleet.worker_num())


def by_ddp():
    net = plain.make_net()
    model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = plain.make_optimizer("sgd", net)
    for batch in my_parts():
        optimizer.zero_grad()
        plain.mean_loss(model, batch).backward()
        optimizer.step()
    return net.state_dict()


def by_fleetx(**settings):
    net = plain.make_net()
    strategy = fleet.DistributedStrategy(**settings)
    step = X.Step(net, plain.make_optimizer("sgd", net), torch.nn.functional.cross_entropy, strategy)
    for batch in my_parts():
        step(batch)
    return net.state_dict()


def main():
    fleet.init()
    results = {
        "ddp": by_ddp(),
        "fleetx": by_fleetx(),
        "unfused": by_fleetx(fuse_all_reduce_ops=False),
        "bf16_allreduce": by_fleetx(bf16_allreduce=True),
        "fp16_allreduce": by_fleetx(fp16_allreduce=True),
    }
    torch.save(results, Path(sys.argv[1]) / f"{fleet.worker_index()}.pt")


if __name__ == "__main__":
    main()
