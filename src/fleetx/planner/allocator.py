"""CUDA's allocator: what it reserves for the tensors of a step, and what the process has on the device beside them."""

import gc
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fleetx.memory.structures import tensors_in
from fleetx.notices import tell_once
from fleetx.planner.costs import EXACTLY, Profile, Reserve
from fleetx.planner.lines import NOTHING, Line
from fleetx.planner.updating import tensors_of
from fleetx.slicing import Batch

# Measured with segments that grow: blocks are taken in steps of 20 MiB, and little is lost between small ones. Of large
# ones up to one and a half times the largest: where it was, something smaller lies when the next one comes.
RESERVE = Reserve(1.01, 40 * 2**20)
_LOST = 0.8


def gaps_on(device: torch.device, largest: float) -> Line:
    """What is lost between tensors, of which the largest takes so many bytes per sample."""
    return Line(0.0, _LOST * largest) if device.type == "cuda" else NOTHING


def reserve_on(device: torch.device) -> Reserve:
    """What the device's allocator takes for tensors."""
    return RESERVE if device.type == "cuda" else EXACTLY


def let_segments_grow(device: torch.device) -> None:
    """Without that it keeps a tenth or more of its memory in gaps that no tensor fits into; who set it is obeyed."""
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return
    chosen = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments" in chosen:
        return
    # All options at once: those that are not named fall back to their defaults.
    wanted = ",".join(filter(None, [chosen, "expandable_segments:True"]))
    # The newer name first: the older one warns where both are there.
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    try:
        change(wanted)
    except RuntimeError as error:
        tell_once(
            "allocator.segments",
            f"expandable_segments could not be switched on ({error}): expect gaps in memory. "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True does it from the start.",
        )


def with_others(
    fixed: Mapping[str, int], model: nn.Module, optimizer: Any, batch: Batch, device: torch.device
) -> dict[str, int]:
    """What is always there, with what this process has on the device beside this training: another model, say."""
    if device.type != "cuda":
        return dict(fixed)
    gc.collect()  # what nobody can reach any more is nobody's
    known = [*tensors_of(model, optimizer), *(p.grad for p in model.parameters() if p.grad is not None)]
    known += tensors_in(batch)
    ours = [one for one in known if one.device == device and one.layout is torch.strided]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in ours}
    others = torch.cuda.memory_allocated(device) - sum(storages.values())
    return {**fixed, "others": max(0, others)}


def with_batch_there(profile: Profile, batch: Batch, device: torch.device, times: float = 1.0) -> Profile:
    """With a batch, or one so many `times` as large, that is on the device whole: its slices are views of it."""
    there = sum(one.numel() * one.element_size() for one in tensors_in(batch) if one.device == device)
    if device.type != "cuda" or not there:
        return profile
    return replace(profile, fixed={**profile.fixed, "whole batch": math.ceil(there * times)}, batch_bytes=NOTHING)
