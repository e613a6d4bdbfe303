"""Compilations of a model's forward, one for each set of outputs that are fetched, and of an optimizer's update."""

import inspect
import itertools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn

from fleetx import memory
from fleetx.fleet.optimizer import DistributedOptimizer
from fleetx.notices import tell_once
from fleetx.optim import Lamb
from fleetx.static.fetching import OutputTaps

_numbers = itertools.count()


class CompiledForwards:
    """Gives a model the compiled forward that computes what is fetched.

    Hooks that are added after a compilation never fire, and their absence is not noticed either. So each set of fetched
    outputs has its own compilation, made while its hooks, and no others of ours, are in place.
    """

    def __init__(self, model: nn.Module, *, enabled: bool = True, mode: str | None = None) -> None:
        self.model = model
        self.enabled = enabled
        self.mode = mode
        self._forwards: dict[tuple[str, ...], Any] = {}

    @contextmanager
    def fetching(self, outputs: tuple[str, ...]) -> Generator[dict[str, Any]]:
        """Inside, calling the model also notes these outputs; it uses their own compilation."""
        taps = OutputTaps(self.model, outputs)
        before = self.model.__dict__.get("forward")
        if self.enabled:
            # The instance's forward, so that hooks around the model, such as autocast, stay outside of the graph.
            self.model.forward = self._compiled(outputs)
        try:
            yield taps.outputs
        finally:
            if self.enabled:
                del self.model.forward
                if before is not None:  # somebody had given this very object a forward of its own
                    self.model.forward = before
            taps.remove()

    def _compiled(self, outputs: tuple[str, ...]) -> Any:
        if outputs not in self._forwards:
            self._forwards[outputs] = compiled_apart(self.model.forward, mode=self.mode)
        return self._forwards[outputs]


class CompiledSegments:
    """The same for a model that recomputes: compiled between its cuts, by what is fetched too."""

    def __init__(self, model: nn.Module, applied: memory.Applied, mode: str | None = None) -> None:
        self.model = model
        self.compilations = applied.compile(mode=mode)

    @contextmanager
    def fetching(self, outputs: tuple[str, ...]) -> Generator[dict[str, Any]]:
        """Inside, calling the model also notes these outputs."""
        taps = OutputTaps(self.model, outputs)
        self.compilations.variant = outputs
        try:
            yield taps.outputs
        finally:
            taps.remove()


def forwards_of(model: nn.Module, *, compile: bool, mode: str | None) -> CompiledForwards | CompiledSegments:
    """How a program runs the model's forward."""
    applied = memory.applied_to(model)
    if applied is not None and compile:
        return CompiledSegments(model, applied, mode)
    return CompiledForwards(model, enabled=compile, mode=mode)


def compiled_apart(function: Callable[..., Any], mode: str | None = None) -> Callable[..., Any]:
    """The function compiled, sharing nothing with other compilations of it: torch keeps them by code object."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    # A number in the name too: torch remembers by file, line and name which sizes have varied.
    code = call.__code__.replace(co_name=f"call_{next(_numbers)}")
    apart = FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
    options: dict[str, Any] = {"mode": mode}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        # torch 2.13 can also keep what is compiled separately behind a graph break apart.
        options["isolate_recompiles"] = True
    return torch.compile(apart, **options)


def compile_update(optimizer: DistributedOptimizer) -> None:
    """Compile the update where its optimizer can be; a fused one is a single kernel already."""
    inner = optimizer.inner
    if any(group.get("fused") for group in inner.param_groups):
        return
    if any(parameter.dim() == 0 for group in inner.param_groups for parameter in group["params"]):
        # torch 2.13 compiles the first gradient of a parameter without dimensions into the code as a constant.
        tell_once("scalar-update", "a parameter without dimensions cannot be updated by compiled code: eager update.")
        return
    updater = optimizer.engine.updater
    updater.compile()
    if updater._compiled_step is None:  # an optimizer with kernels of its own
        return
    if isinstance(inner, Lamb):
        # It reads its step count on the host, to correct the bias: compiled code would be made anew for each step.
        updater._compiled_step = None
        return
    for group in inner.param_groups:
        # A float would be part of the compiled code, and each new learning rate would compile it anew.
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float64)
    # Apart, or torch would stop compiling updates after the eighth program of a process.
    updater._compiled_step = compiled_apart(inner.step)


def require_not_compiled(model: nn.Module) -> None:
    """Refuse a model that was compiled before: hooks for what is fetched would come too late."""
    if isinstance(model, torch._dynamo.OptimizedModule) or any(m._compiled_call_impl for m in model.modules()):
        raise ValueError(
            "the model was compiled already, by torch.compile(model) or model.compile(). A program compiles it "
            "itself, for what is fetched: give it the model as it was before, or say Program(..., compile=False)."
        )


def graphs_so_far() -> int:
    """Graphs that torch has compiled in this process."""
    from torch._dynamo.utils import counters  # the whole compiler: not before it is needed

    return counters["stats"]["unique_graphs"]
