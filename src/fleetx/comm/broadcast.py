"""Gives every worker the first worker's weights, after making sure that they hold the same model."""

import torch
import torch.distributed as dist
from torch import nn

from fleetx.comm import beats, world
from fleetx.comm.agreement import require_agreement


def broadcast_module(module: nn.Module) -> None:
    """Copy parameters and buffers of worker 0 to all others."""
    if world.size() == 1:
        return
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    # Strides are part of it: gradients travel in the parameters' own memory order.
    lines = [f"{name} {tuple(t.shape)} {t.stride()} {t.dtype} {t.requires_grad}" for name, t in tensors.items()]
    device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
    require_agreement(lines, device, "their models")
    with beats.waiting():
        for tensor in tensors.values():
            message = tensor.detach().contiguous()
            dist.broadcast(message, src=0)
            tensor.detach().copy_(message)
