"""Which plan is fastest and fits: measured on the model itself, found by a pure search."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fleetx.memory import applied_to
from fleetx.planner import asked, cache
from fleetx.planner.allocator import with_others
from fleetx.planner.blocks import find_blocks, ways_to_cut
from fleetx.planner.budget import budget_on
from fleetx.planner.costs import Profile
from fleetx.planner.feeding import Feeding
from fleetx.planner.fitting import DoesNotFit, first_that_fits
from fleetx.planner.making import plan_for
from fleetx.planner.plan import Plan
from fleetx.planner.profile import key_of, measure
from fleetx.planner.verify import time_is_right, until_verified, with_doubtful_time
from fleetx.slicing import Batch, batch_size
from fleetx.units import parse_bytes

__all__ = ["DoesNotFit", "Feeding", "Plan", "find_blocks", "measure", "plan", "plan_for"]


def plan(
    model: nn.Module,
    sample: Batch,
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    optimizer: Optimizer | None = None,
    memory: int | str | None = None,
    host_memory: int | str | None = None,
    global_batch: int | None = None,
    one_forward: bool = False,
    compile: bool = False,
    checkpoints: Sequence[str] | str = "auto",
    precision: torch.dtype | None = None,
    even: bool = False,
    bandwidth: float | None = None,
    cached: bool = True,
    verify: bool = False,
) -> Plan:
    """The fastest plan to train `model` within `memory`, before the first step.

    `sample` is a batch as `fleetx.Step` takes it, of any size: `(inputs, target)` with `loss_fn`, else what the model
    is called with. `global_batch` is what one update sees (default: the sample's size), `memory` what the device may
    reserve (default: what is free, less a margin), `host_memory` what offload may use (default: no limit).

    `one_forward=True` keeps the batch whole, for losses that couple its samples. `checkpoints` names the modules to cut
    at, by globs too; `"auto"` finds the model's blocks, and cuts each in two if whole ones do not fit. `precision` is
    the dtype of autocast. `even` allows only micro-batches of equal size. `bandwidth` is that of the host link in bytes
    per second, measured if not given. What was measured is kept on disk if `cached`. `verify=True` runs the plan on
    real micro-batches, and plans anew if they take more than the budget, or differ from the prediction by more than
    3 %.

    The model, its gradients, buffers and all random generators are as before afterwards.
    """
    asked.check(model, sample, loss_fn, optimizer, checkpoints, precision)
    if applied_to(model) is not None:
        raise ValueError("this model has a plan already: take it off with remove() before planning anew.")
    feeding = Feeding(model, loss_fn, precision)
    batch = batch_size(sample) if global_batch is None else global_batch
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ValueError(f"global_batch must be a number of samples, at least 1, got {batch!r}.")
    budget, notes = budget_on(feeding.device, memory)
    cap = None if host_memory is None else parse_bytes(host_memory)

    question = {"memory": budget, "global_batch": batch, "host_memory": cap, "one_forward": one_forward, "even": even}

    def make_one_to_try(profile: Profile) -> Plan:
        return plan_for(profile, **question, curve=False)  # which takes longer than the plan itself

    def planned(cuts: Sequence[str]) -> Plan:
        profile = measure(
            feeding, sample, cuts, optimizer=optimizer, compile=compile, bandwidth=bandwidth, cached=cached
        )
        fixed = with_others(profile.fixed, model, optimizer, sample, feeding.device)
        profile = replace(profile, fixed=fixed, notes=(*profile.notes, *notes, *asked.doubts(model, optimizer)))
        if not verify:
            return plan_for(profile, **question)
        tried = until_verified(profile, feeding, sample, make_one_to_try)
        with suppress(DoesNotFit):  # with what it took there may be no room for it: then nothing is said of others
            tried = tried._replace(plan=replace(tried.plan, curve=plan_for(tried.profile, **question).curve))
        verified = tried.plan
        if time_is_right(verified):
            return verified
        if cached:  # what a busy machine measured is not kept for ever
            cache.forget(key_of(feeding, sample, cuts, optimizer, compile, bandwidth=bandwidth))
        return with_doubtful_time(verified)

    ways = ways_to_cut(feeding, sample) if isinstance(checkpoints, str) else [asked.cuts_at(model, checkpoints)]
    return first_that_fits(ways, planned).of(model)
