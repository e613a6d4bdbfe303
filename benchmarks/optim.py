"""What one step of LARS and LAMB costs, beside torch's fused SGD and AdamW, on the parameters of real models.

Each rival has parameters, gradients and state of its own. A figure is the mean over several steps in a row, waited for
at the end, so that hosts may run ahead of the device as in training.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import nn
from torch.optim import Optimizer

from benchmarks.timing import interleaved
from fleetx import names
from fleetx.applications import Bert_large, Resnet50
from fleetx.optim import Lamb, Lars
from fleetx.optim.plan import Tuning

Run = Callable[[], object]


def _what(models: str) -> str:
    return (
        f"One optimizer step in fp32 on the parameters of {models}, biases and norms excluded from decay and adaptation"
    )


WHAT = _what("BERT-large and of ResNet-50")
TINY_WHAT = _what("a tiny BERT and a tiny ResNet")
FUSED, FOREACH = "FleetX {}, fused", "FleetX {}, foreach"
# Reads and writes of a whole set of parameters: the least that a step can do.
PASSES = {"LARS": 7, "LAMB": 10}
PEERS = {"LARS": "torch SGD momentum, fused", "LAMB": "torch AdamW, fused"}
TUNINGS = [
    Tuning(block, rounds, warps)
    for block, rounds, warps in [
        (1024, 1, 4),
        (1024, 2, 4),
        (1024, 4, 4),
        (2048, 1, 4),
        (2048, 1, 8),
        (2048, 2, 8),
        (2048, 4, 8),
        (4096, 1, 8),
        (4096, 2, 8),
        (4096, 1, 16),
        (8192, 1, 16),
    ]
]


@dataclass(frozen=True)
class Case:
    """The parameters of one model, and how many times the peer's time ours may take."""

    name: str
    make: Callable[[], nn.Module]
    limit: float


CASES = [Case("BERT-large", Bert_large, limit=1.6), Case("ResNet-50", Resnet50, limit=2.0)]
TINY_CASES = [
    Case(
        "BERT, tiny",
        lambda: Bert_large(layers=2, width=64, heads=2, intermediate=128, vocab_size=500),
        limit=1.6,
    ),
    Case("ResNet, tiny", lambda: Resnet50(classes=10, depths=(1, 1, 1, 1), width=4), limit=2.0),
]


def measure(case: Case, device: str, *, rounds: int = 9, steps: int = 10) -> dict[str, Any]:
    """Seconds per step of all rivals, in turns, once for LARS and once for LAMB."""
    return {family: _measure(case, family, device, rounds, steps) for family in PASSES}


def sweep(case: Case, device: str, *, rounds: int = 5, steps: int = 10) -> dict[str, Any]:
    """Milliseconds per step of our kernels, for several ways to cut their work."""
    found: dict[str, Any] = {}
    for family in PASSES:
        rivals: dict[str, Run] = {PEERS[family]: _steps(_peer(family, parameters(case, device)), device, steps)}
        for tuning in TUNINGS:
            optimizer = _ours(family, parameters(case, device), fused=True)
            optimizer._fused_step.tuning = tuning
            rivals[f"block {tuning.block}, rounds {tuning.rounds}, warps {tuning.warps}"] = _steps(
                optimizer, device, steps
            )
        seconds = interleaved(rivals, rounds=rounds, calls=1, warmup=2)
        found[family] = {name: 1e3 * statistics.median(values) / steps for name, values in seconds.items()}
        del rivals
        free()
    return found


def parameters(case: Case, device: str) -> list[nn.Parameter]:
    """Parameters of the model's shapes, names and memory formats, with gradients."""
    with torch.device("meta"):
        model = case.make()
    model.to(memory_format=torch.channels_last)  # pyrefly: ignore[no-matching-overload]
    generator = torch.Generator(device=device).manual_seed(0)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                real = nn.Parameter(torch.empty_like(parameter, device=device).normal_(generator=generator).mul_(0.02))
                _replace(model, parameter, real)
                assert module._parameters[name] is real
    names.record(model)
    found = list(model.parameters())
    for parameter in found:
        parameter.grad = torch.empty_like(parameter).normal_(generator=generator).mul_(1e-3)
    return found


def free() -> None:
    """Give back what the last case held."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def draw(cases: dict[str, Any], folder: Path, name: str = "optim") -> Path:
    """`name.png`: a bar for each rival, one row of panels for each model."""
    figure = Figure(figsize=(11, 2.6 * len(cases)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(cases), len(PASSES), squeeze=False)
    for row, (case, families) in zip(panels, cases.items(), strict=True):
        for axes, (family, result) in zip(row, families.items(), strict=True):
            bars = result["median_ms"]
            colours = ["#0b6e99" if name.startswith("FleetX") else "#d9822b" for name in bars]
            drawn = axes.barh(list(bars), list(bars.values()), color=colours)
            axes.bar_label(drawn, fmt="%.2f", padding=3)
            axes.invert_yaxis()
            axes.margins(x=0.15)
            axes.set(title=f"{family}, {case}", xlabel="ms per step")
            axes.spines[["top", "right"]].set_visible(False)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=130)
    return path


def _measure(case: Case, family: str, device: str, rounds: int, steps: int) -> dict[str, Any]:
    makers = _rivals(family, device)
    optimizers = {name: make(parameters(case, device)) for name, make in makers.items()}
    shapes = [p.numel() for group in optimizers[PEERS[family]].param_groups for p in group["params"]]
    rivals = {name: _steps(optimizer, device, steps) for name, optimizer in optimizers.items()}
    seconds = interleaved(rivals, rounds=rounds, calls=1)
    medians = {name: statistics.median(values) / steps for name, values in seconds.items()}
    hosts = {name: _host_seconds(optimizer, device) for name, optimizer in optimizers.items()}
    ours = next(name for name in (FUSED.format(family), FOREACH.format(family)) if name in medians)
    result = {
        "tensors": len(shapes),
        "parameters": sum(shapes),
        "median_ms": {name: 1e3 * median for name, median in medians.items()},
        "host_ms": {name: 1e3 * value for name, value in hosts.items()},
        "times_the_peer": {name: median / medians[PEERS[family]] for name, median in medians.items()},
        "limit": case.limit,
        "within_limit": medians[ours] / medians[PEERS[family]] <= case.limit,
        "ours_gb_per_s": PASSES[family] * 4 * sum(shapes) / medians[ours] / 1e9,
        "seconds": {name: [value / steps for value in values] for name, values in seconds.items()},
    }
    del optimizers, rivals
    free()
    return result


def _rivals(family: str, device: str) -> dict[str, Callable[[list[nn.Parameter]], Optimizer]]:
    rivals: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {PEERS[family]: lambda p: _peer(family, p)}
    if device == "cuda":
        rivals[FUSED.format(family)] = lambda p: _ours(family, p, fused=True)
    rivals[FOREACH.format(family)] = lambda p: _ours(family, p, fused=False)
    if importlib.util.find_spec("timm"):
        rivals[f"timm {family.title()}"] = lambda p: _timm(family, p)
    return rivals


def _peer(family: str, params: list[nn.Parameter]) -> Optimizer:
    if family == "LARS":
        return torch.optim.SGD(params, lr=1e-6, momentum=0.9, weight_decay=5e-4, fused=True)
    return torch.optim.AdamW(params, lr=1e-6, weight_decay=0.01, fused=True)


def _ours(family: str, params: list[nn.Parameter], *, fused: bool) -> Any:
    excluded = ["norm", "bias"]
    if family == "LARS":
        return Lars(params, lr=1e-6, exclude_from_weight_decay=excluded, fused=fused)
    return Lamb(params, lr=1e-6, exclude_from_weight_decay=excluded, fused=fused)


def _timm(family: str, params: list[nn.Parameter]) -> Optimizer:
    from timm.optim import Lamb as TimmLamb  # pyrefly: ignore[missing-import]
    from timm.optim import Lars as TimmLars  # pyrefly: ignore[missing-import]

    if family == "LARS":
        return TimmLars(params, lr=1e-6, momentum=0.9, weight_decay=5e-4)
    return TimmLamb(params, lr=1e-6, weight_decay=0.01, max_grad_norm=None)


def _steps(optimizer: Optimizer, device: str, steps: int) -> Run:
    def run() -> None:
        for _ in range(steps):
            optimizer.step()
        _wait(device)

    return run


def _host_seconds(optimizer: Optimizer, device: str, calls: int = 20) -> float:
    """How long a step keeps the host, the device being idle before."""

    found = []
    for _ in range(calls):
        _wait(device)
        began = time.perf_counter()
        optimizer.step()
        found.append(time.perf_counter() - began)
    _wait(device)
    return statistics.median(found)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _replace(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """In every module that shares it: BERT's decoder has the weight of its word embeddings."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new


def rows(cases: dict[str, Any]) -> Sequence[tuple[str, ...]]:
    """The table: case and rival, milliseconds, times the peer."""
    return [
        (f"{case}: {name}", f"{ms:.3f}", f"{result['times_the_peer'][name]:.2f}×", f"{result['host_ms'][name]:.3f}")
        for case, families in cases.items()
        for result in families.values()
        for name, ms in result["median_ms"].items()
    ]
