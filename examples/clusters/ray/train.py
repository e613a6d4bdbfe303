"""Ray Train has started the process group on each worker: fleet.init() uses it.

python examples/clusters/ray/train.py 2
"""

import runpy
import sys
from pathlib import Path

import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

SCRIPT = Path(__file__).resolve().parents[1] / "train.py"


def train() -> None:
    """What each worker runs."""
    runpy.run_path(str(SCRIPT))  # or your own training, from fleet.init() on


if __name__ == "__main__":
    scaling = ScalingConfig(num_workers=int(sys.argv[1]), use_gpu=torch.cuda.is_available())
    TorchTrainer(train, scaling_config=scaling).fit()
