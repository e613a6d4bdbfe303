"""Accuracy on the digits: FleetX's LARS at a large batch, and plain SGD at that batch and at a small one.

Each seed draws other first weights and another order, and tests with another fifth of the digits. Nothing was tuned for
it: each run has the one learning rate that `fleetx train` has.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from fleetx.curves import OURS, PLAIN, THIRD, Curve, draw_curves, epoch_accuracies, epoch_losses
from fleetx.demo.command import run_demo
from fleetx.runs import read_metrics

EPOCHS, GLOBAL_BATCH, WORKERS = 40, 512, 2
Result = dict[str, Any]


def measure(seeds: int) -> Result:
    """Make all runs with each seed."""
    runs: dict[str, Any] = {}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as out:
            code = run_demo(
                workers=WORKERS,
                global_batch=GLOBAL_BATCH,
                epochs=EPOCHS,
                strategy=None,
                out=Path(out),
                baseline=True,
                checks=False,
                seed=seed,
            )
            if code:
                raise SystemExit(code)
            (folder,) = Path(out).iterdir()
            for name, run in _runs_in(folder, seed).items():
                runs.setdefault(name, []).append(run)
    return {"epochs": EPOCHS, "global_batch": GLOBAL_BATCH, "workers": WORKERS, "runs": runs}


def _runs_in(folder: Path, seed: int) -> Result:
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    runs = {}
    for name, run in summary["runs"].items():
        metrics = read_metrics(folder / run["metrics"])
        losses, accuracies = epoch_losses(metrics), epoch_accuracies(metrics)
        runs[name] = {
            "seed": seed,
            "test_digits": summary["test_digits"],
            "accuracy": run["accuracy"],
            "seconds": run["seconds"],
            "epochs": [{"epoch": epoch, "loss": losses[epoch], "accuracy": accuracies[epoch]} for epoch in accuracies],
        }
    return runs


def draw(result: Result) -> bytes:
    """The picture of a saved result, as a PNG."""
    return draw_curves(
        [
            Curve(name, color, [run["epochs"] for run in runs])
            for (name, runs), color in zip(result["runs"].items(), (OURS, PLAIN, THIRD), strict=True)
        ]
    )
