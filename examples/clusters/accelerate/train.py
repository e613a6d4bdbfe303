"""Accelerate has started the process group: fleet.init() uses it.

accelerate launch --multi_gpu --num_processes 2 examples/clusters/accelerate/train.py
"""

import runpy
from pathlib import Path

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=not torch.cuda.is_available())
runpy.run_path(str(Path(__file__).parents[1] / "train.py"))  # or your own training, from fleet.init() on
accelerator.end_training()
