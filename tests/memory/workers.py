"""Trains models on several workers, plain and with a plan, and says where they differ."""

import copy
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fleetx import memory
from fleetx.memory import offload
from tests.memory import zoo
from tests.memory.comparing import STATES, assert_equal_outcomes, assert_nothing_left, cycled, some_states, step


class AllReduce(torch.autograd.Function):
    """The sum over all workers; so is its gradient."""

    @staticmethod
    def forward(ctx, tensor):
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total)
        return total


class SyncNorm(nn.Module):
    """What torch's SyncBatchNorm does, which runs on GPUs only."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.register_buffer("running_mean", torch.zeros(width))

    def forward(self, x):
        moments = AllReduce.apply(torch.stack([x.mean(0), x.square().mean(0)])) / dist.get_world_size()
        mean, square = moments.unbind()
        self.running_mean.mul_(0.9).add_(mean.detach(), alpha=0.1)
        return (x - mean) * (square - mean.square() + 1e-5).rsqrt() * self.weight


def sync_norms():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), SyncNorm(4), nn.ReLU(inplace=True)) for _ in range(4)]
    cuts = {"blocks": ["0", "1", "2", "3"], "one": ["2.1"]}
    return zoo.Example(nn.Sequential(*layers), lambda number: (zoo.normal(number, 5, 4),), cuts)


def compare(make, cuts, states, wrap):
    built = make()
    plain = copy.deepcopy(built.model)
    applied = memory.apply(built.model, cycled(cuts, states))
    ours, plain = wrap(built.model), wrap(plain)
    for number in range(3):
        outcomes = []
        for model in (plain, ours):
            torch.manual_seed(100 * number + dist.get_rank())
            outcomes.append(step(model, built.batch(10 * number + dist.get_rank()), built.loss))
        assert_equal_outcomes(outcomes[1], outcomes[0])
        assert_nothing_left(applied)


def main(folder):
    offload.SMALLEST = 1
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for states in some_states():
        compare(sync_norms, sync_norms().cuts["blocks"], states, lambda model: model)
    compare(sync_norms, sync_norms().cuts["one"], STATES["dear-host"], DistributedDataParallel)
    for make in (zoo.resnet, zoo.gpt):
        compare(make, make().cuts["blocks"], STATES["mixed"], DistributedDataParallel)
    (folder / str(dist.get_rank())).touch()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
