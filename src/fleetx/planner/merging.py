"""Whether the gradient of a batch is that of its parts, put together: what a loss shows of that."""

import math
import warnings

import torch

from fleetx.planner.feeding import Feeding
from fleetx.planner.untouched import untouched
from fleetx.slicing import Batch, split

_REPEATED = 1e-4  # part of a loss by which it may differ if nothing else is computed
_ROUNDING = 0.02  # part of a loss: low precision and other kernels may move it by so much


def couples_samples(feeding: Feeding, four: Batch) -> bool:
    """Whether the loss of four samples is neither a sum nor any mean of those of their parts, as contrastive ones are.

    Asked in evaluation, where nothing is drawn and batch norms, of which others know, see single samples. A loss that
    is another one each time, or is not computed then, says nothing.
    """
    with untouched(feeding.model, feeding.loss_fn, gradients=False), torch.enable_grad():
        for module in (feeding.model, feeding.loss_fn):
            for part in module.modules() if isinstance(module, torch.nn.Module) else ():
                part.training = False  # not by eval(), in which some change their weights
        whole, again, halves, single = (_numbers(feeding, four, parts) for parts in (1, 1, 2, 4))
    if not (whole and again and all(_is_near(a, b, _REPEATED) for a, b in zip(whole[0], again[0], strict=False))):
        return False
    return any(
        _is_other(number, [part[place] for part in parts])
        for parts in (halves, single)
        for place, number in enumerate(whole[0])
        if parts and all(len(part) == len(whole[0]) for part in parts)
    )


def _numbers(feeding: Feeding, batch: Batch, parts: int) -> list[list[float]]:
    """The losses of each part; none if there are none, for in evaluation a model may do something else entirely."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it says of a single sample is of no interest
            return [[loss.item() for loss in feeding.losses(part)] for part in split(batch, parts)]
    except Exception:
        return []


def _is_near(one: float, other: float, part: float = _ROUNDING) -> bool:
    return abs(one - other) <= part * max(abs(one), abs(other)) + 1e-6


def _is_other(whole: float, parts: list[float]) -> bool:
    """Whether a number is neither between some others, wherever, nor their sum; if all of them are numbers."""
    if not all(map(math.isfinite, (whole, *parts))):
        return False
    is_mean = min(parts) <= whole <= max(parts) or any(_is_near(whole, part) for part in parts)
    return not is_mean and not _is_near(whole, sum(parts))
