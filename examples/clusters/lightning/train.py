"""Lightning Fabric has started the process group: fleet.init() uses it.

torchrun --nproc_per_node 2 examples/clusters/lightning/train.py
"""

import os
import runpy
from pathlib import Path

from lightning.fabric import Fabric

fabric = Fabric(devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), strategy="ddp")
fabric.launch()
runpy.run_path(str(Path(__file__).parents[1] / "train.py"))  # or your own training, from fleet.init() on
