"""What the step itself costs: `Step` and `minimize` against a hand-written loop that does the same."""

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.timing import interleaved, ratio
from fleetx import fleet
from fleetx.batch_step import Step

K_STEPS, BATCH, LAYERS = 4, 64, 24
# The wide network makes a step of about 20 ms; the narrow one has as many layers and parameters' tensors but hardly any
# arithmetic, so that what is left is the host's own work.
WIDTHS = {"wide": 256, "narrow": 8}
DOORS = ("Step", "minimize")


def measure(*, rounds: int = 31, calls: int = 5) -> dict[str, Any]:
    """Seconds per update of the three loops; one thread, so that the figure is the step's and not the scheduler's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {name: _measure_width(width, rounds, calls) for name, width in WIDTHS.items()}
    finally:
        torch.set_num_threads(threads)


def _measure_width(width: int, rounds: int, calls: int) -> dict[str, list[float]]:
    torch.manual_seed(0)
    batch = (torch.randn(BATCH, width), torch.randint(0, width, (BATCH,)))
    rivals = {
        "hand-written": _by_hand(batch, width),
        "Step": _by_step(batch, width),
        "minimize": _by_minimize(batch, width),
    }
    return interleaved(rivals, rounds=rounds, calls=calls)


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over processes: where memory happens to lie changes a process's figures by several percent."""

    def median_of(figure: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(figure(run) for run in runs)

    names = ("hand-written", *DOORS)
    return {
        "what": f"{LAYERS} linear layers of width {WIDTHS['wide']}, batch {BATCH}, k_steps {K_STEPS}, "
        "SGD with momentum, one process, one thread; every loop clips and reports the gradient norm. "
        f"Host work: the same at width {WIDTHS['narrow']}. Medians over {len(runs)} processes",
        "median_ms": {name: median_of(lambda run, n=name: 1e3 * statistics.median(run["wide"][n])) for name in names},
        "overhead": {
            name: median_of(lambda run, n=name: 1 / ratio(run["wide"], n, "hand-written") - 1) for name in DOORS
        },
        "host_overhead_ms": {name: median_of(lambda run, n=name: _extra_ms(run["narrow"], n)) for name in DOORS},
        "runs": runs,
    }


def _extra_ms(seconds: dict[str, list[float]], name: str) -> float:
    return 1e3 * (statistics.median(seconds[name]) - statistics.median(seconds["hand-written"]))


def _model(width: int) -> nn.Module:
    torch.manual_seed(1)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers)


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _strategy() -> fleet.DistributedStrategy:
    return fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": K_STEPS})


def _pieces(batch: Any) -> list[tuple[Tensor, Tensor]]:
    return list(zip(batch[0].chunk(K_STEPS), batch[1].chunk(K_STEPS), strict=True))


def _by_hand(batch: Any, width: int) -> Callable[[], object]:
    model = _model(width)
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


def _by_step(batch: Any, width: int) -> Callable[[], object]:
    model = _model(width)
    step = Step(model, _sgd(model), functional.cross_entropy, _strategy(), clip_norm=1.0)
    return lambda: step(batch).loss.item()


def _by_minimize(batch: Any, width: int) -> Callable[[], object]:
    strategy = _strategy()
    model = fleet.distributed_model(_model(width), strategy)
    optimizer = fleet.distributed_optimizer(_sgd(model), strategy, clip_norm=1.0)

    def run() -> float:
        outs = [
            optimizer.minimize(functional.cross_entropy(model(inputs), labels)) for inputs, labels in _pieces(batch)
        ]
        return outs[-1].loss.item()

    return run


def main() -> None:
    """One process's figures, as JSON on the standard output."""
    json.dump(measure(), sys.stdout)


if __name__ == "__main__":
    main()
