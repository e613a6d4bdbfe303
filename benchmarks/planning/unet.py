"""A U-Net: shortcuts cross every cut."""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional


def _block(channels_in: int, channels: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for given in (channels_in, channels):
        layers += [nn.Conv2d(given, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Two convolutions per level on the way down and up; gives one channel per pixel."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(depth + 1)]
        self.begin = _block(3, sizes[0])
        self.down = nn.ModuleList(_block(a, b) for a, b in itertools.pairwise(sizes))
        self.up = nn.ModuleList(_block(a + b, a) for a, b in itertools.pairwise(sizes))
        self.end = nn.Conv2d(width, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        """A score for each pixel."""
        hidden = self.begin(images)
        skips = []
        for block in self.down:
            skips.append(hidden)
            hidden = block(functional.max_pool2d(hidden, 2))
        for block, skip in zip(reversed(self.up), reversed(skips), strict=True):
            larger = functional.interpolate(hidden, size=skip.shape[-2:])
            hidden = block(torch.cat([larger, skip], dim=1))
        return self.end(hidden)
