"""The picture of the memory benchmark: batch against speed, one curve for each way to train."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fleetx.report.curves import OURS, PLAIN

_GREYS = ("#6b7280", "#9ca3af", "#4b5563", "#c4b5a0")


def draw_batches(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """Draw the rows that ran, a panel for each model."""
    ran = [row for row in rows if "samples_per_s" in row]
    models = list(dict.fromkeys(row["model"] for row in ran))
    figure = Figure(figsize=(6.5 * max(len(models), 1), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, max(len(models), 1), squeeze=False)[0]
    for axes, model in zip(panels, models, strict=False):
        _draw(axes, [row for row in ran if row["model"] == model])
        axes.set(title=model, xlabel="batch in one forward", ylabel="samples per second", xscale="log", ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    return path


def _draw(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    greys = iter(_GREYS * 10)
    for name in dict.fromkeys(row["name"] for row in rows):
        points = sorted((row["batch"], row["samples_per_s"], row["cap_gib"]) for row in rows if row["name"] == name)
        ours = any(row["method"] == "ours" and row["name"] == name and "plain" not in name for row in rows)
        color = OURS if ours else PLAIN if name.startswith("plain") else next(greys)
        batches, speeds = [point[0] for point in points], [point[1] for point in points]
        axes.plot(batches, speeds, marker="o", color=color, alpha=0.9, label=name)
        for batch, speed, cap in points:
            if cap is not None:
                axes.annotate(f"{cap:.0f} GiB", (batch, speed), textcoords="offset points", xytext=(4, 5), fontsize=7)
