"""Small tools over lists of tensors: one call each, nothing read back by the host."""

from collections.abc import Sequence

import torch
from torch import Tensor

Tensors = list[Tensor] | tuple[Tensor, ...]


ROW = 1 << 12
"""How many squares may be added up at once: on the host torch does it in fp32, and of 30 million loses 0.2 %."""


SAFE = (1e-12, 1e18)
"""Norms that fp32 can find: of smaller ones the squares vanish, of greater ones they overflow."""


def norms(tensors: Tensors) -> Tensor:
    """The L2 norm of each tensor, as one vector that stays on the device."""
    kind, compiling = tensors[0].device.type, torch.compiler.is_compiling()
    wide = torch.float64 if kind == "cuda" or compiling else None
    found = torch.stack(torch._foreach_norm([_shortened(tensor) for tensor in tensors], 2, wide))
    if kind == "cpu" and not compiling:  # the host waits for nothing there: it looks, and is wide only where it must
        for index, norm in enumerate(found.tolist()):
            if not SAFE[0] < norm < SAFE[1]:
                found[index] = torch.linalg.vector_norm(tensors[index], dtype=torch.float64)
    return found.to(tensors[0].dtype)


def _shortened(tensor: Tensor) -> Tensor:
    """The tensor itself, or a short one of the same norm: the norms of its parts."""
    if tensor.device.type != "cpu" or tensor.numel() <= ROW:
        return tensor
    if torch.compiler.is_compiling():
        return torch.linalg.vector_norm(tensor, dtype=torch.float64)  # compiled code converts as it reads
    in_memory_order = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    flat = in_memory_order.reshape(-1)  # a view, unless there are gaps
    rows = len(flat) // ROW * ROW
    parts = [torch.linalg.vector_norm(flat[:rows].view(-1, ROW), dim=1), torch.linalg.vector_norm(flat[rows:])[None]]
    return torch.cat(parts).double()


def scale_(tensors: Tensors, factor: float | Tensor) -> None:
    """Multiply in place: all tensors by one number (or 0-dim tensor), or each by its entry of a vector."""
    if isinstance(factor, Tensor) and factor.ndim == 1:
        torch._foreach_mul_(tensors, factor.unbind())
    else:
        torch._foreach_mul_(tensors, factor)


def in_dtype(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The tensors in ``dtype``; those that have it are returned as they are."""
    wanted = [tensor if tensor.dtype == dtype else torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    converted = [(new, old) for new, old in zip(wanted, tensors, strict=True) if new is not old]
    if converted:
        torch._foreach_copy_([new for new, _ in converted], [old for _, old in converted])
    return wanted


def length_of_all(lengths: Sequence[Tensor]) -> Tensor:
    """The length of everything together, from vectors of the lengths of its parts."""
    wide = [moved(length, lengths[0].device, torch.float64) for length in lengths]
    return torch.linalg.vector_norm(torch.cat(wide))


def number_on(value: float | Tensor, like: Tensor) -> float | Tensor:
    """A number as it is; a one-element tensor as 0-dim on the device and in the dtype of ``like``."""
    if not isinstance(value, Tensor):
        return value
    return moved(value.detach().reshape(()), like.device, like.dtype)


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor elsewhere. Nobody waits for what goes to a device; what comes to the host is read there at once."""
    return tensor.to(device, dtype, non_blocking=device.type != "cpu")


def times(tensors: list[Tensor], factor: float | Tensor) -> list[Tensor]:
    """All tensors times one number; as they are if it is the number 1."""
    if not isinstance(factor, Tensor) and factor == 1:
        return tensors
    return list(torch._foreach_mul(tensors, factor))
