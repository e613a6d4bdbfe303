"""Gradients that are still multiplied by a loss scale: refused where that can be known.

LARS hides a forgotten unscale completely: its ratio divides by the length of the gradient, so that only the weight
decay gets lost. FleetX's step unscales before anything looks at a length, and torch's GradScaler hands its scale to
``step``. What remains is a loop that scales the loss and then calls ``optimizer.step()`` itself: its scaler is in
sight of the call, as a variable or as an attribute of the object whose method runs the loop.
"""

import sys
from collections.abc import Iterator
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer


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
