"""Check on this machine what FleetX promises of several workers: with NCCL on GPUs, with gloo on the host.

    torchrun --nproc_per_node 2 scripts/check_communication.py

`fleetrun` starts it too. It prints one line for each promise: ok, FAILED with figures, or skipped with the reason. The
exit code is 1 if any failed.
"""

import argparse
import copy
import logging
import os
import random
import statistics
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from fleetx import fleet
from fleetx.own_gpu import own_gpu

COLUMNS = 79
HANGS_AFTER = 300.0
"""Seconds without a line: long, as a first message of NCCL takes some, and a busy machine takes more."""
WINDOWS, K_STEPS = 3, 2


class Verdict(NamedTuple):
    """What came out; `held` is None where nothing could be judged."""

    held: bool | None
    text: str


class Job(NamedTuple):
    """Who this worker is, and where it computes."""

    rank: int
    workers: int
    device: torch.device
    backend: str

    def most(self, number: float) -> float:
        """The largest of all workers' numbers; NaN counts as infinite."""
        shared = torch.tensor(number, dtype=torch.float64).nan_to_num(torch.inf).to(self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return shared.item()

    def held(self, everywhere: bool, text: str) -> Verdict:
        """A verdict that holds if it does on all workers."""
        return Verdict(self.most(float(not everywhere)) == 0, text)


# The same weights --------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "default settings": {},
    "fuse_all_reduce_ops = False": {"fuse_all_reduce_ops": False},
    "nccl_comm_num = 3": {"nccl_comm_num": 3, "fuse_all_reduce_ops": False},
    "use_hierarchical_allreduce": {"use_hierarchical_allreduce": True},
    "hierarchy in twos, 3 groups": {
        "use_hierarchical_allreduce": True,
        "hierarchical_allreduce_inter_nranks": 2,
        "nccl_comm_num": 3,
        "fuse_all_reduce_ops": False,
    },
    "recompute": {"recompute": True, "recompute_configs": {"checkpoints": ["0", "2"]}},
}


def make_net(device: torch.device) -> nn.Module:
    """A small network in fp64, with a parameter that no loss uses; the same on all workers."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)]
    net = nn.Sequential(*layers)
    net.register_parameter("unused", nn.Parameter(torch.ones(4)))
    return net.double().to(device)


def batches(job: Job) -> list[list[list[tuple[Tensor, Tensor]]]]:
    """Of each window the micro-batches of each worker, whose sizes differ."""
    generator = torch.Generator().manual_seed(1)
    sizes = [[3 + (rank + k) % 3 for k in range(K_STEPS)] for rank in range(job.workers)]
    return [[[_micro(generator, size) for size in worker] for worker in sizes] for _ in range(WINDOWS)]


def _micro(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 6, generator=generator).double(), torch.randint(0, 3, (size,), generator=generator)


def prepare(net: nn.Module, k_steps: int = K_STEPS, lr: float = 0.1, **settings: Any) -> tuple[nn.Module, Any]:
    """The model and its optimizer, by a strategy with these settings."""
    strategy = fleet.DistributedStrategy(
        gradient_merge=True, gradient_merge_configs={"k_steps": k_steps}, last_comm_group_size_MB=0.001, **settings
    )
    model = fleet.distributed_model(net, strategy)
    return model, fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=lr), strategy)


def check_weights(job: Job) -> Iterator[Verdict]:
    """Against one process that has all micro-batches, in fp64."""
    expected = _train_alone(job)
    for name, settings in SETTINGS.items():
        model, optimizer = prepare(make_net(job.device), **settings)
        for window in batches(job):
            for inputs, labels in window[job.rank]:
                loss = functional.cross_entropy(model(inputs.to(job.device)), labels.to(job.device))
                optimizer.minimize(loss, items=len(labels))
        ours = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        first = ours.clone()
        dist.broadcast(first, src=0)
        wrong, apart = job.most((ours - expected).abs().max().item()), job.most(float(not torch.equal(ours, first)))
        text = f"weights, {name}: {wrong:.0e} from one process in fp64"
        yield job.held(wrong < 1e-12 and not apart, text + ("; the workers differ" if apart else ""))


def _train_alone(job: Job) -> Tensor:
    net = make_net(job.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for window in batches(job):
        inputs, labels = (
            torch.cat(parts).to(job.device) for parts in zip(*(m for w in window for m in w), strict=True)
        )
        net.zero_grad()
        functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


# How gradients travel ----------------------------------------------------------------------------------------


class Counting:
    """Counts the all-reduces that are started."""

    def __enter__(self) -> "Counting":
        self.count, self._before = 0, dist.all_reduce
        dist.all_reduce = self._counted
        return self

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._before(*args, **kwargs)

    def __exit__(self, *_error: object) -> None:
        dist.all_reduce = self._before


def check_fusing(job: Job) -> Iterator[Verdict]:
    """As many messages in a window as the overview says, and none before its last micro-batch."""
    for name, settings in (("fused", {}), ("not fused", {"fuse_all_reduce_ops": False})):
        model, optimizer = prepare(make_net(job.device), **settings)
        first, second, _ = batches(job)
        _messages(job, model, optimizer, first)  # in which the workers also compare what they reduce
        before, last = _messages(job, model, optimizer, second)
        said = optimizer.overview().splitlines()[-1].partition(" per update")[0].split()
        stated = said[-1 if name == "fused" else 0]
        yield job.held(before == 0 and stated == str(last), f"messages, {name}: {last} in an update, {stated} stated")


def _messages(job: Job, model: nn.Module, optimizer: Any, window: list[list[tuple[Tensor, Tensor]]]) -> list[int]:
    counts = []
    for inputs, labels in window[job.rank]:
        with Counting() as counting:
            loss = functional.cross_entropy(model(inputs.to(job.device)), labels.to(job.device))
            optimizer.minimize(loss)
        counts.append(counting.count)
    return counts


def check_orders(job: Job) -> Iterator[Verdict]:
    """Gradients that arrive in another order on each worker, late, or not at all."""
    for name in ("nccl_comm_num = 3", "hierarchy in twos, 3 groups"):
        wrong, chance = 0.0, random.Random(job.rank)
        net = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in (3, 500, 1, 70, 9000, 40, 2)])
        parameters = list(net.double().to(job.device).parameters())
        _, optimizer = prepare(net, k_steps=1, lr=1.0, **SETTINGS[name])
        for trial in range(20):
            common = random.Random(trial)
            used = [common.choices((0, 1, 2), k=len(parameters)) for _ in range(job.workers)]
            before = [parameter.detach().clone() for parameter in parameters]
            optimizer.minimize(_in_random_order(parameters, used[job.rank], chance))
            for index, parameter in enumerate(parameters):
                mean = sum(row[index] for row in used) / job.workers
                wrong = max(wrong, (before[index] - parameter - mean).abs().max().item())
        wrong = job.most(wrong)
        yield job.held(wrong < 1e-12, f"order, {name}: 20 random orders, no deadlock, {wrong:.0e} wrong")


def _in_random_order(parameters: list[nn.Parameter], factors: list[int], chance: random.Random) -> Tensor:
    terms = [(p * factor).sum() for p, factor in zip(parameters, factors, strict=True) if factor]
    terms = terms or [parameters[0].sum() * 0]
    chance.shuffle(terms)
    for term in terms:
        if chance.random() < 0.3:
            pause = chance.random() / 100
            term.register_hook(lambda _grad, pause=pause: time.sleep(pause))
    return sum(terms[1:], start=terms[0])


def check_hierarchy(job: Job) -> Iterator[Verdict]:
    """Which groups were made, or why none were: NCCL chooses by itself."""
    model, optimizer = prepare(make_net(job.device), k_steps=1, **SETTINGS["hierarchy in twos, 3 groups"])
    inputs, labels = batches(job)[0][job.rank][0]
    optimizer.minimize(functional.cross_entropy(model(inputs.to(job.device)), labels.to(job.device)))
    said = optimizer.overview().splitlines()[-1]
    within, flat = said.rpartition("within ")[2], said.rpartition("not in a hierarchy: ")[2]
    is_made = within != said
    if job.backend == "nccl" or job.workers == 2:
        yield job.held(not is_made and flat != said, f"hierarchy: changes nothing here, as {flat}")
    else:
        yield job.held(is_made, f"hierarchy: within {within}")


def check_compression(job: Job) -> Iterator[Verdict]:
    """Means of gradients of all sizes, by the bound of the guide; 1 would be all that it allows."""
    for name, unit, smallest in (("fp16", 2.0**-11, 2.0**-25), ("bf16", 2.0**-8, 0.0)):
        given = torch.stack([_of_all_sizes(rank) for rank in range(job.workers)]).double()
        net = nn.ParameterList([nn.Parameter(torch.zeros(given.shape[1]))]).to(job.device)
        (parameter,) = net.parameters()
        _, optimizer = prepare(net, k_steps=1, lr=1.0, **{f"{name}_allreduce": True})
        optimizer.minimize((parameter * _of_all_sizes(job.rank).to(job.device)).sum())
        error = (-parameter.detach().cpu().double() - given.mean(0)).abs()
        relative = job.workers * unit / (1 - job.workers * unit) + 1e-6
        part = job.most((error / (relative * given.abs().mean(0) + job.workers * smallest)).max().item())
        yield job.held(part <= 1, f"compression, {name}_allreduce: {part:.2f} of the stated bound")


def _of_all_sizes(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    sizes = 10.0 ** torch.empty(10000).uniform_(-9, 4, generator=generator)
    return sizes * (torch.randint(0, 2, (10000,), generator=generator) * 2 - 1)


# BatchNorm over all workers ----------------------------------------------------------------------------------


class Normed(nn.Module):
    """Two norms over all workers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.first = nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.head, self.second = nn.Linear(16, 5, bias=False), nn.BatchNorm1d(5)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the images."""
        return self.second(self.head(torch.tanh(self.first(self.conv(images))).flatten(1)))


def check_norms(job: Job) -> Iterator[Verdict]:
    """Forward, gradients and running statistics, of parts that are not equally large."""
    torch.manual_seed(0)
    alone = Normed().double().to(job.device)
    sizes = [2 + rank % 3 for rank in range(job.workers)]
    images = torch.randn(sum(sizes), 2, 4, 4).double().to(job.device)
    targets = torch.randn(sum(sizes), 5).double().to(job.device)
    net, optimizer = prepare(copy.deepcopy(alone), k_steps=1, lr=1.0, sync_batch_norm=True)
    scores = net(images.split(sizes)[job.rank])
    loss = functional.mse_loss(scores, targets.split(sizes)[job.rank])
    optimizer.minimize(loss, items=sizes[job.rank])
    reference = torch.optim.SGD(alone.parameters(), lr=1.0)
    expected = alone(images)
    functional.mse_loss(expected, targets).backward()
    reference.step()
    theirs = alone.state_dict()
    wrong = {
        "output": (scores - expected.split(sizes)[job.rank]).abs().max().item(),
        "gradients": max((p - theirs[name]).abs().max().item() for name, p in net.named_parameters()),
        "running statistics": max((b - theirs[name]).abs().max().item() for name, b in net.named_buffers()),
    }
    for name, error in wrong.items():
        worst = job.most(error)
        yield job.held(worst < 1e-12, f"sync_batch_norm, {name}: {worst:.0e} from one process, uneven parts")


# Time --------------------------------------------------------------------------------------------------------


def _wide_net(job: Job) -> nn.Module:
    torch.manual_seed(0)
    width = 2048 if job.device.type == "cuda" else 192
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8)]
    return nn.Sequential(*layers).to(job.device)


def check_times(job: Job) -> Iterator[Verdict]:
    """What an outcome says of its communication, and whether workers learn each other's times."""
    net, optimizer = prepare(_wide_net(job), k_steps=1, fuse_all_reduce_ops=False)
    inputs = torch.randn(64, next(net.parameters()).shape[1], device=job.device)
    found = [optimizer.minimize(net(inputs).square().mean()).comm_hidden for _ in range(8)]
    known = [share for share in found if share is not None]
    right = len(known) == len(found) and 0 < max(known, default=0.0) <= 1
    middle = statistics.median(known or [0.0])
    yield job.held(right, f"overlap: {middle:.0%} of the communication was hidden, median of {len(known)} updates")
    seconds = optimizer.engine.window.reducer.of_workers[0].tolist()
    text = f"own times of all workers: {min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f} ms"
    yield job.held(all(0 < one < HANGS_AFTER for one in seconds), text)


def check_speed(job: Job) -> Iterator[Verdict]:
    """Against DistributedDataParallel, in turns."""
    plain = DistributedDataParallel(_wide_net(job), device_ids=[job.device] if job.device.type == "cuda" else None)
    by_torch = torch.optim.SGD(plain.parameters(), lr=0.01)
    net, optimizer = prepare(_wide_net(job), k_steps=1, lr=0.01)
    inputs = torch.randn(64, next(net.parameters()).shape[1], device=job.device)

    def theirs() -> float:
        loss = plain(inputs).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1e9)  # ours reports the norm too
        by_torch.step()
        by_torch.zero_grad()
        return loss.item()

    def ours() -> float:
        return optimizer.minimize(net(inputs).square().mean()).loss.item()

    seconds = _in_turns({"ours": ours, "theirs": theirs}, rounds=15 if job.device.type == "cuda" else 5)
    # The slowest worker's: the others wait for it.
    ratio = job.most(statistics.median(seconds["theirs"])) / job.most(statistics.median(seconds["ours"]))
    text = f"speed: {ratio:.2f} times that of DistributedDataParallel"
    if job.device.type == "cuda":
        yield Verdict(ratio >= 0.99, text)
    else:
        yield Verdict(None, f"{text}; it is judged on GPUs only")


def _in_turns(rivals: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(rounds + 2):
        for name, run in rivals.items():
            began = time.perf_counter()
            for _ in range(3):
                run()
            seconds[name].append(time.perf_counter() - began)
    return {name: times[2:] for name, times in seconds.items()}  # the first ones warm up


def check_own_gpus(job: Job) -> Iterator[Verdict]:
    """More workers of a machine than it has GPUs."""
    count = torch.cuda.device_count()
    if job.device.type != "cuda":
        yield Verdict(None, "more workers than GPUs: the workers train on the host")
        return
    try:
        own_gpu({"LOCAL_RANK": str(count)}, count)
    except RuntimeError as error:
        yield job.held("needs a GPU of its own" in str(error), f"more workers than GPUs: refused beyond {count}")
    else:
        yield job.held(False, f"more workers than GPUs: worker {count} was given one of {count}")


CHECKS = (
    check_own_gpus,
    check_weights,
    check_fusing,
    check_orders,
    check_hierarchy,
    check_compression,
    check_norms,
    check_times,
    check_speed,
)


# Running -----------------------------------------------------------------------------------------------------


def main() -> int:
    """Run all checks, print a line for each; 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    given = parser.parse_args()
    logging.getLogger("fleetx").setLevel(logging.ERROR)
    job = _join(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    say(job, f"{job.workers} workers, {job.backend} on {_device_name(job)}, torch {torch.__version__}")
    found: list[Verdict] = []
    for check in CHECKS:
        with _watched(job, check.__name__):
            for verdict in check(job):
                found.append(verdict)
                say(job, _word(verdict).ljust(9) + verdict.text)
    counts = [sum(_word(verdict) == word for verdict in found) for word in ("ok", "FAILED", "skipped")]
    say(job, "{} ok, {} failed, {} skipped".format(*counts))
    return 1 if counts[1] else 0


def _join(device: str) -> Job:
    fleet.init()
    if not dist.is_initialized() or fleet.worker_num() < 2:
        raise SystemExit(
            "this checks several workers, and there is one: start it with torchrun --nproc_per_node 2, or fleetrun."
        )
    if device == "cpu":
        torch.set_num_threads(1)
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    backends = dict(entry.split(":") for entry in dist.get_backend_config().split(","))
    return Job(fleet.worker_index(), fleet.worker_num(), place, backends[device])


def _device_name(job: Job) -> str:
    return torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "the host"


def _word(verdict: Verdict) -> str:
    return {True: "ok", False: "FAILED", None: "skipped"}[verdict.held]


def say(job: Job, text: str) -> None:
    """One line, broken where it is too long, by the first worker."""
    if job.rank == 0:
        print(textwrap.fill(text, COLUMNS, subsequent_indent=" " * 9), flush=True)


@contextmanager
def _watched(job: Job, name: str) -> Iterator[None]:
    """A worker that fails or waits for ever ends the job: the others would wait for it."""
    timer = threading.Timer(HANGS_AFTER, lambda: _give_up(job, f"{name}: no end after {HANGS_AFTER:.0f} s"))
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        _give_up(job, f"{name}: {type(error).__name__}: {error}")
    finally:
        timer.cancel()


def _give_up(job: Job, why: str) -> None:
    text = textwrap.fill(f"FAILED   worker {job.rank}: {why}", COLUMNS, subsequent_indent=" " * 9)
    print(text, flush=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
