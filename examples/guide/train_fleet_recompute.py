"""Recompute and mixed precision in a static program: ResNet-50, cut at its sixteen blocks, two workers.

IMAGENET_LIST=ImageNet/train.txt fleetrun --gpus 0,1 examples/guide/train_fleet_recompute.py --lr 0.1
"""
# ruff: noqa: UP032 - the guide's way to write text

import os

import numpy as np

import fleetx.compat as X
from fleetx.compat import fleet, paddle


def accuracy(logits, labels, k):
    """The share of samples whose label is among the k largest logits."""
    best = np.argsort(-logits, axis=1)[:, :k]
    return (best == labels[:, None]).any(axis=1).mean()


epochs = 90
configs = X.parse_train_configs()
fleet.init(is_collective=True)
model = X.applications.Resnet50()
train_loader = model.load_imagenet_from_file(
    os.environ.get("IMAGENET_LIST", "ImageNet/train.txt"), batch_size=configs.batch_size
)

# fmt: off
checkpoint_idx = ["2a", "2b", "2c", "3a", "3b", "3c", "3d", "4a", "4b", "4c", "4d", "4e", "4f", "5a", "5b", "5c"]
checkpoints = ['res{}.add.output.5.tmp_0'.format(idx) for idx in checkpoint_idx]
strategy = fleet.DistributedStrategy()
strategy.recompute = True
strategy.amp = True
strategy.recompute_configs = {
    "checkpoints": checkpoints,
    "enable_offload": False,
    "checkpoint_shape": []
    }
# fmt: on

optimizer = paddle.optimizer.Momentum(learning_rate=configs.lr, momentum=configs.momentum, weight_decay=1e-4)
optimizer = fleet.distributed_optimizer(optimizer, strategy)
optimizer.minimize(model.loss)
if fleet.is_first_worker():
    print(strategy)

place = paddle.CUDAPlace(int(os.environ.get("FLAGS_selected_gpus", 0)))
exe = paddle.static.Executor(place)
exe.run(paddle.static.default_startup_program())

for epoch in range(epochs):
    for batch_id, data in enumerate(train_loader()):
        loss, logits = exe.run(
            paddle.static.default_main_program(),
            feed=data,
            fetch_list=[model.loss.name, "fc"],  # "fc": the output of the module of that name
        )
        if batch_id % 5 == 0 and fleet.is_first_worker():
            labels = data["labels"].numpy()
            acc1, acc5 = accuracy(logits, labels, 1), accuracy(logits, labels, 5)
            print(
                "[Epoch %d, batch %d] loss: %.5f, acc1: %.5f, acc5: %.5f" % (epoch, batch_id, loss, acc1, acc5),
                flush=True,
            )
