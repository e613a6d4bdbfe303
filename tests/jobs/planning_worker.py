"""Trains on this worker with a plan; on one of the workers memory runs out once, in mid-window."""

import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import fleetx as X
from fleetx import fleet
from tests.fleet.planned import RunsOut, batches, prepared, state, strategy
from tests.planner.work_clock import WorkClock

# What a worker that has to repeat its step must not confuse.
SENDING = {
    "forward": {"nccl_comm_num": 3},
    "backward": {"nccl_comm_num": 3, "fuse_all_reduce_ops": False},
}


def trained(where):
    """Losses, weights, buffers, counts and random state, and the plans before and after."""
    made = strategy({"oom_retry": where is not None} if where != "plain" else None, **SENDING.get(where, {}))
    model, optimizer = prepared(made, seed=fleet.worker_index())
    step = X.Step(model, optimizer, nn.functional.mse_loss)
    torch.manual_seed(3 + fleet.worker_index())
    data = batches(seed=10 + fleet.worker_index())
    losses, plans = [], []
    for number, batch in enumerate(data):
        if number == 1 and where in ("forward", "backward") and fleet.worker_index() == fleet.worker_num() - 1:
            model.greed = RunsOut(at=2, where=where)  # the second of two micro-batches
        losses.append(step(batch).loss.item())
        plans.append("" if step.plan is None else repr((step.plan.names, step.plan.states, step.plan.k_steps)))
    return state(model, losses), plans


def main():
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(dir=sys.argv[1])
    fleet.init()
    results = {str(where): trained(where) for where in ("plain", None, "forward", "backward")}
    torch.save(results, Path(sys.argv[1]) / f"{fleet.worker_num()}-{fleet.worker_index()}.pt")


if __name__ == "__main__":
    with WorkClock():
        main()
