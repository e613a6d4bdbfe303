"""Trains with each of some combinations of settings, resumes each in between, and saves what came out."""

import json
import sys
from pathlib import Path

import torch

import fleetx as X
from fleetx import fleet
from fleetx.comm.reducer import Reducer
from tests import plain
from tests.jobs import combinations


def build(combination, seed):
    strategy = fleet.DistributedStrategy(
        gradient_merge=True,
        gradient_merge_configs={"k_steps": combination["k_steps"]},
        sync_batch_norm=combination["norm"] == "batch",
        fuse_all_reduce_ops=combination["fused"],
        nccl_comm_num=combination["groups"],
        use_hierarchical_allreduce=combination["hierarchy"] != "off",
        fp16_allreduce=combination["wire"] == "float16",
        bf16_allreduce=combination["wire"] == "bfloat16",
    )
    strategy.hierarchical_allreduce_inter_nranks = {"twos": 2, "threes": 3}.get(combination["hierarchy"], 1)
    strategy.last_comm_group_size_MB = 0.0001
    if combination["amp"] != "off":
        strategy.update({"amp": True, "amp_configs": {"dtype": combination["amp"].partition(",")[0]}})
    if combination["kept"] != "all":
        offload = combination["kept"] == "offload"
        strategy.recompute = True
        strategy.recompute_configs = {"checkpoints": ["first", "norm"], "enable_offload": offload}
    if combination["optimizer"] == "lars":
        configs = {"lars_coeff": 0.02, "exclude_from_weight_decay": ["bias"]}
        strategy.update({"lars": True, "lars_configs": configs})
    if combination["optimizer"] == "lamb":
        strategy.update({"lamb": True, "lamb_configs": {"exclude_from_weight_decay": ["bias"]}})
    net = fleet.distributed_model(combinations.make_net(combination, seed), strategy)
    return net, fleet.distributed_optimizer(wrapped(combination["optimizer"], net), strategy)


def wrapped(name, net):
    if name == "lars":
        return torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    return torch.optim.Adam(net.parameters(), lr=0.01, eps=1e-6) if name == "lamb" else plain.make_optimizer(name, net)


def calls(combination):
    """What this worker gives to each call, window by window; None is a flush."""
    for parts in combinations.windows(combination, fleet.worker_num()):
        own = parts[fleet.worker_index()]
        if combination["way"] == "Step":
            yield tuple(map(torch.cat, zip(*own, strict=True)))
        else:
            yield from own
    yield None


def trainer(combination, net, optimizer):
    step = X.Step(net, optimizer, torch.nn.functional.cross_entropy) if combination["way"] == "Step" else None

    def call(given):
        if given is None:
            return optimizer.flush()
        if step is not None:
            return step(given)
        items = len(given[1]) if combination["way"] == "items" else None
        return optimizer.minimize(plain.mean_loss(net, given), items=items)

    return call


def run(combination, folder):
    """Weights after the first window and at the end, losses, what was sent, and whether a resumed run gave the same."""
    net, optimizer = build(combination, seed=fleet.worker_index())
    call, given = trainer(combination, net, optimizer), list(calls(combination))
    outs, states = [], []
    with Sent() as sent:
        for one in given:
            outs.append(call(one))
            states += [copied(net)] if outs[-1] is not None and outs[-1].closed else []
    closed = [out for out in outs if out is not None and out.closed]
    continued = resumed(combination, given, folder)
    return {
        "plainly sent": sent_plainly(combination, given),
        "first": states[0],
        "last": states[-1],
        "losses": [None if out.skipped else out.loss.item() for out in closed],
        "sent": sent.buckets if combination["wire"] != "full" else [],
        "hidden": [out.comm_hidden for out in closed],
        "resumed": all(torch.equal(value, continued[name]) for name, value in net.state_dict().items()),
    }


def sent_plainly(combination, given):
    """Weights after the first window, of low precision: nothing recomputed, and gradients take the usual way."""
    if combination["amp"] != "bfloat16":
        return None
    usual = {"kept": "all", "groups": 1, "hierarchy": "off", "fused": True, "wire": "full"}
    net, optimizer = build(combination | usual, seed=0)
    call, outs = trainer(combination, net, optimizer), []
    while not any(outs):
        outs.append(call(given[len(outs)]))
    return copied(net)


def copied(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


def resumed(combination, given, folder):
    """Saved in mid-window, if there is such a place, and continued by fresh objects."""
    cut = combination["k_steps"] + combination["k_steps"] // 2 if combination["way"] != "Step" else 1
    net, optimizer = build(combination, seed=fleet.worker_index())
    call = trainer(combination, net, optimizer)
    for one in given[:cut]:
        call(one)
    continued, its_optimizer = build(combination, seed=99)
    if combination["resume"] == "checkpoint":
        X.Checkpoints(folder, model=net, optimizer=optimizer).save(step=cut)
        assert X.Checkpoints(folder, model=continued, optimizer=its_optimizer).resume().step == cut
    else:
        file = folder.with_suffix(f".{fleet.worker_index()}.pt")
        torch.save((net.state_dict(), optimizer.state_dict()), file)
        weights, states = torch.load(file, weights_only=True)
        continued.load_state_dict(weights)
        its_optimizer.load_state_dict(states)
    call = trainer(combination, continued, its_optimizer)
    for one in given[cut:]:
        call(one)
    return continued.state_dict()


class Sent:
    """Of each bucket of the first window what this worker adds, and the sum that comes back."""

    def __enter__(self):
        self.buckets, self._send, self._finish = [], Reducer._send, Reducer.finish
        own = []

        def send(reducer, bucket):
            if bucket.indices and not self.buckets:
                own.append((bucket, (bucket.payload * reducer._prescale).double()))
            self._send(reducer, bucket)

        def finish(reducer):
            extras = self._finish(reducer)
            if not self.buckets:
                self.buckets = [(given, bucket.payload.to(torch.float64, copy=True)) for bucket, given in own]
            return extras

        Reducer._send, Reducer.finish = send, finish
        return self

    def __exit__(self, *_):
        Reducer._send, Reducer.finish = self._send, self._finish


def main():
    fleet.init()
    folder, chosen = Path(sys.argv[1]), json.loads(sys.argv[2])
    results = {name: run(one, folder / str(number)) for number, (name, one) in enumerate(chosen.items())}
    torch.save(results, folder / f"{fleet.worker_index()}.pt")


if __name__ == "__main__":
    main()
