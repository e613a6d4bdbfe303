"""Sizes of inputs, as far as it matters which compilation of a function serves them."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_MANY = 1000  # sizes that are remembered: a counter among the arguments is always another one


class Copies:
    """Which copy of a function serves which sizes.

    At the second size torch compiles for any size, and uses that from then on, also for the first: what ran before it
    would save other tensors if it were repeated. So as long as that may happen, other sizes have a copy of their own.
    """

    def __init__(self) -> None:
        self._copy: dict[Any, int] = {}
        self._frames: list[weakref.WeakSet[Any]] = []  # that use each copy

    def which(self, sizes: Any, frame: object) -> int:
        """The number of the copy for these sizes."""
        if sizes not in self._copy:
            if len(self._copy) >= _MANY and not any(self._frames):
                self._copy.clear()
            unused = (number for number, frames in enumerate(self._frames) if not frames)
            self._copy[sizes] = 0 if frame is None else next(unused, len(self._frames))
        number = self._copy[sizes]
        if frame is not None:
            while number >= len(self._frames):
                self._frames.append(weakref.WeakSet())
            self._frames[number].add(frame)
        return number


def sizes_of(arguments: Any) -> tuple[Any, ...]:
    """What the compiler may make symbols of."""
    leaves = pytree.tree_leaves(arguments)
    return tuple((x.shape, _strides(x)) if isinstance(x, Tensor) else x for x in leaves if isinstance(x, Tensor | int))


def _strides(tensor: Tensor) -> Any:
    return tensor.stride() if tensor.layout is torch.strided else None
