"""Compilations of modules that run as a whole: one for all that are alike."""

import itertools
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fleetx.compiler_paths import check_compiler_paths
from fleetx.memory.dear import is_dear
from fleetx.memory.sizes import Copies, sizes_of

Kinds = tuple[str, ...]

_numbers = itertools.count()
_MOST_SIZES = 8  # a compilation takes long: with more, most of the time would go into them
_SHARING = 3  # each of them may be compiled twice: the first layer's input has no gradient
_TORCH = str(Path(torch.__file__).parent)
# torch 2.13 does not compile in several threads at once: now and then a traced graph fails with a NameError.
_one_thread = threading.RLock()


@dataclass(eq=False)
class Saving:
    """What a compiled forward is asked to save, and for whom."""

    dear: Kinds | None
    frame: object
    refused: str | None = None  # why the compiler would not save dear outputs alone


class _TooManySizes(Exception):  # noqa: N818 - it reads as what it says
    """What would have to be compiled for each size by itself was given too many."""


class SharedCompilations:
    """Compiled forwards by what a module is made of.

    torch keeps compilations by code object and stops after eight of one. Modules of the same class and different sizes
    share a code object, so each size is given one of its own.
    """

    def __init__(self, **options: Any) -> None:
        if options.get("backend", "inductor") == "inductor":
            check_compiler_paths()
        from torch._dynamo import exc  # only now, as it takes seconds: and now, so that all hooks are shielded

        self.options = options
        self._refusals = (exc.TorchDynamoException, exc.FailOnRecompileLimitHit, _TooManySizes)
        self._functions: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._undivided: dict[tuple[Any, ...], str] = {}  # why the compiler cannot save their dear outputs alone
        self._sizes: dict[tuple[Any, ...], set[Any]] = {}  # for which it does
        self._copies: dict[tuple[Any, ...], Copies] = {}
        self._likeness: dict[int, tuple[Any, ...]] = {}
        self._numbers: dict[tuple[Any, ...], dict[Any, int]] = {}  # in which modules differ that are alike otherwise
        self._local = threading.local()
        self._installed: Counter[nn.Module] = Counter()  # how often
        # Part of what is compiled for: hooks that are added after a compilation never fire.
        self.variant: object = None

    def __reduce__(self) -> Any:
        """A copy of a model compiles anew: what is known here is about these very modules."""
        return partial(SharedCompilations, **self.options), ()

    def install(self, modules: Iterable[nn.Module]) -> None:
        """Give the modules their compiled forwards, until they are uninstalled as often: threads may share a model."""
        with _one_thread:
            for module in modules:
                if "forward" not in module.__dict__:  # else somebody gave it one already
                    module.forward = partial(self._forward, module)
                if self.is_installed(module):
                    self._installed[module] += 1

    def uninstall(self, modules: Iterable[nn.Module]) -> None:
        """Take them away again."""
        with _one_thread:
            for module in modules:
                if self.is_installed(module):
                    self._installed[module] -= 1
                    if not self._installed[module]:
                        del module.forward, self._installed[module]

    def is_installed(self, module: nn.Module) -> bool:
        """Whether the module's forward is compiled here; not if it has one of its own."""
        given = module.__dict__.get("forward")
        return isinstance(given, partial) and given.func == self._forward

    @contextmanager
    def saving(self, dear: Kinds | None, frame: object = None) -> Iterator["Saving"]:
        """Inside, compiled forwards save inputs and outputs of dear kinds; if there are none, what they need.

        What runs for a `frame` may be repeated as long as that lives.
        """
        outer, saving = self._saving, Saving(dear, frame)
        self._local.saving = saving
        try:
            yield saving
        finally:
            self._local.saving = outer

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

    def why_undivided(self, module: nn.Module, dear: Kinds) -> str | None:
        """Why the compiler would not save these dear outputs of a module alone, if that was tried before."""
        return self._undivided.get(((*self._like(module), self.variant), dear))

    @property
    def _saving(self) -> "Saving":
        return getattr(self._local, "saving", Saving(None, None))

    def _forward(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        with _one_thread:
            return self._compiled_forward(module, args, kwargs)

    def _compiled_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        saving, like = self._saving, (*self._like(module), self.variant)
        if saving.dear is None:
            return self._whole(module, like, saving.frame, args, kwargs)
        key, handled = (like, saving.dear), sys.exception()
        if key not in self._undivided:
            try:
                return self._divided(module, key, args, kwargs)
            except self._refusals as error:  # of the compiler, before anything ran
                reason = str(error).strip().splitlines()[0]
                _let_go(error, handled)
        else:
            reason = self._undivided[key]
        output = self._whole(module, like, saving.frame, args, kwargs)
        self._undivided[key] = saving.refused = reason  # only now: an error of the model itself says nothing
        return output

    def _whole(self, module: nn.Module, like: tuple[Any, ...], frame: object, args: Any, kwargs: Any) -> Any:
        """Run a compilation that saves what the compiler sees fit."""
        copy = self._copies.setdefault(like, Copies()).which(sizes_of((args, kwargs)), frame)
        return self._compiled((like, copy), lambda: _forward_of(module), self.options)(module, *args, **kwargs)

    def _divided(self, module: nn.Module, key: tuple[Any, Kinds], args: Any, kwargs: Any) -> Any:
        """Run a compilation that saves inputs and dear outputs, and computes the rest again.

        torch 2.11 cannot divide a graph whose sizes are symbols: each size is compiled for itself. Numbers are left to
        torch, which compiles anew where they are read.
        """
        sizes = tuple(size for size in sizes_of((args, kwargs)) if not isinstance(size, int))
        known = self._sizes.setdefault(key, set())
        if sizes not in known and len(known) == _MOST_SIZES:
            raise _TooManySizes(f"it was given inputs of more than {_MOST_SIZES} sizes")
        known.add(sizes)
        options = {"dynamic": False} | self.options | {"fullgraph": True}
        function = self._compiled((*key, sizes), lambda: own_code(_selective(_forward_of(module), key[1])), options)
        return function(module, *args, **kwargs)

    def _compiled(
        self, key: tuple[Any, ...], function: Callable[[], Any], options: dict[str, Any]
    ) -> Callable[..., Any]:
        if key not in self._functions:
            self._functions[key] = torch.compile(function(), **options)
        return self._functions[key]

    def _like(self, module: nn.Module) -> tuple[Any, ...]:
        """What modules have in common that share compilations.

        torch compiles anew for each number that is read from a module, such as a layer's own, and after eight of them
        not at all: so those with other numbers share as far as that is sure not to happen.
        """
        if id(module) not in self._likeness:
            tensors = [*module.named_parameters(), *module.named_buffers()]
            shapes = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)
            like = (type(module), repr(module), shapes)
            numbers = self._numbers.setdefault(like, {})
            place = numbers.setdefault(_numbers_of(module), len(numbers))
            self._likeness[id(module)] = (*like, place // _SHARING)
        return self._likeness[id(module)]


def _numbers_of(module: nn.Module) -> tuple[Any, ...]:
    """The numbers that a module and those in it have as attributes."""
    held = [(name, *item) for name, inner in module.named_modules() for item in vars(inner).items()]
    return tuple(one for one in held if isinstance(one[2], int | float) and not isinstance(one[2], bool))


def _let_go(error: BaseException | None, handled: BaseException | None) -> None:
    """An error knows the frames that it passed, which know it: their tensors would live until garbage is collected.

    Not so of the one that somebody was handling before.
    """
    while error is not None and error is not handled:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__, error = None, error.__cause__ or error.__context__


def _forward_of(module: nn.Module) -> Any:
    forward = type(module).forward
    return own_code(forward) if isinstance(forward, FunctionType) else forward


def _selective(forward: Callable[..., Any], kinds: Kinds) -> Callable[..., Any]:
    """The forward, of which the compiler saves inputs and dear outputs, and computes the rest again in the backward.

    torch has a simpler way, `activation_memory_budget`; but with dropout its gradients are wrong: it draws new random
    numbers when it computes again (torch 2.13).
    """

    def policy(_context: Any, function: Any, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
        save = is_dear(kinds, function, args)
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    def run(*args: Any, **kwargs: Any) -> Any:
        contexts = partial(create_selective_checkpoint_contexts, policy)
        # Not as its keywords: some of them are checkpoint's own.
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, context_fn=contexts)

    return run


def own_code(function: Any) -> FunctionType:
    """The function with a code object of its own: torch keeps compilations by code object.

    And with a name of its own: torch remembers by file, line and name which sizes have varied. If it is torch's own, in
    a file of ours: torch wraps such functions, as a convolution's, and keeps the compilations of all wrappers together.
    """
    code = function.__code__
    file = __file__ if code.co_filename.startswith(_TORCH) else code.co_filename
    code = code.replace(co_name=f"{function.__name__}_{next(_numbers)}", co_filename=file)
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
