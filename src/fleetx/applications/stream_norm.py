"""A LayerNorm that leaves the residual stream in its low precision."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class StreamLayerNorm(nn.LayerNorm):
    """A LayerNorm whose output has the dtype of its input; its statistics are fp32 at least, inside the kernel."""

    def forward(self, input: Tensor) -> Tensor:
        """The normalised tensor."""
        # Autocast would first copy the input to fp32 and keep that copy for the backward.
        with torch.autocast(input.device.type, enabled=False):
            weight, bias = (None if one is None else one.to(input.dtype) for one in (self.weight, self.bias))
            return functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)
