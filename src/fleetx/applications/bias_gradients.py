"""Gradients of biases, summed up by kernels that pass over the same numbers for something else.

The gradient of a bias is a sum over all rows. torch reads them once more for it, with a kernel that keeps a part of a
GPU busy where there are few columns.
"""

from typing import Any

import torch
from torch import Tensor

from fleetx.applications import column_sums, own_kernels

_FEWEST_ROWS = 16384  # below, the device may wait for the host, whose time is all that counts
_ROWS, _COLUMNS = 4, 1024  # that a program reads at once
_GELU_PROGRAMS, _PARTS_PROGRAMS = 4224, 1056  # about so many, 32 and 8 for each processor of an H200: as measured there


def can_take(hidden: Tensor) -> bool:
    """Whether projections of hidden states like these may be given to the functions below."""
    return own_kernels.can_take(hidden) and hidden.numel() >= _FEWEST_ROWS * hidden.shape[-1] > 0


def biased_gelu(projected: Tensor, bias: Tensor) -> Tensor:
    """`gelu(projected + bias)`."""
    return _BiasedGelu.apply(projected.contiguous(), bias)


def parts_with_bias(projected: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three views of a projection that lie side by side; `bias` is in it already, and gets its gradient here."""
    return _Parts.apply(projected, bias)


class _BiasedGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(projected, bias)
        output = torch.empty_like(projected)
        rows, columns = _flat(projected)
        block = _block(columns)
        with own_kernels.on_device_of(projected):
            _kernels().gelu_kernel[(-(-rows // _ROWS), -(-columns // block))](
                projected, bias, output, rows, columns, ROWS=_ROWS, COLUMNS=block, num_warps=4
            )
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[bad-override]
        projected, bias = ctx.saved_tensors
        if own_kernels.must_be_torchs(gradient):
            slope = torch.ops.aten.gelu_backward(gradient, projected + bias.to(projected.dtype))
            return slope, column_sums.by_torch(slope).to(bias.dtype)
        output = torch.empty_like(projected)
        rows, columns = _flat(projected)
        block = _block(columns)
        blocks = -(-columns // block)
        shares = column_sums.shares_of(rows, _ROWS, _GELU_PROGRAMS // blocks)
        partial = column_sums.room_for(1, shares, columns, projected.device)
        tensors = gradient.contiguous(), projected, bias, output, partial
        with own_kernels.on_device_of(projected):
            _kernels().gelu_backward_kernel[(blocks, shares.count)](
                *tensors, rows, columns, shares.rows, ROWS=_ROWS, COLUMNS=block, num_warps=4
            )
        (of_bias,) = column_sums.totals(partial)
        return output, of_bias.to(bias.dtype)


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = bias.dtype
        return projected.chunk(3, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[bad-override]
        if any(own_kernels.must_be_torchs(one) for one in gradients):
            joined = torch.cat(gradients, -1)
            return joined, column_sums.by_torch(joined).to(ctx.dtype)
        rows, columns = _flat(gradients[0])
        joined = gradients[0].new_empty((*gradients[0].shape[:-1], 3 * columns))
        block = _block(columns)
        blocks = -(-columns // block)
        shares = column_sums.shares_of(rows, _ROWS, _PARTS_PROGRAMS // (3 * blocks))
        partial = column_sums.room_for(1, shares, 3 * columns, joined.device)
        with own_kernels.on_device_of(joined):
            _kernels().joined_kernel[(blocks, shares.count, 3)](
                *(one.contiguous() for one in gradients),
                joined,
                partial,
                rows,
                columns,
                shares.rows,
                ROWS=_ROWS,
                COLUMNS=block,
                num_warps=4,
            )
        (of_bias,) = column_sums.totals(partial)
        return joined, of_bias.to(ctx.dtype)


def _flat(tensor: Tensor) -> tuple[int, int]:
    """Rows and columns."""
    columns = tensor.shape[-1]
    return tensor.numel() // columns, columns


def _block(columns: int) -> int:
    """Columns of a program."""
    return min(_COLUMNS, own_kernels.power_of_two_from(columns))


def _kernels() -> Any:
    from fleetx.applications import bias_gradients_kernels

    return bias_gradients_kernels
