"""The folder of a run: what happened, line by line, in a form that other tools read."""

import json
import math
import time
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from fleetx.optim import TrustRatios
from fleetx.outcome import Outcome


def new_run_folder(root: Path, name: str) -> Path:
    """A fresh folder `root/name-<time>`; runs of the same second get a number."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in range(1000):
        folder = root / (f"{name}-{stamp}" if number == 0 else f"{name}-{stamp}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise RuntimeError(f"{root} holds a thousand runs of this second: remove some.")


class MetricsLog:
    """Writes `metrics.jsonl`: one JSON object per window, and one per evaluation."""

    def __init__(self, path: Path, *, enabled: bool = True) -> None:
        self._path = path
        self._enabled = enabled
        self._file: TextIO | None = None
        self._began = time.perf_counter()
        self._windows = 0

    def __enter__(self) -> Self:
        if self._enabled:
            self._file = self._path.open("w", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def window(self, epoch: int, out: Outcome) -> None:
        """What one window did."""
        self._windows += 1
        if self._file is None:
            return
        self._write(
            epoch=epoch,
            window=self._windows,
            loss=out.loss.item(),
            grad_norm=None if out.grad_norm is None else out.grad_norm.item(),
            lr=float(out.lr),
            loss_scale=out.loss_scale,
            updated=out.updated,
            skipped=out.skipped,
            samples=out.samples,
            samples_per_s=out.samples_per_s,
            **({} if out.trust_ratios is None else _ratios(out.trust_ratios)),
        )

    def accuracy(self, epoch: int, accuracy: float, **more: float) -> None:
        """What an evaluation at the end of an epoch found."""
        if self._file is not None:
            self._write(epoch=epoch, window=self._windows, accuracy=accuracy, **more)

    def _write(self, **values: Any) -> None:
        assert self._file is not None
        seconds = time.perf_counter() - self._began
        line = {"seconds": round(seconds, 4), **{name: _plain(value) for name, value in values.items()}}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()


def _ratios(ratios: TrustRatios) -> dict[str, Any]:
    """Least, median and greatest trust ratio, of all layers and of each."""
    return {**ratios.metrics(), "trust_ratios": {name: list(spread) for name, spread in ratios.per_layer().items()}}


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
