"""ImageNet in the guide's form: a list of `relative/path.JPEG label` lines, and the images beside it."""

import codecs
import importlib
import os
from collections import Counter
from pathlib import Path
from typing import Literal, NamedTuple, Unpack, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from fleetx.cores import cores
from fleetx.data.checks import whole_number
from fleetx.data.loader import Loader, Loading, check_loading, check_on_error
from fleetx.data.randomness import Epoch
from fleetx.data.reading import OnError, SampleError
from fleetx.data.sampling import Last, ShardedBatches, place

Phase = Literal["train", "val"]
MOST_LOADING_PROCESSES = 16


def load_imagenet_from_file(
    path: str | Path,
    batch_size: int = 32,
    phase: Phase = "train",
    shuffle: bool = True,
    *,
    image_size: int = 224,
    classes: int = 1000,
    on_error: OnError = "raise",
    last: Last | None = None,
    seed: int = 0,
    rank: int | None = None,
    workers: int | None = None,
    **loading: Unpack[Loading],
) -> Loader:
    """Batches `{"images": uint8 (n, 3, h, w), "labels": int64 (n,)}` of one worker, `batch_size` per worker.

    Images are bytes from 0 to 255, channels-last in memory. They are not normalised here: the model does that on the
    device, in one place, and a batch travels at a quarter of its size. `"train"` cuts a random part (0.08 to 1 of the
    area, ratio 3/4 to 4/3) and mirrors half of them; `"val"` cuts the centre (224 of a short side of 256, in
    proportion for other sizes) and never shuffles.

    The images lie in a folder named like the list without `.txt` or, where that does not hold the first of them, in
    the list's folder. Every epoch deals all images to the workers; in training the end is filled to a whole batch, in
    validation nothing is doubled and the last batch may be empty (`last` changes that, see `ShardedBatches`).

    A bad line or image is an error with its file and line. With `on_error="skip"` bad lines are left out, and a
    missing or broken image is replaced by the next good one of the list, so that no other batch on any worker changes;
    `loader.skipped` counts both by reason.
    """
    if phase not in get_args(Phase):
        raise ValueError(f"phase must be 'train' or 'val', got {phase!r}.")
    check_loading(loading, load_imagenet_from_file)
    batch_size = whole_number("batch_size", batch_size, "32 images per worker are the default")
    image_size = whole_number("image_size", image_size, "224 pixels are usual")
    classes = whole_number("classes", classes, "1000 for ImageNet; labels are from 0 to classes - 1")
    if batch_size < 1 or image_size < 1 or classes < 1:
        raise ValueError(
            f"batch_size, image_size and classes must be at least 1, got {batch_size}, {image_size} and {classes}."
        )
    check_on_error(on_error)
    count = place(rank, workers)[1]
    samples = ImageSamples(read_list(Path(path), classes, on_error), phase, image_size)
    plan = ShardedBatches(
        len(samples),
        batch_size * count,
        rank=rank,
        workers=workers,
        seed=seed,
        shuffle=shuffle and phase == "train",
        last=last or ("wrap" if phase == "train" else "keep"),
    )
    loading.setdefault("num_workers", default_loading_processes())
    return Loader(samples, plan, collate=collate_images, on_error=on_error, **loading)


class ImageList(NamedTuple):
    """A list file's content, in few large objects: a million small ones would be copied into each loading process."""

    path: Path
    root: Path
    names: bytes
    ends: np.ndarray
    labels: np.ndarray
    lines: np.ndarray
    skipped: dict[str, int]

    def name(self, index: int) -> str:
        """The image's path below the root."""
        return self.names[self.ends[index] : self.ends[index + 1]].decode()


class ImageSamples:
    """The images of a list, as a network sees them."""

    def __init__(self, listed: ImageList, phase: Phase, size: int) -> None:
        self.listed = listed
        self.phase = phase
        self.size = size
        self.skipped = listed.skipped
        # It needs an extra: if that is missing, raise here and not later, in a loading process.
        importlib.import_module("fleetx.data.cropping")

    def __len__(self) -> int:
        return len(self.listed.labels)

    def sample(self, index: int, epoch: Epoch) -> tuple[Tensor, int]:
        """Bytes of shape (size, size, 3) and the label."""
        from fleetx.data import cropping

        path = self.listed.root / self.listed.name(index)
        try:
            if self.phase == "train":
                image = cropping.read_train(path, self.size, epoch.rng(index))
            else:
                image = cropping.read_val(path, self.size)
        except FileNotFoundError:
            raise SampleError(
                "missing image", f"{self._where(index)}: there is no image {path}.", FileNotFoundError
            ) from None
        except cropping.DECODING_ERRORS as error:
            raise SampleError("broken image", f"{self._where(index)}: {path} cannot be decoded ({error}).") from None
        return image, int(self.listed.labels[index])

    def _where(self, index: int) -> str:
        return f"{self.listed.path}:{self.listed.lines[index]}"


def read_list(path: Path, classes: int, on_error: OnError) -> ImageList:
    """Read and check every line; whether the images are there shows when they are read."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such list of images.")
    names: list[bytes] = []
    labels: list[int] = []
    lines: list[int] = []
    skipped: Counter[str] = Counter()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                name, label = _parse(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, classes)
            except SampleError as bad:
                if on_error == "raise":
                    raise ValueError(f"{path}:{number}: {bad}") from None
                skipped[bad.reason] += 1
                continue
            names.append(name)
            labels.append(label)
            lines.append(number)
    if not names:
        raise ValueError(f"{path}: the list holds no image (skipped: {dict(skipped)}).")
    ends = np.cumsum([0, *map(len, names)])
    root = _root(path, names[0].decode())
    return ImageList(path, root, b"".join(names), ends, np.array(labels), np.array(lines), dict(skipped))


def collate_images(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """Stack as they were decoded, colours innermost, and only rename the dimensions: no pixel is moved."""
    images: Tensor = default_collate([image for image, _ in samples])
    return {"images": images.permute(0, 3, 1, 2), "labels": torch.tensor([label for _, label in samples])}


def default_loading_processes() -> int:
    """The cores that this job may use, shared by the workers on this machine."""
    return min(MOST_LOADING_PROCESSES, cores().share(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _parse(line: bytes, classes: int) -> tuple[bytes, int]:
    parts = line.rsplit(maxsplit=1)
    try:
        name, label = parts[0].decode(), int(parts[1])
    except (IndexError, ValueError):
        raise SampleError("malformed line", f"expected `relative/path.JPEG label`, got {line[:80]!r}.") from None
    if not 0 <= label < classes:
        raise SampleError(
            "label out of range", f"a label is from 0 to {classes - 1} for classes={classes}, got {label} for {name}."
        )
    return parts[0], label


def _root(path: Path, first: str) -> Path:
    folder = path.with_suffix("")
    if folder == path or not folder.is_dir():
        return path.parent
    # A list beside `train/` may spell that folder out in each line.
    return path.parent if not (folder / first).exists() and (path.parent / first).exists() else folder
