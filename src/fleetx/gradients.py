"""Arithmetic on lists of gradients, in place and without waiting for the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

Number = float | Tensor


def divide_(grads: Sequence[Tensor], divisor: Number) -> None:
    """Divide all gradients by one number; by exactly 1 costs nothing."""
    if not isinstance(divisor, Tensor) and divisor == 1:
        return
    for same in _by_dtype(grads):
        # The reciprocal is taken in fp64, so that only the product is rounded.
        factor = torch.as_tensor(divisor, dtype=torch.float64, device=same[0].device).reciprocal()
        torch._foreach_mul_(same, factor.to(same[0].dtype))


def global_norm(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """The 2-norm of all gradients together."""
    norms = [norm for same in _by_dtype(grads) for norm in torch._foreach_norm(same)]
    if not norms:
        return torch.zeros((), device=device)
    wide = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
    return torch.linalg.vector_norm(torch.stack([norm.to(device, wide) for norm in norms]))


def clip_(grads: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Shorten the gradients to `max_norm`, as torch.nn.utils.clip_grad_norm_ does."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for same in _by_dtype(grads):
        torch._foreach_mul_(same, factor.to(same[0].device, same[0].dtype))


def _by_dtype(grads: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    return list(groups.values())
