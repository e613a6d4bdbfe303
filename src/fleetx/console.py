"""What a person sees while a run goes on: a live bar in a terminal, lines elsewhere."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fleetx.outcome import Outcome

_LINES_IN_A_LOG = 10


class TrainingProgress:
    """A bar over the windows of a run, with loss, lr, samples/s, accuracy and the time left."""

    def __init__(self, windows: int, *, enabled: bool = True, console: Console | None = None) -> None:
        self.accuracy: float | None = None
        self._windows = windows
        self._done = 0
        self._console = console or Console()
        self._enabled = enabled
        self._live = enabled and self._console.is_terminal
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self._console,
            disable=not self._live,
            expand=True,
        )
        self._task = self._bar.add_task("training", total=windows, figures="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, out: Outcome) -> None:
        """Count one window and show its figures."""
        if not self._enabled:
            return
        self._done += 1
        figures = self._figures(out)
        self._bar.update(self._task, advance=1, figures=figures)
        if not self._live and (
            self._done % max(1, self._windows // _LINES_IN_A_LOG) == 0 or self._done == self._windows
        ):
            self._console.print(f"window {self._done}/{self._windows}  {figures}")

    def _figures(self, out: Outcome) -> str:
        wide = not self._live or self._console.width >= 110
        rate = f"  {out.samples_per_s:,.0f}{' samples' if wide else ''}/s" if out.samples_per_s else ""
        accuracy = f"  {'accuracy' if wide else 'acc'} {self.accuracy:.1%}" if self.accuracy is not None else ""
        note = "  skipped" if out.skipped else ""
        return f"loss {out.loss.item():.4f}  lr {float(out.lr):.3g}{rate}{accuracy}{note}"
