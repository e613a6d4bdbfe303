"""A residual network on handwritten digits: with FleetX and a large batch, and with plain torch.

What a training script needs of FleetX is in `Training`; the rest is ordinary torch code.
"""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler

import fleetx as X
from fleetx import fleet
from fleetx.applications.resnet_small import SmallResnet
from fleetx.data import Digits, Loader, ShardedBatches, load_digits
from fleetx.data.digits import FOLDS
from fleetx.optim.schedules import Schedule, as_scheduler, cosine_decay, linear_warmup, polynomial_decay
from fleetx.outcome import Outcome

EPOCHS = 40
GLOBAL_BATCH = 512
MICRO_BATCHES = 4
WARMUP_EPOCHS = 5
LARS_LR, LAMB_LR, SGD_LR = 1.0, 0.02, 0.2
WEIGHT_DECAY = 5e-4


def default_strategy() -> X.DistributedStrategy:
    """Gradient merge, bf16 and LARS, as in the guide."""
    strategy = fleet.DistributedStrategy()
    strategy.amp = True
    strategy.amp_configs = {"dtype": "bfloat16"}
    strategy.gradient_merge = True
    strategy.gradient_merge_configs = {"k_steps": MICRO_BATCHES, "avg": True}
    strategy.lars = True
    strategy.lars_configs = {"lars_coeff": 0.01, "exclude_from_weight_decay": ["batch_norm", "bias"]}
    return strategy


def digits_of(seed: int) -> Digits:
    """The digits of a run: each of five seeds in a row tests with another fifth."""
    return load_digits(seed % FOLDS)


class Training:
    """The run with FleetX on this worker, one update at a time."""

    def __init__(self, strategy: X.DistributedStrategy, *, epochs: int, global_batch: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.digits = digits_of(seed)
        count = len(self.digits.train_labels)
        batches = ShardedBatches(count, global_batch, seed=seed)
        self.updates_in_all = epochs * len(batches)
        self.updates = 0
        self.loader = Loader(range(count), batches, collate=torch.tensor)
        self.moves = torch.Generator().manual_seed(seed + fleet.worker_index())
        self.model = fleet.distributed_model(SmallResnet(), strategy)
        inner = wrapped_optimizer(self.model, strategy)
        schedule = large_batch_schedule(inner.param_groups[0]["lr"], epochs, len(batches))
        self.optimizer = fleet.distributed_optimizer(inner, strategy, scheduler=as_scheduler(inner, schedule))
        self.step = X.Step(self.model, self.optimizer, functional.cross_entropy)

    def rest(self) -> Generator[tuple[int, Outcome]]:
        """Make the updates that are left, and give the epoch and the outcome of each."""
        images, labels = self.digits.train_images, self.digits.train_labels
        while self.updates < self.updates_in_all:
            epoch = self.loader.epoch
            self.model.train()
            for indices in self.loader:
                out = self.step((shifted(images[indices], self.moves), labels[indices]))
                self.updates += 1
                yield epoch, out


def large_batch_schedule(lr: float, epochs: int, updates_in_epoch: int) -> Schedule:
    """A linear warm-up, then a decay along a parabola."""
    warmup = min(WARMUP_EPOCHS, epochs // 4) * updates_in_epoch
    return linear_warmup(polynomial_decay(lr, epochs * updates_in_epoch - warmup, power=2.0), warmup)


def wrapped_optimizer(model: nn.Module, strategy: X.DistributedStrategy) -> torch.optim.Optimizer:
    """What the strategy's LARS or LAMB takes the place of; SGD where it has neither."""
    if strategy.lamb:
        return torch.optim.Adam(model.parameters(), lr=LAMB_LR)
    if strategy.lars:
        return torch.optim.SGD(model.parameters(), lr=LARS_LR, momentum=0.9)
    return torch.optim.SGD(model.parameters(), lr=SGD_LR, momentum=0.9, weight_decay=WEIGHT_DECAY)


@dataclass(frozen=True)
class PlainRun:
    """A run of plain torch to compare with: SGD with momentum in fp32, one process, no micro-batches."""

    batch: int
    lr: float
    schedule: Callable[[float, int, int], Schedule]

    @property
    def name(self) -> str:
        """How files and tables call it."""
        return f"SGD, batch {self.batch:,}"


def small_batch_run() -> PlainRun:
    """What one would do without a large batch."""
    return PlainRun(32, 0.05, lambda lr, epochs, updates: cosine_decay(lr, epochs * updates))


def large_batch_run(global_batch: int) -> PlainRun:
    """The large batch with the schedule of FleetX's run, and without LARS."""
    return PlainRun(global_batch, SGD_LR, large_batch_schedule)


class PlainTraining:
    """A plain run: the same network, digits and first weights as `Training` with the same seed."""

    def __init__(self, run: PlainRun, *, epochs: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.digits, self.model = digits_of(seed), SmallResnet()
        self._epochs = epochs
        self._batches = ShardedBatches(len(self.digits.train_labels), run.batch, rank=0, workers=1, seed=seed)
        self._moves = torch.Generator().manual_seed(seed)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=run.lr, momentum=0.9, weight_decay=WEIGHT_DECAY)
        self._scheduler = as_scheduler(self._optimizer, run.schedule(run.lr, epochs, len(self._batches)))

    def updates(self) -> Generator[tuple[int, bool, float, int]]:
        """Make all updates, and give of each the epoch, whether it is the epoch's last, the loss and the samples."""
        threads = FastestThreads()
        for epoch in range(self._epochs):
            self.model.train()
            for number, indices in enumerate(self._batches.epoch(epoch), 1):
                with threads.update():
                    loss = self._update(indices, self._scheduler)
                yield epoch, number == len(self._batches), loss, len(indices)

    def _update(self, indices: Tensor, scheduler: LRScheduler) -> float:
        images = shifted(self.digits.train_images[indices], self._moves)
        loss = functional.cross_entropy(self.model(images), self.digits.train_labels[indices])
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        scheduler.step()
        return loss.item()


class FastestThreads:
    """Gives each update one thread of torch or all, whichever was faster when it was last used; both are tried.

    Threads that wait for each other make small batches slow where other programs want the cores too, up to ten times.
    FleetX's workers share the cores out among them; a comparison with them must not be won by that.
    """

    def __init__(self) -> None:
        self._before = torch.get_num_threads()
        self._seconds = dict.fromkeys(sorted({1, self._before}), 0.0)

    @contextmanager
    def update(self) -> Generator[int]:
        """Inside, torch computes on the chosen number of threads."""
        chosen = min(self._seconds, key=lambda threads: self._seconds[threads])
        torch.set_num_threads(chosen)
        began = time.perf_counter()
        try:
            yield chosen
        finally:
            self._seconds[chosen] = time.perf_counter() - began
            torch.set_num_threads(self._before)


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image moved by up to one pixel in each direction."""
    padded = functional.pad(images, (1, 1, 1, 1))
    windows = padded.unfold(2, 8, 1).unfold(3, 8, 1)  # n, 1, 3 ways down, 3 ways right, 8, 8
    down, right = torch.randint(0, 3, (2, len(images)), generator=generator)
    return windows[torch.arange(len(images)), :, down, right]


@torch.no_grad()
def evaluate(model: nn.Module, digits: Digits) -> float:
    """The share of test digits that the model names correctly. Leaves the model in the mode it finds."""
    was_training = model.training
    model.eval()
    guesses = model(digits.test_images).argmax(dim=1)
    model.train(was_training)
    return (guesses == digits.test_labels).float().mean().item()
