"""Dropout whose zeros cost two instructions per number where the compiler computes it with its neighbours.

The compiler draws a random number for each number that may be dropped, by about a hundred instructions: a kernel that
would wait for memory then waits for them. Here each row and each column has a random word of 32 bits, and a number is
dropped when the low 32 bits of the product of its two words lie below a threshold. The words are drawn by torch's
generator, few enough to be kept for the backward in place of a mask.
"""

import torch
from torch import Tensor, nn

from fleetx.applications.packed_attention import RANDOM_WORDS, dropout_threshold, keep_probability


class CheapDropout(nn.Dropout):
    """`nn.Dropout`, and something cheaper in its place where it is compiled."""

    def forward(self, input: Tensor) -> Tensor:
        """The input with some numbers set to zero, the others raised to make up for it."""
        is_plain = input.dim() > 0 and not self.inplace
        if self.training and is_plain and 0.0 < self.p < 1.0 and torch.compiler.is_compiling():
            return thinned(input, self.p)
        return super().forward(input)


def thinned(input: Tensor, dropout: float) -> Tensor:
    """The input with zeros, the last dimension being the columns."""
    width = input.shape[-1]
    rows, half = input.numel() // width, RANDOM_WORDS // 2
    words = torch.randint(-half, half, (rows + width,), dtype=torch.int32, device=input.device)
    kept = words[:rows, None] * words[rows:] >= dropout_threshold(dropout)
    return torch.where(kept.view(input.shape), input / keep_probability(dropout), 0.0)
