"""One script for every launcher: fleet.init() finds out what started it. Each prints the same weights' checksum."""

import hashlib

import torch
from torch.nn import functional

from fleetx import fleet
from fleetx.data import ShardedBatches, load_digits

fleet.init()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # fleet.init() or the trainer has chosen which
strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 4, "avg": True})

torch.manual_seed(0)
digits = load_digits()
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
model = fleet.distributed_model(model.to(device), strategy)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = fleet.distributed_optimizer(optimizer, strategy)

batches = ShardedBatches(
    len(digits.train_labels), global_batch=128, rank=fleet.worker_index(), workers=fleet.worker_num()
)
for epoch in range(2):
    for indices in batches.epoch(epoch):
        images, labels = digits.train_images[indices].to(device), digits.train_labels[indices].to(device)
        optimizer.minimize(functional.cross_entropy(model(images), labels))
    optimizer.flush()

checksum = hashlib.sha256(b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in model.parameters()))
if fleet.is_first_worker():
    print(f"{fleet.worker_num()} workers, weights {checksum.hexdigest()[:16]}", flush=True)
