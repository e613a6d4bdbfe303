"""Gives every worker the first worker's weights, after making sure that they hold the same model."""

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fleetx.comm import world


def broadcast_module(module: nn.Module) -> None:
    """Copy parameters and buffers of worker 0 to all others."""
    if world.size() == 1:
        return
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    _require_same_structure(tensors)
    for tensor in tensors.values():
        message = tensor.detach().contiguous()
        dist.broadcast(message, src=0)
        tensor.detach().copy_(message)


def _require_same_structure(tensors: dict[str, Tensor]) -> None:
    # Strides are part of it: gradients travel in the parameters' own memory order.
    lines = [f"{name} {tuple(t.shape)} {t.stride()} {t.dtype} {t.requires_grad}" for name, t in tensors.items()]
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
    mine = torch.tensor(list(digest), dtype=torch.int32, device=device)
    first = mine.clone()
    dist.broadcast(first, src=0)
    differs = (mine != first).any().int()
    dist.all_reduce(differs, op=dist.ReduceOp.MAX)
    if differs.item():
        raise ValueError(
            f"the workers hold different models: worker {world.rank()} has {len(tensors)} tensors, and their "
            "names, shapes, strides, dtypes or requires_grad differ from those of worker 0 on at least one worker. "
            "Build the model from the same code and settings everywhere."
        )
