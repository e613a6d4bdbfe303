"""Jobs that `srun` started: SLURM's words for who a worker is, translated into torch's."""

import re
from collections.abc import Mapping

from fleetx.comm.variables import port_of_job, whole_number

_REMEDY = "Leave SLURM's variables as srun sets them, or unset SLURM_PROCID to run alone."


def slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """torch's variables for a task of `srun`; nothing for any other process, a batch script among them."""
    if "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment:
        return {}
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS", 1)
    if tasks < 2:
        return {}
    rank, local = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_LOCALID", 0)
    if rank >= tasks:
        raise ValueError(f"SLURM_PROCID must be less than the number of tasks, and it is {rank} of {tasks}. {_REMEDY}")
    hosts = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environment else "SLURM_JOB_NODELIST"
    job, step = _number(environment, "SLURM_JOB_ID", 0), _number(environment, "SLURM_STEP_ID")
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(_first_count(environment.get("SLURM_STEP_TASKS_PER_NODE", str(tasks)))),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(environment.get(hosts, "localhost"), hosts),
        "MASTER_PORT": environment.get("MASTER_PORT") or port_of_job(job + step),
    }


def first_host(hosts: str, variable: str = "SLURM_STEP_NODELIST") -> str:
    """The first name of SLURM's short form: `gpu[03-07,9],other` begins with `gpu03`."""
    match = re.match(r"(?:[\w.-]+|\[[\w.-]+(?:,[\w.-]+)*\])+(?=,|$)", hosts)
    if match is None:
        raise ValueError(f"{variable} must name hosts, for example gpu[03-07], and it is {hosts!r}. {_REMEDY}")
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", match.group())


def _number(environment: Mapping[str, str], variable: str, default: int | None = None) -> int:
    return whole_number(environment, variable, _REMEDY, default)


def _first_count(text: str) -> int:
    """`4(x2),3` says 4 tasks on each of two hosts, then 3."""
    match = re.match(r"([0-9]{1,9})(?:\(x[0-9]+\))?(?:,|$)", text)
    if match is None:
        raise ValueError(f"SLURM_STEP_TASKS_PER_NODE must be a list such as 4(x2),3, and it is {text!r}. {_REMEDY}")
    return int(match[1])
