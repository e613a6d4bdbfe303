"""Jobs that Open MPI's `mpirun` started: its words for who a worker is, translated into torch's."""

import zlib
from collections.abc import Mapping

from fleetx.comm.variables import port_of_job, whole_number

_WORLD = "OMPI_COMM_WORLD_"
_REMEDY = f"Leave Open MPI's variables as mpirun sets them, or unset {_WORLD}RANK to run alone."


def openmpi_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """torch's variables for a process of `mpirun`; nothing for any other, and for one that is alone."""
    if f"{_WORLD}RANK" not in environment or whole_number(environment, f"{_WORLD}SIZE", _REMEDY) < 2:
        return {}
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    rank, workers, local, local_workers = (whole_number(environment, _WORLD + name, _REMEDY) for name in names)
    if rank >= workers:
        raise ValueError(
            f"{_WORLD}RANK must be less than the number of workers, and it is {rank} of {workers}. {_REMEDY}"
        )
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(local_workers),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or _only_host(workers, local_workers),
        "MASTER_PORT": environment.get("MASTER_PORT") or _port(environment),
    }


def _only_host(workers: int, local_workers: int) -> str:
    if local_workers < workers:
        raise RuntimeError(
            "MASTER_ADDR must name the machine of worker 0 where mpirun starts workers on several, and it is not set: "
            f"this machine has {local_workers} of {workers}. mpirun does not tell workers: give it "
            "-x MASTER_ADDR=HOST."
        )
    return "127.0.0.1"


def _port(environment: Mapping[str, str]) -> str:
    """The same on all workers, and seldom that of another job on the same host."""
    job = environment.get("PMIX_NAMESPACE")
    if not job:
        raise RuntimeError(
            "MASTER_PORT must be a port that is free on the machine of worker 0, and it is not set; nor is "
            "PMIX_NAMESPACE, from which it would follow. Give mpirun -x MASTER_PORT=29500."
        )
    return port_of_job(zlib.crc32(job.encode()))
