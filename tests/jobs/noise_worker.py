"""Measures the noise scale on several workers: each has its own micro-batches, and in the last window one has none."""

import sys
from pathlib import Path

import torch

from fleetx import fleet
from fleetx.convergence import NoiseScale
from tests.convergence.test_noise_scale import loss_of, make, micro_batches

WAYS = {"plain": {}, "compressed": {"bf16_allreduce": True}, "unfused": {"fuse_all_reduce_ops": False}}
WINDOWS = 2


def measure(settings):
    """With two micro-batches on each worker; then with those of the first worker alone."""
    noise = NoiseScale(every=1)
    model, optimizer = make(noise, k_steps=2, **settings)
    first = 2 * fleet.worker_index()
    for seed in range(WINDOWS):
        for batch in micro_batches(seed=seed)[first : first + 2]:
            optimizer.minimize(loss_of(model, batch), items=len(batch[1]))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if fleet.is_first_worker():
        for batch in micro_batches(seed=9)[:2]:
            optimizer.minimize(loss_of(model, batch), items=len(batch[1]))
    optimizer.flush()
    moments = {name or "": torch.tensor(noise.moments(layer=name)) for name in noise._moments}
    return {"moments": moments, "weights": weights}


if __name__ == "__main__":
    fleet.init()
    torch.save(
        {way: measure(settings) for way, settings in WAYS.items()}, Path(sys.argv[1], f"{fleet.worker_index()}.pt")
    )
