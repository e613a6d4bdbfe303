"""A LayerNorm that leaves the residual stream in its low precision, and whose backward keeps a GPU busy.

torch adds up the gradients of weight and bias with one block per 32 columns, unless there are more than 65,536 rows: of
width 1,024 a quarter of an H200 works.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetx.applications import own_kernels

_FEWEST_ROWS = 32768  # below, the device may wait for the host, whose time is all that counts
_ROWS, _COLUMNS = 16, 128  # that a program reads at once
_PROGRAMS = 1024  # about so many, for a device of a hundred processors


class StreamLayerNorm(nn.LayerNorm):
    """A LayerNorm whose output has the dtype of its input; its statistics are fp32 at least, inside the kernel."""

    def forward(self, input: Tensor) -> Tensor:
        """The normalised tensor."""
        # Autocast would first copy the input to fp32 and keep that copy for the backward.
        with torch.autocast(input.device.type, enabled=False):
            if self._has_own_backward(input):
                return _StreamNorm.apply(input, self.weight, self.bias, self.eps)
            weight, bias = (None if one is None else one.to(input.dtype) for one in (self.weight, self.bias))
            return functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)

    def _has_own_backward(self, input: Tensor) -> bool:
        if not own_kernels.can_take(input) or not torch.is_grad_enabled():
            return False
        is_plain = type(self.weight) is type(self.bias) is nn.Parameter and len(self.normalized_shape) == 1
        return is_plain and input.numel() >= _FEWEST_ROWS * input.shape[-1]


class _StreamNorm(torch.autograd.Function):
    """Over the last dimension; weight and bias may have more precision than the input, and so have their gradients."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        low = weight.to(input.dtype)
        output, mean, deviation = torch.native_layer_norm(input, weight.shape, low, bias.to(input.dtype), eps)
        ctx.save_for_backward(input, weight, bias, low, mean, deviation)
        return output

    @staticmethod
    def backward(  # type: ignore[bad-override]  # a base class that takes anything
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        input, weight, bias, low, mean, deviation = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        if own_kernels.must_be_torchs(gradient):
            parameters = weight.to(input.dtype), bias.to(input.dtype)
            grads = _torchs(gradient, input, mean, deviation, *parameters, needed)
            of_weight, of_bias = (
                None if g is None else g.to(p.dtype) for g, p in zip(grads[1:], (weight, bias), strict=True)
            )
            return grads[0], of_weight, of_bias, None
        of_input = _torchs(gradient, input, mean, deviation, low, None, (needed[0], False, False))[0]
        if not (needed[1] or needed[2]):
            return of_input, None, None, None
        of_weight, of_bias = parameter_gradients(gradient, input, mean, deviation)
        return of_input, of_weight.to(weight.dtype), of_bias.to(bias.dtype), None


def _torchs(
    gradient: Tensor,
    input: Tensor,
    mean: Tensor,
    deviation: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needed: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of input, weight and bias; None of those that are not needed."""
    return torch.ops.aten.native_layer_norm_backward(
        gradient, input, weight.shape, mean, deviation, weight, bias, list(needed)
    )


def parameter_gradients(gradient: Tensor, input: Tensor, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias in fp32; `deviation` is the reciprocal one."""
    from fleetx.applications import stream_norm_kernels

    kernel: Any = stream_norm_kernels.parameter_gradients_kernel
    columns = input.shape[-1]
    rows = input.numel() // columns
    blocks = -(-columns // _COLUMNS)
    share = max(_ROWS, -(-rows * blocks // _PROGRAMS))
    shares = -(-rows // share)
    partial = input.new_empty((2, shares, columns), dtype=torch.float32)
    flat = [one.contiguous() for one in (gradient, input, mean, deviation)]
    with own_kernels.on_device_of(input):
        kernel[(blocks, shares)](*flat, partial, rows, columns, share, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4)
    sums = partial.sum(1)
    return sums[0], sums[1]
