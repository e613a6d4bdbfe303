"""Ray Train starts the workers and the process group, and starts them again when a worker or a machine fails.

python examples/clusters/ray/train.py WORKERS FOLDER    # FOLDER: one that all machines see
"""

import os
import runpy
import sys
from pathlib import Path

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fleetx import fleet

SCRIPT = Path(__file__).resolve().parents[1] / "train.py"


def ask_ray(*_: object) -> None:
    """After each update: is Ray about to lose a machine of this job? All workers must ask equally often."""
    if ray.train.get_preemption_info() is not None:
        fleet.request_stop()


def train(config: dict[str, str]) -> None:
    """What each worker runs; returning means that the job is done."""
    os.environ["CHECKPOINTS"] = config["checkpoints"]  # Ray has changed the working directory
    register_optimizer_step_post_hook(ask_ray)  # in a loop of your own, call it after minimize()
    runpy.run_path(str(SCRIPT))  # or your own training, from fleet.init() on


if __name__ == "__main__":
    workers, folder = int(sys.argv[1]), Path(sys.argv[2]).resolve()
    ray.init()  # joins the cluster of this machine, or that of RAY_ADDRESS; else it starts one here
    TorchTrainer(
        train,
        train_loop_config={"checkpoints": str(folder / "digits" / "checkpoints")},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu="GPU" in ray.cluster_resources()),
        run_config=RunConfig(name="digits", storage_path=str(folder), failure_config=FailureConfig(max_failures=3)),
    ).fit()
