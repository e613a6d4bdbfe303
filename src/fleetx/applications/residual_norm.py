"""The end of a half layer in one pass forwards and one backwards: bias, dropout, shortcut and norm.

One after the other these read and write the residual stream thirteen times, forwards and backwards; together eight. And
each kernel costs a device some microseconds in which little of it works, which many micro-batches pay again and again.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fleetx.applications import column_sums, own_kernels
from fleetx.applications.cheap_dropout import draw_words, thinned
from fleetx.applications.packed_attention import dropout_threshold, keep_probability

_FEWEST_ROWS = 1024  # below, all that counts is how soon the next kernel starts
_MOST_COLUMNS = 4096  # that a program can hold
_FORWARD, _BACKWARD = 4096, 2048  # numbers that a program reads at once, of each tensor
_PROGRAMS = 528  # of the backward, about so many: four for each processor of an H200


def can_take(shortcut: Tensor) -> bool:
    """Whether a residual stream like this may be given to `residual_norm`."""
    if not own_kernels.can_take(shortcut):
        return False
    columns = shortcut.shape[-1]
    return 0 < columns <= _MOST_COLUMNS and shortcut.numel() >= _FEWEST_ROWS * columns


def residual_norm(projected: Tensor, bias: Tensor, shortcut: Tensor, norm: nn.LayerNorm, dropout: float) -> Tensor:
    """`norm(dropout(projected + bias) + shortcut)`; zeros as those of `CheapDropout`."""
    words = draw_words(shortcut) if dropout else None
    return _ResidualNorm.apply(projected, bias, shortcut, norm.weight, norm.bias, words, dropout, norm.eps)[0]


class _Saved(NamedTuple):
    """What the backward needs; `deviations` are reciprocal ones."""

    summed: Tensor
    means: Tensor
    deviations: Tensor
    weight: Tensor
    words: Tensor | None


class _ResidualNorm(torch.autograd.Function):
    """The norm, and the sum that it is taken of: derivatives of derivatives come to the inputs through that.

    Parameters may have more precision than the stream, and so have their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        projected: Tensor,
        bias: Tensor,
        shortcut: Tensor,
        weight: Tensor,
        norm_bias: Tensor,
        words: Tensor | None,
        dropout: float,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        shortcut = shortcut.contiguous()
        summed, output = torch.empty_like(shortcut), torch.empty_like(shortcut)
        columns = shortcut.shape[-1]
        rows = shortcut.numel() // columns
        # Each by itself: as a part of another tensor it would begin anywhere, and Triton compiles for that too.
        means, deviations = (shortcut.new_empty(rows, dtype=torch.float32) for _ in range(2))
        block, at_once = _block(columns, _FORWARD)
        tensors = projected.contiguous(), bias, shortcut, words, weight, norm_bias, summed, output, means, deviations
        with own_kernels.on_device_of(shortcut):
            _kernels().residual_norm_kernel[(-(-rows // at_once),)](
                *tensors, rows, columns, *_chances(dropout), eps, ROWS=at_once, COLUMNS=block, num_warps=4
            )
        ctx.save_for_backward(*_Saved(summed, means, deviations, weight, words))
        ctx.dropout = dropout
        ctx.dtypes = weight.dtype, norm_bias.dtype, bias.dtype
        ctx.set_materialize_grads(False)
        return output, summed

    @staticmethod
    def backward(  # type: ignore[bad-override]
        ctx: Any, gradient: Tensor | None, of_summed: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        saved = _Saved(*ctx.saved_tensors)
        if gradient is None:
            gradient = torch.zeros_like(saved.summed)
        if of_summed is not None or own_kernels.must_be_torchs(gradient):
            of_sum, of_projected, *sums = _by_torch(gradient, of_summed, saved, ctx.dropout)
        else:
            of_sum, of_projected, *sums = _by_kernel(gradient, saved, ctx.dropout)
        of_weight, of_norm_bias, of_bias = (one.to(dtype) for one, dtype in zip(sums, ctx.dtypes, strict=True))
        return of_projected, of_bias, of_sum, of_weight, of_norm_bias, None, None, None


def _by_kernel(gradient: Tensor, saved: _Saved, dropout: float) -> tuple[Tensor, ...]:
    """The gradients of the sum, the projection, the norm's weight and bias, and the projection's bias."""
    of_sum = torch.empty_like(saved.summed)
    of_projected = of_sum if saved.words is None else torch.empty_like(of_sum)
    columns, rows = of_sum.shape[-1], saved.means.numel()
    block, at_once = _block(columns, _BACKWARD)
    shares = column_sums.shares_of(rows, at_once, _PROGRAMS)
    partial = column_sums.room_for(3, shares, columns, of_sum.device)
    with own_kernels.on_device_of(of_sum):
        _kernels().residual_norm_backward_kernel[(shares.count,)](
            gradient.contiguous(),
            *saved,
            of_sum,
            of_projected,
            partial,
            rows,
            columns,
            shares.rows,
            *_chances(dropout),
            ROWS=at_once,
            COLUMNS=block,
            num_warps=4,
        )
    return of_sum, of_projected, *column_sums.totals(partial)


def _by_torch(gradient: Tensor, of_summed: Tensor | None, saved: _Saved, dropout: float) -> tuple[Tensor, ...]:
    """The same by torch's operations, which have derivatives and can take many gradients at once."""
    statistics = (one.view(*saved.summed.shape[:-1], 1) for one in (saved.means, saved.deviations))
    low = saved.weight.to(saved.summed.dtype)
    of_sum, of_weight, of_norm_bias = torch.ops.aten.native_layer_norm_backward(
        gradient, saved.summed, low.shape, *statistics, low, torch.zeros_like(low), [True, True, True]
    )
    if of_summed is not None:
        of_sum = of_sum + of_summed
    of_projected = of_sum if saved.words is None else thinned(of_sum, saved.words, dropout)
    return of_sum, of_projected, of_weight, of_norm_bias, column_sums.by_torch(of_projected)


def _block(columns: int, numbers: int) -> tuple[int, int]:
    """Columns of a program, and the rows that it reads at once: so many numbers together."""
    block = own_kernels.power_of_two_from(columns)
    return block, max(1, numbers // block)


def _chances(dropout: float) -> tuple[int, float]:
    return dropout_threshold(dropout), keep_probability(dropout)


def _kernels() -> Any:
    from fleetx.applications import residual_norm_kernels

    return residual_norm_kernels
