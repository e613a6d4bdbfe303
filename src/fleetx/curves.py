"""The picture of a run: its loss and its accuracy, beside those of the plain run."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fleetx.runs import read_metrics

OURS, PLAIN = "#0b6e99", "#d9822b"


def draw_run(folder: Path, *, ours: str, plain: str | None) -> Path:
    """Draw `run.png` from the folder's metrics; `ours` and `plain` are the labels of the two runs."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    loss, accuracy = figure.subplots(1, 2)
    _draw(loss, accuracy, read_metrics(folder / "metrics.jsonl"), ours, OURS, zorder=3)
    if plain is not None:
        _draw(loss, accuracy, read_metrics(folder / "plain.jsonl"), plain, PLAIN, zorder=2)
    loss.set(title="Training loss", xlabel="epoch", yscale="log")
    accuracy.set(title="Test accuracy", xlabel="epoch", ylim=(0.8, 1.002), yticks=[0.8, 0.85, 0.9, 0.95, 1.0])
    accuracy.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    accuracy.legend(loc="lower right", frameon=False)
    for axes in (loss, accuracy):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_xlim(left=0)
    path = folder / "run.png"
    figure.savefig(path, dpi=130)
    return path


def _draw(loss: Any, accuracy: Any, metrics: list[dict[str, Any]], label: str, color: str, zorder: int) -> None:
    losses = _epoch_means(metrics)
    points = [(line["epoch"] + 1, line["accuracy"]) for line in metrics if "accuracy" in line]
    if losses:
        loss.plot(*zip(*losses, strict=True), color=color, zorder=zorder, label=label)
    if points:
        text = f"{label}: {points[-1][1]:.1%}"
        accuracy.plot(*zip(*points, strict=True), color=color, zorder=zorder, label=text)


def _epoch_means(metrics: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """The mean loss of each epoch, weighted by samples where these are known."""
    sums: dict[int, tuple[float, float]] = {}
    for line in metrics:
        if "loss" in line:
            weight = line.get("samples") or 1
            total, count = sums.get(line["epoch"], (0.0, 0.0))
            sums[line["epoch"]] = (total + line["loss"] * weight, count + weight)
    return [(epoch + 1, total / count) for epoch, (total, count) in sums.items()]
