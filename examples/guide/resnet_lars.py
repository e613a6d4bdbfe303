"""The guide's LARS script: ResNet-50 as a static program, two workers.

IMAGENET_LIST=ImageNet/train.txt fleetrun --gpus 0,1 examples/guide/resnet_lars.py
"""
# ruff: noqa: I001 - the guide's imports, in the guide's order

# fmt: off
import os
import fleetx.compat as X
from fleetx.compat import fluid
from fleetx.compat import role_maker
import time
from fleetx.compat import fleet
from fleetx.compat import paddle  # repair: was missing

model = X.applications.Resnet50()
data_loader = model.load_imagenet_from_file(  # repair: was called loader, and used as data_loader
    os.environ.get('IMAGENET_LIST', "/pathto/ImageNet/train.txt"))  # repair: the path can be given

# FleetX
configs = X.parse_train_configs()
role = role_maker.PaddleCloudRoleMaker(is_collective=True)
fleet.init(role)
dist_strategy = fleet.DistributedStrategy()

#
dist_strategy.lars = True
dist_strategy.lars_configs = {
                    "lars_coeff": 0.001,
                    "lars_weight_decay": 0.0005,
                    "exclude_from_weight_decay": ['batch_norm', '.b_0']
                }

optimizer = paddle.optimizer.Momentum(learning_rate=0.01, momentum=0.9)
optimizer = fleet.distributed_optimizer(optimizer, dist_strategy)
optimizer.minimize(model.loss)

place = fluid.CUDAPlace(int(os.environ.get('FLAGS_selected_gpus', 0)))
exe = fluid.Executor(place)
exe.run(fluid.default_startup_program())

total_time = 0
for i, data in enumerate(data_loader()):
    start_time = time.time()
    cost_val = exe.run(paddle.static.default_main_program(),
                       feed=data,
                       fetch_list=[model.loss.name])
    end_time = time.time()
    total_time += (end_time - start_time)
    print(
        "worker_index: %d, step%d cost = %f, total time cost = %f, step per second: %f, speed: %f"
        % (fleet.worker_index(), i, cost_val[0], total_time,
           (i + 1) / total_time, 1 / (end_time - start_time)))  # repairs: was i - 9, though all are timed; ")" missing
