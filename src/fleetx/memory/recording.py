"""Notes what containers do between their modules: each call of a torch function goes through here."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


class Listener(Protocol):
    """Who wants to know."""

    def is_listening(self) -> bool:
        """Whether calls are of interest now."""

    def begin_call(self, args: Any, kwargs: Any) -> Any:
        """A call that may write to its inputs is about to be made."""

    def end_call(self, function: Callable[..., Any], args: Any, kwargs: Any, begun: Any, output: Any) -> None:
        """A call that gave tensors or wrote to some was made."""


class Recorder(TorchFunctionMode):
    """Tells its listener of calls that give or change tensors. Questions, such as for a shape, are not calls."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self.listener = listener

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.listener.is_listening():
            return func(*args, **kwargs)
        begun = self.listener.begin_call(args, kwargs) if writes(func, kwargs) else None
        inputs = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        versions = [tensor._version for tensor in inputs]
        output = func(*args, **kwargs)
        has_written = versions != [tensor._version for tensor in inputs]
        if has_written and begun is None:
            _writing.add(func)  # too late for this time
        if has_written or any(isinstance(value, Tensor) for value in pytree.tree_leaves(output)):
            self.listener.end_call(func, args, kwargs, begun, output)
        return output

    @property
    def is_innermost(self) -> bool:
        """Whether no mode of somebody else was opened since."""
        depth = torch._C._len_torch_function_stack()
        return depth > 0 and torch._C._get_function_stack_at(depth - 1) is self


_writing: set[Any] = set()
_ASSIGNING = {"__setitem__", "__set__", "__delitem__"}
_OPERATORS = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul")
_AUGMENTED = {f"__i{name}__" for name in _OPERATORS}


def writes(function: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function is known, or sounds, as if it wrote to its inputs."""
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    augmented = name in _AUGMENTED or name in _ASSIGNING
    return in_place or augmented or bool(kwargs.get("inplace")) or "out" in kwargs or function in _writing
