"""Jobs that `srun` started: SLURM's words for who a worker is, translated into torch's."""

import re
from collections.abc import Mapping

_FIRST_PORT, _PORTS = 20000, 20000


def slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """torch's variables for a task of `srun`; nothing for any other process, a batch script among them."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))
    if "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment or int(tasks) < 2:
        return {}
    hosts = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "localhost"))
    job, step = environment.get("SLURM_JOB_ID", "0"), environment["SLURM_STEP_ID"]
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": _first_count(environment.get("SLURM_STEP_TASKS_PER_NODE", tasks)),
        # The same on all tasks, and seldom that of another job on the same host.
        "MASTER_ADDR": environment.get("MASTER_ADDR", first_host(hosts)),
        "MASTER_PORT": environment.get("MASTER_PORT", str(_FIRST_PORT + (int(job) + int(step)) % _PORTS)),
    }


def first_host(hosts: str) -> str:
    """The first name of SLURM's short form: `gpu[03-07,9],other` begins with `gpu03`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", hosts)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST should name hosts, for example gpu[03-07], and it is {hosts!r}.")
    return match[1] + (match[2] or "") + (match[3] or "")


def _first_count(text: str) -> str:
    """`4(x2),3` says 4 tasks on each of two hosts, then 3."""
    match = re.match(r"\d+", text)
    return match.group() if match else "1"
