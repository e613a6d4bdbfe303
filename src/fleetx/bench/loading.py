"""How fast images are loaded: the ImageNet loader against a plain PyTorch DataLoader that does the same work."""

import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fleetx.bench.timing import ratio
from fleetx.data.imagenet import load_imagenet_from_file
from fleetx.data.make import make_imagenet

OURS, PEER, FULL_PEER = "fleetx", "plain DataLoader", "plain DataLoader, full decoding"
CLASSES, IMAGE_SIZE, BATCH = 8, 224, 16
# A typical ImageNet photograph is 500 pixels wide; the large ones are where decoding at a fraction of the size helps.
WIDTHS = {"typical": 500, "large": 1200}
FILES = {"typical": 64, "large": 16}


def measure(*, rounds: int = 9, batches: int = 6, num_workers: int | None = None) -> dict[str, Any]:
    """Seconds per image, for photographs of two sizes."""
    processes = num_workers or max(1, os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as folder:
        return {
            name: _measure_size(Path(folder) / name, name, rounds=rounds, batches=batches, num_workers=processes)
            for name in WIDTHS
        } | {"num_workers": processes}


def _measure_size(folder: Path, name: str, *, rounds: int, batches: int, num_workers: int) -> dict[str, list[float]]:
    path = make_imagenet(folder, CLASSES, FILES[name], WIDTHS[name], val_images=1)
    warmup = 2 * num_workers
    # A list may name an image several times: the epoch never ends while it is measured, and nobody runs dry.
    lines = path.read_text().splitlines(keepends=True)
    needed = BATCH * (batches + 2 * warmup + 1)
    path.write_text("".join(lines * math.ceil(needed / len(lines))))
    rivals: dict[str, Callable[[], Iterator[Any]]] = {
        OURS: lambda: _ours(path, num_workers),
        PEER: lambda: _plain(path, num_workers, draft=True),
        FULL_PEER: lambda: _plain(path, num_workers, draft=False),
    }
    seconds: dict[str, list[float]] = {rival: [] for rival in rivals}
    for number in range(rounds):
        names = list(rivals)
        for rival in names if number % 2 == 0 else reversed(names):
            seconds[rival].append(_steady_seconds(rivals[rival](), warmup, batches))
    return seconds


def _steady_seconds(stream: Iterator[Any], warmup: int, batches: int) -> float:
    """Per image, once every process is at work; the stream ends with this call, and with it its processes."""
    for _ in range(warmup):
        next(stream)
    began = time.perf_counter()
    for _ in range(batches):
        next(stream)
    return (time.perf_counter() - began) / (batches * BATCH)


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over processes."""

    def medians(figure: Callable[[dict[str, list[float]]], float]) -> dict[str, float]:
        return {name: statistics.median(figure(run[name]) for run in runs) for name in WIDTHS}

    return {
        "what": f"JPEG files {WIDTHS['typical']} (typical) and {WIDTHS['large']} (large) pixels wide, random crop to "
        f"{IMAGE_SIZE}, flip, batches of {BATCH}, {runs[0]['num_workers']} loading processes. The plain DataLoader "
        f"does the same work; with full decoding it reads every JPEG at its full size. "
        f"Medians over {len(runs)} processes",
        "images_per_s": {
            rival: medians(lambda seconds, r=rival: 1 / statistics.median(seconds[r]))
            for rival in (OURS, PEER, FULL_PEER)
        },
        "speed": {rival: medians(lambda seconds, r=rival: ratio(seconds, OURS, r)) for rival in (PEER, FULL_PEER)},
        "runs": runs,
    }


def _ours(path: Path, num_workers: int) -> Iterator[Any]:
    loader = load_imagenet_from_file(
        path, BATCH, image_size=IMAGE_SIZE, classes=CLASSES, num_workers=num_workers, rank=0, workers=1
    )
    return iter(loader)


def _plain(path: Path, num_workers: int, *, draft: bool) -> Iterator[Any]:
    loader = DataLoader(
        _PlainImages(path, draft), BATCH, shuffle=True, num_workers=num_workers, generator=torch.Generator()
    )
    return iter(loader)


class _PlainImages(Dataset[tuple[Tensor, int]]):
    """The same decoding, crop, resampling and flip, as a PyTorch user writes them."""

    def __init__(self, path: Path, draft: bool) -> None:
        lines = [line.rsplit(maxsplit=1) for line in path.read_text().splitlines()]
        self.samples = [(path.with_suffix("") / name, int(label)) for name, label in lines]
        self.draft = draft

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        with Image.open(path) as image:
            left, top, wide, high = _random_crop(*image.size)
            across = down = 1.0
            if self.draft:
                width, height = image.size
                image.draft("RGB", (width * 2 * IMAGE_SIZE // wide + 1, height * 2 * IMAGE_SIZE // high + 1))
                across, down = image.size[0] / width, image.size[1] / height
            box = (left * across, top * down, (left + wide) * across, (top + high) * down)
            picture = image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR, box=box).convert("RGB")
        if random.random() < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous(), label


def _random_crop(width: int, height: int) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        shape = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, high = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < wide <= width and 0 < high <= height:
            return random.randint(0, width - wide), random.randint(0, height - high), wide, high
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


def main() -> None:
    """One process's figures, as JSON on the standard output."""
    json.dump(measure(), sys.stdout)


if __name__ == "__main__":
    main()
