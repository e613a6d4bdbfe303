"""Trains all exactness cases with FleetX on this worker, and saves what came out of each."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import fleetx as X
from fleetx import fleet
from tests import plain

all_reduce_calls = 0


def strategy_for(case):
    strategy = fleet.DistributedStrategy()
    strategy.gradient_merge = True
    strategy.gradient_merge_configs = {"k_steps": plain.K_STEPS, "avg": case.avg}
    if case.optimizer == "lars":
        strategy.lars = True
        strategy.lars_configs = {"lars_coeff": 0.02, "exclude_from_weight_decay": ["bias"]}
    if case.optimizer == "lamb":
        strategy.lamb = True
        strategy.lamb_configs = {"exclude_from_weight_decay": ["bias"]}
    if case.recompute:
        strategy.recompute = True
        strategy.recompute_configs = {"checkpoints": ["first", "norm"], "enable_offload": case.recompute == "host"}
    return strategy


def wrapped_optimizer(case, net):
    if case.optimizer == "lars":
        return torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    if case.optimizer == "lamb":
        return torch.optim.Adam(net.parameters(), lr=0.01, eps=1e-6)
    return plain.make_optimizer(case.optimizer, net)


def prepare(case, net=None):
    # Workers start from different weights: the first one's must win.
    strategy = strategy_for(case)
    net = fleet.distributed_model(net or plain.make_net(seed=fleet.worker_index()), strategy)
    return net, fleet.distributed_optimizer(wrapped_optimizer(case, net), strategy, clip_norm=case.clip_norm)


def by_step(case, net=None):
    net, optimizer = prepare(case, net)
    step = X.Step(net, optimizer, torch.nn.functional.cross_entropy)
    outs = [step(my_part(batch)) for batch in plain.batches(case, fleet.worker_num())]
    assert all(out.updated and not out.skipped for out in outs)
    samples = [len(batch[1]) for batch in plain.batches(case, fleet.worker_num())]
    assert [out.samples for out in outs] == samples, (outs, samples)
    return net, [out.loss.item() for out in outs]


def by_minimize(case):
    net, optimizer = prepare(case)
    losses = []
    for batch in plain.batches(case, fleet.worker_num()):
        for index, micro in enumerate(plain.micro_batches(my_part(batch))):
            items = len(micro[1]) if case.avg and case.ragged else None
            out = optimizer.minimize(plain.mean_loss(net, micro), items=items)
            assert out.updated == (index == plain.K_STEPS - 1)
        losses.append(out.loss.item())
    return net, losses


def two_losses():
    strategy = strategy_for(plain.Case())
    net = fleet.distributed_model(plain.make_tagger(), strategy)
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(net.parameters(), lr=0.01), strategy)
    step = X.Step(net, optimizer, compute=plain.tagger_losses, items=plain.tagger_items)
    reported = []
    for batch in plain.tagged_batches(fleet.worker_num()):
        keys = list(batch)
        out = step(dict(zip(keys, my_part([batch[key] for key in keys]), strict=True)))
        reported.append({name: loss.item() for name, loss in out.losses.items()})
    return net, reported


def weighed():
    """Weights of samples as items, with `Step` and with `minimize`."""
    strategy = strategy_for(plain.Case())
    net = fleet.distributed_model(plain.make_two_heads(), strategy)
    optimizer = fleet.distributed_optimizer(plain.make_optimizer("sgd", net), strategy)
    step = X.Step(net, optimizer, compute=plain.weighed_losses, items=plain.weighed_items)
    assert all(step(my_part(batch)) for batch in plain.weighed_batches(fleet.worker_num()))
    merged = fleet.distributed_model(plain.make_two_heads(), strategy)
    optimizer = fleet.distributed_optimizer(plain.make_optimizer("sgd", merged), strategy)
    for batch in plain.weighed_batches(fleet.worker_num()):
        for micro in plain.micro_batches(my_part(batch)):
            loss = plain.weighed_losses(merged, micro)["common"]
            optimizer.minimize(loss, items=plain.weighed_items(micro)["common"])
    return state(net), state(merged)


def resumed_in_mid_window():
    """Save after 2 of 4 micro-batches, go on with fresh objects: the run must not notice."""

    def micros():
        return [
            m for b in plain.batches(plain.Case("adam"), fleet.worker_num()) for m in plain.micro_batches(my_part(b))
        ]

    net, optimizer = prepare(plain.Case("adam"))
    for micro in micros():
        optimizer.minimize(plain.mean_loss(net, micro))
    uninterrupted = net.state_dict()

    net, optimizer = prepare(plain.Case("adam"))
    for micro in micros()[:10]:
        optimizer.minimize(plain.mean_loss(net, micro))
    assert optimizer.micro_batches_held == 2
    saved = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
    path = Path(sys.argv[1]) / f"mid-window-{fleet.worker_num()}-{fleet.worker_index()}.pt"
    torch.save(saved, path)
    saved = torch.load(path, weights_only=True)
    net, optimizer = prepare(plain.Case("adam"), plain.make_net(seed=99))
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    for micro in micros()[10:]:
        optimizer.minimize(plain.mean_loss(net, micro))
    return all(torch.equal(value, uninterrupted[name]) for name, value in net.state_dict().items())


def uneven_flush():
    """Worker r holds r % 3 micro-batches at the end of an epoch: the flush averages over all of them."""
    case = plain.Case()
    net, optimizer = prepare(case)
    batch = plain.batches(case, fleet.worker_num())[0]
    for micro in plain.micro_batches(my_part(batch))[: fleet.worker_index() % 3]:
        optimizer.minimize(plain.mean_loss(net, micro))
    out = optimizer.flush()
    nothing_left = optimizer.flush() is None
    return net, out is not None, nothing_left


def messages_per_window():
    """All-reduce calls of one window of `minimize`, counted from outside."""
    global all_reduce_calls
    original = dist.all_reduce

    def counting(*args, **kwargs):
        global all_reduce_calls
        all_reduce_calls += 1
        return original(*args, **kwargs)

    net, optimizer = prepare(plain.Case())
    batch = my_part(plain.batches(plain.Case(), fleet.worker_num())[0])
    for micro in plain.micro_batches(batch):  # in the first window the workers also compare what they reduce
        optimizer.minimize(plain.mean_loss(net, micro))
    dist.all_reduce = counting
    per_call = []
    for micro in plain.micro_batches(batch):
        all_reduce_calls = 0
        optimizer.minimize(plain.mean_loss(net, micro))
        per_call.append(all_reduce_calls)
    dist.all_reduce = original
    assert optimizer.engine.window.reductions == 2
    return per_call


def awkward_windows():
    """Whether a backward reduces is decided at backward: forwards in between, twice, or shared, change nothing."""
    case = plain.Case()
    net, optimizer = prepare(case)
    first, second, third = plain.batches(case, fleet.worker_num())[:3]
    for micro in plain.micro_batches(my_part(first)):
        net.eval()
        with torch.no_grad():
            net(micro[0])
        net.train()
        loss = plain.contrast(net, micro)
        net(micro[0])  # a graph that nobody uses
        optimizer.minimize(loss)
    for micro in plain.micro_batches(my_part(second))[:2]:
        scores = net(micro[0])
        optimizer.minimize(torch.nn.functional.cross_entropy(scores, micro[1]), retain_graph=True)
        optimizer.minimize(scores.square().mean())
    net.frozen.requires_grad_(True)
    for micro in plain.micro_batches(my_part(third)):
        optimizer.minimize(plain.mean_loss(net, micro))
    return net


def step_after_minimize():
    """A window weighed by items must not colour the next one."""
    case = plain.Case(ragged=True)
    net, optimizer = prepare(case)
    step = X.Step(net, optimizer, torch.nn.functional.cross_entropy)
    for number, batch in enumerate(plain.batches(case, fleet.worker_num())):
        if number % 2:
            step(my_part(batch))
        else:
            for micro in plain.micro_batches(my_part(batch)):
                optimizer.minimize(plain.mean_loss(net, micro), items=torch.tensor(len(micro[1])))
    return net


def skipped_window():
    """An inf in the second micro-batch of the third window: that window must leave no trace."""
    case = plain.Case("adam")
    net, optimizer = prepare(case)
    outs = []
    for number, batch in enumerate(plain.batches(case, fleet.worker_num())):
        for index, (inputs, labels) in enumerate(plain.micro_batches(my_part(batch))):
            if (number, index, fleet.worker_index()) == (2, 1, fleet.worker_num() - 1):
                inputs = inputs * float("inf")
            out = optimizer.minimize(plain.mean_loss(net, (inputs, labels)))
        outs.append((out.updated, out.skipped))
    return net, outs


def used_by_one_worker():
    """A parameter that only the last worker uses is averaged over all; one that nobody uses stays as it is."""
    case = plain.Case("sgd")
    net, optimizer = prepare(case)
    batch = my_part(plain.batches(case, fleet.worker_num())[0])
    for micro in plain.micro_batches(batch):
        loss = plain.mean_loss(net, micro)
        if fleet.worker_index() == fleet.worker_num() - 1:
            loss = loss + (net.unused * torch.arange(4)).sum()
        optimizer.minimize(loss)
    return net


def my_part(batch):
    return plain.part(batch, fleet.worker_index(), fleet.worker_num())


def state(net):
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def main():
    fleet.init()
    results = {"cases": {}}
    for case in plain.CASES:
        for door, run in (("step", by_step), ("minimize", by_minimize)):
            net, losses = run(case)
            results["cases"][f"{case.name}-{door}"] = (state(net), losses)
    net, losses = by_step(plain.COMPLEX, plain.make_complex(seed=5 + fleet.worker_index()))
    results["complex"] = (state(net), losses)
    net, reported = two_losses()
    results["two losses"] = (state(net), reported)
    results["weighed"] = weighed()
    results["resumed"] = resumed_in_mid_window()
    results["mixed doors"] = state(step_after_minimize())
    net, outs = skipped_window()
    results["skipped"] = (state(net), outs)
    if fleet.worker_num() > 1:
        net, flushed, nothing_left = uneven_flush()
        results["flush"] = (state(net), flushed, nothing_left)
        results["messages"] = messages_per_window()
        results["awkward"] = state(awkward_windows())
        results["one worker"] = state(used_by_one_worker())
    torch.save(results, Path(sys.argv[1]) / f"{fleet.worker_num()}-{fleet.worker_index()}.pt")


if __name__ == "__main__":
    main()
