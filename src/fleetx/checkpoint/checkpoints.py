"""`Checkpoints`: save a run so that it can be interrupted at any moment, and go on with it bit for bit."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fleetx.batch_step import Step
from fleetx.checkpoint import state
from fleetx.checkpoint.background import Background
from fleetx.checkpoint.errors import CheckpointError
from fleetx.checkpoint.folder import CheckpointFolder
from fleetx.checkpoint.loading import PassedOver, newest
from fleetx.checkpoint.replaying import WindowStart
from fleetx.checkpoint.restoring import put_back, require_sound
from fleetx.checkpoint.saving import contents_of, write
from fleetx.checkpoint.snapshot import HostCopies
from fleetx.checkpoint.state import Run
from fleetx.checkpoint.workers import Workers
from fleetx.fleet.model import require_joined, strategy_of
from fleetx.fleet.optimizer import DistributedOptimizer


@dataclass(frozen=True)
class Resumed:
    """What a run goes on from.

    `epoch` is that of the next batch, if there is a loader. `replayed` is how many micro-batches a worker takes again
    because a window was in progress and the number of workers (or `k_steps`) is another one now: a loop that counts
    micro-batches goes on from `step - replayed`.
    """

    path: Path
    step: int
    epoch: int | None
    workers: int
    replayed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    passed_over: tuple[PassedOver, ...] = ()

    def __str__(self) -> str:
        epoch = "" if self.epoch is None else f", epoch {self.epoch}"
        by = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        lines = [f"resumed from {self.path} (step {self.step}{epoch}, saved by {by})"]
        if self.replayed:
            taken = "1 micro-batch is" if self.replayed == 1 else f"{self.replayed} micro-batches are"
            lines.append(f"  the window in progress begins anew: {taken} taken again")
        return "\n".join([*lines, *(f"  passed over {one}" for one in self.passed_over)])


class Checkpoints:
    """The checkpoints of a run, in one folder. Every worker makes one, and calls `resume` and `save` with the others.

    Saved are the model with its buffers, the optimizer with masters, loss scale, schedule and the window in progress,
    the loader's position, and the random state of Python, numpy and torch. `also` names further objects that have a
    `state_dict`, or random generators. Several models, optimizers or loaders are given as dicts.

    `keep` is how many checkpoints stay; None keeps all. `job` is a name that a checkpoint must have to be resumed from,
    where the shape of the model does not tell jobs apart. `timeout` is how many seconds workers wait for each other.

    >>> import tempfile, torch, fleetx as X
    >>> model = X.fleet.distributed_model(torch.nn.Linear(4, 2))
    >>> optimizer = X.fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    >>> checkpoints = Checkpoints(tempfile.mkdtemp(), model=model, optimizer=optimizer)
    >>> checkpoints.resume() is None
    True
    >>> checkpoints.save(step=10).name
    'save-000001-step-10'
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
        loader: Any | None = None,
        step: Step | None = None,
        also: Mapping[str, Any] | None = None,
        keep: int | None = 3,
        job: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        if step is not None:
            if not isinstance(step, Step):
                raise TypeError(
                    f"step= takes a fleetx.Step, not a {type(step).__name__}. The number of a step belongs to save()."
                )
            if model is not None or optimizer is not None:
                raise ValueError("a Step has its model and optimizer: give step=, or model= and optimizer=, not both.")
            model, optimizer = step.model, step.optimizer
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ValueError(f"keep must be a whole number of at least 1, or None to keep all, not {keep!r}.")
        path = Path(folder).absolute()  # whatever folder the program goes to later
        if path.exists() and not path.is_dir():
            raise CheckpointError(f"{path} must be a folder, and it is a file. Give another folder.")
        require_joined()
        self._folder = CheckpointFolder(path, keep)
        self._job_name = job
        self._workers = Workers(timeout)
        self._run = _run(model, optimizer, loader, also)
        self._background: Background[Path] = Background(self._workers.waited)
        self._copies = HostCopies()
        self._latest: Path | None = None

    @property
    def folder(self) -> Path:
        """Where the checkpoints are."""
        return self._folder.path

    @property
    def latest(self) -> Path | None:
        """The checkpoint that was saved or resumed from last."""
        return self._latest

    def save(self, step: int, *, extra: Mapping[str, Any] | None = None, asynchronous: bool = False) -> Path | None:
        """Save the run after `step` steps; gives the path of the checkpoint.

        `extra` is anything of your own made of numbers, text and tensors; `resume` gives it back. When the call
        returns, the checkpoint is on the disk and has been read back. With `asynchronous` the state is copied to the
        host, and written while training goes on: then `wait` gives the path, and what goes wrong is raised by the next
        `save` or `wait`. All workers must call it.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step must be a whole number of at least 0, not {step!r}.")
        self.wait()
        try:
            contents = contents_of(
                state.collect(self._run, extra or {}, self._workers.rank),
                step=step,
                epoch=self._run.epoch,
                job=self._run.job(self._job_name),
                weights=_bytes_of(self._run.models),
                workers=self._workers,
                sums=state.sums_of_weights(self._run),
            )
            if asynchronous:
                contents = contents.copied_by(self._copies)
        except Exception as error:
            write(self._folder, self._workers, error)  # tells the others, and raises
            raise
        if asynchronous:
            self._background.start(lambda: write(self._folder, self._workers, contents))
            return None
        self._latest = write(self._folder, self._workers, contents)
        return self._latest

    def wait(self) -> Path | None:
        """Wait for an asynchronous save; gives the newest checkpoint, and raises if that save failed."""
        path = self._background.wait()
        self._latest = path or self._latest
        return self._latest

    def resume(self, path: str | Path | None = None) -> Resumed | None:
        """Put back the newest checkpoint that is whole; None if there is none at all. All workers must call it.

        Damaged checkpoints, and those of another job, are passed over: they are logged, and listed in what is
        returned. If there are checkpoints but none can be used, that is an error. `path` takes a certain one.
        Call it last, when everything is built, so that nothing draws random numbers between it and the first step.
        """
        self.wait()
        chosen = self.folder if path is None else Path(path).parent
        names, drafts = self._workers.first(lambda: self._candidates(path))
        reading, passed = newest(
            names,
            chosen,
            self._workers,
            self._run.job(self._job_name),
            self._run.model_outline(),
            require_sound=lambda reading: require_sound(self._run, reading, self._workers),
            any_name=path is not None,
        )
        self._folder.damaged |= {one.path.name for one in passed}
        unfinished = [PassedOver(chosen / name, "its save was interrupted") for name in drafts]
        self._tell(passed)
        if reading is None:
            if passed:
                raise CheckpointError(_none_usable(chosen, passed, given=path is not None))
            self._folder.begin_empty()
            return None
        extra, replayed = put_back(self._run, reading, self._workers)
        self._folder.is_ours = True
        self._latest = reading.path
        manifest = reading.manifest
        return Resumed(
            path=reading.path,
            step=manifest.step,
            epoch=self._run.epoch,
            workers=manifest.workers,
            replayed=replayed,
            extra=extra,
            passed_over=(*passed, *unfinished),
        )

    def _candidates(self, path: str | Path | None) -> tuple[list[str], list[str]]:
        if self._run.optimizers:  # a run that goes on will save: better to learn now that another one saves here
            self._folder.claim()
        if path is None:
            return [found.path.name for found in self._folder.found()], [d.name for d in self._folder.drafts()]
        if not Path(path).is_dir():
            raise CheckpointError(f"resume(path) takes the folder of one checkpoint, and {path} is none.")
        return [Path(path).name], []

    def _tell(self, passed: list[PassedOver]) -> None:
        if self._workers.rank == 0:
            for one in passed:
                logging.getLogger("fleetx").warning(f"a checkpoint was passed over, {one}.")


def _run(model: Any, optimizer: Any, loader: Any, also: Mapping[str, Any] | None) -> Run:
    models, optimizers = _named("model", model), _named("optimizer", optimizer)
    loaders, others = _named("loader", loader), dict(also or {})
    if not (models or optimizers or loaders or others):
        raise ValueError("a checkpoint of nothing is of no use: give model=, optimizer= and loader=, or step=.")
    for name, module in models.items():
        if not isinstance(module, nn.Module):
            raise TypeError(f"model= takes nn.Modules, and {name!r} is a {type(module).__name__}.")
    models = {name: _unwrapped(module) for name, module in models.items()}
    for kind, things in (("optimizer", optimizers), ("loader", loaders), ("also", others)):
        for name, thing in things.items():
            _require_stateful(kind, name, thing)
    for name, its in optimizers.items():
        _require_outer(name, its)
    start = None
    if len(optimizers) == 1:
        only = next(iter(optimizers.values()))
        if isinstance(only, DistributedOptimizer):
            start = WindowStart(only, models, loaders)
    return Run(models, optimizers, loaders, others, start)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model that others wrapped: what is saved of it fits with and without them."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):  # the result of torch.compile
            model = inner
        else:
            return model


def _named(kind: str, things: Any) -> dict[str, Any]:
    if things is None:
        return {}
    return dict(things) if isinstance(things, Mapping) else {kind: things}


def _require_stateful(kind: str, name: str, thing: Any) -> None:
    if state.is_stateful(thing):
        return
    remedy = "Give it a state_dict() and a load_state_dict(state), or leave it out."
    if kind == "loader":
        remedy = "Use fleetx.data.Loader, which knows its position, or leave loader= out and begin epochs anew."
    raise TypeError(
        f"{kind}= takes what has a state to save, and {name!r}, a {type(thing).__name__}, has none. {remedy}"
    )


def _require_outer(name: str, optimizer: Any) -> None:
    """The optimizer inside of a distributed one does not know of the window, the masters and the schedule."""
    if isinstance(optimizer, DistributedOptimizer) or not isinstance(optimizer, Optimizer):
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(strategy_of(parameter) is not None for parameter in parameters):
        raise ValueError(
            f"{name!r} is a plain {type(optimizer).__name__} on a model that went through fleet.distributed_model: the "
            "window, masters, loss scale and schedule would not be saved. Give what fleet.distributed_optimizer "
            "returned, or step= with the Step."
        )


def _bytes_of(models: Mapping[str, nn.Module]) -> int:
    return sum(p.numel() * p.dtype.itemsize for model in models.values() for p in model.parameters())


def _none_usable(folder: Path, passed: list[PassedOver], given: bool) -> str:
    listed = "\n".join(f"  - {one}" for one in passed)
    if given:
        return f"this checkpoint cannot be used:\n{listed}\nLeave the path out to take the newest one that can."
    count = "one checkpoint" if len(passed) == 1 else f"{len(passed)} checkpoints"
    whole = all(one.is_whole for one in passed)
    remedy = "Build what was saved" if whole else "Bring back one of them from a copy"
    return f"{folder} holds {count}, and none can be used:\n{listed}\n{remedy}, or give another folder to begin anew."
