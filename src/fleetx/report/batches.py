"""The picture of the memory benchmark: batch against speed, one curve for each way to train."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fleetx.report.curves import OURS, PLAIN

# Colour says whose way it is, the marker which one.
_OTHERS = "#8a8f98"
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def draw_batches(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """Draw the rows that ran, a panel for each model."""
    ran = [row for row in rows if "samples_per_s" in row]
    models = list(dict.fromkeys(row["model"] for row in ran))
    figure = Figure(figsize=(7.5 * max(len(models), 1), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, max(len(models), 1), squeeze=False)[0]
    for axes, model in zip(panels, models, strict=False):
        _draw(axes, [row for row in ran if row["model"] == model])
        axes.set(title=model, xlabel="batch in one forward", ylabel="samples per second", xscale="log", ylim=(0, None))
        batches = sorted({row["batch"] for row in ran if row["model"] == model})
        axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=130)
    return path


def _draw(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    counts = {color: iter(_MARKERS * 4) for color in (OURS, PLAIN, _OTHERS)}
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = sorted((row for row in rows if row["name"] == name), key=lambda row: row["batch"])
        color = _color(mine[0])
        batches, speeds = [row["batch"] for row in mine], [row["samples_per_s"] for row in mine]
        axes.plot(batches, speeds, marker=next(counts[color]), color=color, alpha=0.85, linewidth=1.2, label=name)
        for row in mine:
            memory = f"{row['reserved_gib']:.0f}" if "reserved_gib" in row else ""
            place = (row["batch"], row["samples_per_s"])
            axes.annotate(memory, place, textcoords="offset points", xytext=(6, 3), fontsize=7, color=color)
    axes.plot([], [], " ", label="numbers: GiB on the device")


def _color(row: dict[str, Any]) -> str:
    if row["name"].startswith("plain"):
        return PLAIN
    return OURS if row["method"] == "ours" else _OTHERS
