"""`fleetx train`: options, folder, workers. What the workers do is in `job`."""

import contextlib
import io
import signal
import sys
from pathlib import Path

import typer

from fleetx.applications import digits
from fleetx.applications.resnet_small import SmallResnet
from fleetx.console import open_console, reopen_closed_streams
from fleetx.demo.settings import CHECKPOINTS, WEIGHTS, Settings
from fleetx.launch.devices import on_host
from fleetx.launch.run import launch
from fleetx.results import command_line
from fleetx.runs import new_run_folder, require_room
from fleetx.strategy import DistributedStrategy

# Copies of the weights that a run writes: weights, and in up to four checkpoints weights, masters and two moments each.
_COPIES = 1 + 4 * 4
_LOGS = 4 * 2**20
_STOPPED = [128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)]


def run_demo(
    *,
    workers: int,
    global_batch: int,
    epochs: int,
    strategy: Path | None,
    out: Path,
    baseline: bool,
    checks: bool = True,
    seed: int = 0,
) -> int:
    """Train, check, compare, save; gives the exit code."""
    used = _strategy(strategy)
    _require_batch(used, workers, global_batch)
    command = command_line(sys.argv)
    settings = Settings(workers, global_batch, epochs, seed, baseline, checks, strategy is None, command)
    try:
        folder = new_run_folder(out, "digits")
    except OSError as error:
        raise typer.BadParameter(f"--out {out} must be a folder to write to: {error.strerror}.") from None
    try:
        _require_room(folder)
    except typer.BadParameter:
        folder.rmdir()
        raise
    settings.save(folder, used)
    return start(folder, workers)


def resume_demo(folder: Path) -> int:
    """Go on with a run that was stopped; gives the exit code."""
    try:
        settings = Settings.load(folder)
        settings.strategy(folder)
    except FileNotFoundError as error:
        raise typer.BadParameter(
            f"--resume {folder}: there is no {Path(error.filename).name}. Name the folder of a run of `fleetx train`."
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise typer.BadParameter(f"--resume {folder}: {error}") from None
    _require_room(folder)
    return start(folder, settings.workers)


def start(folder: Path, workers: int) -> int:
    """Do the job of a folder; gives the exit code."""
    reopen_closed_streams()
    console = open_console()
    try:
        console.print(f"starting {workers} worker{'s' if workers > 1 else ''}; Ctrl-C saves and ends", markup=False)
        # The launcher's blocks of arguments and environments are the guide's, and belong to `fleetrun`.
        with contextlib.redirect_stdout(io.StringIO()):
            code = launch(["-m", "fleetx.demo.job", str(folder)], workers=workers, environment=on_host(workers))
    except KeyboardInterrupt:  # before the launcher listens
        code = 128 + signal.SIGINT
    if code in _STOPPED and not (folder / WEIGHTS).exists() and not list((folder / CHECKPOINTS).glob("save-*")):
        console.print("No update had been made: there is nothing to save.", markup=False)
    return code


def _strategy(path: Path | None) -> DistributedStrategy:
    try:
        used = DistributedStrategy.load(path) if path else digits.default_strategy()
        used.check_runnable()
    except (OSError, ValueError, TypeError) as error:
        raise typer.BadParameter(f"--strategy {path}: {error}") from None
    return used


def _require_batch(strategy: DistributedStrategy, workers: int, global_batch: int) -> None:
    """Say what is wrong before workers are started, once and without tracebacks."""
    least = workers * (strategy.gradient_merge_configs.k_steps if strategy.gradient_merge else 1)
    if global_batch < least:
        raise typer.BadParameter(
            f"--global-batch {global_batch} is too small: {workers} workers with the strategy's micro-batches need at "
            f"least {least} samples."
        )
    most = min(len(digits.load_digits(fold).train_labels) for fold in range(digits.FOLDS))
    if global_batch > most:
        raise typer.BadParameter(f"--global-batch {global_batch} is too large: there are {most:,} digits to train on.")


def _require_room(folder: Path) -> None:
    """Before training, not after it."""
    weights = sum(p.numel() * p.element_size() for p in SmallResnet().parameters())
    sizes = [_LOGS, *[weights] * _COPIES]
    try:
        require_room(folder, sizes)
    except OSError as error:
        raise typer.BadParameter(
            f"a run writes up to {sum(sizes) / 2**20:.0f} MiB, and {folder} does not take that ({error.strerror}). "
            "Free some space, or give another folder with --out."
        ) from None
