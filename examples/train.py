"""The six lines in a whole script. Run it alone, or on two workers:

python examples/train.py
fleetrun --nproc_per_node 2 examples/train.py
"""

import torch
from torch.nn import functional

from fleetx import fleet
from fleetx.data import ShardedBatches, load_digits

fleet.init()
strategy = fleet.DistributedStrategy()
strategy.gradient_merge = True
strategy.gradient_merge_configs = {"k_steps": 4, "avg": True}
strategy.amp = True
strategy.amp_configs = {"dtype": "bfloat16"}
strategy.lamb = True
strategy.lamb_configs = {"exclude_from_weight_decay": ["norm", "bias"]}

torch.manual_seed(0)
digits = load_digits()
model = torch.nn.Sequential(
    torch.nn.Flatten(),
    torch.nn.Linear(64, 256),
    torch.nn.LayerNorm(256),
    torch.nn.ReLU(),
    torch.nn.Linear(256, 10),
)
model = fleet.distributed_model(model, strategy)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
optimizer = fleet.distributed_optimizer(optimizer, strategy)

micro_batches = ShardedBatches(
    len(digits.train_labels), global_batch=128, rank=fleet.worker_index(), workers=fleet.worker_num()
)
for epoch in range(10):
    for indices in micro_batches.epoch(epoch):
        loss = functional.cross_entropy(model(digits.train_images[indices]), digits.train_labels[indices])
        optimizer.minimize(loss)
    optimizer.flush()

if fleet.is_first_worker():
    print(strategy)
    with torch.no_grad():
        correct = model(digits.test_images).argmax(dim=1) == digits.test_labels
    print(f"test accuracy {correct.float().mean():.1%}")
