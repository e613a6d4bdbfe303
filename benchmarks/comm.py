"""Gradients between hosts: bytes and times of each way to send them, against DistributedDataParallel.

Two hosts of two workers are network namespaces on this machine, their links limited by `tc`. The command `comm` runs
this module inside of `unshare`, where it makes the hosts, and once more in each worker.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.reduce import Classifier
from benchmarks.timing import interleaved, ratio
from fleetx import fleet
from tests.jobs.starting import ROOT
from tests.launch import hosts

HOSTS, WORKERS = 2, 2
BATCH, BUCKET_MB, CALLS = 64, 1, 3
LINKS = (200, 1000)
"""Mbit/s that leave a host."""
HIERARCHY, BF16 = {"use_hierarchical_allreduce": True}, {"bf16_allreduce": True}
DDP = "DistributedDataParallel"


def send_as_bf16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """torch's own, which DistributedDataParallel refuses by its name where there is no NCCL; it works with gloo."""
    return bf16_compress_hook(state, bucket)


class Way(NamedTuple):
    """One way to send gradients: DistributedDataParallel with a hook, or ours with settings, compared to a peer."""

    hook: Any = None
    settings: dict[str, Any] | None = None
    peer: str = ""


WAYS = {
    DDP: Way(),
    "FleetX": Way(settings={}, peer=DDP),
    "FleetX, hierarchical": Way(settings=HIERARCHY, peer=DDP),
    f"{DDP}, fp16 hook": Way(hook=fp16_compress_hook),
    "FleetX, fp16_allreduce": Way(settings={"fp16_allreduce": True}, peer=f"{DDP}, fp16 hook"),
    f"{DDP}, bf16 hook": Way(hook=send_as_bf16),
    "FleetX, bf16_allreduce": Way(settings=BF16, peer=f"{DDP}, bf16 hook"),
    "FleetX, hierarchical, bf16_allreduce": Way(settings=HIERARCHY | BF16, peer=f"{DDP}, bf16 hook"),
}


class Size(NamedTuple):
    """How much is sent, and how often it is measured."""

    layers: int = 64
    width: int = 240
    rounds: int = 7


TINY = Size(layers=3, width=64, rounds=2)


# A worker ----------------------------------------------------------------------------------------------------


def measure(size: Size) -> dict[str, Any]:
    """Seconds per update, bytes that this host sends for one, what was hidden, and how far weights are apart."""
    torch.manual_seed(fleet.worker_index())
    batch = (torch.randn(BATCH, size.width), torch.randint(0, size.width, (BATCH,)))
    made = {name: _made(way, batch, size) for name, way in WAYS.items()}
    seconds = interleaved({name: run for name, (run, _) in made.items()}, rounds=size.rounds, calls=CALLS, warmup=2)
    found = {name: _sent(run) for name, (run, _) in made.items()}
    weights = {name: torch.cat([p.detach().flatten() for p in model.parameters()]) for name, (_, model) in made.items()}
    return {
        "seconds": seconds,
        "bytes": {name: sent for name, (sent, _) in found.items()},
        "hidden": {name: hidden for name, (_, hidden) in found.items() if hidden is not None},
        "apart": {name: (weights[name] - weights[DDP]).abs().max().item() for name in WAYS},
    }


def _made(way: Way, batch: tuple[Tensor, Tensor], size: Size) -> tuple[Callable[[], float | None], nn.Module]:
    torch.manual_seed(1)
    model = Classifier(size.width, size.layers)
    return _by_ddp(model, way, batch) if way.settings is None else _by_fleetx(model, way.settings, batch)


def _by_ddp(model: nn.Module, way: Way, batch: tuple[Tensor, Tensor]) -> tuple[Callable[[], None], nn.Module]:
    wrapped = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    if way.hook is not None:
        wrapped.register_comm_hook(None, way.hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def run() -> None:
        loss = functional.cross_entropy(wrapped(batch[0]), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return run, model


def _by_fleetx(
    model: nn.Module, settings: dict[str, Any], batch: tuple[Tensor, Tensor]
) -> tuple[Callable[[], float | None], nn.Module]:
    strategy = fleet.DistributedStrategy(fuse_grad_size_in_MB=BUCKET_MB, **settings)
    model = fleet.distributed_model(model, strategy)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = fleet.distributed_optimizer(sgd, strategy, clip_norm=1.0)

    def run() -> float | None:
        out = optimizer.minimize(functional.cross_entropy(model(batch[0]), batch[1]))
        out.loss.item()
        return out.comm_hidden

    return run, model


def _sent(run: Callable[[], float | None]) -> tuple[float, float | None]:
    """Bytes that leave this host for one update, and the share of communication that was hidden."""
    dist.barrier()
    before = _counter()
    dist.barrier()
    hidden = [run() for _ in range(CALLS)]
    dist.barrier()
    after = _counter()
    dist.barrier()
    known = [share for share in hidden if share is not None]
    return (after - before) / CALLS, statistics.median(known) if known else None


def _counter() -> int:
    """The bytes that this host has sent so far."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:")]
    return int(line.partition(":")[2].split()[8])


# The hosts ---------------------------------------------------------------------------------------------------


def measure_link(megabits: int | None, size: Size) -> dict[str, Any]:
    """One job on hosts whose links carry so much; None does not limit them."""
    with tempfile.TemporaryDirectory() as name:
        arguments = ["hosts", name, json.dumps(size), json.dumps(megabits)]
        done = hosts.play("benchmarks.comm", *arguments, timeout=3600)
        if done.returncode:
            raise RuntimeError(f"the hosts failed with exit code {done.returncode}:\n{done.stderr[-3000:]}")
        return json.loads(Path(name, "figures.json").read_text(encoding="utf-8"))


def _run_hosts(folder: Path, size: str, megabits: int | None) -> None:
    machines = hosts.Hosts(HOSTS)
    if megabits is not None:
        machines.limit(megabits)
    options = ["--nnodes", HOSTS, "--master", f"{hosts.address(0)}:6170", "--nproc_per_node", WORKERS]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    worker = ["-m", "benchmarks.comm", "worker", folder, size]
    jobs = [machines.start(n, folder, *options, "--rank", n, *worker, PYTHONPATH=path) for n in range(HOSTS)]
    codes = [job.wait() for job in jobs]
    if any(codes):
        sys.exit("\n".join(path.read_text(encoding="utf-8")[-3000:] for path in sorted(folder.glob("host*.txt"))))


# What came out -----------------------------------------------------------------------------------------------


def summarise(runs: dict[str, dict[str, Any]], size: Size) -> dict[str, Any]:
    """Medians over rounds; what is compared was measured in turns by the same processes."""
    parameters = size.layers * (size.width + 1) * size.width
    return {
        "what": f"{HOSTS} hosts (network namespaces of one machine) of {WORKERS} workers of one thread, gloo; "
        f"{size.layers} linear layers of width {size.width} ({parameters / 1e6:.1f} M parameters), batch {BATCH} per "
        f"worker, buckets of {BUCKET_MB} MiB, SGD with momentum, fp32; every loop clips and reports the gradient norm. "
        f"Sent: by each host for an update. Medians over {size.rounds} rounds",
        "cases": {
            link: {
                "median_ms": {name: 1e3 * statistics.median(run["seconds"][name]) for name in WAYS},
                "megabytes_per_host": {name: run["bytes"][name] / 1e6 for name in WAYS},
                "hidden": run["hidden"],
                "speed_against_ddp": {
                    name: ratio(run["seconds"], name, way.peer) for name, way in WAYS.items() if way.peer
                },
            }
            for link, run in runs.items()
        },
        "runs": runs,
    }


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Of each link and way: time, bytes, speed against its peer, and what was hidden."""
    return [
        (
            link,
            name,
            f"{milliseconds:.0f}",
            f"{case['megabytes_per_host'][name]:.1f}",
            f"{case['speed_against_ddp'][name]:.2f}×" if name in case["speed_against_ddp"] else "1",
            f"{case['hidden'][name]:.0%}" if name in case["hidden"] else "",
        )
        for link, case in result["cases"].items()
        for name, milliseconds in case["median_ms"].items()
    ]


HEADS = ("links", "way", "ms per update", "MB sent", "speed", "hidden")


def main() -> None:
    """What the namespace of the hosts runs, and what each worker does."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comm", description=__doc__)
    parser.add_argument("role", choices=("hosts", "worker"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("size")
    parser.add_argument("megabits", nargs="?", default="null")
    given = parser.parse_args()
    if given.role == "hosts":
        _run_hosts(given.folder, given.size, json.loads(given.megabits))
        return
    fleet.init()
    torch.set_num_threads(1)
    figures = measure(Size(*json.loads(given.size)))
    if fleet.is_first_worker():
        (given.folder / "figures.json").write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
