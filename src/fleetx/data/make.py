"""Makes tiny data sets in each file format, with structure that a model can learn: for trials, tests and benchmarks."""

import gzip
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np

from fleetx.data.checks import whole_number
from fleetx.data.randomness import check_seed
from fleetx.data.vocabulary import SPECIAL
from fleetx.extras import needs_extra

# A sentence of the made text stays on one topic, so that a second sentence shows whether it belongs to the first.
MOST_TOPICS = 8
ODD_TOKENS = 0.1

# All that a maker writes, folders too: what `overwrite` may remove.
IMAGENET_FILES = r"(train|val)(\.txt|(/class\d+(/(train|val)_\d+\.JPEG)?)?)"
DIGITAL_FILES = r"vocab\.txt|data(/part-\d+\.(gz|txt))?"
IDX_FILES = r"(train|t10k)-(images-idx3|labels-idx1)-ubyte\.gz"
MOST_NAMED = 5


class FolderInUseError(FileExistsError):
    """The folder is not empty, and nobody has said that its files may be replaced."""


def make_imagenet(
    folder: str | Path,
    classes: int = 4,
    images: int = 64,
    size: int = 64,
    seed: int = 0,
    *,
    val_images: int | None = None,
    overwrite: bool = False,
) -> Path:
    """`train.txt` and `val.txt` with their JPEG files; gives the path of `train.txt`.

    A class is a colour and a direction of stripes, under noise. Images are about `size` pixels wide, a quarter as many
    are made for validation unless `val_images` says otherwise. `overwrite` removes what was made there before.
    """
    with needs_extra("images", "Making images"):
        from PIL import Image

    _check_counts(classes=classes, images=images, size=size)
    if val_images is not None and whole_number("val_images", val_images, "None makes a quarter as many") < 0:
        raise ValueError(f"val_images must be at least 0, got {val_images}.")
    rng, folder = np.random.default_rng(check_seed(seed)), _prepare(folder, overwrite, IMAGENET_FILES)
    counts = {"train": images, "val": max(classes, images // 4) if val_images is None else val_images}
    for part, count in counts.items():
        lines = []
        for number in range(count):
            label = number % classes
            name = f"class{label:03d}/{part}_{number:06d}.JPEG"
            path = folder / part / name
            path.parent.mkdir(parents=True, exist_ok=True)
            height = max(1, round(size * rng.uniform(0.7, 1.0)))
            Image.fromarray(striped_image(label, classes, size, height, rng)).save(path, "JPEG", quality=90)
            lines.append(f"{name} {label}\n")
        (folder / f"{part}.txt").write_text("".join(lines), encoding="utf-8")
    return folder / "train.txt"


def make_digital(
    folder: str | Path,
    samples: int = 256,
    vocab: int = 64,
    seq_len: int = 32,
    seed: int = 0,
    *,
    files: int = 2,
    overwrite: bool = False,
) -> tuple[Path, Path]:
    """A folder of samples and `vocab.txt`; gives both paths, as the loader wants them.

    Each topic has tokens of its own, which follow each other in a circle but for one in ten, so that a masked token
    can be told from its neighbours; both sentences of a sample are on one topic. Every second file is compressed.
    `overwrite` removes what was made there before.
    """
    _check_counts(samples=samples, files=files, vocab=vocab, seq_len=seq_len)
    if files > samples:
        raise ValueError(f"each file needs a sample, got files={files} and samples={samples}: make fewer files.")
    ordinary = vocab - len(SPECIAL)
    if ordinary < 4 or seq_len < 7:
        raise ValueError(
            f"made text needs a vocabulary of at least {len(SPECIAL) + 4} and sequences of at least 7 tokens, "
            f"got vocab={vocab} and seq_len={seq_len}."
        )
    rng, folder = np.random.default_rng(check_seed(seed)), _prepare(folder, overwrite, DIGITAL_FILES)
    names = [*SPECIAL, *(f"token{number}" for number in range(ordinary))]
    vocab_path, data_dir = folder / "vocab.txt", folder / "data"
    vocab_path.write_text("".join(f"{name}\t{number}\n" for number, name in enumerate(names)), encoding="utf-8")
    data_dir.mkdir(exist_ok=True)
    for number, share in enumerate(np.array_split(np.arange(samples), files)):
        content = "".join(_text_line(ordinary, seq_len, rng) for _ in share).encode()
        if number % 2 == 0:
            (data_dir / f"part-{number:03d}.gz").write_bytes(gzip.compress(content, mtime=0))
        else:
            (data_dir / f"part-{number:03d}.txt").write_bytes(content)
    return data_dir, vocab_path


def make_idx(
    folder: str | Path,
    images: int = 256,
    size: int = 28,
    classes: int = 10,
    seed: int = 0,
    *,
    overwrite: bool = False,
) -> Path:
    """The four files of Fashion-MNIST under their usual names; gives the folder. A quarter as many to test with.

    `overwrite` removes what was made there before.
    """
    _check_counts(images=images, size=size, classes=classes)
    if classes > 10:
        raise ValueError(f"Fashion-MNIST has 10 classes, got {classes}.")
    rng, folder = np.random.default_rng(check_seed(seed)), _prepare(folder, overwrite, IDX_FILES)
    for part, count in (("train", images), ("t10k", max(classes, images // 4))):
        labels = (np.arange(count) % classes).astype(np.uint8)
        pictures = [
            striped_image(label, classes, size, size, rng).mean(axis=2).astype(np.uint8) for label in labels.tolist()
        ]
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", np.stack(pictures))
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", labels)
    return folder


def write_idx(path: Path, values: np.ndarray) -> None:
    """Bytes of any shape as one IDX file."""
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    content = header + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def striped_image(label: int, classes: int, width: int, height: int, rng: np.random.Generator) -> np.ndarray:
    """Stripes whose direction, density and colour tell the class; where they lie, and the noise, are random."""
    turn = label / classes
    # Less than half a turn: a mirrored picture must not look like that of another class.
    angle = np.pi * turn / 2
    down, across = np.mgrid[0:height, 0:width] / max(width, height)
    phase = rng.uniform(0, 2 * np.pi)
    stripes = np.sin(2 * np.pi * (3 + 2 * (label % 3)) * (across * np.cos(angle) + down * np.sin(angle)) + phase)
    colour = 0.5 + 0.5 * np.cos(2 * np.pi * (turn + np.array([0, 1 / 3, 2 / 3])))
    picture = 255 * colour * (0.6 + 0.4 * stripes[..., None]) + rng.normal(0, 25, (height, width, 3))
    return picture.clip(0, 255).astype(np.uint8)


def _text_line(ordinary: int, seq_len: int, rng: np.random.Generator) -> str:
    topics = min(MOST_TOPICS, ordinary // 2)
    per_topic = ordinary // topics
    topic = int(rng.integers(topics))
    total = int(rng.integers(max(4, seq_len // 2), seq_len - 2))
    first = int(rng.integers(total // 3, total - total // 3))
    sentences = [_sentence(count, topic * per_topic, per_topic, rng) for count in (first, total - first)]
    cls, sep = SPECIAL.index("[CLS]"), SPECIAL.index("[SEP]")
    tokens = [cls, *sentences[0], sep, *sentences[1], sep]
    kinds = [0] * (first + 2) + [1] * (total - first + 1)
    return ";".join(" ".join(map(str, field)) for field in (tokens, kinds, range(len(tokens)), [1])) + "\n"


def _sentence(count: int, start: int, tokens: int, rng: np.random.Generator) -> list[int]:
    circle = (int(rng.integers(tokens)) + np.arange(count)) % tokens
    odd = rng.random(count) < ODD_TOKENS
    return (len(SPECIAL) + start + np.where(odd, rng.integers(tokens, size=count), circle)).tolist()


def _prepare(folder: str | Path, overwrite: bool, ours: str) -> Path:
    """An empty folder; `ours` is a pattern of all paths in it that a maker writes, and may thus remove."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; name a folder to make the data set in.")
    if folder.is_dir() and any(folder.iterdir()):
        if not overwrite:
            raise FolderInUseError(
                f"{folder} is not empty: name another folder, or pass overwrite=True to replace what was made there."
            )
        _remove_made(folder, ours)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _remove_made(folder: Path, ours: str) -> None:
    """Empty the folder, unless something is in it that was not made here: a loader would read that too."""
    paths = sorted(folder.rglob("*"))
    # Removing through a link would reach files elsewhere.
    foreign = [p for p in paths if p.is_symlink() or not re.fullmatch(ours, p.relative_to(folder).as_posix())]
    if foreign:
        named = ", ".join(str(path.relative_to(folder)) for path in foreign[:MOST_NAMED])
        more = f" and {len(foreign) - MOST_NAMED} more" if len(foreign) > MOST_NAMED else ""
        raise FileExistsError(
            f"{folder} holds what was not made here, and would not be replaced: {named}{more}. Move it away, or name "
            "another folder."
        )
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _check_counts(**counts: Any) -> None:
    for name, value in counts.items():
        if whole_number(name, value, "give a count of at least 1") < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
