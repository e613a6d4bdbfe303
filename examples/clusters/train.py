"""One script for every launcher: fleet.init() finds out what started it. Each prints the same weights' checksum.

Started again, it goes on from its last checkpoint. CHECKPOINTS names the folder, which all workers must see.
"""

import hashlib
import os

import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

import fleetx as X
from fleetx import fleet
from fleetx.data import Loader, ShardedBatches, load_digits

fleet.init()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # fleet.init() or the trainer has chosen which
strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 4, "avg": True})

torch.manual_seed(0)
digits = load_digits()
samples = TensorDataset(digits.train_images, digits.train_labels)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
model = fleet.distributed_model(model.to(device), strategy)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = fleet.distributed_optimizer(optimizer, strategy)
loader = Loader(samples, ShardedBatches(len(samples), global_batch=128))

folder = os.environ.get("CHECKPOINTS", "checkpoints")
checkpoints = X.Checkpoints(folder, model=model, optimizer=optimizer, loader=loader)
start = checkpoints.resume()
number = start.step - start.replayed if start else 0  # batches so far
if start and fleet.is_first_worker():
    print(f"resumed after {number} batches", flush=True)

for epoch in range(loader.epoch, 2):
    for images, labels in loader:
        optimizer.minimize(functional.cross_entropy(model(images.to(device)), labels.to(device)))
        number += 1
        if fleet.stop_requested() and loader.epoch == epoch:  # not between the last batch and the flush
            checkpoints.save(number)
            fleet.leave()  # with an exit code that is not 0: the job is not done
    optimizer.flush()
    checkpoints.save(number)

checksum = hashlib.sha256(b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in model.parameters()))
if fleet.is_first_worker():
    print(f"{fleet.worker_num()} workers, weights {checksum.hexdigest()[:16]}", flush=True)
