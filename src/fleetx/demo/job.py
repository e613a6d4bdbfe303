"""What each worker of `fleetx train` does. The first one also shows, writes and compares."""

import math
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from rich.table import Table

from fleetx import Checkpoints, DistributedStrategy, fleet
from fleetx.applications.digits import (
    PlainRun,
    PlainTraining,
    Training,
    digits_of,
    evaluate,
    large_batch_run,
    small_batch_run,
)
from fleetx.checkpoint import CheckpointError
from fleetx.console import JobProgress, broken_between_words, open_console, reopen_closed_streams
from fleetx.curves import MISSING, OURS, PLAIN, THIRD, Curve, draw_curves
from fleetx.demo.checks import BATCH, CHECKS, Check, Given
from fleetx.demo.settings import CHECKPOINTS, WEIGHTS, Settings
from fleetx.results import result_of
from fleetx.runs import MetricsLog, RunFolder, whole_lines

METRICS = "metrics.jsonl"
_SAVES = 4
"""How many checkpoints are saved on the way."""


class Stopped(Exception):  # noqa: N818 - a request, not an error
    """The job was asked to stop (Ctrl-C, SIGTERM), and everything is saved."""


@dataclass(frozen=True)
class Run:
    """A run that was made: what its table and curve show."""

    name: str
    batch: int
    color: str
    file: str
    metrics: list[dict[str, Any]]

    @property
    def accuracy(self) -> float:
        """After the last epoch."""
        return [line["accuracy"] for line in self.metrics if "accuracy" in line][-1]

    @property
    def seconds(self) -> float:
        """From its first update to its last evaluation."""
        return self.metrics[-1]["seconds"]


class Job:
    """One job on this worker, in its order."""

    def __init__(self, folder: Path, settings: Settings, strategy: DistributedStrategy) -> None:
        self.folder = folder
        self.settings = settings
        self.strategy = strategy
        self.first = fleet.is_first_worker()
        self.console = open_console()
        self.files = RunFolder(folder, self.say)
        self.plain_runs = _plain_runs(settings)
        self.progress = JobProgress(_samples(settings, self.plain_runs), enabled=self.first, console=self.console)
        self._weights: Path | None = None

    def say(self, text: str, *, whole: bool = False) -> None:
        """A paragraph, in a terminal broken between words; `whole`, for what is copied, leaves that to the terminal."""
        if self.first:
            if self.console.is_terminal and not whole:
                text = broken_between_words(text, self.console.width)
            self.console.print(text, markup=False, soft_wrap=True)

    def work(self) -> int:
        """Train, check, compare; gives the exit code."""
        try:
            training = Training(
                self.strategy,
                epochs=self.settings.epochs,
                global_batch=self.settings.global_batch,
                seed=self.settings.seed,
            )
            checkpoints = Checkpoints(
                self.folder / CHECKPOINTS,
                step=training.step,
                loader=training.loader,
                also={"moves": training.moves},
                keep=2,
            )
            start = checkpoints.resume()
            if start is not None:
                training.updates = start.step
                self.say(str(start))
            self.say(training.optimizer.overview(self.console.width))
            with self.progress:
                runs = [self._train(training, checkpoints)]
                checks = self._check(training) if self.settings.checks else []
                fleet.shutdown()
                if not self.first:
                    return 0
                _use_all_cores()
                runs += [self._train_plain(run, color) for run, color in self.plain_runs]
        except Stopped:
            return 0  # the launcher gives the exit code of the signal
        return self._report(runs, checks)

    # The run with FleetX -------------------------------------------------------------------------------

    def _train(self, training: Training, checkpoints: Checkpoints) -> Run:
        name = f"FleetX, {_optimizer(self.strategy)}, batch {self.settings.global_batch:,}"
        self.progress.begin(name)
        self.progress.advance(_samples_done(training))
        every = math.ceil(self.settings.epochs / _SAVES)
        path = self.folder / METRICS
        with MetricsLog(path, enabled=self.first, resume_at=training.updates, files=self.files) as log:
            for epoch, out in training.rest():
                log.window(epoch, out)
                ended = training.loader.epoch > epoch
                if ended and self.first:
                    log.accuracy(epoch, evaluate(training.model, training.digits))
                self.progress.advance(out.samples or 0, _figures(log))
                stop = fleet.stop_requested()
                due = stop or (ended and (epoch + 1) % every == 0) or training.updates == training.updates_in_all
                if due:
                    self._save(training, checkpoints)
                if stop:
                    self._write_weights(training)
                    self._say_stopped(training, checkpoints)
                    raise Stopped
            self._write_weights(training)
            return Run(name, self.settings.global_batch, OURS, METRICS, log.lines)

    def _save(self, training: Training, checkpoints: Checkpoints) -> None:
        """A checkpoint, if there is room for it: training can do without."""
        try:
            checkpoints.save(step=training.updates)
        except CheckpointError as error:
            self.files.complete = False
            self.say(str(error))

    def _write_weights(self, training: Training) -> None:
        if self.first:
            weights = {name: tensor.contiguous() for name, tensor in training.model.state_dict().items()}
            self._weights = self.files.write(WEIGHTS, safetensors.torch.save(weights))

    def _say_stopped(self, training: Training, checkpoints: Checkpoints) -> None:
        self.progress.stop()
        self.say(f"Stopped after update {training.updates} of {training.updates_in_all}.")
        if self._weights is not None:
            self.say(f"The weights are in {self._weights}")
        if checkpoints.latest is None:
            self.say("No checkpoint could be saved: this run cannot be resumed.")
        else:
            self.say(_how_to_resume(self.folder), whole=True)

    # Checks and plain runs -----------------------------------------------------------------------------

    def _check(self, training: Training) -> list[Check]:
        batch = training.digits.train_images[:BATCH], training.digits.train_labels[:BATCH]
        given = Given(batch, training.model, self.strategy, self.folder, self.settings.seed)
        self.progress.begin("checks")
        checks = []
        for check, samples in CHECKS:
            checks.append(check(given))
            self.progress.advance(samples)
        return checks

    def _train_plain(self, run: PlainRun, color: str) -> Run:
        self.progress.begin(run.name)
        training = PlainTraining(run, epochs=self.settings.epochs, seed=self.settings.seed)
        path = self.folder / f"plain-{run.batch}.jsonl"
        done = whole_lines(path) if path.exists() else []
        if len(done) == self.settings.epochs:  # before the job was stopped
            self.progress.advance(self.settings.epochs * len(training.digits.train_labels))
            return Run(run.name, run.batch, color, path.name, done)
        with MetricsLog(path, files=self.files) as log:
            losses: list[float] = []
            for epoch, ended, loss, samples in training.updates():
                losses.append(loss)
                if ended:
                    log.accuracy(epoch, evaluate(training.model, training.digits), loss=sum(losses) / len(losses))
                    losses = []
                self.progress.advance(samples, _figures(log))
                if fleet.stop_requested():
                    self.progress.stop()
                    self.say(f"Stopped. The run with FleetX is complete: {self._weights}")
                    self.say(_how_to_resume(self.folder), whole=True)
                    raise Stopped
            return Run(run.name, run.batch, color, path.name, log.lines)

    # What came out -------------------------------------------------------------------------------------

    def _report(self, runs: Sequence[Run], checks: Sequence[Check]) -> int:
        test_digits = len(digits_of(self.settings.seed).test_labels)
        outcome = {
            **asdict(self.settings),
            "test_digits": test_digits,
            "runs": {
                run.name: {"batch": run.batch, "accuracy": run.accuracy, "seconds": run.seconds, "metrics": run.file}
                for run in runs
            },
        }
        self.files.write_json("summary.json", result_of("summary", outcome))
        if checks:
            found = {"command": self.settings.command, "checks": [asdict(check) for check in checks]}
            self.files.write_json("checks.json", result_of("checks", found))
        self._draw(runs)
        self.console.print(runs_table(runs))
        if len(runs) > 1:
            self.say(what_it_shows(max(run.accuracy for run in runs), test_digits))
        if checks:
            self.console.print(checks_table(checks))
        self.say(f"{'All of it is' if self.files.complete else 'What there was room for is'} in {self.folder}")
        failed = [check.name for check in checks if check.held is False]
        if failed:
            self.say(f"{len(failed)} of {len(checks)} checks FAILED: {', '.join(failed)}")
        return 1 if failed or not self.files.complete else 0

    def _draw(self, runs: Sequence[Run]) -> None:
        curves = [Curve(f"{run.name}: {run.accuracy:.1%}", run.color, [run.metrics]) for run in runs]
        try:
            picture = draw_curves(curves)
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("matplotlib"):
                raise
            self.say(MISSING)
            return
        self.files.write("run.png", picture)


def runs_table(runs: Sequence[Run]) -> Table:
    """Accuracy and time of each run."""
    table = Table("run", "test accuracy", "seconds")
    table.columns[1].justify = table.columns[2].justify = "right"
    for run in runs:
        table.add_row(run.name, f"{run.accuracy:.2%}", f"{run.seconds:.1f}")
    return table


def what_it_shows(accuracy: float, test_digits: int) -> str:
    """How much of a difference between accuracies may be chance: two standard errors of a binomial share."""
    share = min(accuracy, 1 - 1 / test_digits)  # without an error there is none to estimate from
    error = 2 * math.sqrt(share * (1 - share) / test_digits)
    return f"One seed, {test_digits} test digits: each accuracy is known to +-{error * 100:.1f} points only."


def checks_table(checks: Sequence[Check]) -> Table:
    """What was measured, and whether it is as promised."""
    table = Table("check", "measured in this run", "")
    table.columns[1].overflow = "fold"  # names of files stay whole
    for check in checks:
        table.add_row(check.name, check.found, {True: "ok", False: "FAILED", None: ""}[check.held])
    return table


def _plain_runs(settings: Settings) -> list[tuple[PlainRun, str]]:
    if not settings.baseline:
        return []
    large, small = large_batch_run(settings.global_batch), small_batch_run()
    return [(large, PLAIN), *([(small, THIRD)] if small.batch != large.batch else [])]


def _samples(settings: Settings, plain_runs: Sequence[tuple[PlainRun, str]]) -> int:
    """How many samples pass in the whole job."""
    of_run = settings.epochs * len(digits_of(settings.seed).train_labels)
    checks = sum(samples for _, samples in CHECKS) if settings.checks else 0
    return of_run * (1 + len(plain_runs)) + checks


def _samples_done(training: Training) -> int:
    position = training.loader.state_dict()
    return position["epoch"] * len(training.digits.train_labels) + position["samples"]


def _figures(log: MetricsLog) -> str:
    accuracies = [line["accuracy"] for line in log.lines if "accuracy" in line]
    return f"accuracy {accuracies[-1]:.1%}" if accuracies else ""


def _optimizer(strategy: DistributedStrategy) -> str:
    return "LARS" if strategy.lars else "LAMB" if strategy.lamb else "SGD"


def _how_to_resume(folder: Path) -> str:
    program = Path(sys.executable).with_name("fleetx")
    on_path = shutil.which("fleetx")
    if on_path is not None and Path(on_path).resolve() == program.resolve():
        program = Path("fleetx")
    elif program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    return f"Go on with: {shlex.join([str(program), 'train', '--resume', str(folder)])}"


def _use_all_cores() -> None:
    """The other workers have left."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))


def work(folder: Path) -> int:
    """Join the job and do this worker's part; gives the exit code."""
    reopen_closed_streams()
    fleet.init()
    fleet.stop_requested()  # from here on Ctrl-C asks this worker to save, rather than ending it
    settings = Settings.load(folder)
    return Job(folder, settings, settings.strategy(folder)).work()


if __name__ == "__main__":
    sys.exit(work(Path(sys.argv[1])))
