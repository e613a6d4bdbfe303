import re

import pytest

from fleetx.comm.openmpi import openmpi_environment

WORKER = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "2094792705",
    "MASTER_ADDR": "gpu03",
}


def without(*names):
    return {name: value for name, value in WORKER.items() if name not in names}


def test_a_worker_of_mpirun_knows_who_it_is():
    found = openmpi_environment(WORKER)
    port = found.pop("MASTER_PORT")
    assert found == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu03",
    }
    assert 20000 <= int(port) < 32000  # Linux gives connections the ports from 32768
    assert openmpi_environment(WORKER | {"OMPI_COMM_WORLD_RANK": "6"})["MASTER_PORT"] == port
    assert openmpi_environment(WORKER | {"PMIX_NAMESPACE": "prterun-gpu03-17@1"})["MASTER_PORT"] != port
    assert openmpi_environment(WORKER | {"MASTER_PORT": "9"})["MASTER_PORT"] == "9"


def test_on_one_machine_workers_meet_on_its_loopback():
    one_machine = without("MASTER_ADDR") | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
    assert openmpi_environment(one_machine)["MASTER_ADDR"] == "127.0.0.1"


def test_other_processes_and_one_alone_are_no_workers():
    assert openmpi_environment({}) == {}
    assert openmpi_environment(WORKER | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}) == {}


@pytest.mark.parametrize(
    ("environment", "error", "message"),
    [
        (without("MASTER_ADDR"), RuntimeError, "this machine has 4 of 8. mpirun does not tell workers: give it -x"),
        (without("PMIX_NAMESPACE"), RuntimeError, "Give mpirun -x MASTER_PORT=29500."),
        (
            WORKER | {"OMPI_COMM_WORLD_RANK": "8"},
            ValueError,
            "less than the number of workers, and it is 8 of 8",
        ),
        (WORKER | {"OMPI_COMM_WORLD_SIZE": "many"}, ValueError, "SIZE must be a whole number, and it is 'many'. Leave"),
        (without("OMPI_COMM_WORLD_LOCAL_RANK"), ValueError, "LOCAL_RANK must be a whole number, and it is not set"),
    ],
)
def test_odd_variables_are_refused_with_rule_value_and_remedy(environment, error, message):
    with pytest.raises(error, match=re.escape(message)):
        openmpi_environment(environment)
