"""What started this process, and what it says of the job: torch's variables, whatever the launcher calls them."""

import os
from collections.abc import Mapping

from fleetx.comm.openmpi import openmpi_environment
from fleetx.comm.slurm import slurm_environment


def torch_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """RANK, WORLD_SIZE and their kind, as far as a launcher has given them in any form; without one nothing.

    A launcher may have been started by another, as torchrun by srun, and the inner one knows the workers: torch's own
    variables come first. mpirun starts its daemons by srun, so that its workers may find both kinds.
    """
    if "RANK" not in environment:
        _refuse_other_mpi(environment)
        found = openmpi_environment(environment) or slurm_environment(environment)
        if found:
            return found
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: environment[name] for name in names if name in environment}


def _refuse_other_mpi(environment: Mapping[str, str]) -> None:
    """The launcher of MPICH and Intel MPI does not name the job: its workers would each train alone."""
    if "MPI_LOCALNRANKS" in environment and environment.get("PMI_SIZE", "1") != "1":
        raise RuntimeError(
            "of MPI's launchers only Open MPI's mpirun says what is needed to train together, and another one has "
            f"started this process (PMI_SIZE={environment['PMI_SIZE']!r}, as MPICH and Intel MPI set it). Use "
            "torchrun, srun or Open MPI's mpirun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT."
        )
