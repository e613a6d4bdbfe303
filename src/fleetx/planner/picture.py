"""The pictures of a plan: memory over the step, predicted against measured, and memory against speed."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from fleetx.extras import needs_extra

with needs_extra("plots", "The picture of a plan"):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

from fleetx.curves import OURS, PLAIN
from fleetx.planner.plan import Moment, Plan

_FIXED, _KEPT, _MOVING = "#9db7c4", "#0b6e99", "#5fa55a"
_LATE = "#c9d7de"
_LABELS = {
    "gradients": "gradients so far",
    "kept": "activations kept",
    "working": "working",
    "moving": "to and from the host",
}
FORMATS = tuple(sorted(FigureCanvasAgg.get_supported_filetypes()))
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def draw_plan(plan: Plan, path: str | Path) -> Path:
    """Draw the memory of one micro-batch over time, and what other budgets would give, side by side.

    A plan that was verified is drawn with what the real step took.
    """
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    step, trade = figure.subplots(1, 2, width_ratios=(3, 2))
    unit, size = next(((name, size) for name, size in _UNITS if plan.peak >= size), ("B", 1))
    _draw_step(step, plan, plan.moments, size)
    of_what = "one forward" if plan.k_steps == 1 else "a micro-batch"
    step.set(title=f"Memory over {of_what} of {plan.micro_batch:,}", xlabel="seconds, as predicted", ylabel=unit)
    _draw_trade(trade, plan, size)
    trade.set(title="Memory against speed", xlabel=f"budget, {unit}", ylabel="samples/s")
    for axes in (step, trade):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_ylim(bottom=0)
    path = Path(path)
    figure.savefig(path, dpi=130)
    return path


def _draw_step(axes: Any, plan: Plan, moments: Sequence[Moment], size: int) -> None:
    points = [point for point in plan.timeline if point.phase != "update"]
    ends = list(accumulate(point.seconds for point in points))
    starts, widths = [0.0, *ends[:-1]], [point.seconds for point in points]
    bottom = [plan.fixed_bytes / size] * len(points)
    fixed = "weights, optimizer, batch" if plan.gradients_come_late else "weights, gradients, optimizer, batch"
    axes.bar(starts, bottom, widths, align="edge", color=_FIXED, label=fixed)
    for name, color in (("gradients", _LATE), ("kept", _KEPT), ("working", PLAIN), ("moving", _MOVING)):
        heights = [getattr(point, name) / size for point in points]
        if any(heights):
            axes.bar(starts, heights, widths, bottom, align="edge", color=color, label=_LABELS[name])
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.axhline(plan.memory / size, color="black", linestyle=":", label="budget")
    if moments:
        places = _places(plan, moments, dict(zip([(p.name, p.phase) for p in points], ends, strict=True)))
        peaks = [m.peak / size for m in moments]
        axes.step([0.0, *places], [peaks[0], *peaks], where="pre", color="black", label="measured")
    axes.set_xlim(0, ends[-1] if ends and ends[-1] > 0 else 1)
    # Below, and not in front of anything: the bars fill the axes.
    axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", frameon=False, fontsize=8, ncols=6)


def _places(plan: Plan, moments: Sequence[Moment], ends: dict[tuple[str, str], float]) -> list[float]:
    """Where on the predicted time axis each moment ended."""
    names = [*plan.names]
    last = max(ends.values(), default=0.0)
    places = []
    for moment in moments:
        if moment.phase == "forward":
            places.append(ends.get((moment.name, "forward"), last))
        elif moment.name in names and names.index(moment.name) + 1 < len(names):
            # Marked before its own backward: when that of the segment after it has ended.
            places.append(ends.get((names[names.index(moment.name) + 1], "backward"), last))
        else:
            places.append(last if moment.name == "end" else ends.get(("tail", "forward"), last))
    return places


def _draw_trade(axes: Any, plan: Plan, size: int) -> None:
    curve = [(one.memory / size, one.samples_per_s) for one in plan.curve]
    if curve:
        axes.plot(*zip(*curve, strict=True), color=OURS, marker="o", markersize=4, label="predicted")
    axes.plot([plan.memory / size], [plan.samples_per_s], "o", color=PLAIN, markersize=9, label="this plan", zorder=3)
    if plan.measured is not None:
        speed = plan.global_batch / plan.measured.seconds
        axes.plot([plan.memory / size], [speed], "x", color="black", markersize=9, label="measured", zorder=4)
    axes.margins(y=0.1)  # else a mark at the top is half cut off
    axes.legend(loc="best", frameon=False)
