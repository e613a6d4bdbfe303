import pytest

from fleetx.fleet.slurm import first_host, slurm_environment

TASK = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "41",
}


def test_a_task_of_srun_knows_who_it_is():
    assert slurm_environment(TASK) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "20041",
    }
    assert slurm_environment(TASK | {"MASTER_ADDR": "a", "MASTER_PORT": "9"})["MASTER_PORT"] == "9"


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_STEP_ID"])
def test_a_batch_script_is_no_task(missing):
    assert slurm_environment({key: value for key, value in TASK.items() if key != missing}) == {}
    assert slurm_environment(TASK | {"SLURM_STEP_NUM_TASKS": "1"}) == {}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("one", "one"), ("gpu[03-07,9],x", "gpu03"), ("a,b", "a"), ("n[1,3]-ib", "n1-ib"), ("rack-2[10-11]", "rack-210")],
)
def test_the_first_host_of_a_list(hosts, first):
    assert first_host(hosts) == first
