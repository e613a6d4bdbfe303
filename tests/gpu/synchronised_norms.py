"""torch's SyncBatchNorm inside segments, on two workers that share a CUDA device."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tests.memory import zoo
from tests.memory.comparing import STATES
from tests.memory.workers import compare


def synchronised():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)) for _ in range(4)]
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(*layers)).cuda()
    cuts = {"blocks": ["0", "1", "2", "3"]}
    return zoo.Example(model, lambda number: (zoo.normal(number, 5, 4, 6, 6).cuda(),), cuts)


def main(folder):
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for states in STATES.values():
        compare(synchronised, synchronised().cuts["blocks"], states, lambda model: model)
    (folder / str(dist.get_rank())).touch()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
