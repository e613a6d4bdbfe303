"""Parameters of which each rank holds a part, as ``fully_shard`` makes them (DTensor).

Everything that LARS and LAMB do element by element, a rank does to its own part. Only norms need the others: the
squares of all tensors travel together, in one all-reduce for each dimension of the device mesh that cuts parameters.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fleetx.comm import beats
from fleetx.optim.foreach import Tensors, norms

Part = tuple[Any, int]  # a mesh, and one of its dimensions


def is_sharded(tensor: Tensor) -> bool:
    """Whether the tensor is a DTensor; nobody who has none needs to import them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is. Writing to the part writes to the whole."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # pyrefly: ignore[missing-attribute]


def gradient_of(parameter: Any) -> Tensor:
    """A parameter's gradient, cut as the parameter is."""
    gradient = parameter.grad
    if is_sharded(parameter) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local(gradient)


def cut_like(value: Tensor, parameter: Any) -> Tensor:
    """A whole tensor, as from a checkpoint of an unsharded run, cut as the parameter is."""
    if not is_sharded(parameter) or is_sharded(value) or value.shape != parameter.shape:
        return value
    module = sys.modules["torch.distributed.tensor"]
    # Every rank has the whole: nothing needs to be sent.
    return module.distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def all_norms(lists: Sequence[tuple[Sequence[Tensor], Tensors]]) -> list[Tensor]:
    """For each pair of parameters and lists of (parts of) tensors cut like them: a vector of the whole tensors' norms.

    All of them travel in one all-reduce per dimension of the mesh; nothing travels where nothing is cut.
    """
    found = [norms(tensors) for _, tensors in lists]
    cut: dict[tuple[Part, ...], list[tuple[int, int]]] = {}
    for number, (parameters, _) in enumerate(lists):
        for index, parameter in enumerate(parameters):
            if parts := _parts(parameter):
                cut.setdefault(parts, []).append((number, index))
    if not cut:
        return found
    # Views of vectors: one operation for each vector, not for each tensor.
    entries = [list(vector.double().unbind()) for vector in found]
    for parts, places in cut.items():
        squares = torch.stack([entries[number][index] for number, index in places]).square_()
        for mesh, dimension in parts:
            with beats.waiting():
                dist.all_reduce(squares, group=mesh.get_group(dimension))
        for value, (number, index) in zip(squares.sqrt_().unbind(), places, strict=True):
            entries[number][index] = value
    return [torch.stack(own).to(vector.dtype) for own, vector in zip(entries, found, strict=True)]


def _parts(parameter: Any) -> tuple[Part, ...]:
    """The dimensions of the mesh that cut a parameter."""
    if not is_sharded(parameter):
        return ()
    mesh = parameter.device_mesh
    return tuple((mesh, number) for number, place in enumerate(parameter.placements) if not place.is_replicate())
