"""Compilations of modules that run as a whole: one for all that are alike."""

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config

from fleetx.memory.states import Segment

DEAR_BUDGET = 0.5
"""The share of its activations that a compiled segment may save when it saves dear ones: torch's own measure."""


class SharedCompilations:
    """Compiled forwards by what a module is made of.

    torch keeps compilations by code object and stops after eight of one. Modules of the same class and different sizes
    share a code object, so each size is given one of its own.
    """

    def __init__(self, budget: float = DEAR_BUDGET, **options: Any) -> None:
        self.budget = budget
        self.options = options
        self._functions: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._likeness: dict[int, tuple[Any, ...]] = {}

    def fresh(self) -> "SharedCompilations":
        """The same settings with nothing compiled yet, for a copy of the model."""
        return SharedCompilations(self.budget, **self.options)

    def enter(self, module: nn.Module, state: Segment) -> Callable[[], None]:
        """Give the module its compiled forward; what is returned takes it away again."""
        compiled = MethodType(self._function(module, state), module)
        budget = self.budget if state.save == "dear" else 1.0
        patch = functorch_config.patch(activation_memory_budget=budget)
        patch.__enter__()
        module.forward = compiled

        def undo() -> None:
            del module.forward
            patch.__exit__(None, None, None)

        return undo

    def callee(self, module: nn.Module, state: Segment) -> Callable[..., Any]:
        """What to call when the module is repeated."""

        def call(*args: Any, **kwargs: Any) -> Any:
            undo = self.enter(module, state)
            try:
                return module(*args, **kwargs)
            finally:
                undo()

        return call

    def _function(self, module: nn.Module, state: Segment) -> Callable[..., Any]:
        key = (*self._like(module), state.save == "dear")
        if key not in self._functions:
            forward = type(module).forward
            own = own_code(forward, len(self._functions)) if isinstance(forward, FunctionType) else forward
            self._functions[key] = torch.compile(own, **self.options)
        return self._functions[key]

    def _like(self, module: nn.Module) -> tuple[Any, ...]:
        if id(module) not in self._likeness:
            tensors = [*module.named_parameters(), *module.named_buffers()]
            self._likeness[id(module)] = (
                type(module),
                repr(module),
                tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors),
            )
        return self._likeness[id(module)]


def own_code(function: Any, number: int) -> FunctionType:
    """The function with a code object of its own: torch keeps compilations by code object."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{number}")
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
