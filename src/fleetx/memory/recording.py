"""Notes what containers do between their modules: each call of a torch function goes through here."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fleetx.memory.structures import tensors_in
from fleetx.memory.tape import version_of


class Listener(Protocol):
    """Who wants to know."""

    def is_listening(self) -> bool:
        """Whether calls are of interest now."""

    def calling(self, args: Any, kwargs: Any, written: list[Tensor]) -> AbstractContextManager[Any]:
        """A call is about to be made that will write to these tensors; it is made inside."""

    def overheard(self, written: list[Tensor]) -> None:
        """A call that cannot be noted is about to be made; it will write to these."""

    def called(self, function: Callable[..., Any], args: Any, kwargs: Any, output: Any, begun: Any) -> None:
        """A call that gave tensors or wrote to some was made; `begun` is what `calling` gave."""


def is_transforming() -> bool:
    """Whether this is inside of vmap or the like: there tensors are not what they are outside, and cannot be noted."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class Recorder(TorchFunctionMode):
    """Tells its listener of calls that give or change tensors. Questions, such as for a shape, are not calls."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self.listener: Listener | None = listener

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Gradients that are asked for in a forward may be those of an earlier segment: not to be had again.
        listener = self.listener
        if listener is None or not listener.is_listening() or func is torch.autograd.grad:
            return func(*args, **kwargs)
        if is_transforming():
            listener.overheard(written_by(func, args, kwargs))
            return func(*args, **kwargs)
        inputs = tensors_in((args, kwargs))
        written = written_by(func, args, kwargs)
        versions = [version_of(tensor) for tensor in inputs]
        with listener.calling(args, kwargs, written) as begun:
            output = func(*args, **kwargs)
        changed = [t for t, version in zip(inputs, versions, strict=True) if version_of(t) != version]
        if changed and not written:
            _writing.add(func)  # too late for this time
        if self.listener is not None and (changed or written or tensors_in(output)):
            self.listener.called(func, args, kwargs, output, begun)
        return output

    @property
    def is_innermost(self) -> bool:
        """Whether no mode of somebody else was opened since."""
        depth = torch._C._len_torch_function_stack()
        return depth > 0 and torch._C._get_function_stack_at(depth - 1) is self


def drop_deaf() -> None:
    """Take recorders off that have no listener any more: they could not be while they were asked."""
    while (depth := torch._C._len_torch_function_stack()) > 0:
        innermost = torch._C._get_function_stack_at(depth - 1)
        if not isinstance(innermost, Recorder) or innermost.listener is not None:
            return
        innermost.__exit__(None, None, None)


_writing: set[Any] = set()
_ASSIGNING = {"__setitem__", "__set__", "__delitem__"}
_OPERATORS = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul")
_AUGMENTED = {f"__i{name}__" for name in (*_OPERATORS, "lshift", "rshift")}
_NORMS = {"batch_norm", "instance_norm"}
"""They write to their running statistics, of which the versions say nothing."""


def written_by(function: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors to which a function is known, or sounds as if it were, to write."""
    name = getattr(function, "__name__", "")
    found = tensors_in(kwargs["out"]) if kwargs.get("out") is not None else []
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or name in _AUGMENTED or name in _ASSIGNING or _is_in_place(function, args, kwargs):
        found += tensors_in(args[:1] or list(kwargs.values()))
    elif name in _NORMS:
        found += [tensor for tensor in tensors_in((args[1:], kwargs)) if not tensor.requires_grad]
    elif function in _writing:
        found += tensors_in((args, kwargs))
    return found


def _is_in_place(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if "inplace" in kwargs:
        return bool(kwargs["inplace"])
    place = _place_of_inplace(function)
    return place is not None and place < len(args) and args[place] is True


@cache
def _place_of_inplace(function: Any) -> int | None:
    if not inspect.isfunction(function):
        return None
    names = list(inspect.signature(function, follow_wrapped=False).parameters)
    return names.index("inplace") if "inplace" in names else None
