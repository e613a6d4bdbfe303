"""One rank of a sharded run beside the whole one: `sharded_worker.py`, started by `test_sharded`."""

import copy
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from fleetx import names
from fleetx.optim import Lamb, Lars
from tests.leaving import leave_at_once

CASES = {
    "lars": (lambda p: Lars(p, lr=0.3, lars_coeff=0.05, exclude_from_weight_decay=["bias", "norm"]), 1),
    "lars, everybody": (lambda p: Lars(p, lr=0.3, lars_coeff=0.05, form="paper", excluded_lr=0.1), 1),
    "lars, clipped": (lambda p: Lars(p, lr=0.3, lars_coeff=0.05, max_grad_norm=0.01, skip_nonfinite=True), 1),
    "lars, timm": (lambda p: Lars(p, lr=0.3, lars_coeff=0.05, form="timm", exclude_from_weight_decay=["bias"]), 1),
    "lamb": (lambda p: Lamb(p, lr=0.02, exclude_from_weight_decay=["bias", "norm"]), 1),
    "lamb, everybody": (lambda p: Lamb(p, lr=0.02, form="paper"), 1),
    "lamb, clipped": (lambda p: Lamb(p, lr=0.02, form="nvlamb", max_grad_norm=0.01, skip_nonfinite=True), 2),
    "lamb, checked": (lambda p: Lamb(p, lr=0.02, skip_nonfinite=True), 2),
}


def network(dtype):
    torch.manual_seed(0)
    # Seven rows and a bias of three are not cut evenly, and some ranks have nothing of the last layer's bias.
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 1)).to(dtype)


def shard(net, mesh):
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def train(net, optimizer, steps, dtype):
    """Every rank sees the whole batch, so that the mean over ranks is the gradient of one."""
    counts = set()
    for step in steps:
        x = torch.cos(torch.arange(30.0) + step).reshape(6, 5).to(dtype)
        optimizer.zero_grad()
        net(x).square().mean().backward()
        with CommDebugMode() as comm:
            optimizer.step()
        counts.add(comm.get_total_counts())
    return counts


def whole(parameter):
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()


def distance(one, other):
    return max(
        (whole(a) - whole(b)).double().norm().item() / whole(a).double().norm().item()
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


def run(make, mesh, dtype=torch.float64):
    plain, parts = network(dtype), shard(network(dtype), mesh)
    optimizers = []
    for net in (plain, parts):
        names.record(net)
        optimizers.append(make(net.parameters()))
    counts = [train(net, optimizer, range(3), dtype) for net, optimizer in zip((plain, parts), optimizers, strict=True)]
    return plain, parts, optimizers, counts


def main():
    dist.init_process_group("gloo")
    flat = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    for name, (make, expected) in CASES.items():
        plain, parts, _, counts = run(make, flat)
        found[name] = {"distance": distance(plain, parts), "alone": max(counts[0]), "sharded": sorted(counts[1])}
        assert counts[1] == {expected}, (name, counts)
        assert found[name]["distance"] < 1e-12, (name, found[name])

    if dist.get_world_size() == 4:  # two copies of two parts: only the parts are summed
        plain, parts, _, counts = run(
            CASES["lars"][0], init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "part"))
        )
        assert counts[1] == {1}
        assert distance(plain, parts) < 1e-12

    beside_whole_parameters(flat)
    for name in ("lars", "lamb"):  # masters
        _, _, optimizers, _ = run(CASES[name][0], flat, torch.bfloat16)
        masters = [[s["master"] for s in o.state.values()] for o in optimizers]
        assert all(m.dtype == torch.float32 for own in masters for m in own)
        assert max((whole(a) - whole(b)).abs().max().item() for a, b in zip(*masters, strict=True)) < 0.05

    resume(CASES["lamb"][0], flat)
    overflow(flat)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    leave_at_once()


def beside_whole_parameters(mesh):
    """Some parameters are cut, and others are whole on each rank."""
    for name in ("lars, clipped", "lamb, clipped"):
        make, expected = CASES[name]
        plain, mixed = network(torch.float64), network(torch.float64)
        fully_shard(mixed[0], mesh=mesh)
        for net, allowed in ((plain, 0), (mixed, expected)):
            names.record(net)
            assert train(net, make(net.parameters()), range(3), torch.float64) == {allowed}
        assert distance(plain, mixed) < 1e-12, name


def resume(make, mesh):
    """A state of the whole run continues in parts, and a state of parts too."""
    plain, parts, (whole_optimizer, part_optimizer), _ = run(make, mesh)
    for saved in (whole_optimizer.state_dict(), part_optimizer.state_dict()):
        again = shard(network(torch.float64), mesh)
        names.record(again)
        with torch.no_grad():
            for target, source in zip(again.parameters(), parts.parameters(), strict=True):
                target.copy_(source)
        optimizer = make(again.parameters())
        optimizer.load_state_dict(saved)
        reference, twin = copy.deepcopy((plain, whole_optimizer))
        names.record(reference)
        train(again, optimizer, range(5, 7), torch.float64)
        train(reference, twin, range(5, 7), torch.float64)
        assert distance(reference, again) < 1e-12


def overflow(mesh):
    """An inf that one rank alone holds leaves the step out on all of them, and their state as it was."""
    for kind in (Lars, Lamb):
        parts = shard(network(torch.float64), mesh)
        optimizer = kind(parts.parameters(), lr=0.1, skip_nonfinite=True)
        train(parts, optimizer, range(1), torch.float64)
        before = [whole(tensor).clone() for tensor in everything(parts, optimizer)]
        gradient = next(parts.parameters()).grad.to_local()
        if dist.get_rank() == 1:
            gradient.view(-1)[0] = float("inf")
        optimizer.step()
        assert all(torch.equal(a, whole(b)) for a, b in zip(before, everything(parts, optimizer), strict=True))


def everything(net, optimizer):
    return [*net.parameters(), *(value for state in optimizer.state.values() for value in state.values())]


if __name__ == "__main__":
    main()
