"""The guide's BERT script: a static program, Adam, two workers.

DATA_DIR=bert/data VOCAB_PATH=bert/vocab.txt fleetrun --gpus 0,1 examples/guide/bert.py --lr 1e-4
"""
# ruff: noqa: F401, I001 - the guide's imports, in the guide's order

# fmt: off
import os  # repair: was missing
import numpy as np
from fleetx.compat import fleet_lightning as lighting
from fleetx.compat import fluid
from fleetx.compat import role_maker
import time
from fleetx.compat import fleet
from fleetx.compat import paddle

configs = lighting.parse_train_configs()
role = role_maker.PaddleCloudRoleMaker(is_collective=True)
fleet.init(role)

model = lighting.applications.Bert_large()
#model = lighting.applications.Bert_base()

data_loader = model.load_digital_dataset_from_file(
    data_dir=os.environ.get('DATA_DIR', 'bert/data/'),  # repair: was a folder of its author
    vocab_path=os.environ.get('VOCAB_PATH', 'bert/vocab.txt'),  # repair: the same
    max_seq_len=512,
    batch_size=12,
)

place = fluid.CUDAPlace(int(os.environ.get('FLAGS_selected_gpus', 0)))
exec_strategy = fluid.ExecutionStrategy()
exec_strategy.num_threads = 2
exec_strategy.num_iteration_per_drop_scope = 1
dist_strategy = fleet.DistributedStrategy()
dist_strategy.execution_strategy = exec_strategy
dist_strategy.recompute = False
dist_strategy.nccl_comm_num = 3
dist_strategy.use_hierarchical_allreduce = True

optimizer = fluid.optimizer.Adam(learning_rate=configs.lr)
optimizer = fleet.distributed_optimizer(optimizer, dist_strategy)
optimizer.minimize(model.loss)

exe = fluid.Executor(place)
exe.run(fluid.default_startup_program())

total_time = 0  # repair: was never set
scope = fluid.global_scope()  # repair: was never made
for i, data in enumerate(data_loader()):
    if i >= 10:
        start_time = time.time()
    cost_val = exe.run(paddle.default_main_program(),
                       feed=data,
                       fetch_list=[model.loss.name])
    if i >= 10:
        end_time = time.time()
        total_time += (end_time - start_time)
        print(
            "worker_index: %d, step%d cost = %f, total time cost = %f, step per second: %f, speed: %f"
            % (fleet.worker_index(), i, cost_val[0], total_time,
               (i - 9) / total_time, 1 / (end_time - start_time)))
    print("step: %d, encoder_layer_16_ffn_fc_1.w_0: %s" % (
         i, scope.var("encoder_layer_16_ffn_fc_1.w_0").get_tensor().__array__()))
