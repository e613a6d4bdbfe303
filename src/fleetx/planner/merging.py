"""Whether the gradient of a batch is that of its parts, put together: what a loss shows of that."""

import torch

from fleetx.planner.feeding import Feeding
from fleetx.planner.untouched import untouched
from fleetx.slicing import Batch, split

_ROUNDING = 0.02  # part of a loss: low precision and other kernels may move it by so much


def couples_samples(feeding: Feeding, four: Batch) -> bool:
    """Whether the loss of four samples is neither a sum nor any mean of those of two and two, as contrastive ones are.

    Asked in evaluation, where nothing is drawn and batch norms, of which others know, see single samples. A loss that
    is another one each time, or is not computed then, says nothing.
    """
    with untouched(feeding.model, feeding.loss_fn, gradients=False), torch.enable_grad():
        for module in (feeding.model, feeding.loss_fn):
            for part in module.modules() if isinstance(module, torch.nn.Module) else ():
                part.training = False  # not by eval(), in which some change their weights
        try:
            whole, again, *parts = (_numbers(feeding, batch) for batch in (four, four, *split(four, 2)))
        except Exception:  # in evaluation a model may do something else entirely
            return False
    if not whole or len(parts) != 2 or any(len(other) != len(whole) for other in (again, *parts)):
        return False
    if any(abs(one - two) > _ROUNDING * abs(one) for one, two in zip(whole, again, strict=True)):
        return False
    return any(_is_other(*numbers) for numbers in zip(whole, *parts, strict=True))


def _numbers(feeding: Feeding, batch: Batch) -> list[float]:
    return [loss.item() for loss in feeding.losses(batch) or ()]


def _is_other(whole: float, first: float, second: float) -> bool:
    """Whether one number is neither between two others, wherever, nor their sum."""
    near = _ROUNDING * max(abs(whole), abs(first), abs(second)) + 1e-6
    is_mean = min(first, second) - near <= whole <= max(first, second) + near
    return not is_mean and abs(whole - first - second) > near
