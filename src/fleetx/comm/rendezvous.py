"""Meet in a store that earlier attempts of the job have used: only workers that are alive now take part.

torchrun keeps one store for all attempts (torch 2.13). Workers that are started again find the addresses of processes
that have ended, and fail. The number of the attempt does not help: agents on several machines count it differently. So
each worker draws a name of its own, the first one asks each for an answer that only a living worker gives, and the keys
of this attempt begin with the first one's name.
"""

import os
import time
import uuid

import torch.distributed as dist

from fleetx.comm import beats
from fleetx.comm.beats import Wait

# Seconds for which workers wait for each other; torch waits as long for a store.
PATIENCE = 1800.0
_TICK = 0.05


@beats.waiting(Wait.TO_JOIN)
def join(backend: str | None) -> None:
    """Start the process group of the workers that the launcher's variables describe."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or beats.has_launcher():  # a store for each attempt
        dist.init_process_group(backend)
        return
    store, rank, workers = next(dist.rendezvous("env://"))
    own = dist.PrefixStore(agree(dist.PrefixStore(f"fleetx of {workers}", store), rank, workers), store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=workers)


def agree(store: dist.Store, rank: int, workers: int, patience: float = PATIENCE) -> str:
    """Wait for all workers; gives the name of this attempt, the same on all of them and of no earlier one."""
    name, end = uuid.uuid4().hex, time.monotonic() + patience
    if rank == 0:
        _ask_all(store, name, workers, end, patience)
        return name
    store.set(f"worker {rank}", name)
    first = ""
    while not (first and store.check([f"{first} has all"])):
        asking = _value(store, f"asks {name}")
        if asking != first:  # also if the first worker was itself started again meanwhile
            first = asking
            store.set(f"{first} has {rank}", "")
        _pause(end, patience, [0])
    return first


def _ask_all(store: dist.Store, name: str, workers: int, end: float, patience: float) -> None:
    asked: dict[int, str] = {}
    while missing := [rank for rank in range(1, workers) if not store.check([f"{name} has {rank}"])]:
        for rank in missing:
            found = _value(store, f"worker {rank}")
            if found != asked.get(rank, ""):
                asked[rank] = found
                store.set(f"asks {found}", name)
        _pause(end, patience, missing)
    store.set(f"{name} has all", "")


def _value(store: dist.Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _pause(end: float, patience: float, missing: list[int]) -> None:
    if time.monotonic() > end:
        raise TimeoutError(
            f"all workers that the launcher has started must call fleet.init(), and within {patience:g} s these have "
            f"not: {', '.join(map(str, missing))}. Look into their output, or for a machine that was not started."
        )
    time.sleep(_TICK)
