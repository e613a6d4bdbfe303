"""Dropout whose zeros cost two instructions per number, and no mask.

A random number for each number that may be dropped takes about a hundred instructions: a kernel that would wait for
memory then waits for them. Here each row and each column has a random word of 32 bits, and a number is dropped when the
low 32 bits of the product of its two words lie below a threshold. The words are drawn by torch's generator, few enough
to be kept for the backward in place of a mask, which would be half as large as the input.

Where the model is compiled, the compiler makes it one kernel with its neighbours; for low precision on a GPU there is a
kernel, and another one that does the rest of a residual too (``residual_norm``); elsewhere it is torch's own dropout.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fleetx.applications import own_kernels
from fleetx.applications.packed_attention import dropout_threshold, keep_probability, random_words

_FEWEST_ROWS = 1024  # below, all that counts is how soon the next kernel starts
_ROWS, _COLUMNS = 4, 1024  # that a program reads at once, at most


class CheapDropout(nn.Dropout):
    """`nn.Dropout`, and something cheaper in its place where that is possible."""

    def forward(self, input: Tensor) -> Tensor:
        """The input with some numbers set to zero, the others raised to make up for it."""
        if self._drops_some_of(input) and torch.compiler.is_compiling():
            return thinned(input, draw_words(input), self.p)
        if self._has_own_kernel(input):
            return _Thinned.apply(input, draw_words(input), self.p)
        return super().forward(input)

    @property
    def present_rate(self) -> float:
        """The share of numbers that is dropped now: none in evaluation."""
        return self.p if self.training else 0.0

    def _drops_some_of(self, input: Tensor) -> bool:
        return 0.0 < self.present_rate < 1.0 and input.dim() > 0 and not self.inplace

    def _has_own_kernel(self, input: Tensor) -> bool:
        if not own_kernels.can_take(input) or not self._drops_some_of(input):
            return False
        return input.numel() >= _FEWEST_ROWS * input.shape[-1]


def draw_words(input: Tensor) -> Tensor:
    """A random word for each row, and behind these one for each column: the last dimension."""
    width = input.shape[-1]
    rows = input.numel() // width if width else 0
    return random_words((rows + width,), input.device)


def thinned(input: Tensor, words: Tensor, dropout: float) -> Tensor:
    """The input with zeros, by torch's operations."""
    rows = words.shape[0] - input.shape[-1]
    kept = words[:rows, None] * words[rows:] >= dropout_threshold(dropout)
    return torch.where(kept.view(input.shape), input / keep_probability(dropout), 0.0)


class _Thinned(torch.autograd.Function):
    """The input with zeros."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, words: Tensor, dropout: float) -> Tensor:
        ctx.save_for_backward(words)
        ctx.dropout = dropout
        return thinned_by_kernel(input, words, dropout)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[bad-override]
        (words,) = ctx.saved_tensors
        differentiate = thinned if own_kernels.must_be_torchs(gradient) else thinned_by_kernel
        return differentiate(gradient, words, ctx.dropout), None, None


def thinned_by_kernel(input: Tensor, words: Tensor, dropout: float) -> Tensor:
    """The input with zeros."""
    from fleetx.applications import cheap_dropout_kernels

    kernel: Any = cheap_dropout_kernels.thinned_kernel
    columns = input.shape[-1]
    rows = words.shape[0] - columns
    output = torch.empty_like(input, memory_format=torch.contiguous_format)
    if not output.numel():
        return output
    block = min(_COLUMNS, own_kernels.power_of_two_from(columns))
    grid = (-(-rows // _ROWS), -(-columns // block))
    numbers = rows, columns, dropout_threshold(dropout), keep_probability(dropout)
    with own_kernels.on_device_of(input):
        kernel[grid](input.contiguous(), words, output, *numbers, ROWS=_ROWS, COLUMNS=block, num_warps=4)
    return output
