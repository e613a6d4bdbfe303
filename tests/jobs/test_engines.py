"""One script, unchanged, under each launcher and inside each trainer: the same weights, bit for bit."""

import importlib.util
import os
import shutil
import sys

import pytest

from tests.jobs import engines
from tests.jobs.engines import CLUSTERS, MPIRUN, SCRIPT, fleetrun, run, weights

pytestmark = [pytest.mark.middle, pytest.mark.xdist_group("engines")]

TORCHRUN = (*engines.TORCHRUN, "--nproc_per_node", "2")
ACCELERATE = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
PORT = str(10000 + os.getpid() % 10000)  # of no other run of these tests; jobs of SLURM and mpirun take others

# What it needs: a program or a module. What starts it. Whether it has started the process group.
ENGINES = {
    "torchrun": (None, [*TORCHRUN, "--master_addr", "127.0.0.1", "--master_port", PORT, SCRIPT], False),
    "torchrun c10d": (None, [*TORCHRUN, "--standalone", SCRIPT], False),
    "mpirun": ("mpirun", [*MPIRUN, SCRIPT], False),
    "Accelerate": (
        "accelerate",
        [sys.executable, "-m", "accelerate.commands.launch", *ACCELERATE.split(), "--main_process_port", "0"]
        + [str(CLUSTERS / "accelerate" / "train.py")],
        True,
    ),
    "Fabric": ("lightning", [*TORCHRUN, "--standalone", str(CLUSTERS / "lightning" / "train.py")], True),
    "Ray Train": ("ray", [sys.executable, str(CLUSTERS / "ray" / "train.py"), "2", "runs"], True),
}
MORE = ("torchrun c10d", "Fabric", "Ray Train")  # each is much like another one


def test_alone_a_script_gives_the_weights_of_one_worker(tmp_path):
    alone = run([sys.executable, SCRIPT], tmp_path)
    assert "process group" not in alone
    assert weights(alone) == weights(fleetrun(1, tmp_path))
    assert weights(alone)[0] == "1"


@pytest.mark.parametrize(
    "engine",
    [pytest.param(engine, marks=pytest.mark.full) if engine in MORE else engine for engine in ENGINES],
)
def test_each_engine_gives_the_weights_of_fleetrun(engine, by_fleetrun, tmp_path, request):
    needs, command, has_started = ENGINES[engine]
    if needs and not (shutil.which(needs) or importlib.util.find_spec(needs)):
        pytest.skip(f"{needs} is not installed")
    if needs == "ray":
        request.getfixturevalue("ray_apart")
    output = run(command, tmp_path)
    assert by_fleetrun[0] == "2"
    assert weights(output) == by_fleetrun
    assert output.count("fleet.init() uses the process group that is already up: 2 workers") == has_started


def test_two_machines_under_slurm_give_the_weights_of_fleetrun(slurm, by_fleetrun, tmp_path):
    assert (
        weights(run(slurm.inside("srun", "-N2", "-n2", sys.executable, SCRIPT, folder=tmp_path), tmp_path))
        == by_fleetrun
    )


def test_tasks_with_the_variables_of_srun_meet(by_fleetrun, tmp_path):
    """Where there is no SLURM: what it would set for two tasks on this machine."""
    # Each task is a process of its own; a shell starts both, and fails if one of them does.
    task = f'SLURM_PROCID=$n SLURM_LOCALID=$n "{sys.executable}" "{SCRIPT}" & tasks="$tasks $!"'
    variables = (
        f"export SLURM_JOB_ID={os.getpid()} SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost"
    )
    script = f"{variables}; for n in 0 1; do {task}; done; for task in $tasks; do wait $task || exit 1; done"
    assert weights(run(["sh", "-c", script], tmp_path)) == by_fleetrun
