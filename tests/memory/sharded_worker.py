"""Trains a model whose parameters are sharded by torch, plain and with a plan, and says where they differ."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fleetx import memory
from fleetx.memory import offload
from tests.leaving import leave_at_once
from tests.memory.comparing import STATES, assert_nothing_left, cycled
from tests.memory.zoo import normal

LAYERS = 4


def build():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(8, 1))


def shard(model, mesh):
    for layer in model[:LAYERS]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gradients(model, number):
    torch.manual_seed(number)
    model.zero_grad()
    model(normal(number + dist.get_rank(), 6, 8)).square().sum().backward()
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]


def compare(states, mesh, *, is_sharded_first):
    plain, ours = shard(build(), mesh), build()
    segments = cycled([str(number) for number in range(LAYERS)], states)
    if is_sharded_first:
        applied = memory.apply(shard(ours, mesh), segments)
    else:
        applied = memory.apply(ours, segments)
        shard(ours, mesh)
    for number in range(3):
        expected, found = gradients(plain, number), gradients(ours, number)
        assert all(map(torch.equal, found, expected)), (states, is_sharded_first, number)
        assert_nothing_left(applied)


def main(folder):
    offload.SMALLEST = 1
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for states in STATES.values():
        for is_sharded_first in (True, False):
            compare(states, mesh, is_sharded_first=is_sharded_first)
    (folder / str(dist.get_rank())).touch()
    leave_at_once()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
