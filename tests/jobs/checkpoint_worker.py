"""Trains cases that are hard to resume. `through` saves on the way and goes on; `resume` goes on from that save."""

import hashlib
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import fleetx as X
from fleetx import fleet
from fleetx.data import Loader, ShardedBatches

SAMPLES, BATCH, BATCHES = 54, 12, 17


@dataclass(frozen=True)
class Case:
    """One way to train. Windows have 3 batches and epochs 5, so that 7 is in the middle of both."""

    optimizer: str = "adam"
    amp: dict | None = None
    save_at: int = 7
    num_workers: int = 0
    items: bool = False
    asynchronous: bool = False
    door: str = "minimize"
    clip_norm: float | None = None


FP16 = {"init_loss_scaling": 2.0**20, "incr_every_n_steps": 2, "decr_every_n_nan_or_inf": 1}
PURE_BF16 = {"use_pure_bf16": True}
CASES = {
    "adam, loading process, asynchronous": Case(num_workers=1, asynchronous=True),
    "sgd, fp16 with a moving scale": Case("sgd", FP16),
    "adam, pure bf16 with masters, clipped": Case("adam", PURE_BF16, clip_norm=0.5),
    "lars, pure bf16": Case("lars", PURE_BF16, save_at=8),
    "lamb, fp32, weighed by items": Case("lamb", items=True),
    "lamb, pure bf16, whole batches": Case("lamb", PURE_BF16, door="step", save_at=6),
    "sgd, between windows, at the end of an epoch": Case("sgd", save_at=15),
}


class Samples:
    """Pictures with noise that differs from epoch to epoch."""

    def __len__(self):
        return SAMPLES

    def sample(self, index, epoch):
        picture = epoch.rng(index).standard_normal((1, 6, 6), dtype=np.float32)
        return torch.from_numpy(picture), index % 3


class Net(nn.Module):
    """Draws from torch, Python and numpy, has running statistics, tied weights, and memory in channels-last order."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.2)
        self.first = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.first.weight
        self.head = nn.Linear(8, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, pictures):
        hidden = self.dropout(torch.relu(self.norm(self.second(torch.relu(self.conv(pictures))))))
        hidden = hidden.mean((2, 3)) * (1 + 0.1 * random.random())
        hidden = hidden + torch.relu(self.again(torch.relu(self.first(hidden)))) * float(np.random.rand())
        return self.head(hidden)


def build(case, folder, seed, device="cpu"):
    torch.manual_seed(seed)
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 3})
    if case.amp:
        strategy.amp = True
        strategy.amp_configs = case.amp
    if case.optimizer == "lars":
        strategy.lars = True
        strategy.lars_configs = {"lars_coeff": 0.02, "exclude_from_weight_decay": ["bias"]}
    if case.optimizer == "lamb":
        strategy.lamb = True
        strategy.lamb_configs = {"exclude_from_weight_decay": ["bias"]}
    net = fleet.distributed_model(Net().to(device), strategy)
    if case.optimizer in ("sgd", "lars"):
        wrapped = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    else:
        wrapped = torch.optim.Adam(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(wrapped, 0.2, 1.0, total_iters=5)
    optimizer = fleet.distributed_optimizer(wrapped, strategy, schedule, clip_norm=case.clip_norm)
    plan = ShardedBatches(SAMPLES, BATCH, seed=4)
    loader = Loader(Samples(), plan, num_workers=case.num_workers, timeout=60.0)
    step = X.Step(net, optimizer, functional.cross_entropy)
    given = {"step": step} if case.door == "step" else {"model": net, "optimizer": optimizer}
    checkpoints = X.Checkpoints(folder, **given, loader=loader, timeout=60)
    return net, optimizer, loader, step, checkpoints


def train(case, parts, number, save=False, until=BATCHES):
    net, optimizer, loader, step, checkpoints = parts
    device = net.head.weight.device
    while number < until:
        for batch in loader:
            batch = [tensor.to(device) for tensor in batch]
            if case.door == "step":
                step(batch)
            else:
                items = len(batch[1]) + fleet.worker_index() if case.items else None
                optimizer.minimize(functional.cross_entropy(net(batch[0]), batch[1]), items=items)
            number += 1
            if save and number == case.save_at:
                checkpoints.save(number, extra={"text": "ü", "batch": number}, asynchronous=case.asynchronous)
            if number == until:
                break


def finish(parts):
    """What ends a run."""
    _, optimizer, loader, _, checkpoints = parts
    checkpoints.wait()
    loader.close()
    optimizer.flush()
    return fingerprint(parts)


def fingerprint(parts):
    """A hash of everything that should be equal, by name, and the next random numbers."""
    net, optimizer, loader, _, _ = parts
    prints = {name: _hash(tensor) for name, tensor in net.state_dict().items()}
    for key, state in optimizer.state_dict()["state"].items():
        prints |= {f"{key} {name}": _hash(torch.as_tensor(value)) for name, value in state.items()}
    device = net.head.weight.device
    drawn = [random.random(), float(np.random.rand()), torch.rand(1).item(), torch.rand(1, device=device).item()]
    return prints | {
        "drawn": drawn,
        "scale": optimizer.loss_scale,
        "lr": float(optimizer.param_groups[0]["lr"]),
        "position": loader.state_dict()["batches"],
    }


def _hash(tensor):
    return hashlib.sha256(
        tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()


def play(mode, folder, case, device="cpu"):
    """One case from its beginning, or from where it was saved."""
    seed = 1 if mode == "through" else 99
    parts = build(case, folder, seed, device)
    random.seed(seed + fleet.worker_index())
    np.random.seed(seed + fleet.worker_index())
    torch.manual_seed(seed + fleet.worker_index())
    start = parts[-1].resume()
    if mode == "through":
        assert start is None
        train(case, parts, 0, save=True)
    else:
        assert (start.step, start.extra) == (case.save_at, {"text": "ü", "batch": case.save_at}), start
        assert start.replayed == 0
        assert start.passed_over == ()
        train(case, parts, start.step)
    return finish(parts)


def main():
    mode, folder = sys.argv[1], Path(sys.argv[2])
    fleet.init()
    results = {name: play(mode, folder / f"{fleet.worker_num()} {name}", case) for name, case in CASES.items()}
    path = folder / f"{mode}-{fleet.worker_num()}-{fleet.worker_index()}.json"
    path.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
