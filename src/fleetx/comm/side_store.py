"""The store of the process group, on a connection of its own: for words between workers that need no collective.

A request to a store whose holder stands still never returns (torch 2.13: timeouts bound `wait` alone). So each request
runs in a thread that is given up after a while.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from fleetx.comm import world

T = TypeVar("T")
# Seconds that an answer of the store may take.
_ANSWERS = 10.0
_TICK = 0.02


def within(seconds: float, request: Callable[[], T]) -> T:
    """What the store answers to a request; raises if it takes longer, or is gone."""
    answers: list[T] = []
    errors: list[Exception] = []

    def ask() -> None:
        try:
            answers.append(request())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=ask, name="fleetx-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answers[0]


def connect() -> dist.Store:
    """A connection to the store of the group that is up."""
    own: Any = _get_default_store()  # torch's stubs do not know that it can be cloned
    return within(_ANSWERS, lambda: dist.PrefixStore("fleetx", own.clone()))


def leave_together(limit: float) -> list[int]:
    """Wait until all workers have called this; gives those that have not within `limit` seconds.

    Many launchers end all workers with the first that ends: nobody may go while another one still saves.
    """
    names = [f"leaves/{rank}" for rank in range(world.size())]

    def wait() -> list[int]:
        store.set(names[world.rank()], "")
        with contextlib.suppress(dist.DistStoreError):
            store.wait(names, timedelta(seconds=limit))
        missing = [rank for rank, name in enumerate(names) if not store.check([name])]
        here = store.add("has its answer", 1)
        while world.rank() == 0 and here < len(names) - len(missing):  # it may hold the store for the others
            time.sleep(_TICK)
            here = store.add("has its answer", 0)
        return missing

    with contextlib.suppress(TimeoutError, dist.DistError):  # the store has gone with a worker that did not wait
        store = connect()
        return within(limit + _ANSWERS, wait)
    return []
