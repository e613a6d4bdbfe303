"""Compilations of modules that run as a whole: one for all that are alike."""

import itertools
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fleetx.memory.dear import is_dear
from fleetx.memory.sizes import Copies, sizes_of

Kinds = tuple[str, ...]

_numbers = itertools.count()
_MOST_SIZES = 8  # as torch does


class _TooManySizes(Exception):  # noqa: N818 - it reads as what it says
    """What would have to be compiled for each size by itself was given too many."""


class SharedCompilations:
    """Compiled forwards by what a module is made of.

    torch keeps compilations by code object and stops after eight of one. Modules of the same class and different sizes
    share a code object, so each size is given one of its own.
    """

    def __init__(self, **options: Any) -> None:
        from torch._dynamo import exc  # only now, as it takes seconds: and now, so that all hooks are shielded

        self.options = options
        self._refusals = (exc.TorchDynamoException, exc.FailOnRecompileLimitHit, _TooManySizes)
        self._functions: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._undivided: dict[tuple[Any, ...], str] = {}  # why the compiler cannot save their dear outputs alone
        self._sizes: dict[tuple[Any, ...], set[Any]] = {}  # for which it does
        self._copies: dict[tuple[Any, ...], Copies] = {}
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
    def saving(self, dear: Kinds | None, user: object = None) -> Iterator[list[str]]:
        """Inside, compiled forwards save inputs and outputs of dear kinds; if there are none, what they need.

        What the `user` runs may be repeated as long as it lives. Gives why the compiler refused, as far as it does.
        """
        outer, reasons = self._now, []
        self._local.now = (dear, user, reasons)
        try:
            yield reasons
        finally:
            self._local.now = outer

    def callee(self, module: nn.Module, dear: Kinds | None) -> Callable[..., Any]:
        """What to call when the module is repeated."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.install([module])
            try:
                with self.saving(dear):
                    return module(*args, **kwargs)
            finally:
                self.uninstall([module])

        return call

    @property
    def _now(self) -> tuple[Kinds | None, object, list[str]]:
        return getattr(self._local, "now", (None, None, []))

    def _forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        dear, user, reasons = self._now
        like, sizes = (*self._like(module), self.variant), sizes_of((args, kwargs))
        if dear is not None and (like, dear) not in self._undivided:
            try:
                return self._divided(module, (like, dear), sizes)(module, *args, **kwargs)
            except self._refusals as error:  # before anything ran
                self._undivided[like, dear] = str(error).strip().splitlines()[0]
                _let_go(error)
        if dear is not None:
            reasons.append(self._undivided[like, dear])
        copy = self._copies.setdefault(like, Copies()).which(sizes, user)
        return self._compiled((like, copy), lambda: _forward_of(module), self.options)(module, *args, **kwargs)

    def _divided(self, module: nn.Module, key: tuple[Any, Kinds], sizes: Any) -> Callable[..., Any]:
        """A compilation that saves inputs and dear outputs, and computes the rest again.

        torch 2.11 cannot divide a graph whose sizes are symbols: each size is compiled for itself.
        """
        known = self._sizes.setdefault(key, set())
        if sizes not in known and len(known) == _MOST_SIZES:
            raise _TooManySizes(f"it was given inputs of more than {_MOST_SIZES} sizes")
        known.add(sizes)
        options = {"dynamic": False} | self.options | {"fullgraph": True}
        return self._compiled((*key, sizes), lambda: own_code(_selective(_forward_of(module), key[1])), options)

    def _compiled(
        self, key: tuple[Any, ...], function: Callable[[], Any], options: dict[str, Any]
    ) -> Callable[..., Any]:
        if key not in self._functions:
            self._functions[key] = torch.compile(function(), **options)
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


def _let_go(error: BaseException | None) -> None:
    """An error knows the frames that it passed, which know it: their tensors would live until garbage is collected."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__, error = None, error.__cause__ or error.__context__


def _forward_of(module: nn.Module) -> Any:
    forward = type(module).forward
    return own_code(forward) if isinstance(forward, FunctionType) else forward


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
