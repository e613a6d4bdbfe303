"""What the step itself costs: `Step` and `minimize` against a hand-written loop that does the same."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetx import fleet
from fleetx.batch_step import Step
from fleetx.bench.timing import interleaved, ratio

K_STEPS, BATCH, WIDTH, LAYERS = 4, 64, 256, 24


def measure(*, rounds: int = 61, calls: int = 5) -> dict[str, Any]:
    """Seconds per update of the three loops; one thread, so that the figure is the step's and not the scheduler's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(0)
        batch = (torch.randn(BATCH, WIDTH), torch.randint(0, WIDTH, (BATCH,)))
        rivals = {"hand-written": _by_hand(batch), "Step": _by_step(batch), "minimize": _by_minimize(batch)}
        seconds = interleaved(rivals, rounds=rounds, calls=calls)
    finally:
        torch.set_num_threads(threads)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "what": f"{LAYERS} linear layers of width {WIDTH}, batch {BATCH}, k_steps {K_STEPS}, SGD with momentum, "
        "one process, one thread; every loop clips and reports the gradient norm",
        "seconds": seconds,
        "median_ms": {name: 1e3 * value for name, value in medians.items()},
        "overhead": {name: 1 / ratio(seconds, name, "hand-written") - 1 for name in ("Step", "minimize")},
    }


def _model() -> nn.Module:
    torch.manual_seed(1)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers)


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _strategy() -> fleet.DistributedStrategy:
    return fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": K_STEPS})


def _pieces(batch: Any) -> list[tuple[Tensor, Tensor]]:
    return list(zip(batch[0].chunk(K_STEPS), batch[1].chunk(K_STEPS), strict=True))


def _by_hand(batch: Any) -> Callable[[], object]:
    model = _model()
    optimizer = _sgd(model)

    def run() -> float:
        optimizer.zero_grad()
        total = torch.zeros(())
        for inputs, labels in _pieces(batch):
            loss = functional.cross_entropy(model(inputs), labels) / K_STEPS
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total.item()

    return run


def _by_step(batch: Any) -> Callable[[], object]:
    model = _model()
    step = Step(model, _sgd(model), functional.cross_entropy, _strategy(), clip_norm=1.0)
    return lambda: step(batch).loss.item()


def _by_minimize(batch: Any) -> Callable[[], object]:
    strategy = _strategy()
    model = fleet.distributed_model(_model(), strategy)
    optimizer = fleet.distributed_optimizer(_sgd(model), strategy, clip_norm=1.0)

    def run() -> float:
        outs = [
            optimizer.minimize(functional.cross_entropy(model(inputs), labels)) for inputs, labels in _pieces(batch)
        ]
        return outs[-1].loss.item()

    return run
