"""Checks of arguments: a message says the rule, the value and the remedy."""

import math
from typing import Any

from torch import Tensor

ROUNDING = 1e-9
"""How far below 0 a schedule that ends at 0 may come out."""


def check_number(
    name: str,
    value: Any,
    *,
    at_least: float = 0.0,
    above: float | None = None,
    below: float | None = None,
    usual: str,
) -> None:
    """Refuse what is not a finite number in the range; ``usual`` is the remedy: what people write there."""
    low = f"above {above:g}" if above is not None else f"at least {at_least:g}"
    rule = f"{name} must be a number {low}" + (f" and below {below:g}" if below is not None else "")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{rule}, got {value!r}: {usual}.")
    too_low = value <= above if above is not None else value < at_least
    if not math.isfinite(value) or too_low or (below is not None and value >= below):
        raise ValueError(f"{rule}, got {value!r}: {usual}.")


def check_count(name: str, value: Any, *, at_least: int = 1, below: int | None = None, usual: str) -> None:
    """Refuse what is not a whole number of at least ``at_least``."""
    limits = f"of at least {at_least}" + (f" and below {below}" if below is not None else "")
    rule = f"{name} must be a whole number {limits}, got {value!r}: {usual}."
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(rule)
    if value < at_least or (below is not None and value >= below):
        raise ValueError(rule)


def check_betas(betas: Any) -> None:
    """Refuse what is not two numbers of at least 0 and below 1."""
    usual = "(0.9, 0.999) is usual"
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"betas must be two numbers, got {betas!r}: {usual}.")
    for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
        check_number(name, beta, below=1, usual=usual)


def check_lr(value: Any, *, rounding: float = 0.0) -> None:
    """Refuse what is not a number or a tensor of one element, which is not read where that would wait for a device.

    ``rounding`` is how far below 0 it may be.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"lr must be one number, got a tensor of shape {tuple(value.shape)}: "
                "give torch.tensor(0.1), and several rates as several parameter groups."
            )
        check_lr_tensor(value)
        if value.requires_grad:
            raise ValueError(
                f"lr must be a tensor without requires_grad, got {value!r}: no gradient would ever reach it. Give "
                "lr.detach()."
            )
        if value.device.type != "cpu":
            return
        value = value.item()
    if not (isinstance(value, float) and -rounding <= value < 0):
        check_number("lr", value, usual="give a number, or a tensor of one element, to the optimizer or to each group")


def check_lr_tensor(value: Tensor) -> None:
    """Refuse whole numbers: schedulers write into a tensor, which would keep 0 of any rate below 1."""
    if not value.dtype.is_floating_point:
        raise TypeError(
            f"lr must be a number with a fraction, got a tensor of {value.dtype}, {value!r}, in which schedulers "
            "would write 0 for any rate below 1: give a float, or torch.tensor(0.1)."
        )


def check_switch(name: str, value: Any) -> None:
    """Refuse what is not True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}: write one of them.")
