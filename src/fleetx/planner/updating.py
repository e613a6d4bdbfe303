"""What the weights, their gradients and their optimizer take: bytes by kind, and the time of an update."""

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.clock import host_seconds, wait_for
from fleetx.planner.meter import CountingMeter

_ONLY_VALUES = ("lr", "initial_lr", "weight_decay")  # that cost the same whatever they are
_SCRATCH, _SCRATCH_ON_GPU = 2**20, 2**24  # elements: as many as keep the device busy
_SCRATCH_TO_COUNT, _SEVERAL = 2**14, 4  # elements of a parameter, and parameters


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
            trial = _Trial(optimizer, settings, dtype, trained[0].device)
            state, took = trial.cost_per_element(elements)
            state_bytes, seconds = state_bytes + state * elements, seconds + took * elements
            working += trial.working_bytes(elements, max(p.numel() for p in trained))
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


class _Trial:
    """An optimizer of the same kind, on parameters of our own."""

    def __init__(
        self, optimizer: Optimizer, settings: dict[str, Any], dtype: torch.dtype, device: torch.device
    ) -> None:
        accepted = inspect.signature(type(optimizer)).parameters
        self._settings = {name: value for name, value in settings.items() if name in accepted}
        self._kind: Any = type(optimizer)
        self._dtype, self._device = dtype, device

    def cost_per_element(self, elements: int) -> tuple[float, float]:
        """Bytes of state and seconds."""
        count = min(elements, _SCRATCH_ON_GPU if self._device.type == "cuda" else _SCRATCH)
        scratch, took = self._scratch(max(1, count // 1024), min(1024, count)), []
        with self._own_random_numbers():
            trial = self._kind([scratch], **self._settings)
            for _ in range(4):
                wait_for(self._device)
                began = host_seconds()
                trial.step()
                wait_for(self._device)
                took.append(host_seconds() - began)
        return _held(trial) / scratch.numel(), min(took) / scratch.numel()

    def working_bytes(self, elements: int, largest: int) -> int:
        """What an update takes meanwhile: for all parameters at once, or for one after the other."""
        if self._device.type == "cuda":
            # Implementations that work on lists of tensors need about one more copy meanwhile.
            return 0 if self._settings.get("fused") else elements * self._dtype.itemsize
        alone, together = self._peak(1), self._peak(_SEVERAL)
        at_once = max(0.0, (together - alone) / (_SEVERAL - 1))
        return int(at_once * elements + max(0.0, alone - at_once) * largest)

    def _peak(self, count: int) -> float:
        """Bytes beyond those before, by element of one of some equal parameters, in an update that is not the first."""
        scratch = [self._scratch(_SCRATCH_TO_COUNT // 64, 64) for _ in range(count)]
        with self._own_random_numbers():
            trial = self._kind(scratch, **self._settings)
            trial.step()
            with CountingMeter() as meter:
                trial.step()
                return meter.take_peak() / _SCRATCH_TO_COUNT

    def _scratch(self, *shape: int) -> nn.Parameter:
        """Ones: of a weight without length some optimizers have something to say."""
        scratch = nn.Parameter(torch.ones(shape, dtype=self._dtype, device=self._device))
        scratch.grad = torch.ones_like(scratch)
        return scratch

    def _own_random_numbers(self) -> AbstractContextManager[None]:
        return torch.random.fork_rng([self._device] if self._device.type == "cuda" else [])


def _held(optimizer: Optimizer) -> int:
    values = [value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values()]
    return sum(_size(value) for value in values if isinstance(value, Tensor) and value.dim() > 0)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
