"""The picture of the memory benchmark: batch against speed, one curve for each way to train.

Where many ways were tried with one batch, a panel more shows what memory buys there.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fleetx.curves import OURS, PLAIN

Row = dict[str, Any]
_OTHERS = "#8a8f98"
_MANY = 6  # rows with the same batch
_APART = 1.25  # ratio of neighbouring batches that are both written at the axis


class Mode(NamedTuple):
    """A way to train: its name, and how it is drawn. Colour says whose way it is, the marker which one."""

    name: str
    color: str
    marker: str
    line: str = "-"


_GUIDE = Mode("the guide's rows: fp32, + recompute, + bf16", _OTHERS, "v", " ")
_PLAIN = Mode("plain, compiled", PLAIN, "o")
_TORCH = Mode("torch checkpoint", _OTHERS, "o")
_BUDGET = Mode("torch activation budget", _OTHERS, "s")
_AGAIN = Mode("recompute", OURS, "o")
_AWAY = Mode("recompute, offload", OURS, "D")
_DEAR = Mode("recompute, dear outputs saved", OURS, "s")
_DEAR_AWAY = Mode("recompute, dear outputs saved, offload", OURS, "^")


def draw_batches(rows: Sequence[Row], path: Path) -> Path:
    """Draw the rows that ran."""
    ran = [row for row in rows if "samples_per_s" in row]
    panels: list[tuple[str, list[Row], int | None]] = []
    for model in dict.fromkeys(row["model"] for row in ran):
        mine = [row for row in ran if row["model"] == model]
        panels.append((model, mine, None))
        batch, count = Counter(row["batch"] for row in mine).most_common(1)[0]
        if count >= _MANY:
            panels.append((f"{model}, batch {batch}", [row for row in mine if row["batch"] == batch], batch))
    figure = Figure(figsize=(5.6 * max(len(panels), 1), 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, mine, batch) in zip(
        figure.subplots(1, max(len(panels), 1), squeeze=False)[0], panels, strict=False
    ):
        _draw_batches(axes, mine) if batch is None else _draw_memory(axes, mine)
        axes.set(title=title, ylabel="samples per second", ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    figure.savefig(path, dpi=130)
    return path


def _draw_batches(axes: Any, rows: Sequence[Row]) -> None:
    """Of each way the fastest row at each batch."""
    for mode, mine in _by_mode(rows).items():
        fastest = {row["batch"]: row for row in sorted(mine, key=lambda row: row["samples_per_s"])}
        points = [fastest[batch] for batch in sorted(fastest)]
        _plot(axes, mode, points, "batch")
        for row in points:
            if "reserved_gib" in row:
                place = (row["batch"], row["samples_per_s"])
                text = f"{row['reserved_gib']:.0f}"
                axes.annotate(text, place, textcoords="offset points", xytext=(5, 4), fontsize=7, color=mode.color)
    batches = _apart(sorted({row["batch"] for row in rows}))
    axes.set(xscale="log", xlabel="batch in one forward (numbers: GiB on the device)")
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.minorticks_off()


def _draw_memory(axes: Any, rows: Sequence[Row]) -> None:
    for mode, mine in _by_mode(rows).items():
        _plot(axes, mode, sorted(mine, key=lambda row: row["reserved_gib"]), "reserved_gib")
    axes.set(xlabel="GiB on the device", xlim=(0, None))


def _plot(axes: Any, mode: Mode, rows: Sequence[Row], across: str) -> None:
    places, speeds = [row[across] for row in rows], [row["samples_per_s"] for row in rows]
    style = {"color": mode.color, "marker": mode.marker, "linestyle": mode.line}
    axes.plot(places, speeds, alpha=0.85, linewidth=1.2, label=mode.name, **style)


def _by_mode(rows: Sequence[Row]) -> dict[Mode, list[Row]]:
    found: dict[Mode, list[Row]] = {}
    for row in rows:
        found.setdefault(_mode(row), []).append(row)
    return found


def _mode(row: Row) -> Mode:
    name = row["name"]
    if name.startswith("guide"):
        return _GUIDE
    if name.startswith("plain"):
        return _PLAIN
    if row["method"] != "ours":
        return _TORCH if row["method"] == "torch checkpoint" else _BUDGET
    is_away = bool(row.get("gib_to_host"))
    if "dear" in name:
        return _DEAR_AWAY if is_away else _DEAR
    return _AWAY if is_away else _AGAIN


def _apart(batches: Sequence[int]) -> list[int]:
    """Those that can be written beside each other."""
    kept: list[int] = []
    for batch in batches:
        if not kept or batch >= kept[-1] * _APART:
            kept.append(batch)
    return kept
