"""How a batch gets from a loading process to the training process.

torch puts each tensor into shared memory and passes on a file descriptor, which takes longer than making many a batch
of text. Small tensors travel faster as bytes in the message itself; large ones stay with torch.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

# One tensor alone is faster as bytes up to between 512 KiB and 1 MiB; a batch has several.
MOST_BYTES = 2**18


class ByValue:
    """A small tensor on its way."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def tensor(self) -> Tensor:
        """What it was."""
        return torch.from_numpy(self.array)

    def pin_memory(self) -> Tensor:
        """torch's loader calls this where batches are to arrive in page-locked memory."""
        return self.tensor().pin_memory()


def packed(batch: Any) -> Any:
    """The batch as it leaves a loading process."""
    return tree_map_only(Tensor, _by_value, batch)


def unpacked(batch: Any) -> Any:
    """The batch as it was."""
    return tree_map_only(ByValue, ByValue.tensor, batch)


def _by_value(tensor: Tensor) -> ByValue | Tensor:
    small = 0 < tensor.numel() * tensor.element_size() <= MOST_BYTES
    # Arrays forget other orders in memory than the usual one, and numpy does not know bfloat16.
    plain = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.is_contiguous()
    if not (small and plain) or tensor.requires_grad or tensor.dtype in (torch.bfloat16, torch.complex32):
        return tensor
    return ByValue(tensor.numpy())
