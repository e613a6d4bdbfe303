"""What a distributed optimizer refuses, and how it says so: rule, value, remedy."""

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, cast

from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fleetx import names
from fleetx.fleet.model import strategy_of
from fleetx.fleet.wrappers import require_whole
from fleetx.notices import shown
from fleetx.numbers import Number
from fleetx.optim.checks import check_lr_tensor
from fleetx.strategy import DistributedStrategy


def require_steppable(optimizer: Any) -> None:
    """A torch optimizer that updates from gradients alone."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"distributed_optimizer takes a torch optimizer, not a {type(optimizer).__name__}.")
    if isinstance(optimizer, LBFGS):
        raise TypeError("LBFGS evaluates the loss several times per step, which a window cannot do. Use SGD or Adam.")
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), Tensor):
            check_lr_tensor(group["lr"])


def require_prepared(optimizer: Optimizer, strategy: DistributedStrategy) -> None:
    """All parameters belong to models that were prepared with this very strategy."""
    require_prepared_parameters([p for group in optimizer.param_groups for p in group["params"]], strategy)


def require_prepared_parameters(parameters: list[Tensor], strategy: DistributedStrategy) -> None:
    """The same of a list of parameters."""
    require_whole(parameters)
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
            raise ValueError(
                f"the model of {names.label(parameter)} was prepared with another strategy (none given means "
                "all defaults). Give fleet.distributed_model and fleet.distributed_optimizer the same one."
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
        hint = " Give the loss itself, not loss.item()."
        if isinstance(loss, dict):
            hint = " Losses with counts of their own go through fleetx.Step."
        raise TypeError(f"minimize takes the loss as a tensor, not a {type(loss).__name__}.{hint}")
    if loss.numel() != 1:
        raise ValueError(
            f"the loss has shape {tuple(loss.shape)}, but minimize needs one number. Take its mean(), "
            "or its sum() with gradient_merge_configs.avg=False."
        )


ITEMS_OR_SUM = (
    "items weighs micro-batches by what they average over, gradient_merge_configs.avg=False adds them up: "
    "only one of the two is possible. Set avg=True."
)


MOST_ITEMS = 2.0**53
"""Beyond it fp64 skips whole numbers, and sums of a few numbers may overflow."""


def as_count(items: Any, what: str = "items") -> Number:
    """A count as a number; one on a device stays there, since reading it would wait."""
    if isinstance(items, Mapping):
        raise TypeError("minimize takes one count; a dict of counts needs fleetx.Step, which sees the whole window.")
    if isinstance(items, Tensor):
        if items.numel() != 1:
            raise ValueError(f"{what} must be one number, not a tensor of shape {tuple(items.shape)}.")
        if items.device.type != "cpu":
            return items.reshape(())
        items = items.item()
    if isinstance(items, bool) or not isinstance(items, Real) or not 0 <= cast(float, items) <= MOST_ITEMS:
        raise ValueError(f"{what} must be a number from 0 to 2**53, not {shown(items)}.")
    return int(items) if isinstance(items, Integral) else float(items)
