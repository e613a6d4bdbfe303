"""The picture of runs: loss and accuracy of each, with the spread where a run was made several times."""

import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

OURS, PLAIN, THIRD = "#0b6e99", "#d9822b", "#7a8288"
MISSING = "no picture, since matplotlib is not installed: pip install 'fleetx[plots]'"
Metrics = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Curve:
    """A run by its name: the metrics of it, once for each time that it was made."""

    name: str
    color: str
    runs: Sequence[Metrics]


def draw_curves(curves: Sequence[Curve]) -> bytes:
    """Draw a PNG: means over the repetitions, in a band from the least to the greatest. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    loss, accuracy = figure.subplots(1, 2)
    for order, curve in enumerate(curves):
        _draw(loss, curve, [epoch_losses(run) for run in curve.runs], zorder=9 - order)
        _draw(accuracy, curve, [epoch_accuracies(run) for run in curve.runs], zorder=9 - order)
    loss.set(title="Training loss", xlabel="epoch", yscale="log")
    accuracy.set(title="Test accuracy", xlabel="epoch", ylim=(0.8, 1.002), yticks=[0.8, 0.85, 0.9, 0.95, 1.0])
    accuracy.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    most = max(len(curve.runs) for curve in curves)
    title = f"mean and range of {most} seeds" if most > 1 else None
    accuracy.legend(loc="lower right", frameon=False, title=title)
    for axes in (loss, accuracy):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_xlim(left=0)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    return picture.getvalue()


def _draw(axes: Any, curve: Curve, runs: Sequence[dict[int, float]], zorder: int) -> None:
    epochs = sorted(set.intersection(*(set(run) for run in runs)))
    values = [[run[epoch] for run in runs] for epoch in epochs]
    places = [epoch + 1 for epoch in epochs]
    axes.plot(places, list(map(statistics.mean, values)), color=curve.color, zorder=zorder, label=curve.name)
    if len(runs) > 1:
        lows, highs = list(map(min, values)), list(map(max, values))
        axes.fill_between(places, lows, highs, color=curve.color, alpha=0.15, linewidth=0, zorder=zorder - 5)


def epoch_losses(metrics: Metrics) -> dict[int, float]:
    """The mean loss of each epoch, weighted by samples where these are known."""
    sums: dict[int, tuple[float, float]] = {}
    for line in metrics:
        if line.get("loss") is not None:
            weight = line.get("samples") or 1
            total, count = sums.get(line["epoch"], (0.0, 0.0))
            sums[line["epoch"]] = (total + line["loss"] * weight, count + weight)
    return {epoch: total / count for epoch, (total, count) in sums.items()}


def epoch_accuracies(metrics: Metrics) -> dict[int, float]:
    """The test accuracy after each epoch."""
    return {line["epoch"]: line["accuracy"] for line in metrics if "accuracy" in line}
