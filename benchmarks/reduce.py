"""Gradient reduction against DistributedDataParallel, on the same job: same numbers, and at what speed.

Run by each worker; `python -m benchmarks reduce` starts two.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.timing import interleaved, ratio
from fleetx import fleet
from fleetx.batch_step import Step

BATCH, WIDTH, LAYERS = 64, 512, 16
WINDOWS = (1, 4)
PEER, VIEWS, DOORS = "DistributedDataParallel", "the same, gradient_as_bucket_view", ("Step", "minimize")


class Classifier(nn.Module):
    """Enough layers and bytes that reduction has something to hide behind: 4.2 million parameters."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores of as many classes."""
        for layer in self.layers:
            inputs = functional.relu(layer(inputs))
        return inputs


def measure(*, rounds: int, calls: int) -> dict[str, Any]:
    """Seconds per update of both, for windows of one and of four micro-batches."""
    torch.manual_seed(fleet.worker_index())
    batch = (torch.randn(BATCH, WIDTH), torch.randint(0, WIDTH, (BATCH,)))
    return {f"k_steps={k_steps}": _measure_window(batch, k_steps, rounds, calls) for k_steps in WINDOWS}


def _measure_window(batch: Any, k_steps: int, rounds: int, calls: int) -> dict[str, list[float]]:
    rivals = {
        PEER: _by_ddp(batch, k_steps),
        VIEWS: _by_ddp(batch, k_steps, gradient_as_bucket_view=True),
        "Step": _by_step(batch, k_steps),
        "minimize": _by_minimize(batch, k_steps),
    }
    return interleaved(rivals, rounds=rounds, calls=calls)


def summarise(runs: list[dict[str, Any]], workers: int) -> dict[str, Any]:
    """Medians over jobs: where memory happens to lie changes a job's figures by several percent."""

    def median_of(figure: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(figure(run) for run in runs)

    return {
        "what": f"{LAYERS} linear layers of width {WIDTH}, batch {BATCH} per worker, SGD with momentum, fp32, gloo, "
        f"{workers} workers of one thread; every loop clips and reports the gradient norm. "
        f"Medians over {len(runs)} jobs",
        "cases": {
            case: {
                "median_ms": {
                    n: median_of(lambda r, c=case, n=n: 1e3 * statistics.median(r[c][n])) for n in (PEER, VIEWS, *DOORS)
                },
                "speed_against_ddp": {
                    n: median_of(lambda r, c=case, n=n: ratio(r[c], n, PEER)) for n in (VIEWS, *DOORS)
                },
            }
            for case in runs[0]
        },
        "runs": runs,
    }


def _model() -> nn.Module:
    torch.manual_seed(1)
    return Classifier()


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _strategy(k_steps: int) -> fleet.DistributedStrategy:
    return fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": k_steps})


def _pieces(batch: Any, k_steps: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(batch[0].chunk(k_steps), batch[1].chunk(k_steps), strict=True))


def _by_ddp(batch: Any, k_steps: int, **options: Any) -> Callable[[], object]:
    model = DistributedDataParallel(_model(), **options)
    optimizer = _sgd(model)

    def run() -> float:
        total = torch.zeros(())
        for index, (inputs, labels) in enumerate(_pieces(batch, k_steps)):
            model.require_backward_grad_sync = index == k_steps - 1  # what no_sync() sets
            loss = functional.cross_entropy(model(inputs), labels) / k_steps
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return run


def _by_step(batch: Any, k_steps: int) -> Callable[[], object]:
    model = _model()
    step = Step(model, _sgd(model), functional.cross_entropy, _strategy(k_steps), clip_norm=1.0)
    return lambda: step(batch).loss.item()


def _by_minimize(batch: Any, k_steps: int) -> Callable[[], object]:
    strategy = _strategy(k_steps)
    model = fleet.distributed_model(_model(), strategy)
    optimizer = fleet.distributed_optimizer(_sgd(model), strategy, clip_norm=1.0)

    def run() -> float:
        outs = [
            optimizer.minimize(functional.cross_entropy(model(inputs), labels))
            for inputs, labels in _pieces(batch, k_steps)
        ]
        return outs[-1].loss.item()

    return run


def main() -> None:
    """What each worker of one job runs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reduce", description=__doc__)
    parser.add_argument("out", type=Path, help="where the first worker writes its figures as JSON")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=5)
    options = parser.parse_args()
    fleet.init()
    torch.set_num_threads(1)
    figures = measure(rounds=options.rounds, calls=options.calls)
    if fleet.is_first_worker():
        options.out.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
