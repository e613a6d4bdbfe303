"""What segments hold on a device at this moment: for whoever must say why memory ran out."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fleetx.memory.recompute import Frame, frames_alive
from fleetx.memory.tape import pointer_of
from fleetx.notices import shown


class Resident(NamedTuple):
    """Bytes."""

    checkpoints: int  # what segments keep to be computed again
    activations: int  # what autograd saved while we watched, and what was computed again


def resident_on(device: torch.device | str) -> Resident:
    """What the segments of all models hold on a device; memory that two of them share is counted once."""
    device = _one_device(device)
    frames = frames_alive()
    checkpoints = _storages(frames, _checkpoints, device)
    activations = _storages(frames, _activations, device)
    for pointer in checkpoints:
        activations.pop(pointer, None)
    return Resident(sum(checkpoints.values()), sum(activations.values()))


def _one_device(device: object) -> torch.device:
    if isinstance(device, str):
        device = torch.device(device)  # which refuses what is none
    if not isinstance(device, torch.device):
        raise TypeError(
            f"resident_on takes a torch.device or its name, got {shown(device)}: write for example 'cuda:0'."
        )
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())  # tensors know their number
    return device


def _storages(frames: list[Frame], held: Callable[[Frame], Iterator[Tensor]], device: torch.device) -> dict[int, int]:
    tensors = [tensor for frame in frames for tensor in held(frame) if tensor.device == device]
    return {pointer: t.untyped_storage().nbytes() for t in tensors if (pointer := pointer_of(t)) is not None}


def _checkpoints(frame: Frame) -> Iterator[Tensor]:
    for external in frame.tape.externals:
        if external.tensor is not None and not external.is_kept:
            yield external.tensor
    for call in frame.tape.calls:
        for saved in [] if call.dear is None else call.dear.saved:
            yield from [] if saved is None else (one for one in saved.flat if isinstance(one, Tensor))


def _activations(frame: Frame) -> Iterator[Tensor]:
    for reference in frame.references:
        saved = reference()
        if saved is not None and saved.tensor is not None:
            yield saved.tensor
    yield from frame.tensors_again()
