"""A small run to save and resume, with something of everything in it."""

import torch
from torch.nn import functional

import fleetx as X
from fleetx import fleet
from fleetx.data import Loader, ShardedBatches

K_STEPS, BATCH, SAMPLES = 3, 4, 22


class Parts:
    """A model, its optimizer, its loader, and how they are trained."""

    def __init__(self, folder=None, *, seed=0, width=6, k_steps=K_STEPS, optimizer=torch.optim.Adam, **options):
        torch.manual_seed(seed)
        strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": k_steps})
        layers = (
            torch.nn.Linear(4, width),
            torch.nn.BatchNorm1d(width),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(width, 2),
        )
        self.model = fleet.distributed_model(torch.nn.Sequential(*layers), strategy)
        wrapped = optimizer(self.model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.MultiStepLR(wrapped, [1, 3])
        self.optimizer = fleet.distributed_optimizer(wrapped, strategy, schedule)
        generator = torch.Generator().manual_seed(7)
        samples = [(torch.randn(4, generator=generator), index % 2) for index in range(SAMPLES)]
        self.loader = Loader(samples, ShardedBatches(SAMPLES, BATCH, seed=3))
        self.checkpoints = None
        if folder is not None:
            self.checkpoints = X.Checkpoints(
                folder, model=self.model, optimizer=self.optimizer, loader=self.loader, **options
            )

    def train(self, batches):
        for _ in range(batches):
            inputs, labels = next(iter(self.loader))
            self.optimizer.minimize(functional.cross_entropy(self.model(inputs), labels))
        return self

    def saved(self, step, **options):
        """Call `resume` once, then save."""
        if self.checkpoints.latest is None:
            self.checkpoints.resume()
        return self.checkpoints.save(step, **options)

    def weights(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())
