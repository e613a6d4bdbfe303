"""The folder of a run: what happened, line by line, in a form that other tools read."""

import contextlib
import errno
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TextIO

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


def require_room(folder: Path, sizes: Sequence[int]) -> None:
    """Raise OSError unless files of these sizes can be written into `folder` together.

    The files are allocated and removed again. So quotas and limits are found too, which the free space does not show.
    """
    with tempfile.TemporaryDirectory(prefix=".room-", dir=folder) as rehearsal:
        for number, size in enumerate(sizes):
            descriptor = os.open(Path(rehearsal, str(number)), os.O_WRONLY | os.O_CREAT)
            try:
                os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)


class RunFolder:
    """Writes the files of a run. One that its folder does not take goes to a temporary folder, and is reported."""

    def __init__(self, path: Path, report: Callable[[str], object]) -> None:
        self.path = path
        # Whether every file is where it belongs.
        self.complete = True
        self._report = report
        self._spare: Path | None = None

    def write(self, name: str, contents: bytes) -> Path | None:
        """Write a whole file; gives where it is, None if it is lost."""
        try:
            return _write_whole(self.path / name, contents)
        except OSError as error:
            self.complete = False
            failed = f"{name} could not be written to {self.path} ({_reason(error)})"
        try:
            self._spare = self._spare or Path(tempfile.mkdtemp(prefix=f"{self.path.name}-"))
            path = _write_whole(self._spare / name, contents)
        except OSError as error:
            self._report(f"{failed}, nor to {tempfile.gettempdir()} ({_reason(error)}): it is lost.")
            return None
        self._report(f"{failed}: it is in {path}")
        return path

    def write_json(self, name: str, value: Any) -> Path | None:
        """Write a file of JSON."""
        return self.write(name, (json.dumps(value, indent=2) + "\n").encode())


def _write_whole(path: Path, contents: bytes) -> Path:
    """Under its name there is the whole file or what was there before."""
    draft = path.with_name(f".{path.name}.part")
    try:
        draft.write_bytes(contents)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    return path


def _reason(error: OSError) -> str:
    return error.strerror or errno.errorcode.get(error.errno or 0, str(error))


class MetricsLog:
    """Writes `metrics.jsonl`: one JSON object per window, and one per evaluation. `lines` has them all.

    `resume_at` goes on with a file after this many windows; what it says of later ones is dropped. With `files`, a disk
    that gets full does not end the run: what could not be written is handed to `files` at the end.
    """

    def __init__(
        self, path: Path, *, enabled: bool = True, resume_at: int | None = None, files: RunFolder | None = None
    ) -> None:
        self.lines: list[dict[str, Any]] = []
        self._path = path
        self._enabled = enabled
        self._files = files
        self._file: TextIO | None = None
        self._failed = False
        self._windows = resume_at or 0
        if enabled and resume_at is not None and path.exists():
            self.lines = [line for line in whole_lines(path) if line["window"] <= resume_at]
        self._began = time.perf_counter() - (self.lines[-1]["seconds"] if self.lines else 0.0)

    def __enter__(self) -> Self:
        if self._enabled:
            self._put("w", self.lines)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with contextlib.suppress(*([OSError] if self._failed else [])):
                self._file.close()
        if self._failed and self._files is not None:
            self._files.write(self._path.name, "".join(map(_as_line, self.lines)).encode())

    def window(self, epoch: int, out: Outcome) -> None:
        """What one window did."""
        self._windows += 1
        if not self._enabled:
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
            comm_hidden=out.comm_hidden,
            **({} if out.trust_ratios is None else _ratios(out.trust_ratios)),
        )

    def accuracy(self, epoch: int, accuracy: float, **more: float) -> None:
        """What an evaluation at the end of an epoch found."""
        if self._enabled:
            self._write(epoch=epoch, window=self._windows, accuracy=accuracy, **more)

    def _write(self, **values: Any) -> None:
        seconds = time.perf_counter() - self._began
        self.lines.append({"seconds": round(seconds, 4), **{name: _plain(value) for name, value in values.items()}})
        if not self._failed:
            self._put("a", self.lines[-1:])

    def _put(self, mode: Literal["w", "a"], lines: Sequence[dict[str, Any]]) -> None:
        try:
            if self._file is None:
                self._file = self._path.open(mode, encoding="utf-8")
            self._file.writelines(map(_as_line, lines))
            self._file.flush()
        except OSError:
            if self._files is None:
                raise
            self._failed = True


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines up to one that was cut off, as a killed process leaves it."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def _as_line(line: dict[str, Any]) -> str:
    return json.dumps(line, allow_nan=False) + "\n"


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
