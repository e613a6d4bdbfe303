"""Gradients that are still multiplied by a loss scale: refused where that can be known.

LARS hides a forgotten unscale completely: its ratio divides by the length of the gradient, so that only the weight
decay gets lost. FleetX's step unscales before anything looks at a length, and torch's GradScaler hands its scale to
``step``. What remains is a loop that scales the loss and then calls ``optimizer.step()`` itself: its scaler is in
sight of the call, as a variable or as an attribute of the object whose method runs the loop.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

_FIRST_SCALE = 65536.0
"""Where torch's scalers begin."""


def refuse_scaled_gradients(optimizer: Optimizer) -> None:
    """Raise if a GradScaler in sight scaled a loss and neither stepped nor unscaled any optimizer since it was made."""
    for scaler in _in_sight():
        if _is_forgotten(scaler):
            kind = type(optimizer).__name__
            raise RuntimeError(
                f"gradients must be unscaled before {kind} takes their norms, and a GradScaler with scale "
                f"{scaler.get_scale():g} scaled a loss but unscaled nothing: call scaler.step(optimizer) and "
                "scaler.update() in place of optimizer.step(), or scaler.unscale_(optimizer) before it and "
                "scaler.update() after it."
            )


def refuse_scaled_loss(loss: Tensor) -> None:
    """Raise if a GradScaler multiplied the loss: a step scales and unscales by itself, and would not divide by that.

    What the loss was multiplied with last must be the number of a scaler in sight, or the one that all of them begin
    with, as a 0-dimensional tensor.
    """
    made_by: Any = loss.grad_fn
    while type(made_by).__name__ in ("ViewBackward0", "ToCopyBackward0"):
        made_by = made_by.next_functions[0][0]
    if type(made_by).__name__ != "MulBackward0":
        return
    factor = made_by._saved_other
    if factor is None or factor.dim() or factor.requires_grad or factor.dtype != torch.float32:
        return
    scales = [scaler._scale for scaler in _in_sight() if scaler.is_enabled() and scaler._scale is not None]
    if factor == _FIRST_SCALE or any(factor.data_ptr() == scale.data_ptr() for scale in scales):
        raise RuntimeError(
            f"the loss must come unscaled, and a GradScaler multiplied it by {factor.item():g}: the weights would move "
            "that much too far. Give minimize or Step the loss itself; strategy.amp = True scales float16 losses."
        )


def _in_sight() -> Iterator[Any]:
    """The scalers among the variables of our callers, and among the attributes of the objects they belong to."""
    frame = sys._getframe(2)
    modules: set[int] = set()
    while frame is not None:
        own = frame.f_locals
        values = [*own.values(), *getattr(own.get("self"), "__dict__", {}).values()]
        if id(frame.f_globals) not in modules:
            modules.add(id(frame.f_globals))
            values += frame.f_globals.values()
        yield from [value for value in values if issubclass(type(value), GradScaler)]
        frame = frame.f_back


def _is_forgotten(scaler: Any) -> bool:
    if not scaler.is_enabled() or scaler._scale is None or scaler._per_optimizer_states:
        return False  # nothing scaled yet, or an optimizer was served since the last update
    # A scaler that was ever updated counted a step, or changed its scale. Read once in the life of an optimizer.
    return scaler._growth_tracker.item() == 0 and scaler.get_scale() == scaler._init_scale
