"""ResNet-50 v1.5, with torchvision's parameter names: its weights load by name.

v1.5 halves the image in a block's 3×3 convolution; the paper's v1 did so in the first 1×1 one.
The guide's blocks 2a, 2b, 2c, 3a … 5c are layer1.0, layer1.1, layer1.2, layer2.0 … layer4.2.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetx.applications.base import Application, Count, whole
from fleetx.optim.checks import check_count, check_number

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# torch leaves labels of -100 out of the mean, but `items` counts them: here such a label is out of range, as any other.
NOTHING_IGNORED = -(2**31)
EXPANSION = 4
"""How much wider a block's output is than its 3×3 convolution."""


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolution around a shortcut; halves the image where `stride` is 2."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        channels_out = channels * EXPANSION
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, channels_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels_out)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or channels_in != channels_out:
            projection = nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(channels_out))

    def forward(self, images: Tensor) -> Tensor:
        """The block's output, of the same or half the size."""
        shortcut = images if self.downsample is None else self.downsample(images)
        hidden = functional.relu(self.bn1(self.conv1(images)))
        hidden = functional.relu(self.bn2(self.conv2(hidden)))
        return functional.relu(self.bn3(self.conv3(hidden)) + shortcut)


class Resnet50(Application):
    """`model(images)` gives logits, `model(images, labels)` gives `{"loss": ...}`, the mean cross entropy.

    Images are uint8 as loaders give them, normalised here and nowhere else, or floats that are normalised already.
    `zero_init_residual` starts each block as its shortcut, which helps large batches; it is off, as in torchvision.

    >>> model = Resnet50(classes=10, depths=(1, 1, 1, 1), width=4)
    >>> model(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape
    torch.Size([2, 10])
    >>> model.checkpoints
    ['layer1.0', 'layer2.0', 'layer3.0', 'layer4.0']
    """

    inputs = ("images", "labels")
    losses = ("loss",)

    def __init__(
        self,
        classes: int = 1000,
        *,
        depths: Sequence[int] = (3, 4, 6, 3),
        width: int = 64,
        image_size: int = 224,
        label_smoothing: float = 0.0,
        zero_init_residual: bool = False,
    ) -> None:
        super().__init__()
        _check_sizes(classes, depths, width, image_size)
        check_number("label_smoothing", label_smoothing, below=1, usual="0.1 is usual, 0 is off")
        self.depths = tuple(depths)
        self.image_size = image_size
        self.label_smoothing = label_smoothing
        self.zero_init_residual = zero_init_residual
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _stage(width, width, self.depths[0], stride=1)
        self.layer2 = _stage(width * EXPANSION, width * 2, self.depths[1], stride=2)
        self.layer3 = _stage(width * 2 * EXPANSION, width * 4, self.depths[2], stride=2)
        self.layer4 = _stage(width * 4 * EXPANSION, width * 8, self.depths[3], stride=2)
        self.fc = nn.Linear(width * 8 * EXPANSION, classes)
        self.reset_parameters()

    @property
    def checkpoints(self) -> list[str]:
        """The residual blocks, "layer1.0" to "layer4.2"."""
        return [f"layer{stage}.{block}" for stage, depth in enumerate(self.depths, 1) for block in range(depth)]

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        """Logits, or with labels the dict of losses."""
        logits = self.fc(self._features(self._normalised(images)))
        if labels is None:
            return logits
        # In fp32 also under autocast, whose list of fp32 operators differs between devices.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = functional.cross_entropy(
            logits, whole(labels), ignore_index=NOTHING_IGNORED, label_smoothing=self.label_smoothing
        )
        return {"loss": loss}

    def items(self, batch: Any) -> dict[str, Count]:
        """The loss averages over the images."""
        named = self.named_inputs(batch)
        if "images" not in named:
            raise ValueError(f"a batch of Resnet50 needs images, this one has {', '.join(named) or 'nothing'}.")
        return {"loss": len(named["images"])}

    def flops_per_sample(self) -> int:
        """Forward and backward for one image: 3 · Σ 2 · k² · channels in · channels out · height · width."""
        macs, size = 0, (self.image_size + 1) // 2
        macs += _macs(self.conv1, size)
        size = (size + 1) // 2  # the pooling
        for block in self._blocks():
            smaller = -(-size // block.conv2.stride[0])
            macs += _macs(block.conv1, size) + _macs(block.conv2, smaller) + _macs(block.conv3, smaller)
            if block.downsample is not None:
                macs += _macs(block.downsample[0], smaller)
            size = smaller
        return 3 * 2 * (macs + self.fc.weight.numel())

    def reset_parameters(self) -> None:
        """torchvision's initialisation: He's normal by fan-out for convolutions, torch's own for `fc`."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d | nn.Linear):
                module.reset_parameters()
        if self.zero_init_residual:
            for block in self._blocks():
                nn.init.zeros_(block.bn3.weight)

    def load_imagenet_from_file(self, path: str | Path, *arguments: Any, **options: Any) -> Any:
        """`fleetx.data.load_imagenet_from_file` with this model's image size and number of classes."""
        from fleetx.data import load_imagenet_from_file  # a model is useful without what loaders import

        most = self.fc.out_features
        sizes: dict[str, Any] = {"image_size": self.image_size, "classes": most}
        check_count("classes", options.get("classes", most), usual=f"the model has {most}")
        if options.get("classes", most) > most:
            raise ValueError(
                f"classes must be at most the model's {most}, got {options['classes']}: labels beyond would end the "
                "training. Leave it out, or build the model with as many."
            )
        return load_imagenet_from_file(path, *arguments, **{**sizes, **options})

    def _normalised(self, images: Tensor) -> Tensor:
        if images.dim() != 4 or images.shape[1] != 3:
            raise ValueError(
                f"images must have the shape (n, 3, height, width), not {tuple(images.shape)}. "
                "Move the colours forward with permute(0, 3, 1, 2) if they come last."
            )
        if images.is_floating_point():
            return images
        if images.dtype != torch.uint8:
            raise TypeError(
                f"images must be uint8 (0 to 255) or normalised floats, not {images.dtype}. "
                "Convert with images.to(torch.uint8)."
            )
        # Normalised in fp32 at least, then in the dtype of the weights: they are low in the pure modes.
        weights = self.conv1.weight.dtype
        wide = torch.promote_types(weights, torch.float32)
        scale = _per_channel([1 / (255 * std) for std in IMAGENET_STD], wide, images)
        shift = _per_channel([-mean / std for mean, std in zip(IMAGENET_MEAN, IMAGENET_STD, strict=True)], wide, images)
        return (images * scale + shift).to(weights)

    def _features(self, images: Tensor) -> Tensor:
        hidden = functional.relu(self.bn1(self.conv1(images)))
        hidden = functional.max_pool2d(hidden, 3, stride=2, padding=1)
        hidden = self.layer4(self.layer3(self.layer2(self.layer1(hidden))))
        return functional.adaptive_avg_pool2d(hidden, 1).flatten(1)

    def _blocks(self) -> Iterator[Bottleneck]:
        return (module for module in self.modules() if isinstance(module, Bottleneck))


def _stage(channels_in: int, channels: int, depth: int, stride: int) -> nn.Sequential:
    first = Bottleneck(channels_in, channels, stride)
    return nn.Sequential(first, *(Bottleneck(channels * EXPANSION, channels, 1) for _ in range(1, depth)))


def _per_channel(values: Sequence[float], dtype: torch.dtype, like: Tensor) -> Tensor:
    """A constant made on the device: copying one from the host would wait, a buffer would be cast with the model."""
    return torch.stack([torch.full((1, 1), value, dtype=dtype, device=like.device) for value in values])


def _macs(module: nn.Module, size: int) -> int:
    """Multiply-adds of a convolution with square outputs of this size."""
    assert isinstance(module, nn.Conv2d)
    return module.weight.numel() * size * size


def _check_sizes(classes: int, depths: Sequence[int], width: int, image_size: int) -> None:
    check_count("classes", classes, usual="1000 for ImageNet")
    check_count("width", width, usual="64 is ResNet-50's")
    check_count("image_size", image_size, usual="224 is usual")
    if len(depths) != 4:
        raise ValueError(f"depths gives the blocks of four stages, got {depths!r}: (3, 4, 6, 3) is ResNet-50's.")
    for depth in depths:
        check_count("each of depths", depth, usual="(3, 4, 6, 3) is ResNet-50's")
