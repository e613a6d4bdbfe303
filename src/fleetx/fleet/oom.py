"""What an out-of-memory error should say: what was resident, and which settings would help, with figures."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fleetx import memory
from fleetx.strategy import DistributedStrategy
from fleetx.units import format_bytes

if TYPE_CHECKING:
    from fleetx.fleet.optimizer import DistributedOptimizer
    from fleetx.fleet.planning import Planning

_EXPLAINED = "_explained_by_fleetx"


def explain(
    error: BaseException,
    parameters: Iterable[Tensor],
    optimizer: "DistributedOptimizer",
    strategy: DistributedStrategy,
    samples: int | None = None,
) -> None:
    """Add a note to an out-of-memory error; other errors are left alone."""
    if not isinstance(error, torch.OutOfMemoryError) or hasattr(error, _EXPLAINED):
        return
    setattr(error, _EXPLAINED, True)
    parameters = list(parameters)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    resident = {
        "parameters": _bytes(parameters),
        # Those of a window that failed are gone already.
        "gradients, when all are there": sum(p.numel() * max(p.element_size(), 4) for p in trained),
        "optimizer state": _bytes(_tensors(optimizer.state)),
    }
    device = parameters[0].device if parameters else torch.device("cpu")
    held = memory.resident_on(device)
    if held.checkpoints or held.activations:
        resident |= {"checkpoints": held.checkpoints, "activations kept by segments": held.activations}
    activations = sum(held)
    if device.type == "cuda":
        rest = max(torch.cuda.max_memory_allocated(device) - sum(resident.values()), 0)
        resident["activations kept otherwise, and what was there for a moment"] = rest
        activations += rest
    lines = [
        "FleetX: memory ran out" + (f" with a micro-batch of {samples} samples" if samples else "") + ".",
        *(f"  {kind}: {format_bytes(size)}" for kind, size in resident.items()),
        *(f"  {advice}" for advice in _advice(strategy, activations, samples, device, _planning(optimizer))),
    ]
    error.add_note("\n".join(lines))


def _planning(optimizer: "DistributedOptimizer") -> "Planning | None":
    """What chose the plan that is in force."""
    return None if optimizer.plan is None else optimizer.planning


def _advice(
    strategy: DistributedStrategy,
    activations: int,
    samples: int | None,
    device: torch.device,
    planning: "Planning | None" = None,
) -> Iterable[str]:
    """Settings that would lower the peak, those that cost least first."""
    half = f", about {format_bytes(activations // 2)} less" if activations else ""
    if planning is not None and not strategy.recompute_configs.oom_retry:  # which has tried smaller plans already
        yield "try a smaller recompute_configs.memory_budget: the planner keeps to that"
        if planning.door == "Step":
            yield "try recompute_configs.oom_retry = True: such a step is done again with a smaller plan, same update"
    chosen = planning is not None and planning.chooses_k_steps
    if not chosen and (samples is None or samples > 1):
        k_steps = strategy.gradient_merge_configs.k_steps if strategy.gradient_merge else 1
        yield f"try gradient_merge with k_steps = {2 * k_steps}: micro-batches of half the size{half}, same update"
    if not strategy.amp:
        yield f"try amp with dtype 'bfloat16': activations of half the size{half}"
    if not strategy.recompute:
        yield "try recompute with checkpoints = ['...'] or 'auto': of each segment only its inputs are kept"
    elif not strategy.recompute_configs.enable_offload and device.type != "cpu":
        yield "try recompute_configs.enable_offload = True: checkpoints wait in host memory"
    elif planning is None:
        yield "try more checkpoints: the largest segment must fit while it is computed again"


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _tensors(values: Any) -> Iterable[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
