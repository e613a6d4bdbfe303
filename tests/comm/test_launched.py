import pytest

from fleetx.comm import world
from fleetx.comm.launched import torch_variables
from fleetx.data.sampling import place
from fleetx.fleet.model import require_joined
from tests.comm.test_openmpi import WORKER
from tests.comm.test_slurm import TASK

BY_TORCH = {"RANK": "1", "WORLD_SIZE": "2"}


def test_the_launcher_that_was_started_last_knows_the_workers():
    """torchrun below srun or mpirun, and mpirun, whose daemons srun starts."""
    assert torch_variables({"PATH": "/bin"}) == {}
    assert torch_variables(TASK)["WORLD_SIZE"] == "8"
    assert torch_variables(TASK | WORKER | {"SLURM_PROCID": "0"})["RANK"] == "5"
    assert torch_variables(TASK | WORKER | BY_TORCH) == BY_TORCH | {"MASTER_ADDR": "gpu03"}


@pytest.mark.parametrize("also", [{}, TASK])
def test_workers_of_other_mpis_do_not_each_train_alone(also):
    with pytest.raises(RuntimeError, match=r"of MPI's launchers only Open MPI's.*PMI_SIZE='2'.*Use torchrun, srun or"):
        torch_variables(also | {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})


@pytest.mark.parametrize("environment", [TASK, WORKER], ids=["srun", "mpirun"])
def test_all_launchers_are_asked_before_workers_have_joined(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert place(None, None) == (5, 8)
    assert not world.is_first()
    with pytest.raises(RuntimeError, match="the launcher started 8 workers, but this one has not joined them"):
        require_joined()
