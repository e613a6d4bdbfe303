"""The job of `fleetx train`: a residual network on handwritten digits, with a large batch.

Run by each worker. What it needs of FleetX is in `train_worker`; the rest is an ordinary training script.
"""

import argparse
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import fleetx as X
from fleetx import fleet
from fleetx.applications.resnet_small import SmallResnet
from fleetx.console import TrainingProgress
from fleetx.data import Digits, ShardedBatches, load_digits
from fleetx.optim.schedules import as_scheduler, linear_warmup, polynomial_decay
from fleetx.runs import MetricsLog

EPOCHS = 40
GLOBAL_BATCH = 512
PEAK_LR = 1.0
WARMUP_EPOCHS = 5
SEED = 7


def default_strategy() -> X.DistributedStrategy:
    """Gradient merge, bf16 and LARS, as in the guide."""
    strategy = fleet.DistributedStrategy()
    strategy.amp = True
    strategy.amp_configs = {"dtype": "bfloat16"}
    strategy.gradient_merge = True
    strategy.gradient_merge_configs = {"k_steps": 4, "avg": True}
    strategy.lars = True
    strategy.lars_configs = {"lars_coeff": 0.01, "exclude_from_weight_decay": ["batch_norm", "bias"]}
    return strategy


def train_worker(strategy: X.DistributedStrategy, folder: Path, *, epochs: int, global_batch: int) -> None:
    """Train on this worker's part of the digits; the first worker reports and saves."""
    fleet.init()
    first = fleet.is_first_worker()
    torch.manual_seed(SEED)
    digits = load_digits()
    batches = ShardedBatches(
        len(digits.train_labels),
        global_batch,
        rank=fleet.worker_index(),
        workers=fleet.worker_num(),
        seed=SEED,
    )
    moves = torch.Generator().manual_seed(SEED + fleet.worker_index())
    windows = epochs * len(batches)
    warmup = min(WARMUP_EPOCHS, epochs // 4) * len(batches)

    model = fleet.distributed_model(SmallResnet(), strategy)
    inner = wrapped_optimizer(model, strategy)
    decay = polynomial_decay(inner.param_groups[0]["lr"], windows - warmup, power=2.0)
    scheduler = as_scheduler(inner, linear_warmup(decay, warmup))
    optimizer = fleet.distributed_optimizer(inner, strategy, scheduler=scheduler)
    step = X.Step(model, optimizer, functional.cross_entropy)

    if first:
        strategy.save(folder / "strategy.toml")
        print(optimizer.overview(), flush=True)
    with (
        MetricsLog(folder / "metrics.jsonl", enabled=first) as log,
        TrainingProgress(windows, enabled=first) as bar,
    ):
        for epoch in range(epochs):
            model.train()
            for indices in batches.epoch(epoch):
                out = step((shifted(digits.train_images[indices], moves), digits.train_labels[indices]))
                log.window(epoch, out)
                bar.advance(out)
            if first:
                accuracy = evaluate(model, digits)
                log.accuracy(epoch, accuracy)
                bar.accuracy = accuracy
    if first:
        save_file(model.state_dict(), folder / "weights.safetensors")


def wrapped_optimizer(model: nn.Module, strategy: X.DistributedStrategy) -> torch.optim.Optimizer:
    """What the strategy's LARS or LAMB takes the place of; SGD where it has neither."""
    if strategy.lamb:
        return torch.optim.Adam(model.parameters(), lr=0.02)
    return torch.optim.SGD(model.parameters(), lr=PEAK_LR if strategy.lars else 0.2, momentum=0.9)


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


def train_plain(log: MetricsLog, *, epochs: int, batch: int = 32, lr: float = 0.05) -> float:
    """The same network by plain torch: SGD with momentum, small batch, fp32, one process. Gives its accuracy."""
    torch.manual_seed(SEED)
    digits, model = load_digits(), SmallResnet()
    batches = ShardedBatches(len(digits.train_labels), batch, seed=SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(batches))
    moves = torch.Generator().manual_seed(SEED)
    accuracy, threads = 0.0, FastestThreads()
    for epoch in range(epochs):
        model.train()
        losses = []
        for indices in batches.epoch(epoch):
            with threads.update():
                images = shifted(digits.train_images[indices], moves)
                loss = functional.cross_entropy(model(images), digits.train_labels[indices])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                losses.append(loss.item())
        accuracy = evaluate(model, digits)
        log.accuracy(epoch, accuracy, loss=sum(losses) / len(losses))
    return accuracy


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image moved by up to one pixel in each direction."""
    padded = functional.pad(images, (1, 1, 1, 1))
    windows = padded.unfold(2, 8, 1).unfold(3, 8, 1)  # n, 1, 3 ways down, 3 ways right, 8, 8
    down, right = torch.randint(0, 3, (2, len(images)), generator=generator)
    return windows[torch.arange(len(images)), :, down, right]


@torch.no_grad()
def evaluate(model: nn.Module, digits: Digits) -> float:
    """The share of test digits that the model names correctly."""
    model.eval()
    guesses = model(digits.test_images).argmax(dim=1)
    return (guesses == digits.test_labels).float().mean().item()


def main(arguments: Sequence[str] | None = None) -> None:
    """What each worker runs; `fleetx train` gives the arguments."""
    parser = argparse.ArgumentParser(prog="python -m fleetx.applications.digits", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the run folder")
    parser.add_argument("--strategy", type=Path, help="a strategy saved as TOML")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--global-batch", type=int, default=GLOBAL_BATCH)
    options = parser.parse_args(arguments)
    strategy = X.DistributedStrategy.load(options.strategy) if options.strategy else default_strategy()
    train_worker(strategy, options.out, epochs=options.epochs, global_batch=options.global_batch)


if __name__ == "__main__":
    main()
