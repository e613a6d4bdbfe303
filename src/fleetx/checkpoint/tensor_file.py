"""safetensors files, written and read in one pass together with their hash.

The format: eight bytes with the length of a JSON header, the header with dtype, shape and place of each tensor, and the
tensors' bytes. Writing it here, and not through the library, gives the hash of what was meant while it is written. And
since the header follows from what the manifest says, nothing in a file is believed before it has been hashed.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fleetx.checkpoint.durable import Digest, read_into, write_file
from fleetx.checkpoint.errors import Damaged

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
Outline = dict[str, str]
"""Dtype and shape of each tensor, by name: `"F32 [10, 3]"`."""


def outline(tensors: Mapping[str, Tensor]) -> Outline:
    """What a file of these tensors will hold; raises TypeError for a dtype that safetensors has not."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name!r} is {tensor.dtype}, which safetensors files cannot hold. Convert it first.")
    return {name: f"{DTYPES[tensor.dtype]} {list(tensor.shape)}" for name, tensor in tensors.items()}


def payload(tensors: Outline) -> int:
    """The bytes of all tensors together; raises ValueError or KeyError for an outline that describes none."""
    total = 0
    for dtype, shape in map(_parsed, tensors.values()):
        if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 2**63 for size in shape):
            raise ValueError(f"no tensor has the shape {shape}")
        total += math.prod(shape) * dtype.itemsize
    return total


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Digest:
    """Write the tensors, from whichever device they are on, and bring the file to the disk."""
    head, order = _layout(outline(tensors))
    return write_file(path, _pieces(head, [tensors[name] for name in order]))


def read_tensors(path: Path, digest: Digest, expected: Outline) -> dict[str, Tensor]:
    """The tensors of a file, each in memory of its own; raises `Damaged` unless it is exactly what was written."""
    head, order = _layout(expected)
    found = bytearray(len(head))
    tensors = {name: _room_for(expected[name]) for name in order}
    pieces = [memoryview(found), *(_bytes_of(tensor) for tensor in tensors.values())]
    if sum(map(len, pieces)) != digest.size:
        raise Damaged(f"{path.name} holds other tensors than its manifest says")
    read_into(path, digest, pieces)
    if found != head:
        raise Damaged(f"{path.name} holds other tensors than its manifest says")
    return tensors


def _layout(tensors: Outline) -> tuple[bytes, list[str]]:
    """The beginning of a file, and the order of its tensors; both follow from the outline alone."""
    # The widest first, so that each begins at a multiple of its own width.
    order = sorted(tensors, key=lambda name: (-_parsed(tensors[name])[0].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name in order:
        dtype, shape = _parsed(tensors[name])
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, order


def _pieces(head: bytes, tensors: list[Tensor]) -> Iterator[bytes | memoryview]:
    yield head
    for tensor in tensors:
        yield _bytes_of(tensor.cpu().contiguous())


def _bytes_of(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    # torch calls one element contiguous whatever its stride is, and leaves that stride where it flattens.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def _room_for(outline: str) -> Tensor:
    dtype, shape = _parsed(outline)
    return torch.empty(shape, dtype=dtype)


def _parsed(outline: str) -> tuple[torch.dtype, list[int]]:
    name, _, shape = outline.partition(" ")
    return _BY_NAME[name], json.loads(shape)
