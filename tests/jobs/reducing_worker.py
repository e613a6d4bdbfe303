"""Trains in several ways that must send gradients alike, and saves what came out and what was sent."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from fleetx import fleet
from tests import plain

WINDOWS, MICRO_BATCHES = 3, 4

# Beside gradient merge; the model has a frozen part and an unused parameter.
SENDING_ALIKE = {
    "merge": {},
    "recompute": {"recompute": True, "recompute_configs": {"checkpoints": ["first", "norm"]}},
    "offload": {"recompute": True, "recompute_configs": {"checkpoints": ["first", "norm"], "enable_offload": True}},
}


def build(**settings):
    strategy = fleet.DistributedStrategy(
        gradient_merge=True, gradient_merge_configs={"k_steps": MICRO_BATCHES}, fuse_grad_size_in_MB=1, **settings
    )
    strategy.last_comm_group_size_MB = 0.0001
    model = fleet.distributed_model(plain.make_net(), strategy)
    return model, fleet.distributed_optimizer(plain.make_optimizer("adam", model), strategy)


def micro_batch(window, number):
    seed = 1000 * window + 100 * number + fleet.worker_index()
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 6, generator=generator).double(), torch.randint(0, 3, (5,), generator=generator)


def train(**settings):
    """The weights; the all-reduces that each micro-batch after the first window sent; and what the overview says."""
    model, optimizer = build(**settings)
    counts = []
    for window in range(WINDOWS):
        for number in range(MICRO_BATCHES):
            with counted() as calls:
                optimizer.minimize(plain.mean_loss(model, micro_batch(window, number)))
            counts.append(len(calls))
    return {
        "weights": model.state_dict(),
        "counts": counts[MICRO_BATCHES:],
        "overview": optimizer.overview().splitlines()[-1],
    }


class counted:  # noqa: N801 - used like a function
    """Collects the arguments of all all-reduces."""

    def __enter__(self):
        calls, self._before = [], dist.all_reduce

        def counting(*args, **kwargs):
            calls.append(kwargs)
            return self._before(*args, **kwargs)

        dist.all_reduce = counting
        return calls

    def __exit__(self, *_error):
        dist.all_reduce = self._before


def main():
    fleet.init()
    results = {name: train(**settings) for name, settings in SENDING_ALIKE.items()}
    torch.save(results, Path(sys.argv[1]) / f"{fleet.worker_index()}.pt")


if __name__ == "__main__":
    main()
