"""IDX files, the format of Fashion-MNIST: a magic number, big-endian sizes, then the values."""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MOST_DIMENSIONS = 32  # numpy 1's limit
_PIECE = 2**20


class FashionMnist(NamedTuple):
    """Images as bytes, of shape (n, 1, 28, 28), and their labels from 0 to 9."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_idx(path: str | Path) -> Tensor:
    """The array in one IDX file, compressed with gzip or not."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file.")
    with _open(path) as file:
        try:
            return _parse(file, path)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: not a whole gzip file ({error}): fetch it again.") from error


def _parse(file: BinaryIO, path: Path) -> Tensor:
    start = file.read(4)
    if len(start) < 4 or start[:2] != b"\0\0" or start[2] not in _TYPES:
        raise ValueError(f"{path}: an IDX file begins with 0, 0 and a type from 8 to 14, this one with {start!r}.")
    kind, dimensions = np.dtype(_TYPES[start[2]]), start[3]
    if not 0 < dimensions <= _MOST_DIMENSIONS:
        raise ValueError(f"{path}: an IDX file has 1 to {_MOST_DIMENSIONS} dimensions, and this one {dimensions}.")
    sizes = file.read(4 * dimensions)
    if len(sizes) < 4 * dimensions:
        raise ValueError(f"{path}: the header of {dimensions} dimensions does not fit: {4 + len(sizes)} bytes in all.")
    shape = struct.unpack(f">{dimensions}I", sizes)
    wanted = kind.itemsize * math.prod(shape)
    content = _read(file, wanted + 1)
    if len(content) != wanted:
        found = f"has {len(content)}" if len(content) < wanted else "goes on after them"
        raise ValueError(f"{path}: shape {shape} needs {wanted} bytes, and the file {found}: it is damaged.")
    try:
        values = np.frombuffer(content, kind).reshape(shape)
    except ValueError as error:  # no values at all, in impossible sizes
        raise ValueError(f"{path}: no array has the shape {shape} ({error}): the file is damaged.") from None
    return torch.from_numpy(values.astype(kind.newbyteorder("=")))


def load_fashion_mnist(folder: str | Path) -> FashionMnist:
    """The four files of Fashion-MNIST under their usual names, with or without `.gz`."""
    parts: list[Tensor] = []
    for split in ("train", "t10k"):
        images_path = _find(Path(folder), f"{split}-images-idx3-ubyte")
        labels_path = _find(Path(folder), f"{split}-labels-idx1-ubyte")
        images, labels = load_idx(images_path), load_idx(labels_path)
        if images.dtype != torch.uint8 or images.dim() != 3:
            raise ValueError(
                f"{images_path}: expected bytes of shape (n, h, w), got {images.dtype} {(*images.shape,)}."
            )
        if labels.dtype != torch.uint8 or labels.dim() != 1 or len(labels) != len(images):
            raise ValueError(f"{labels_path}: expected {len(images)} bytes, got {labels.dtype} {(*labels.shape,)}.")
        if len(labels) and int(labels.max()) > 9:
            raise ValueError(f"{labels_path}: labels are from 0 to 9, found {int(labels.max())}.")
        parts += [images.unsqueeze(1), labels.long()]
    return FashionMnist(*parts)


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{folder}: neither {name} nor {name}.gz is there.")


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _read(file: BinaryIO, size: int) -> bytes:
    """Up to `size` bytes, piece by piece: a header may claim any size, and a small gzip file may hold far more."""
    pieces = []
    while size > 0 and (piece := file.read(min(size, _PIECE))):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
