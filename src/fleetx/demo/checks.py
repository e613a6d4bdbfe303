"""What FleetX promises, measured on the digits while `fleetx train` runs.

Nothing here is known beforehand: each check computes both sides and compares them. All workers make all checks, in the
same order, since some need them all.
"""

import copy
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from fleetx import Checkpoints, DistributedStrategy, Step, fleet, memory
from fleetx.applications.digits import MICRO_BATCHES, Training
from fleetx.applications.resnet_small import SmallResnet
from fleetx.checkpoint import CheckpointError
from fleetx.comm import world
from fleetx.comm.guard import ParameterGuard, WorkersDifferError
from fleetx.planner.meter import CountingMeter

BATCH = 512
"""Samples that the checks work on, whatever the batch of the run."""
CUTS = ["stages.0", "stages.1", "stages.2"]
TOLERANCE = 1e-12
"""What rounding may make of an update in fp64, compared with the largest change of a weight."""
# What BatchNorm keeps of a micro-batch are numbers per channel, however small the micro-batch is.
_SLACK = 1.01
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Check:
    """What was measured, and whether the promise held; None where nothing is promised."""

    name: str
    held: bool | None
    found: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Given:
    """What the checks work on."""

    batch: Pair
    trained: nn.Module
    strategy: DistributedStrategy
    folder: Path
    seed: int

    @property
    def samples(self) -> int:
        """In the batch."""
        return len(self.batch[1])


# Activations --------------------------------------------------------------------------------------------


def activations(given: Given) -> Check:
    """Count the bytes that wait for the backward: of the whole batch, of micro-batches, and with recompute."""
    torch.manual_seed(given.seed)
    model = SmallResnet()
    whole = kept_for_backward(model, [given.batch])
    merged = kept_for_backward(model, micro_batches(given.batch))
    with memory.apply(model, CUTS):
        recomputed = kept_for_backward(model, [given.batch])
    held = merged * MICRO_BATCHES <= whole * _SLACK and recomputed < whole
    found = (
        f"{mib(whole)} for {given.samples} samples in one forward; {mib(merged)} ({merged / whole:.0%}) in "
        f"{MICRO_BATCHES} micro-batches; {mib(recomputed)} ({recomputed / whole:.0%}) with recompute"
    )
    return Check("activations kept", held, found, {"whole": whole, "merged": merged, "recomputed": recomputed})


def kept_for_backward(model: nn.Module, batches: Sequence[Pair]) -> int:
    """The most bytes that a forward leaves for its backward; the batches come one after the other."""
    most = 0
    for images, labels in batches:
        with CountingMeter() as meter:
            loss = functional.cross_entropy(model(images), labels)
            most = max(most, meter.bytes())
        loss.backward()
    return most


def micro_batches(batch: Pair) -> list[Pair]:
    """The batch in equal parts."""
    images, labels = batch
    return list(zip(images.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES), strict=True))


# Recompute ----------------------------------------------------------------------------------------------


def recompute(given: Given) -> Check:
    """Compare loss, gradients and running statistics with those of the plain run, bit for bit."""
    torch.manual_seed(given.seed)
    plain = SmallResnet()
    recomputing = copy.deepcopy(plain)
    expected = forward_and_backward(plain, given.batch)
    with memory.apply(recomputing, CUTS):
        ours = forward_and_backward(recomputing, given.batch)
    differing = different(ours, expected)
    found = f"loss, gradients, statistics: {equal_bits(len(expected), differing)}"
    return Check("recompute", not differing, found, {"tensors": len(expected), "differing": differing})


def forward_and_backward(model: nn.Module, batch: Pair) -> dict[str, Tensor]:
    """The loss, all gradients, and the model's buffers afterwards."""
    images, labels = batch
    loss = functional.cross_entropy(model(images), labels)
    loss.backward()
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients, **dict(model.named_buffers())}


def different(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """The names of what has other bits, or is there on one side only."""
    both = ours.keys() & expected.keys()
    changed = {name for name in both if not torch.equal(ours[name], expected[name])}
    return sorted(changed | (ours.keys() ^ expected.keys()))


# Merge --------------------------------------------------------------------------------------------------


def merge(given: Given) -> Check:
    """Compare one update of micro-batches on all workers with that of one big batch, in fp64."""
    torch.manual_seed(given.seed)
    images, labels = given.batch
    difference = update_difference(without_batch_norm(SmallResnet()).double(), (images.double(), labels))
    of_workers = f" on {world.size()} workers" if world.size() > 1 else ""
    found = (
        f"{MICRO_BATCHES} micro-batches{of_workers} differ from one batch of {given.samples} by {difference:.0e} (fp64)"
    )
    return Check("merge", difference <= TOLERANCE, found, {"difference": difference, "tolerance": TOLERANCE})


def batch_norm(given: Given) -> Check:
    """The same with BatchNorm, which sees each micro-batch by itself. Nothing is promised, but one should know."""
    torch.manual_seed(given.seed)
    images, labels = given.batch
    difference = update_difference(SmallResnet().double(), (images.double(), labels))
    samples = given.samples // (MICRO_BATCHES * world.size())
    found = f"it sees {samples} samples at a time, not {given.samples}: the update differs by {difference:.0%}"
    return Check("merge with BatchNorm", None, found, {"difference": difference, "samples": samples})


def update_difference(model: nn.Module, batch: Pair) -> float:
    """How far one update by FleetX is from that of plain torch, compared with the largest change of a weight."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    reference, ours = model, copy.deepcopy(model)
    images, labels = batch
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    functional.cross_entropy(reference(images), labels).backward()
    optimizer.step()

    strategy = DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": MICRO_BATCHES})
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    step = Step(ours, optimizer, functional.cross_entropy, strategy)
    own = slice(world.rank(), None, world.size())
    step((images[own], labels[own]))

    theirs = dict(reference.named_parameters())
    change = max((theirs[name] - before[name]).abs().max().item() for name in before)
    return max((p - theirs[name]).abs().max().item() for name, p in ours.named_parameters()) / change


def without_batch_norm(model: nn.Module) -> nn.Module:
    """The same network with a normalisation that sees each sample by itself."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            model.set_submodule(name, nn.GroupNorm(1, module.num_features))
    return model


# Workers and resume -------------------------------------------------------------------------------------


def workers(given: Given) -> Check:
    """Compare the trained weights of all workers, bit for bit."""
    if world.size() == 1:
        return Check("workers", None, "one worker: nothing to compare with")
    guard = ParameterGuard(0)
    parameters: list[Tensor] = list(given.trained.parameters())
    guard.watch(lambda: parameters)
    figures = {"workers": world.size(), "parameters": len(parameters)}
    try:
        guard.compare()
    except WorkersDifferError as error:
        return Check("workers", False, str(error), figures)
    return Check("workers", True, f"{world.size()} workers hold the same weights: equal bits", figures)


UPDATES, SAVED_AFTER = 4, 2


def resume(given: Given) -> Check:
    """Train, save on the way, resume with other objects, and compare with the run that was not interrupted."""
    folder = given.folder / ".resume-check"
    try:
        through = _Resumable(given, folder, given.seed)
        through.train(SAVED_AFTER)
        through.checkpoints.save(step=SAVED_AFTER)
        through.train(UPDATES - SAVED_AFTER)
        again = _Resumable(given, folder, given.seed)
        with torch.no_grad():
            for parameter in again.training.model.parameters():
                parameter.zero_()
        again.checkpoints.resume()
        again.train(UPDATES - SAVED_AFTER)
    except CheckpointError as error:
        return Check("resume", False, str(error))
    finally:
        fleet.barrier_worker()
        if fleet.is_first_worker():
            shutil.rmtree(folder, ignore_errors=True)
    expected = through.state()
    differing = different(again.state(), expected)
    elsewhere = _on_other_workers(len(differing))
    found = f"{UPDATES} updates, saved after {SAVED_AFTER}: {equal_bits(len(expected), differing, elsewhere)}"
    figures = {"tensors": len(expected), "differing": differing, "differing_on_other_workers": elsewhere}
    return Check("resume", not differing and not elsewhere, found, figures)


class _Resumable:
    """A short run like the one that is shown."""

    def __init__(self, given: Given, folder: Path, seed: int) -> None:
        self.training = Training(given.strategy, epochs=UPDATES, global_batch=BATCH, seed=seed)
        self.checkpoints = Checkpoints(
            folder, step=self.training.step, loader=self.training.loader, also={"moves": self.training.moves}
        )
        self._losses: list[Tensor] = []
        self._rest = self.training.rest()

    def train(self, updates: int) -> None:
        self._losses += [out.loss for _, out in islice(self._rest, updates)]

    def state(self) -> dict[str, Tensor]:
        """The last losses, the weights, the statistics and the optimizer's state."""
        kept = self.training.optimizer.state_dict()["state"]
        state = {f"{key} of parameter {n}": v for n, own in kept.items() for key, v in own.items()}
        losses = {f"loss {number}": loss for number, loss in enumerate(self._losses[SAVED_AFTER - UPDATES :])}
        return {
            **losses,
            **self.training.model.state_dict(),
            **{name: value for name, value in state.items() if isinstance(value, Tensor)},
        }


def _on_other_workers(mine: int) -> int:
    if world.size() == 1:
        return 0
    total = torch.tensor(mine)
    dist.all_reduce(total)
    return int(total.item()) - mine


# All of them --------------------------------------------------------------------------------------------

CHECKS: list[tuple[Callable[[Given], Check], int]] = [
    (activations, 3 * BATCH),
    (recompute, 2 * BATCH),
    (merge, 2 * BATCH),
    (batch_norm, 2 * BATCH),
    (workers, 0),
    (resume, (2 * UPDATES - SAVED_AFTER) * BATCH),
]
"""Each with the samples that pass through a network in it."""


def equal_bits(tensors: int, differing: Sequence[str], elsewhere: int = 0) -> str:
    """What a bitwise comparison found, in words."""
    if elsewhere and not differing:
        return f"{elsewhere} tensors differ on other workers"
    if differing:
        return f"{len(differing)} of {tensors} tensors differ, {differing[0]} for one"
    return f"{tensors} tensors, equal bits"


def mib(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / 2**20:.1f} MiB"
