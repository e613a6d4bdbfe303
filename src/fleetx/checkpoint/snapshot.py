"""Copies of tensors on the host: what an asynchronous save writes while training goes on."""

from collections.abc import Mapping

import torch
from torch import Tensor


class HostCopies:
    """Copies in memory that is used again for the next save."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors; they may change once this returns."""
        copies = {name: self._room_for(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            copies[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self._memory = copies
        return copies

    def _room_for(self, name: str, tensor: Tensor) -> Tensor:
        old = self._memory.get(name)
        if old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype:
            return old
        # Page-locked memory is what a device can write to at full speed.
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
