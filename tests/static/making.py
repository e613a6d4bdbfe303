"""Small programs for the tests of the static door."""

import torch
from torch import nn
from torch.nn import functional

from fleetx import fleet, static
from tests import plain


class Classifier(nn.Module):
    """Takes its labels and returns its loss."""

    def __init__(self, seed=0):
        super().__init__()
        self.net = plain.make_net(seed)
        self.scale = nn.Parameter(torch.full((1,), 2.0, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, images, labels):
        return {"loss": functional.cross_entropy(self.net(images) * self.scale, labels)}


def feeds(n=8, size=6):
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "images": torch.randn(size, 6, generator=generator, dtype=torch.float64).numpy(),
            "labels": torch.randint(0, 3, (size,), generator=generator).numpy(),
        }
        for _ in range(n)
    ]


def merging(k_steps=4):
    return fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": k_steps})


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def program(model=None, compile=False, **options):
    return static.Program(model or Classifier(), sgd, merging(), compile=compile, **options)


def tensors(feed):
    return {name: torch.as_tensor(value) for name, value in feed.items()}
