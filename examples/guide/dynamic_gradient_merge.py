"""Gradient merge without a program: what the guide's dynamic recipe means to do.

IMAGENET_LIST=ImageNet/train.txt fleetrun --gpus 0,1 examples/guide/dynamic_gradient_merge.py --lr 0.1
"""

import os

import torch

from fleetx import fleet
from fleetx.applications import Resnet50, parse_train_configs

k = 4
configs = parse_train_configs()
fleet.init()
strategy = fleet.DistributedStrategy()
strategy.gradient_merge = True
strategy.gradient_merge_configs = {"k_steps": k, "avg": True}

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = fleet.distributed_model(Resnet50().to(device), strategy)
optimizer = torch.optim.SGD(model.parameters(), lr=configs.lr, momentum=configs.momentum)
optimizer = fleet.distributed_optimizer(optimizer, strategy)
train_loader = model.load_imagenet_from_file(
    os.environ.get("IMAGENET_LIST", "ImageNet/train.txt"), batch_size=configs.batch_size
)

# The guide's loop updates when batch_id % k == 0: after the very first batch, with one gradient, and from then on with
# the sum of k, a step k times too long. Here minimize counts, averages, and reduces over the workers once per window.
# fmt: off
for batch_id, data in enumerate(train_loader()):
    data = {name: tensor.to(device) for name, tensor in data.items()}
    avg_loss = model(**data)["loss"]
    out = optimizer.minimize(avg_loss, items=len(data["labels"]))  # the last batch may be smaller
    if out.updated and fleet.is_first_worker():
        print("[batch %d] loss: %.5f" % (batch_id, out.loss), flush=True)
# fmt: on
optimizer.flush()  # the last window, if it is not full
