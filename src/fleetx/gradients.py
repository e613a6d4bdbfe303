"""Arithmetic on lists of gradients, in place and without waiting for the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fleetx.numbers import Number


def global_norm(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """The 2-norm of all gradients together."""
    norms = [norm for same in _by_dtype(grads) for norm in torch._foreach_norm(same)]
    if not norms:
        return torch.zeros((), device=device)
    wide = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
    return torch.linalg.vector_norm(torch.stack([norm.to(device, wide) for norm in norms]))


def divide_and_clip_(grads: Sequence[Tensor], divisor: Number, norm: Tensor, max_norm: float | None) -> None:
    """Divide all gradients by one number and shorten them to `max_norm`, in one pass over their memory.

    `norm` is their norm after the division. The limit is that of torch.nn.utils.clip_grad_norm_.
    """
    factor: Number = divisor.double().reciprocal() if isinstance(divisor, Tensor) else 1.0 / divisor
    if max_norm is not None:
        factor = factor * (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if isinstance(factor, Tensor):
        for same in _by_dtype(grads):
            torch._foreach_mul_(same, factor.to(same[0].device, same[0].dtype))
    elif factor != 1:
        torch._foreach_mul_(list(grads), factor)


def _by_dtype(grads: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    return list(groups.values())
