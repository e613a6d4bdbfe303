"""What the weights, their gradients and their optimizer take: bytes by kind, and the time of an update."""

import inspect
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_ONLY_VALUES = ("lr", "initial_lr", "weight_decay")  # that cost the same whatever they are
_SCRATCH, _SCRATCH_ON_GPU = 2**20, 2**24  # elements: as many as keep the device busy


class UpdateCost(NamedTuple):
    """What an optimizer takes."""

    state_bytes: int
    seconds: float
    working_bytes: int
    notes: tuple[str, ...] = ()


def fixed_bytes(model: nn.Module, update: UpdateCost) -> dict[str, int]:
    """Bytes that are there in every moment of the training, by kind."""
    parameters = list(model.parameters())
    return {
        "parameters": sum(_size(p) for p in parameters),
        # Merged in fp32, whatever the parameters are.
        "gradients": sum(p.numel() * max(4, p.element_size()) for p in parameters if p.requires_grad),
        "optimizer": update.state_bytes,
        "buffers": sum(_size(b) for b in model.buffers()),
    }


def tensors_of(model: nn.Module, optimizer: Optimizer | None) -> list[Tensor]:
    """Weights, buffers, and what an optimizer keeps."""
    if optimizer is None:
        return [*model.parameters(), *model.buffers()]
    states = [value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values()]
    kept = [value for value in states if isinstance(value, Tensor)]
    moved = [parameter for group in optimizer.param_groups for parameter in group["params"]]  # masters, maybe
    return [*model.parameters(), *model.buffers(), *moved, *kept]


def cost_of_update(model: nn.Module, optimizer: Optimizer | None) -> UpdateCost:
    """Tried with an optimizer of the same kind on a scratch parameter; the real one is not touched.

    Only what it moves costs anything. If that is nothing of this model, one of its kind is meant, for all of it.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    trained = moved_by(optimizer, trained) or trained
    if optimizer is None or not trained:
        return UpdateCost(0, 0.0, 0)
    state_bytes, seconds, working = 0.0, 0.0, 0
    try:
        for settings, elements, dtype in _groups(optimizer, trained):
            state, took = _tried(optimizer, settings, elements, dtype, trained[0].device)
            state_bytes, seconds = state_bytes + state * elements, seconds + took * elements
            # Implementations that work on lists of tensors need about one more copy meanwhile.
            working += 0 if settings.get("fused") else elements * dtype.itemsize
    except Exception as error:  # whatever an optimizer of somebody else wants
        size = 2 * sum(_size(p) for p in trained)
        note = (
            f"the optimizer {type(optimizer).__name__} could not be tried ({type(error).__name__}: {error}); "
            "two states per parameter are assumed."
        )
        return UpdateCost(max(size, _held(optimizer)), 0.0, size // 2, (note,))
    return UpdateCost(max(int(state_bytes), _held(optimizer)), seconds, working)


def _groups(optimizer: Optimizer, trained: Sequence[Tensor]) -> list[tuple[dict[str, Any], int, torch.dtype]]:
    """The settings of each group, how many elements of the model it moves, and in which dtype: masters have fp32."""
    own, low = {id(p) for p in trained}, {p.shape for p in trained if p.element_size() < 4}
    found: dict[str, tuple[dict[str, Any], int, torch.dtype]] = {}
    for group in optimizer.param_groups:
        settings = {name: value for name, value in group.items() if name != "params"}
        for parameter in group["params"]:
            if id(parameter) in own or (parameter.shape in low and parameter.element_size() >= 4):
                key = f"{[(n, v) for n, v in settings.items() if n not in _ONLY_VALUES]} {parameter.dtype}"
                elements = found[key][1] if key in found else 0
                found[key] = (settings, elements + parameter.numel(), parameter.dtype)
    return list(found.values()) or [(optimizer.defaults, sum(p.numel() for p in trained), trained[0].dtype)]


def moved_by(optimizer: Optimizer | None, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Those parameters that an optimizer has, or whose fp32 masters it has: what is of their shapes, and not theirs."""
    moved = [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
    ids, own = {id(one) for one in moved}, {id(one) for one in parameters}
    masters = {one.shape for one in moved if id(one) not in own and one.element_size() >= 4}
    return [p for p in parameters if id(p) in ids or (p.element_size() < 4 and p.shape in masters)]


def _tried(
    optimizer: Optimizer, settings: dict[str, Any], elements: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """Bytes of state and seconds per element."""
    count = min(elements, _SCRATCH_ON_GPU if device.type == "cuda" else _SCRATCH)
    scratch = nn.Parameter(torch.zeros(max(1, count // 1024), min(1024, count), dtype=dtype, device=device))
    scratch.grad = torch.ones_like(scratch)
    accepted = inspect.signature(type(optimizer)).parameters
    known = {name: value for name, value in settings.items() if name in accepted}
    took = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        trial: Any = type(optimizer)([scratch], **known)  # type: ignore[call-arg]
        for _ in range(4):
            _wait(device)
            began = time.perf_counter()
            trial.step()
            _wait(device)
            took.append(time.perf_counter() - began)
    return _held(trial) / scratch.numel(), min(took) / scratch.numel()


def _held(optimizer: Optimizer) -> int:
    values = [value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values()]
    return sum(_size(value) for value in values if isinstance(value, Tensor) and value.dim() > 0)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
