"""Compilations of modules that run as a whole: one for all that are alike."""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fleetx.memory.dear import is_dear
from fleetx.memory.states import Segment

_numbers = itertools.count()


class SharedCompilations:
    """Compiled forwards by what a module is made of.

    torch keeps compilations by code object and stops after eight of one. Modules of the same class and different sizes
    share a code object, so each size is given one of its own.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self._functions: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._likeness: dict[int, tuple[Any, ...]] = {}
        self._local = threading.local()
        # Part of what is compiled for: hooks that are added after a compilation never fire.
        self.variant: object = None

    def __reduce__(self) -> Any:
        """A copy of a model compiles anew: what is known here is about these very modules."""
        return partial(SharedCompilations, **self.options), ()

    def install(self, modules: Iterable[nn.Module]) -> None:
        """Give the modules their compiled forwards."""
        for module in modules:
            if "forward" not in module.__dict__:  # else somebody gave it one already
                module.forward = partial(self._forward, module)

    def uninstall(self, modules: Iterable[nn.Module]) -> None:
        """Take them away again."""
        for module in modules:
            if isinstance(given := module.__dict__.get("forward"), partial) and given.func == self._forward:
                del module.forward

    @contextmanager
    def saving(self, state: Segment) -> Iterator[None]:
        """Inside, compiled forwards save what the segment's state asks for."""
        outer, self._local.dear = self._dear, state.dear if state.save == "dear" else None
        try:
            yield
        finally:
            self._local.dear = outer

    def callee(self, module: nn.Module, state: Segment) -> Callable[..., Any]:
        """What to call when the module is repeated."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.install([module])
            try:
                with self.saving(state):
                    return module(*args, **kwargs)
            finally:
                self.uninstall([module])

        return call

    @property
    def _dear(self) -> tuple[str, ...] | None:
        return getattr(self._local, "dear", None)

    def _forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._function(module)(module, *args, **kwargs)

    def _function(self, module: nn.Module) -> Callable[..., Any]:
        kinds = self._dear
        key = (*self._like(module), kinds, self.variant)
        if key not in self._functions:
            forward = type(module).forward
            own = own_code(forward) if isinstance(forward, FunctionType) else forward
            if kinds is None:
                self._functions[key] = torch.compile(own, **self.options)
            else:
                # torch 2.11 cannot divide a graph so whose sizes are symbols: each size is compiled for itself.
                options: dict[str, Any] = {"dynamic": False} | self.options
                self._functions[key] = torch.compile(own_code(_selective(own, kinds)), **options)
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


def _selective(forward: Callable[..., Any], kinds: tuple[str, ...]) -> Callable[..., Any]:
    """The forward, of which the compiler saves inputs and dear outputs, and computes the rest again in the backward.

    torch has a simpler way, `activation_memory_budget`; but with dropout its gradients are wrong: it draws new random
    numbers when it computes again (torch 2.13).
    """

    def policy(_context: Any, function: Any, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
        save = is_dear(kinds, function, args)
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    def run(*args: Any, **kwargs: Any) -> Any:
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run


def own_code(function: Any) -> FunctionType:
    """The function with a code object of its own: torch keeps compilations by code object.

    And with a name of its own: torch remembers by file, line and name which sizes have varied. And in a file of ours:
    torch wraps functions of its own, such as a convolution's, and keeps the compilations of all wrappers together.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}", co_filename=__file__)
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
