"""A residual network for small grey images."""

from torch import Tensor, nn
from torch.nn import functional


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions around a shortcut; halves the image and widens it where `stride` is 2."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            projection = nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(channels))

    def forward(self, images: Tensor) -> Tensor:
        """The block's output, of the same or half the size."""
        hidden = functional.relu(self.bn1(self.conv1(images)))
        return functional.relu(self.bn2(self.conv2(hidden)) + self.shortcut(images))


class SmallResnet(nn.Module):
    """A stem, three stages of one block each, and a linear classifier: 0.3 million parameters at width 32."""

    def __init__(self, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.stages = nn.Sequential(
            ResidualBlock(width, width, stride=1),
            ResidualBlock(width, 2 * width, stride=2),
            ResidualBlock(2 * width, 4 * width, stride=2),
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores."""
        hidden = self.stages(functional.relu(self.bn(self.stem(images))))
        return self.head(hidden.mean(dim=(2, 3)))
