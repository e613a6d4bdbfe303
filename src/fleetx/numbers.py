"""Kinds of numbers that several modules speak of."""

import torch
from torch import Tensor

Number = float | Tensor
LOW_PRECISION = (torch.float16, torch.bfloat16)
