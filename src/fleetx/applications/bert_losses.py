"""Cross entropy over a large vocabulary, a few positions at a time.

The logits of BERT's masked positions are positions × 30,522 numbers: kept for the backward they would outweigh the
rest of a small model. Here a chunk of them exists at a time; the backward computes them again from the hidden
states, which costs one more product of a head that is about 1.5 % of BERT-large.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fleetx.applications.base import whole

ALIGNMENT = 64
IGNORED = -100
"""The label of a position that does not count, as in torch."""


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over labels that are not ignored; 0 where there are none (the mean over nothing would be NaN)."""
    total = functional.cross_entropy(_wide(logits), whole(labels), ignore_index=IGNORED, reduction="sum")
    return total / _at_least_one(labels)


def projected_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """`mean_cross_entropy(hidden @ weight.T + bias, labels)`, with the logits of `chunk` positions at a time.

    The products run in the dtype of `hidden`; logits are summed up and differentiated in fp32 at least.
    """
    return _ProjectedCrossEntropy.apply(hidden, weight, bias, whole(labels), chunk) / _at_least_one(labels)


class _ProjectedCrossEntropy(torch.autograd.Function):
    """The sum over positions. The gradient that arrives carries the loss scale, so it is applied before rounding."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, chunk: int) -> Tensor:
        low, bias_wide = _aligned(weight.to(hidden.dtype), bias)
        normalizers, losses = [], []
        for rows in _chunks(len(hidden), chunk):
            logits = _logits(hidden[rows], low, bias_wide)
            normalizer = logits.logsumexp(dim=1)
            # Only among the words that exist: any other label is an error.
            chosen = logits[:, : len(weight)].gather(1, _present(labels[rows])[:, None])[:, 0]
            losses.append(torch.where(labels[rows] == IGNORED, 0, normalizer - chosen).sum())
            normalizers.append(normalizer)
        ctx.save_for_backward(hidden, weight, bias, labels, torch.cat(normalizers))
        ctx.chunk = chunk
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[bad-override]  # the decorator hides the name of `ctx`
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        hidden, weight, bias, labels, normalizers = ctx.saved_tensors
        low, bias_wide = _aligned(weight.to(hidden.dtype), bias)
        hidden_grads = []
        weight_grad, bias_grad = (torch.zeros_like(p, dtype=normalizers.dtype) for p in (low, bias_wide))
        for rows in _chunks(len(hidden), ctx.chunk):
            # softmax minus one-hot, written over the logits
            slopes = _logits(hidden[rows], low, bias_wide).sub_(normalizers[rows][:, None]).exp_()
            slopes.scatter_add_(1, _present(labels[rows])[:, None], -torch.ones_like(slopes[:, :1]))
            slopes.mul_(torch.where(labels[rows] == IGNORED, 0, gradient)[:, None])
            bias_grad += slopes.sum(dim=0)
            rounded = slopes.to(hidden.dtype)
            hidden_grads.append(rounded @ low)
            # Chunks are added up in fp32, or the sum over many of them would lose the small ones.
            weight_grad += rounded.T @ hidden[rows]
        words = len(weight)
        return (
            torch.cat(hidden_grads),
            weight_grad[:words].to(weight.dtype),
            bias_grad[:words].to(bias.dtype),
            None,
            None,
        )


def _aligned(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias with words that never occur, up to a multiple of 64: GPUs multiply odd sizes at half speed."""
    missing = -len(weight) % ALIGNMENT
    if not missing:
        return weight, bias
    return functional.pad(weight, (0, 0, 0, missing)), functional.pad(bias, (0, missing), value=-math.inf)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    logits = _wide(hidden @ weight.T)
    return logits.add_(bias)


def _chunks(length: int, chunk: int) -> Iterator[slice]:
    # No positions at all are one empty chunk, whose loss is 0.
    return (slice(start, min(start + chunk, length)) for start in range(0, max(length, 1), chunk))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _present(labels: Tensor) -> Tensor:
    """With some word where there is none to be predicted; what else is no word stays so, and is an error."""
    return labels.masked_fill(labels == IGNORED, 0)


def _at_least_one(labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum().clamp(min=1)
