"""Compilations of a model's forward, one for each set of outputs that are fetched."""

from collections import defaultdict
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fleetx import memory
from fleetx.apart import compiled_apart
from fleetx.notices import tell_once
from fleetx.static.feeding import described
from fleetx.static.fetching import OutputTaps
from fleetx.static.passing import Sizes


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
        self._sizes: defaultdict[tuple[str, ...], Sizes] = defaultdict(Sizes)

    @contextmanager
    def fetching(self, outputs: tuple[str, ...], batch: Mapping[str, Tensor]) -> Generator[dict[str, Any]]:
        """Inside, calling the model also notes these outputs; it uses their own compilation.

        A batch of a passing size runs eagerly: to compile for it would take longer than it ever saves.
        """
        taps = OutputTaps(self.model, outputs)
        before = self.model.__dict__.get("forward")
        compiles = self.enabled and not self._is_passing(outputs, batch)
        if compiles:
            # The instance's forward, so that hooks around the model, such as autocast, stay outside of the graph.
            self.model.forward = self._compiled(outputs)
        try:
            yield taps.outputs
        finally:
            if compiles:
                del self.model.forward
                if before is not None:  # somebody had given this very object a forward of its own
                    self.model.forward = before
            taps.remove()

    def _is_passing(self, outputs: tuple[str, ...], batch: Mapping[str, Tensor]) -> bool:
        passing = self._sizes[outputs].is_passing(batch)
        if passing:
            tell_once(
                f"passing-{id(self)}",
                f"a feed of another size ran without being compiled ({described(batch)}), as a short last batch does: "
                "it takes less time than compiling again. If such feeds come one after the other, or often, the "
                "program is compiled for any size.",
            )
        return passing

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
    def fetching(self, outputs: tuple[str, ...], _batch: Mapping[str, Tensor]) -> Generator[dict[str, Any]]:
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
