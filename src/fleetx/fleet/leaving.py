"""Ending together: a job that is asked to stop, and workers whose data ends at different times."""

import atexit
import logging
import os
import sys
import threading
from collections.abc import Generator, Iterable
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from fleetx.comm import beats, sharing, side_store, stopping, world

T = TypeVar("T")
# Seconds for which a worker that has saved waits for those that have not. Schedulers are less patient.
_OTHERS_SAVE = 300.0


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


def leave() -> NoReturn:
    """End this process as one that is not done: after `stop_requested` and a save, on all workers.

    The exit code is 128 plus the number of the signal that this worker got, else 143 (SIGTERM): schedulers start such a
    process again, while 0 means that the job is complete. Under `fleetrun`, which knows who asked, the job's exit code
    is the same as with `raise SystemExit`. Before that, saves in the background are waited for, and elsewhere than
    under `fleetrun` the other workers too: many launchers end all workers with the first.

    >>> from fleetx import fleet
    >>> if fleet.stop_requested():
    ...     fleet.leave()
    """
    if not (stopping.is_wanted() or stopping.is_agreed()):
        stopping.request()
    from fleetx.checkpoint import background  # which imports this package

    background.wait_for_all()
    if not beats.has_launcher() and world.size() > 1 and (missing := side_store.leave_together(_OTHERS_SAVE)):
        logging.getLogger("fleetx").error(
            f"fleet.leave() must be called by all workers, and of {world.size()} these had not done so within "
            f"{_OTHERS_SAVE:g} s: {', '.join(map(str, missing))}. This one leaves without them."
        )
    code = 0 if beats.has_launcher() else stopping.exit_code()
    leaving = SystemExit(code)
    if threading.current_thread() is not threading.main_thread():
        _end_process_if_uncaught(leaving, code)
    raise leaving


def _end_process_if_uncaught(leaving: SystemExit, code: int) -> None:
    """Python ends only the thread. Trainers that run scripts in threads catch it, and report that it is not done."""
    before = threading.excepthook

    def end(uncaught: threading.ExceptHookArgs) -> None:
        if uncaught.exc_value is not leaving:
            before(uncaught)
            return
        try:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    threading.excepthook = end


def evenly(batches: Iterable[T]) -> Generator[T]:
    """The batches of this worker, as long as all workers have one: the first that runs out ends the epoch for all.

    For loops in which each worker brings its own data and nobody knows how many batches there are. Each batch costs one
    short message between the workers. It is for models that need all workers in each batch, with `sync_batch_norm` say:
    else `flush` waits for the others.

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
