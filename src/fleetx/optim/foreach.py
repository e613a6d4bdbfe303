"""Small tools over lists of tensors: one call each, nothing read back by the host."""

from collections.abc import Sequence

import torch
from torch import Tensor

Tensors = list[Tensor] | tuple[Tensor, ...]


def norms(tensors: Tensors) -> Tensor:
    """The L2 norm of each tensor, as one vector that stays on the device."""
    return torch.stack(torch._foreach_norm(tensors))


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
    wide = [length.to(lengths[0].device, torch.float64, non_blocking=True) for length in lengths]
    return torch.linalg.vector_norm(torch.cat(wide))


def number_on(value: float | Tensor, like: Tensor) -> float | Tensor:
    """A number as it is; a one-element tensor as 0-dim on the device and in the dtype of ``like``."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().reshape(()).to(like.device, like.dtype, non_blocking=True)


def times(tensors: list[Tensor], factor: float | Tensor) -> list[Tensor]:
    """All tensors times one number; as they are if it is the number 1."""
    if not isinstance(factor, Tensor) and factor == 1:
        return tensors
    return list(torch._foreach_mul(tensors, factor))
