"""`fleetx train`: the job on its workers, the plain run beside it, then the figures and the picture of both."""

from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from fleetx.applications import digits
from fleetx.curves import draw_run
from fleetx.launch.run import launch
from fleetx.results import save_result
from fleetx.runs import MetricsLog, new_run_folder, read_metrics
from fleetx.strategy import DistributedStrategy

PLAIN_BATCH = 32


def run_demo(*, workers: int, global_batch: int, epochs: int, strategy: Path | None, out: Path, baseline: bool) -> int:
    """Train, compare, save; gives the exit code."""
    console = Console()
    _check(strategy, workers, global_batch)
    folder = new_run_folder(out, "digits")
    command = ["-m", "fleetx.applications.digits", "--out", str(folder)]
    command += ["--epochs", str(epochs), "--global-batch", str(global_batch)]
    command += ["--strategy", str(strategy)] if strategy else []
    code = launch(command, workers=workers)
    if code:
        return code
    metrics = read_metrics(folder / "metrics.jsonl")
    summary = {
        "workers": workers,
        "global_batch": global_batch,
        "epochs": epochs,
        "accuracy": _last_accuracy(metrics),
        "seconds": metrics[-1]["seconds"],
    }
    if baseline:
        with (
            MetricsLog(folder / "plain.jsonl") as log,
            console.status(f"plain SGD at batch {PLAIN_BATCH}, for comparison"),
        ):
            digits.train_plain(log, epochs=epochs, batch=PLAIN_BATCH)
        plain = read_metrics(folder / "plain.jsonl")
        summary |= {"plain_accuracy": _last_accuracy(plain), "plain_seconds": plain[-1]["seconds"]}
    ours, theirs = f"FleetX, batch {global_batch:,}", f"plain SGD, batch {PLAIN_BATCH}"
    draw_run(folder, ours=ours, plain=theirs if baseline else None)
    save_result("summary", summary, folder)
    console.print(_table(summary, ours, theirs))
    console.print(f"[dim]in {folder}:[/] {', '.join(sorted(path.name for path in folder.iterdir()))}")
    return 0


def _check(strategy: Path | None, workers: int, global_batch: int) -> None:
    """Say what is wrong before workers are started, once and without tracebacks."""
    try:
        used = DistributedStrategy.load(strategy) if strategy else digits.default_strategy()
        used.check_runnable()
    except (OSError, ValueError, TypeError) as error:
        raise typer.BadParameter(f"--strategy {strategy}: {error}") from None
    least = workers * (used.gradient_merge_configs.k_steps if used.gradient_merge else 1)
    if global_batch < least:
        raise typer.BadParameter(
            f"--global-batch {global_batch} is too small: {workers} workers with the strategy's micro-batches need at "
            f"least {least} samples."
        )
    most = len(digits.load_digits().train_labels)
    if global_batch > most:
        raise typer.BadParameter(f"--global-batch {global_batch} is too large: there are {most:,} digits to train on.")


def _last_accuracy(metrics: list[dict]) -> float:
    return [line["accuracy"] for line in metrics if "accuracy" in line][-1]


def _table(summary: dict, ours: str, theirs: str) -> Table:
    table = Table("run", "test accuracy", "seconds")
    table.columns[1].justify = table.columns[2].justify = "right"
    table.add_row(ours, f"{summary['accuracy']:.2%}", f"{summary['seconds']:.1f}", style="bold")
    if "plain_accuracy" in summary:
        table.add_row(theirs, f"{summary['plain_accuracy']:.2%}", f"{summary['plain_seconds']:.1f}")
    return table
