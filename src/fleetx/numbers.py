"""Kinds of numbers that several modules speak of."""

import torch
from torch import Tensor

Number = float | Tensor
LOW_PRECISION = (torch.float16, torch.bfloat16)


def is_at_hand(tensor: Tensor) -> bool:
    """Whether the host may read it without waiting for a device."""
    return tensor.device.type == "cpu"
