import re

import pytest

from fleetx.comm.slurm import first_host, slurm_environment

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
    assert slurm_environment(TASK | {"SLURM_JOB_ID": "11999"})["MASTER_PORT"] == "31999"
    assert slurm_environment(TASK | {"SLURM_JOB_ID": "12000"})["MASTER_PORT"] == "20000"  # connections take 32768 up
    assert slurm_environment(TASK | {"MASTER_ADDR": "a", "MASTER_PORT": "9"})["MASTER_PORT"] == "9"


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_STEP_ID"])
def test_a_batch_script_is_no_task(missing):
    assert slurm_environment({key: value for key, value in TASK.items() if key != missing}) == {}
    assert slurm_environment(TASK | {"SLURM_STEP_NUM_TASKS": "1"}) == {}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("one", "one"),
        ("gpu[03-07,9],x", "gpu03"),
        ("a,b", "a"),
        ("n[1,3]-ib", "n1-ib"),
        ("rack-2[10-11]", "rack-210"),
        ("r[0-1]n[2-3],x", "r0n2"),
        ("a.b-c[1]", "a.b-c1"),
    ],
)
def test_the_first_host_of_a_list(hosts, first):
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("variable", "value", "rule"),
    [
        ("SLURM_PROCID", "five", "SLURM_PROCID must be a whole number, and it is 'five'"),
        ("SLURM_PROCID", "", "SLURM_PROCID must be a whole number, and it is ''"),
        ("SLURM_PROCID", "8", "SLURM_PROCID must be less than the number of tasks, and it is 8 of 8"),
        ("SLURM_LOCALID", "-1", "SLURM_LOCALID must be a whole number, and it is '-1'"),
        ("SLURM_STEP_NUM_TASKS", "8.0", "SLURM_STEP_NUM_TASKS must be a whole number, and it is '8.0'"),
        ("SLURM_STEP_NUM_TASKS", "9" * 20, "SLURM_STEP_NUM_TASKS must be a whole number"),
        ("SLURM_JOB_ID", "41_3", "SLURM_JOB_ID must be a whole number, and it is '41_3'"),
        ("SLURM_STEP_ID", "²", "SLURM_STEP_ID must be a whole number, and it is '²'"),
        ("SLURM_STEP_TASKS_PER_NODE", "four", "SLURM_STEP_TASKS_PER_NODE must be a list such as 4(x2),3"),
        ("SLURM_STEP_NODELIST", "", "SLURM_STEP_NODELIST must name hosts, for example gpu[03-07], and it is ''"),
        ("SLURM_STEP_NODELIST", "gpu[03", "SLURM_STEP_NODELIST must name hosts"),
        ("SLURM_STEP_NODELIST", "gpu[]", "SLURM_STEP_NODELIST must name hosts"),
        ("SLURM_STEP_NODELIST", "a b", "SLURM_STEP_NODELIST must name hosts"),
    ],
)
def test_odd_variables_are_refused_with_rule_value_and_remedy(variable, value, rule):
    with pytest.raises(ValueError, match=re.escape(rule)) as refused:
        slurm_environment(TASK | {variable: value})
    assert str(refused.value).endswith("Leave SLURM's variables as srun sets them, or unset SLURM_PROCID to run alone.")
