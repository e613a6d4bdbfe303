"""A cluster of Ray on this machine: workers are killed, machines go and come, and Ray starts the workers again.

python tests/jobs/ray_scenarios.py FOLDER    # leaves there what the workers saw
"""

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster
from ray.train import Checkpoint, CheckpointConfig, CheckpointUploadMode, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import TensorDataset

import fleetx as X
from fleetx import fleet
from fleetx.data import Loader, ShardedBatches, load_digits
from tests.waiting import wait_for

EXAMPLE = Path(__file__).parents[2] / "examples" / "clusters" / "ray" / "train.py"


def attempt(folder, name):
    """How often Ray has started this worker before; the others may not have come so far yet."""
    started = len(list(folder.glob(f"{name}-{dist.get_rank()}-*")))
    return started, folder / f"{name}-{dist.get_rank()}-{started}"


# What the user copies, disturbed -------------------------------------------------------------------------


def run_example(config):
    """Killed at its 4th update; on a machine that goes at its 1st; on one that is about to go at its 1st; in peace."""
    folder = Path(config["folder"])
    number, output = attempt(folder, "example")
    is_on_head = ray.get_runtime_context().get_node_id() == config["head"]
    updates = 0

    def disturb(*_):
        nonlocal updates
        updates += 1
        if (number, updates) == (0, 4) and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if (number, updates) == (1, 1) and not is_on_head:
            (folder / "remove").touch()
            time.sleep(600)
        if (number, updates) == (2, 1):
            (folder / "drain").touch()
            while ray.train.get_preemption_info() is None:
                time.sleep(0.05)

    register_optimizer_step_post_hook(disturb)
    with output.open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(EXAMPLE))["train"](config)


def go_and_come(cluster, folder, machine):
    """One machine fails and another takes its place; that one is taken away with notice, and replaced too."""
    wait_for((folder / "remove").exists, "machine to remove")
    cluster.remove_node(machine, allow_graceful=False)
    machine = cluster.add_node(**MACHINE)
    wait_for((folder / "drain").exists, "machine to drain")
    notice = "--reason DRAIN_NODE_REASON_PREEMPTION --reason-message test --deadline-remaining-seconds 600"
    command = ["drain-node", "--address", cluster.address, "--node-id", machine.node_id, *notice.split()]
    subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *command], check=True)
    cluster.add_node(**MACHINE)


# Checkpoints that Ray knows of, and its data -------------------------------------------------------------


def report(config):
    """The same training; one worker gets SIGTERM after a report. Then with data of Ray."""
    folder = Path(config["folder"])
    number, _ = attempt(folder, "report")
    fleet.init()
    torch.manual_seed(0)
    digits = load_digits()
    samples = TensorDataset(digits.train_images, digits.train_labels)
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 4, "avg": True})
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = fleet.distributed_model(model, strategy)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), strategy)
    loader = Loader(samples, ShardedBatches(len(samples), global_batch=128), num_workers=1)
    checkpoints = X.Checkpoints(config["checkpoints"], model=model, optimizer=optimizer, loader=loader, keep=None)
    reported = ray.train.get_checkpoint()
    start = checkpoints.resume(reported.path if reported else None)
    batches = start.step if start else 0
    (folder / f"report-{dist.get_rank()}-{number}").write_text(str(start.path if start else ""))
    for epoch in range(loader.epoch, 2):
        for images, labels in loader:
            optimizer.minimize(functional.cross_entropy(model(images), labels))
            batches += 1
            if (number, batches) == (0, 17) and fleet.is_first_worker():
                os.kill(os.getpid(), signal.SIGTERM)  # which Ray's own handler takes
        optimizer.flush()
        checkpoints.save(batches, asynchronous=True)
        saved = Checkpoint.from_directory(checkpoints.wait())
        if epoch == 0:
            ray.train.report({"batches": batches}, checkpoint=saved if fleet.is_first_worker() else None)
            ray.train.get_all_reported_checkpoints()  # waits until Ray knows
    mode = CheckpointUploadMode.NO_UPLOAD
    for path in (checkpoints.latest, checkpoints.save(batches)):  # Ray removes the first of these, and its copy
        saved = Checkpoint.from_directory(path)
        ray.train.report({"batches": batches}, checkpoint=saved, checkpoint_upload_mode=mode)
    feed(folder)


def feed(folder):
    """All rows of Ray's data make one update, as one big batch of plain torch does."""
    shard = ray.train.get_dataset_shard("rows")
    rank = dist.get_rank()
    found = [
        of_minimize(islice(shard.iter_torch_batches(batch_size=4), 4 - 2 * rank)),  # the second worker has fewer
        of_step(fleet.evenly(islice(shard.iter_torch_batches(batch_size=4), 2 - rank))),
        of_step(shard.iter_torch_batches(batch_size=13)),
    ]
    (folder / f"data-{rank}").write_text(json.dumps(found))


def linear():
    torch.manual_seed(0)
    return torch.nn.Linear(1, 1).double()


def loss_of(model, batch):
    return functional.mse_loss(model(batch["x"].double()[:, None]), batch["y"].double()[:, None])


def of_minimize(batches):
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 100})
    model = fleet.distributed_model(linear(), strategy)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    seen = []
    for batch in batches:
        seen += batch["x"].tolist()
        optimizer.minimize(loss_of(model, batch), items=len(batch["x"]))
    optimizer.flush()
    return difference(model, seen)


def of_step(batches):
    model = fleet.distributed_model(linear())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step, seen = X.Step(model, optimizer, compute=loss_of), []
    for batch in batches:
        seen += batch["x"].tolist()
        step(batch)
    return difference(model, seen)


def difference(model, seen):
    """From plain torch on the rows of all workers; and how many these were."""
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, seen)
    rows = torch.tensor([row for rows in everybody for row in rows])
    plain = linear()
    loss_of(plain, {"x": rows, "y": rows * rows}).backward()
    with torch.no_grad():
        wanted = [parameter - 0.1 * parameter.grad for parameter in plain.parameters()]
        pairs = zip(model.parameters(), wanted, strict=True)
        return len(rows), max(float((found - right).abs().max()) for found, right in pairs)


# The driver ----------------------------------------------------------------------------------------------

MACHINE = {"num_cpus": 1}


def fit(function, name, folder, failures, keep=None, **more):
    config = {"folder": str(folder), "checkpoints": str(folder / name / "checkpoints")}
    config["head"] = ray.get_runtime_context().get_node_id()
    result = TorchTrainer(
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
        run_config=RunConfig(
            name=name,
            storage_path=str(folder),
            failure_config=FailureConfig(max_failures=failures),
            checkpoint_config=CheckpointConfig(num_to_keep=keep),
        ),
        **more,
    ).fit()
    (folder / f"{name}.json").write_text(json.dumps([result.metrics, result.checkpoint and result.checkpoint.path]))


def main(folder):
    cluster = Cluster(initialize_head=True, head_node_args={**MACHINE, "num_cpus": 2, "include_dashboard": False})
    try:
        machine = cluster.add_node(**MACHINE)
        ray.init(address=cluster.address)
        # Machines come and go in the main thread: Ray handles signals there.
        training = threading.Thread(target=fit, args=(run_example, "example", folder, 3), daemon=True)
        training.start()
        go_and_come(cluster, folder, machine)
        training.join()
        rows = ray.data.from_items([{"x": x / 32, "y": (x / 32) ** 2} for x in range(26)])
        fit(report, "report", folder, 1, keep=1, datasets={"rows": rows})
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
