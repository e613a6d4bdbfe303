"""Gradient merge in a static program: ResNet-50, four micro-batches per update, two workers.

IMAGENET_LIST=ImageNet/train.txt fleetrun --gpus 0,1 examples/guide/train_fleet_gradient_merge.py --lr 0.1
"""

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
strategy = fleet.DistributedStrategy()
# 使用Gradient merge策略并设置相关参数
strategy.gradient_merge = True
strategy.gradient_merge_configs = {"k_steps": 4, "avg": True}
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
exe.optimizer().flush()  # a last window of fewer than four batches
