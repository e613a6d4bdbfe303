"""IDX files, the format of Fashion-MNIST: a magic number, big-endian sizes, then the values."""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


class FashionMnist(NamedTuple):
    """Images as bytes, of shape (n, 1, 28, 28), and their labels from 0 to 9."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_idx(path: str | Path) -> Tensor:
    """The array in one IDX file, compressed with gzip or not."""
    content = _read(Path(path))
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES:
        raise ValueError(
            f"{path}: an IDX file begins with 0, 0 and a type from 8 to 14, this one with {content[:4]!r}."
        )
    kind, dimensions = np.dtype(_TYPES[content[2]]), content[3]
    header = 4 + 4 * dimensions
    if dimensions == 0 or len(content) < header:
        raise ValueError(f"{path}: the header of {dimensions} dimensions does not fit: {len(content)} bytes in all.")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    wanted = header + kind.itemsize * math.prod(shape)
    if len(content) != wanted:
        raise ValueError(f"{path}: shape {shape} needs {wanted} bytes, the file has {len(content)}: it is damaged.")
    values = np.frombuffer(content, kind, offset=header).reshape(shape)
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


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file.")
    content = path.read_bytes()
    if path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file ({error}): fetch it again.") from error
