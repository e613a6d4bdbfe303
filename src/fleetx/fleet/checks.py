"""What a distributed optimizer refuses, and how it says so: rule, value, remedy."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fleetx import names
from fleetx.fleet.model import strategy_of
from fleetx.strategy import DistributedStrategy


def require_prepared(optimizer: Optimizer, strategy: DistributedStrategy) -> None:
    """All parameters belong to models that were prepared with this very strategy."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = [index for index, parameter in enumerate(parameters) if strategy_of(parameter) is None]
    if strangers:
        raise ValueError(
            f"{len(strangers)} of the optimizer's {len(parameters)} parameters (the first is number {strangers[0]}, of "
            f"shape {tuple(parameters[strangers[0]].shape)}) belong to no model that went through "
            "fleet.distributed_model. Call model = fleet.distributed_model(model, strategy) first, also for a loss "
            "with parameters of its own."
        )
    # A strategy serves many parameters, so each is compared once.
    first_of = {id(strategy_of(parameter)): parameter for parameter in reversed(parameters)}
    for parameter in first_of.values():
        if strategy_of(parameter) != strategy:
            info = names.info(parameter)
            raise ValueError(
                f"the model of {info.name if info else 'a parameter'} was prepared with another strategy. "
                "Give fleet.distributed_model and fleet.distributed_optimizer the same one."
            )


def require_scheduler_of(optimizer: Optimizer, scheduler: Any) -> None:
    """A schedule that can be stepped without a metric, made for the optimizer that is wrapped."""
    if scheduler is None:
        return
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError(
            "ReduceLROnPlateau needs a metric at each step, which a window does not have. "
            "Leave scheduler= out and call its step(metric) yourself."
        )
    if not callable(getattr(scheduler, "step", None)) or not hasattr(scheduler, "optimizer"):
        raise TypeError(f"scheduler must be a torch lr scheduler, not a {type(scheduler).__name__}.")
    if scheduler.optimizer is not optimizer:
        raise ValueError(
            "the scheduler was made for another optimizer. Make it for the one that you wrap: "
            "opt = torch.optim.SGD(...); distributed_optimizer(opt, strategy, scheduler=StepLR(opt, ...))."
        )


def require_positive(name: str, value: float | None) -> None:
    """A limit, or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
        raise ValueError(f"{name} must be a number above 0, or None for no limit, not {value!r}.")


def require_scalar(loss: Any) -> None:
    """A loss that can be differentiated."""
    if not isinstance(loss, Tensor):
        hint = " Losses with counts of their own go through fleetx.Step." if isinstance(loss, dict) else ""
        raise TypeError(f"minimize takes the loss as a tensor, not a {type(loss).__name__}.{hint}")
    if loss.numel() != 1:
        raise ValueError(
            f"the loss has shape {tuple(loss.shape)}, but minimize needs one number. Take its mean(), "
            "or its sum() with gradient_merge_configs.avg=False."
        )


def require_count(items: Any) -> None:
    """One count of items, or None."""
    if isinstance(items, dict):
        raise TypeError("minimize takes one count; a dict of counts needs fleetx.Step, which sees the whole window.")
    if items is None or (isinstance(items, Tensor) and items.numel() == 1):
        return
    if isinstance(items, bool) or not isinstance(items, int | float) or not items >= 0:
        raise ValueError(f"items must be a number of at least 0, not {items!r}.")
