"""Compilations of a model's forward, one for each set of outputs that are fetched, and of an optimizer's update."""

from collections.abc import Generator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from fleetx.fleet.optimizer import DistributedOptimizer
from fleetx.notices import tell_once
from fleetx.static.fetching import OutputTaps


class CompiledForwards:
    """Gives a model the compiled forward that computes what is fetched.

    Hooks that are added after a compilation never fire, and their absence is not noticed either. So each set of fetched
    outputs has its own compilation, made while its hooks, and no others of ours, are in place.
    """

    def __init__(self, model: nn.Module, *, enabled: bool = True, mode: str | None = None) -> None:
        self.model = model
        self.enabled = enabled
        self.mode = mode
        self.compilations = 0
        self._forwards: dict[tuple[str, ...], Any] = {}

    @contextmanager
    def fetching(self, outputs: tuple[str, ...]) -> Generator[dict[str, Any]]:
        """Inside, calling the model also notes these outputs; it uses their own compilation."""
        taps = OutputTaps(self.model, outputs)
        graphs = counters["stats"]["unique_graphs"]
        if self.enabled:
            # The instance's forward, so that hooks around the model, such as autocast, stay outside of the graph.
            self.model.forward = self._compiled(outputs)
        try:
            yield taps.outputs
        finally:
            if self.enabled:
                del self.model.forward
            taps.remove()
            self.compilations += counters["stats"]["unique_graphs"] - graphs

    def _compiled(self, outputs: tuple[str, ...]) -> Any:
        if outputs not in self._forwards:
            number = len(self._forwards)
            self._forwards[outputs] = torch.compile(_separate(self.model, number), mode=self.mode)
        return self._forwards[outputs]


def _separate(model: nn.Module, number: int) -> MethodType:
    """The model's forward with a code object of its own: torch keeps compilations by code object."""
    original = type(model).forward
    code = original.__code__.replace(co_name=f"{original.__name__}_{number}")
    function = FunctionType(code, original.__globals__, original.__name__, original.__defaults__, original.__closure__)
    function.__kwdefaults__ = original.__kwdefaults__
    return MethodType(function, model)


def compile_update(optimizer: DistributedOptimizer) -> None:
    """Compile the update where its optimizer can be; a fused one is a single kernel already."""
    inner = optimizer.inner
    if any(group.get("fused") for group in inner.param_groups):
        return
    if any(parameter.dim() == 0 for group in inner.param_groups for parameter in group["params"]):
        # torch 2.13 compiles the first gradient of a parameter without dimensions into the code as a constant.
        tell_once("scalar-update", "a parameter without dimensions cannot be updated by compiled code: eager update.")
        return
    for group in inner.param_groups:
        # A float would be part of the compiled code, and each new learning rate would compile it anew.
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float64)
    optimizer.engine.updater.compile()
