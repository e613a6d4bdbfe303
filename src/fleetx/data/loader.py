"""One loader for all data sets: sharded, read ahead by processes, and resumable to the exact next batch.

What a batch holds depends on seed, epoch and sample indices only, and which samples it holds on the plan only. So a
position is two numbers, the epoch and the batches already given, whatever the loading processes have read ahead.
"""

import inspect
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Any, TypedDict, get_args

import torch
from torch.utils.data import DataLoader, default_collate

from fleetx.data.checks import whole_number
from fleetx.data.reading import (
    BatchReader,
    Collate,
    EpochSamples,
    Failure,
    OnError,
    Reply,
    Request,
    outlive_stop_signals,
)
from fleetx.data.sampling import BatchPlan, ShardedBatches
from fleetx.data.travelling import unpacked
from fleetx.notices import did_you_mean, shown


class Loading(TypedDict, total=False):
    """Options that every loader takes, for how batches are read; none changes what they hold."""

    num_workers: int
    """Loading processes; 0 reads in the training process."""
    prefetch: int
    """Batches that each loading process reads ahead."""
    pin_memory: bool
    """Whether batches arrive in page-locked memory, from which copies to the device can overlap with work."""
    timeout: float
    """Seconds to wait for one batch before giving up; 0 waits for ever."""
    start_method: str | None
    """How loading processes are started; torch's default (fork on Linux) where it is None."""


class Loader:
    """Batches of one worker. Iterate it, or call it as the guide does: both give the rest of the current epoch.

    The position moves when a batch is handed over, so leaving a loop and entering it again goes on with the next batch,
    as does a new process after `load_state_dict`. With the last batch of an epoch the position becomes the start of the
    next one. `set_epoch` goes to the start of any epoch. Only the newest iteration may be continued.

    >>> from fleetx.data import ShardedBatches
    >>> loader = Loader(["a", "b", "c"], ShardedBatches(3, 2, shuffle=False), collate=list)
    >>> next(iter(loader)), loader.state_dict()["batches"], list(loader), loader.epoch
    (['a', 'b'], 1, [['c']], 1)
    """

    def __init__(
        self,
        dataset: EpochSamples | Sequence[Any],
        plan: BatchPlan,
        *,
        collate: Collate = default_collate,
        on_error: OnError = "raise",
        num_workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
        timeout: float = 300.0,
        start_method: str | None = None,
    ) -> None:
        check_on_error(on_error)
        _check_plan(plan, dataset)
        num_workers = whole_number("num_workers", num_workers, "0 reads in the training process")
        prefetch = whole_number("prefetch", prefetch, "2 is the default")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float):
            raise TypeError(f"timeout must be a number of seconds, got {shown(timeout)}: 0 waits for ever.")
        for name, value, least in (("num_workers", num_workers, 0), ("prefetch", prefetch, 1), ("timeout", timeout, 0)):
            if not value >= least:
                raise ValueError(f"{name} must be at least {least}, got {value}.")
        self.plan = plan
        self.num_workers = num_workers
        self.prefetch = prefetch
        self.pin_memory = pin_memory
        self.timeout = timeout
        self.start_method = start_method
        self.skipped: Counter[str] = Counter(getattr(dataset, "skipped", {}))
        # Called before a batch is handed over: a checkpoint notes what the model was then.
        self.on_batch: list[Callable[[], None]] = []
        self._reader = BatchReader(dataset, collate, plan.seed, on_error)
        self._epoch = 0
        self._given = 0
        self._last = (0, 0)
        self._iteration = 0
        self._stream: Iterator[Reply | Failure] | None = None

    @property
    def dataset(self) -> EpochSamples | Sequence[Any]:
        """The samples."""
        return self._reader.dataset

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._epoch

    @property
    def last_batch(self) -> tuple[int, int]:
        """Epoch and number of the batch given last; where none was given yet, of the next."""
        return self._last

    def __len__(self) -> int:
        """Batches of the current epoch, those already given included."""
        return self.plan.count(self._epoch)

    def __iter__(self) -> Iterator[Any]:
        self._iteration += 1
        return self._rest_of_epoch(self._iteration)

    def __call__(self) -> Iterator[Any]:
        """The guide's spelling of `iter(loader)`."""
        return iter(self)

    def set_epoch(self, number: int) -> None:
        """Go to the start of an epoch; nothing happens if that is where the loader stands."""
        number = whole_number("the epoch", number, "epochs are counted from 0")
        if number < 0:
            raise ValueError(f"epochs are counted from 0, got {number}.")
        self._go_to(number, 0)

    def state_dict(self, at: tuple[int, int] | None = None) -> dict[str, Any]:
        """The position and what it depends on; equal on all workers. `at` is another one, of an epoch and a batch."""
        epoch, given = (self._epoch, self._given) if at is None else at
        return {
            "epoch": epoch,
            "batches": given,
            "samples": self.plan.samples(epoch, given),
            "plan": self.plan.identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. The number of loading processes may differ; the plan of the batches may not."""
        self.check_state_dict(state)
        self._go_to(state["epoch"], state["batches"])

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise if `load_state_dict` would refuse the position."""
        _check_state(state)
        mine = self.plan.identity()
        differing = [
            f"{name} was {state['plan'].get(name)!r} and is {mine.get(name)!r}"
            for name in sorted({*mine, *state["plan"]})
            if state["plan"].get(name) != mine.get(name)
        ]
        if differing:
            raise ValueError(
                f"a position can only be resumed with the same plan of batches: {'; '.join(differing)}. "
                "Build the loader as it was, or use set_epoch to start an epoch anew."
            )
        epoch, given = state["epoch"], state["batches"]
        if epoch < 0 or not 0 <= given < self.plan.count(epoch):
            raise ValueError(f"there is no batch {given} in epoch {epoch}: it has {self.plan.count(max(epoch, 0))}.")
        if state["samples"] != self.plan.samples(epoch, given):
            raise ValueError(
                f"{state['samples']} samples had been given, but {given} batches of epoch {epoch} now hold "
                f"{self.plan.samples(epoch, given)}: they were dealt otherwise. Resume with the plan that was saved, "
                "or use set_epoch."
            )

    def close(self) -> None:
        """End the loading processes; the position stays. Iterating starts new ones."""
        self._stream = None

    def _go_to(self, epoch: int, given: int) -> None:
        if (epoch, given) != (self._epoch, self._given):
            self.close()
            self._iteration += 1
            self._epoch, self._given = epoch, given
            self._last = (epoch, given)

    def _rest_of_epoch(self, iteration: int) -> Iterator[Any]:
        for _ in range(len(self) - self._given):
            if iteration != self._iteration:
                raise RuntimeError(
                    "a loader has one position, and a newer iteration (or set_epoch, load_state_dict) has moved it: "
                    "go on with that one, or build a loader of its own for each loop."
                )
            batch = self._next_batch()
            for tell in self.on_batch:
                tell()
            yield batch

    def _next_batch(self) -> Any:
        reply = self._next_reply()
        if isinstance(reply, Failure):
            self.close()
            raise reply.kind(reply.message)
        self.skipped.update(reply.skipped)
        self._last = (self._epoch, self._given)
        self._given += 1
        if self._given == len(self):
            self._epoch, self._given = self._epoch + 1, 0
        return unpacked(reply.batch) if self.num_workers else reply.batch

    def _next_reply(self) -> Reply | Failure:
        try:
            if self._stream is None:
                self._stream = self._open_stream()
            return next(self._stream)
        except BaseException as error:
            # A stream that failed may have lost a batch; the position has not, so a retry opens a new stream there.
            self.close()
            if isinstance(error, RuntimeError) and str(error).startswith("DataLoader "):
                raise RuntimeError(self._lost_process(error)) from error
            raise

    def _lost_process(self, error: RuntimeError) -> str:
        return (
            f"a loading process was lost while batch {self._given} of epoch {self._epoch} was awaited: {error}. "
            f"Too little memory (also in /dev/shm) is the usual cause: lower num_workers (now {self.num_workers}) or "
            f"prefetch (now {self.prefetch}). If reading is slow, raise timeout (now {self.timeout:g} s)."
        )

    def _open_stream(self) -> Iterator[Reply | Failure]:
        parallel = self.num_workers > 0
        loader = DataLoader(
            self._reader,
            batch_size=None,  # the reader makes whole batches
            sampler=_Requests(self.plan, self._epoch, self._given),  # pyrefly: ignore[bad-argument-type]
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch if parallel else None,
            pin_memory=self.pin_memory,
            timeout=self.timeout if parallel else 0,
            worker_init_fn=partial(outlive_stop_signals, os.getpid()),
            multiprocessing_context=self.start_method if parallel else None,
            # Without its own generator torch would draw a seed from the global one, and so disturb the training's.
            generator=torch.Generator(),
        )
        with warnings.catch_warnings():
            # Python 3.12 warns of forks beside threads. Loading processes touch no lock of theirs: they only decode.
            warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
            return iter(loader)


class _Requests:
    """What to read, from a position on without end: reading ahead does not stop between two epochs."""

    def __init__(self, plan: BatchPlan, epoch: int, given: int) -> None:
        self._plan = plan
        self._epoch = epoch
        self._given = given

    def __iter__(self) -> Iterator[Request]:
        epoch, given = self._epoch, self._given
        while True:
            for number, indices in enumerate(self._plan.epoch(epoch)):
                if number >= given:
                    yield Request(epoch, indices.tolist())
            epoch, given = epoch + 1, 0


def check_loading(loading: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Raise for a keyword that neither the loading function nor `Loading` knows."""
    own = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    for name in loading:
        if name not in Loading.__annotations__:
            remedy = did_you_mean(name, [*own, *Loading.__annotations__])
            raise TypeError(f"{function.__name__} has no argument {name!r}; {remedy}")


def _check_plan(plan: Any, dataset: Any) -> None:
    """Raise if it is no plan, or if it is one for another number of samples."""
    missing = [name for name in ("seed", "epoch", "count", "samples", "identity") if not hasattr(plan, name)]
    if missing:
        raise TypeError(
            f"a Loader takes a plan of batches, got {shown(plan)} ({type(plan).__name__}), which has no "
            f"{', '.join(missing)}: give ShardedBatches(len(data), global_batch)."
        )
    if isinstance(plan, ShardedBatches) and isinstance(dataset, Sized) and plan.size != len(dataset):
        raise ValueError(
            f"the plan must be made for as many samples as there are: it is for {plan.size}, and the data set has "
            f"{len(dataset)}. Give ShardedBatches({len(dataset)}, ...); for a part of the data give that part, "
            "torch.utils.data.Subset say."
        )


def _check_state(state: Any) -> None:
    """Raise unless it is something that `state_dict` may have given."""
    expected = ("epoch", "batches", "samples", "plan")
    if not isinstance(state, Mapping):
        problem = f"it is {shown(state)} ({type(state).__name__})"
    elif missing := [name for name in expected if name not in state]:
        problem = f"it has no {', '.join(missing)}"
    elif wrong := [name for name in expected[:3] if isinstance(state[name], bool) or not isinstance(state[name], int)]:
        problem = f"its {wrong[0]} is {shown(state[wrong[0]])} and not a whole number"
    elif not isinstance(state["plan"], Mapping):
        problem = f"its plan is {shown(state['plan'])} and not a dict"
    else:
        return
    raise ValueError(
        f"a loader's state is a dict with {', '.join(expected)}; {problem}. Give what a loader's state_dict() returned."
    )


def check_on_error(on_error: str) -> None:
    """Raise unless it names what to do about bad samples."""
    if on_error not in get_args(OnError):
        raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}.")


def _as_it_is(reply: Any) -> Any:
    return reply
