"""Which plan is fastest and fits: measured on the model itself, found by a pure search."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fleetx.clock import host_seconds
from fleetx.memory import applied_to
from fleetx.memory.refusing import HAS_A_PLAN
from fleetx.planner import asked
from fleetx.planner.blocks import find_blocks
from fleetx.planner.budget import budget_on
from fleetx.planner.driver import Driver, Request
from fleetx.planner.feeding import Feeding
from fleetx.planner.fitting import OF_PLAN, DoesNotFit, Words
from fleetx.planner.making import plan_for
from fleetx.planner.plan import Plan
from fleetx.planner.profile import measure
from fleetx.slicing import Batch, batch_size

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
    k_steps: int | None = None,
    one_forward: bool = False,
    compile: bool = False,
    checkpoints: Sequence[str] | str = "auto",
    precision: torch.dtype | None = None,
    even: bool = False,
    bandwidth: float | None = None,
    cached: bool = True,
    verify: bool = False,
    words: Words = OF_PLAN,
) -> Plan:
    """The fastest plan to train `model` within `memory`, before the first step.

    `sample` is a batch as `fleetx.Step` takes it, of any size: `(inputs, target)` with `loss_fn`, else what the model
    is called with. `global_batch` is what one update sees (default: the sample's size), `memory` what the device may
    reserve (default: what is free, less a margin), `host_memory` what offload may use (default: no limit).

    `k_steps` cuts the batch into so many micro-batches, for loops that have their own; `one_forward=True` keeps it
    whole, for losses that couple its samples. `checkpoints` names the modules to cut at, by globs too; `"auto"` finds
    the model's blocks, and cuts each in two if whole ones do not fit. `precision` is the dtype of autocast. `even`
    allows only micro-batches of equal size. `bandwidth` is that of the host link in bytes per second, measured if not
    given. What was measured is kept on disk if `cached`. `verify=True` runs the plan on real micro-batches, and plans
    anew if they take more than the budget, or differ from the prediction by more than 3 %. `words` are what messages
    call these settings, for whoever has them under other names.

    The model, its gradients, buffers and all random generators are as before afterwards.
    """
    began = host_seconds()
    asked.check(
        model,
        sample,
        loss_fn,
        optimizer,
        checkpoints,
        precision,
        global_batch=global_batch,
        k_steps=k_steps,
        bandwidth=bandwidth,
        one_forward=one_forward,
        even=even,
        compile=compile,
        cached=cached,
        verify=verify,
    )
    if applied_to(model) is not None:
        raise ValueError(HAS_A_PLAN)
    feeding = Feeding(model, loss_fn, precision)
    batch = batch_size(sample) if global_batch is None else global_batch
    budget, notes = budget_on(feeding.device, None if memory is None else asked.amount("memory", memory))
    cap = None if host_memory is None else asked.amount("host_memory", host_memory)
    asked.check_slices(batch, k_steps, words, one_forward=one_forward, even=even)
    request = Request(
        feeding,
        sample,
        memory=budget,
        global_batch=batch,
        optimizer=optimizer,
        host_memory=cap,
        k_steps=None if one_forward else k_steps,
        one_forward=one_forward,
        even=even,
        compile=compile,
        bandwidth=bandwidth,
        cached=cached,
        checkpoints=None if isinstance(checkpoints, str) else asked.cuts_at(model, checkpoints),
        verify=verify,
        words=words,
        batch_times=batch / batch_size(sample),
        notes=(*notes, *asked.doubts(model, optimizer)),
    )
    return replace(Driver(request).plan().plan, planning_seconds=host_seconds() - began)
