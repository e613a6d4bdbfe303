"""Trains on 9 samples in global batches of 4: of two workers one has no samples in the last batch of an epoch."""

import sys
from pathlib import Path

import torch
from torch.nn import functional

import fleetx as X
from fleetx import fleet
from fleetx.data import Loader, ShardedBatches

WAYS = ("minimize", "step", "items", "two losses", "merged", "compressed", "resumed", "first", "renamed")
UNEVEN = ("few", "many", "late")


class Rows(torch.nn.Module):
    """Like most models, cannot do with no samples."""

    def forward(self, rows):
        assert len(rows)
        return rows


def build(way):
    torch.manual_seed(0)
    first = torch.nn.Identity() if way == "minimize" else Rows()
    net = torch.nn.Sequential(first, torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()
    strategy = fleet.DistributedStrategy()
    if way == "merged":
        strategy.gradient_merge = True
        strategy.gradient_merge_configs = {"k_steps": 2}
    if way == "compressed":
        strategy.bf16_allreduce = True
    net = fleet.distributed_model(net, strategy)
    return net, fleet.distributed_optimizer(torch.optim.Adam(net.parameters(), lr=0.05), strategy)


def stepping(way, net, optimizer):
    """A step for each batch; in the last batch of a "renamed" run all workers report other losses."""
    if way == "items":
        weight = torch.tensor([0.5, 3.0], dtype=torch.float64)
        loss_fn = torch.nn.CrossEntropyLoss(weight)
        return X.Step(net, optimizer, loss_fn, items=lambda batch: weight[batch[1]].sum())
    if way not in ("two losses", "renamed"):
        return X.Step(net, optimizer, functional.cross_entropy)

    def losses(model, batch, first="first"):
        outputs = model(batch[0])
        lengths = batch[0].abs().sum(1)
        second = (outputs.square().sum(1) * lengths).sum() / lengths.sum()
        return {first: functional.cross_entropy(outputs, batch[1]), "second": second}

    def counts(batch):
        return {"first": len(batch[0]), "other": len(batch[0]), "second": batch[0].abs().sum()}

    step = X.Step(net, optimizer, compute=losses, items=counts)
    last = X.Step(net, optimizer, compute=lambda *given: losses(*given, "other"), items=counts)
    return lambda batch: (last if way == "renamed" and len(batch[0]) < 2 else step)(batch)


def train(way):
    generator = torch.Generator().manual_seed(3)
    samples = [(torch.randn(4, generator=generator, dtype=torch.float64), number % 2) for number in range(9)]
    net, optimizer = build(way)
    step = stepping(way, net, optimizer)
    # In a run of 1 sample the first batch of all is one that worker 1 has no part of.
    size = 1 if way == "first" else 9
    loader = Loader(samples[:size], ShardedBatches(size, 4, seed=1))
    outs = []
    for epoch in range(2):
        for number, (inputs, labels) in enumerate(loader):
            if way == "resumed" and epoch and number == 2:
                saved = [net.state_dict(), optimizer.state_dict()]
                net, optimizer = build(way)
                net.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                step = stepping(way, net, optimizer)
            if way == "minimize":
                out = optimizer.minimize(functional.cross_entropy(net(inputs), labels), items=len(labels))
            else:
                out = step((inputs, labels))
            assert out.updated
            assert way == "minimize" or out.samples == (1 if size == 1 or number == 2 else 4)
            outs.append({name: loss.item() for name, loss in out.losses.items()})
        optimizer.flush()
    return net.state_dict(), outs


def train_unevenly(way):
    """Worker 0 has a batch more in each epoch, and in a "late" run worker 1 none at all in the first."""
    generator = torch.Generator().manual_seed(3)
    samples = torch.randn(4, 4, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 2, (4, 4), generator=generator)
    net, optimizer = build("merged")
    step = stepping("items", net, optimizer)
    if way == "many":
        names = [f"loss {number}" for number in range(40)]
        step = X.Step(
            net,
            optimizer,
            compute=lambda model, batch: {
                name: functional.cross_entropy(model(batch[0]), batch[1]) * (place + 1)
                for place, name in enumerate(names)
            },
            items=lambda batch: {name: len(batch[1]) + place for place, name in enumerate(names)},
        )
    rank, workers = fleet.worker_index(), fleet.worker_num()
    for epoch in range(2):
        for number in range(4):
            both = number < (0 if way == "late" and not epoch else 3)
            if both or rank == 0:
                mine = slice(rank, None, workers) if both else slice(None)
                step((samples[number][mine], labels[number][mine]))
        out = optimizer.flush()
        assert out is None or out.updated
    return net.state_dict()


def refused_unevenly():
    """Norms over all workers wait in each forward."""
    strategy = fleet.DistributedStrategy(sync_batch_norm=True)
    net = fleet.distributed_model(torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)), strategy)
    step = X.Step(net, torch.optim.SGD(net.parameters(), lr=0.1), functional.mse_loss, strategy)
    try:
        for _ in range(3 - fleet.worker_index()):
            step((torch.ones(2, 4), torch.ones(2, 1)))
        step.optimizer.flush()
    except ValueError as error:
        return str(error)
    return None


def refused():
    """An empty batch on all workers is none; the next batch trains."""
    net, optimizer = build("step")
    step = X.Step(net, optimizer, functional.cross_entropy)
    batch = torch.ones(3, 4, dtype=torch.float64), torch.tensor([0, 1, 1])
    assert step(batch)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    try:
        step((batch[0][:0], batch[1][:0]))
    except ValueError as error:
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
        assert step(batch)
        return str(error)
    return None


def main():
    fleet.init()
    found = {way: train(way) for way in WAYS}
    found["uneven"] = {way: train_unevenly(way) for way in UNEVEN}
    found["refused"] = refused()
    found["refused unevenly"] = refused_unevenly()
    torch.save(found, Path(sys.argv[1]) / f"{fleet.worker_index()}.pt")


if __name__ == "__main__":
    main()
