"""Joining the job that a launcher started, and asking who is in it."""

import atexit
import gc
import os
import signal
import weakref
from collections.abc import Mapping

import torch
import torch.distributed as dist

from fleetx.comm import beats, rendezvous, stopping, world
from fleetx.comm.launched import torch_variables
from fleetx.notices import tell_once
from fleetx.own_gpu import own_gpu

_joined: "weakref.ref[dist.ProcessGroup | None] | None" = None  # the group that `init` has started or adopted
_is_ours = False  # whether it has started that one


def init(is_collective: bool = True, *, backend: str | None = None) -> None:
    """Join the workers that fleetrun, torchrun, srun or mpirun started; started alone, be a world of one.

    Where Accelerate, Fabric, Ray Train or other code has brought up the process group, it is used as it is. `backend`
    is torch.distributed's; left out, tensors on a GPU travel by NCCL and those of the host by gloo. Calling it again
    changes nothing.
    """
    if not is_collective:
        raise ValueError("is_collective=False means parameter servers, which FleetX does not have. Leave it out.")
    if _has_started():
        return
    _stop_without_launcher(os.environ)
    if world.is_joined():
        _adopt(backend)
        _begin_job(is_ours=False)
        return
    os.environ.update(torch_variables())
    if not _is_launched(os.environ):
        stopping.begin_job()
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(own_gpu(os.environ, torch.cuda.device_count()))
    beats.expect(True)  # one that does not come keeps all others waiting here
    rendezvous.join(backend)
    beats.expect(False)
    _begin_job(is_ours=True)
    atexit.unregister(shutdown)
    atexit.register(shutdown)


def _stop_without_launcher(environment: Mapping[str, str]) -> None:
    """Be asked to stop, by SIGTERM, when torchrun or mpirun is killed: both leave their workers behind.

    Their workers' parent is the launcher, or a program that stands for one worker. Elsewhere it may be a shell that
    ends long before the training.
    """
    supervised = "TORCHELASTIC_RUN_ID" in environment or "OMPI_COMM_WORLD_RANK" in environment
    if supervised and not beats.has_launcher():  # fleetrun has seen to it already
        from fleetx.launch.parting import die_with_parent  # the launcher's part is imported where it is needed alone

        die_with_parent(os.getppid(), signal.SIGTERM)


def _begin_job(is_ours: bool) -> None:
    """Trainers may run several jobs in one process, each in a group of its own; `init` may be called again in each."""
    global _joined, _is_ours
    if _joined is None or _joined() is not dist.group.WORLD:
        stopping.begin_job()
    _joined, _is_ours = weakref.ref(dist.group.WORLD), is_ours


def _has_started() -> bool:
    """Whether `init` has started the group that is up: other code may have ended that one, and begun another."""
    return _is_ours and world.is_joined() and _joined is not None and _joined() is dist.group.WORLD


def _adopt(backend: str | None) -> None:
    """Train in the group that other code has started, if all workers are in it, and leave it to that code to end."""
    workers, started = world.size(), world.launched_size()
    if workers < started:
        raise RuntimeError(
            f"a process group that is already up must span all workers, and this one has {workers} of the {started} "
            f"that the launcher started. Give init_process_group world_size={started}, or call fleet.init() before any "
            "other code starts torch.distributed."
        )
    config = dist.get_backend_config()
    if backend is not None and _backends(backend) != _backends(config):
        raise ValueError(
            f"backend must be that of the process group that is already up, {config!r}, got {backend!r}. Leave it out, "
            "or call fleet.init() before any other code starts torch.distributed."
        )
    atexit.unregister(gc.collect)
    atexit.register(gc.collect)  # as in `shutdown`: garbage must not hold the group when the interpreter ends
    tell_once("adopted", f"fleet.init() uses the process group that is already up: {workers} workers, {config}.")


def _backends(config: str) -> set[str]:
    """Of `cpu:gloo,cuda:nccl`: gloo and nccl."""
    return {part.rpartition(":")[2].lower() for part in config.split(",")}


def _is_launched(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has said who this worker is; what it said must be possible, else all would wait for ever."""
    given = {name: environment[name] for name in ("RANK", "WORLD_SIZE") if name in environment}
    if not given:
        return False
    if len(given) == 1:
        ((name, value),) = given.items()
        raise ValueError(
            f"a launcher sets RANK and WORLD_SIZE both, and only {name}={value!r} is set. Start this script with "
            "fleetrun or torchrun, call fleet.init() after the trainer has started torch.distributed (Fabric: after "
            f"launch()), or unset {name} to run alone."
        )
    rank, workers = given["RANK"], given["WORLD_SIZE"]
    if not (rank.isdecimal() and workers.isdecimal() and int(rank) < int(workers)):
        raise ValueError(f"RANK must be a number from 0 to WORLD_SIZE - 1, got RANK={rank!r}, WORLD_SIZE={workers!r}.")
    port = environment.get("MASTER_PORT", "0")
    if not (port.isdecimal() and len(port) < 6 and int(port) < 2**16):
        raise ValueError(
            f"MASTER_PORT must be a port from 0 to 65535, the same for all workers, got MASTER_PORT={port!r}. Start "
            "this script with fleetrun or torchrun, which choose one."
        )
    return True


def shutdown() -> None:
    """Leave the job; only a group that `init` started is taken down. Runs by itself when the process ends."""
    if _has_started():
        # Modules that are garbage but not yet collected may hold the group: its threads would then outlive the
        # interpreter, and die with "terminate called" when they release a tensor.
        gc.collect()
        dist.destroy_process_group()


def worker_index() -> int:
    """This worker's number, from 0."""
    return world.rank()


def worker_num() -> int:
    """How many workers train together."""
    return world.size()


def is_first_worker() -> bool:
    """Whether this is worker 0, the one that prints and saves."""
    return world.rank() == 0


@beats.waiting()
def barrier_worker() -> None:
    """Wait until all workers are here."""
    if world.size() > 1:
        dist.barrier()
