"""Ending together: a job that is asked to stop, and workers whose data ends at different times."""

from collections.abc import Generator, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist

from fleetx.comm import beats, sharing, stopping, world

T = TypeVar("T")


def stop_requested() -> bool:
    """Whether the job was asked to stop (Ctrl-C, SIGTERM): then save, and leave the loop.

    Call it after each update, on all workers. All of them get the same answer at the same update, since it travels with
    the gradients of `fleet.distributed_optimizer`; on a GPU it comes one update late. From the first call on these
    signals no longer end the process by themselves. A later job of the same process, from its `fleet.init()` on, was
    not asked.

    >>> from fleetx import fleet
    >>> fleet.stop_requested()
    False
    """
    return stopping.answer()


def request_stop() -> None:
    """Ask all workers to stop, as SIGTERM to this worker would; from any thread, also in a signal handler of your own.

    For an engine's notice that this machine is about to go, and for Ray Train, whose training thread gets no signals.
    All workers see it in `stop_requested` after the same update; a script that never asks there goes on.

    >>> from fleetx import fleet
    >>> fleet.request_stop()  # doctest: +SKIP
    """
    stopping.request()


def evenly(batches: Iterable[T]) -> Generator[T]:
    """The batches of this worker, as long as all workers have one: the first that runs out ends the epoch for all.

    For loops in which each worker brings its own data and nobody knows how many batches there are. Each batch costs one
    short message between the workers. `minimize` does not need it: there `flush` waits for the others.

    >>> from fleetx import fleet
    >>> list(fleet.evenly("abc"))
    ['a', 'b', 'c']
    """
    iterator = iter(batches)
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            _all_have_one(False)
            return
        if not _all_have_one(True):
            return
        yield batch


def alive() -> None:
    """Tell the launcher that this worker makes progress, in long phases without training: evaluation, say."""
    beats.beat()


def _all_have_one(mine: bool) -> bool:
    beats.beat()
    if world.size() == 1:
        return mine
    return bool(sharing.least(int(mine), _device()))


def _device() -> torch.device:
    """Where messages can come from: the host, unless only NCCL is up."""
    on_host = "cpu" in dist.get_backend_config() or dist.get_backend() == "gloo"
    return torch.device("cpu" if on_host else "cuda")
