"""Arithmetic on lists of gradients, in place and without waiting for the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fleetx.numbers import Number, is_at_hand


def norm_after_division(grads: Sequence[Tensor], divisor: Number, device: torch.device) -> Tensor:
    """The 2-norm of all gradients together, divided by one number, in the widest dtype of the gradients.

    It is finite if that dtype can express it, also where the squares of the gradients overflow, and if all gradients
    can be multiplied by the number's reciprocal.
    """
    norms = [_norms(same).to(device, torch.float64) for same in _by_dtype(grads)]
    if not norms:
        return torch.zeros((), device=device) / divisor
    by_size = sorted({grad.dtype.to_real() for grad in grads}, key=lambda dtype: dtype.itemsize)
    factor = torch.as_tensor(_reciprocal(divisor), dtype=torch.float64).to(by_size[0]).double()
    return (torch.linalg.vector_norm(torch.cat(norms)) * factor).to(by_size[-1])


def _reciprocal(divisor: Number) -> Number:
    return divisor.double().reciprocal() if isinstance(divisor, Tensor) else 1.0 / divisor


def _norms(grads: list[Tensor]) -> Tensor:
    """The 2-norm of each gradient: on a GPU in fp64, as nobody may wait for it; on the host where fp32 overflowed."""
    wide = torch.promote_types(grads[0].dtype, torch.float64)
    if not is_at_hand(grads[0]):
        return torch.stack(torch._foreach_norm(grads, 2, wide))
    norms = torch.stack(torch._foreach_norm(grads))
    if not norms.isinf().any():
        return norms
    pairs = zip(grads, norms.unbind(), strict=True)
    return torch.stack([torch.linalg.vector_norm(grad, dtype=wide) if norm.isinf() else norm for grad, norm in pairs])


def divide_and_clip_(grads: Sequence[Tensor], divisor: Number, norm: Tensor, max_norm: float | None) -> None:
    """Divide all gradients by one number and shorten them to `max_norm`, in one pass over their memory.

    `norm` is their norm after the division. The limit is that of torch.nn.utils.clip_grad_norm_.
    """
    factor = _reciprocal(divisor)
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
