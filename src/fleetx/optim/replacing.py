"""Taking another optimizer's place, on its own groups."""

import gc
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR
from torch.optim.optimizer import Optimizer

from fleetx.optim.exclusion import EVERYTHING
from fleetx.optim.groups import LR_SHARES, Group

Ours = TypeVar("Ours", bound=Optimizer)


def sharing(
    cls: type[Ours],
    wrapped: Optimizer,
    theirs: tuple[str, ...],
    settings: dict[str, Any],
    without_decay: Sequence[Group] = (),
) -> Ours:
    """Ours on the very list and dicts of the wrapped one, so that what is bound to it keeps working.

    ``theirs`` are settings of the wrapped one, which must not be given again. ``without_decay`` are groups that the
    wrapped one did not decay, where it decayed others.
    """
    if taken := [name for name in theirs if name in settings]:
        kind = type(wrapped).__name__
        raise TypeError(f"{', '.join(taken)} is the wrapped {kind}'s: give it to {kind}, and leave it out here.")
    _check_unused(cls.__name__, wrapped)
    before = [dict(group) for group in wrapped.param_groups]
    for group in wrapped.param_groups:
        group.pop("fused", None)  # its own choice of kernels says nothing about ours
    for group in without_decay:
        if "lamb_weight_decay" not in group:
            group["exclude_from_weight_decay"] = [EVERYTHING]
    try:
        ours: Any = cls.__new__(cls, **settings)
        ours._replaced = wrapped  # before the groups are read, since they hold its settings too
        with _rates_as_built(wrapped, settings):
            ours.__init__(wrapped.param_groups, **{"lr": wrapped.defaults["lr"], **settings})
    except Exception:
        for group, old in zip(wrapped.param_groups, before, strict=True):
            group.clear()
            group.update(old)
        raise
    ours.param_groups = wrapped.param_groups
    # Hooks of the step are called for whoever steps, those registered later too.
    ours._optimizer_step_pre_hooks = wrapped._optimizer_step_pre_hooks
    ours._optimizer_step_post_hooks = wrapped._optimizer_step_post_hooks
    return ours


@contextmanager
def _rates_as_built(wrapped: Optimizer, settings: dict[str, Any]) -> Iterator[None]:
    """While this is active, ``initial_lr`` of each group is the rate that the wrapped optimizer was built with.

    OneCycleLR and CyclicLR write their own lowest rate there, and ``excluded_lr`` would be divided by that.
    """
    groups = wrapped.param_groups
    asked = any(said.get(share) is not None for said in (settings, *groups) for share in LR_SHARES)
    scheduler = _overwriting_scheduler(wrapped) if asked else None
    if scheduler is None:
        yield
        return
    rate, written = _one_rate(wrapped, scheduler), [group["initial_lr"] for group in groups]
    try:
        for group in groups:
            group["initial_lr"] = rate
        yield
    finally:
        for group, theirs in zip(groups, written, strict=True):
            group["initial_lr"] = theirs


def _overwriting_scheduler(wrapped: Optimizer) -> Any:
    """The scheduler whose own rates stand as ``initial_lr`` in the groups, if there is one."""
    noted, rate = [group.get("initial_lr") for group in wrapped.param_groups], wrapped.defaults["lr"]
    # A tensor may have been written in place.
    if None in noted or not (isinstance(rate, Tensor) or any(other != rate for other in noted)):
        return None
    # An optimizer does not know its schedulers, and CyclicLR leaves no mark in it.
    schedulers: list[Any] = [found for found in gc.get_objects() if issubclass(type(found), OneCycleLR | CyclicLR)]
    own = (scheduler for scheduler in schedulers if getattr(scheduler, "optimizer", None) is wrapped)
    return next((scheduler for scheduler in own if scheduler.base_lrs == noted), None)


def _one_rate(wrapped: Optimizer, scheduler: Any) -> float:
    """The rate of all groups before a scheduler overwrote it; raise where that is lost."""
    kind, name, rate = type(wrapped), type(scheduler).__name__, wrapped.defaults["lr"]
    peaks = getattr(scheduler, "max_lrs", None) or [group["max_lr"] for group in wrapped.param_groups]
    # torch's own default may only stand for the rates that groups were given.
    given = rate != inspect.signature(kind).parameters["lr"].default or rate in peaks
    if isinstance(rate, Tensor) or not given or len(set(peaks)) > 1 or len(set(scheduler.base_lrs)) > 1:
        raise ValueError(
            f"{' and '.join(LR_SHARES)} belong to the learning rate that {kind.__name__} was built with, and {name}, "
            f"made before, wrote over it: make the {name} after fleet.distributed_optimizer, for what that returns, "
            f"or give {kind.__name__} one lr, a number, for all groups."
        )
    return rate


def _check_unused(name: str, wrapped: Optimizer) -> None:
    kind = type(wrapped).__name__
    if any("decays" in group for group in wrapped.param_groups):
        raise ValueError(f"an optimizer can be replaced once, and this {kind} was already: build a new {kind}.")
    if wrapped.state:
        raise ValueError(
            f"{name} replaces an optimizer before its first step, and this {kind} has state of "
            f"{len(wrapped.state)} parameters: replace it first, then load what a {name} saved."
        )
