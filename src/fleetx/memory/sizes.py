"""Sizes of inputs, as far as it matters which compilation of a function serves them."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Copies:
    """Which copy of a function serves which sizes.

    At the second size torch compiles for any size, and uses that from then on, also for the first: what ran before it
    would save other tensors if it were repeated. So as long as that may happen, other sizes have a copy of their own.
    """

    def __init__(self) -> None:
        self._copy: dict[Any, int] = {}
        self._users: list[weakref.WeakSet[Any]] = []

    def which(self, sizes: Any, user: object) -> int:
        """The number of the copy for these sizes."""
        if sizes not in self._copy:
            unused = (number for number, users in enumerate(self._users) if not users)
            self._copy[sizes] = 0 if user is None else next(unused, len(self._users))
        number = self._copy[sizes]
        if user is not None:
            if number == len(self._users):
                self._users.append(weakref.WeakSet())
            self._users[number].add(user)
        return number


def sizes_of(arguments: Any) -> tuple[Any, ...]:
    """What the compiler may make symbols of."""
    leaves = pytree.tree_leaves(arguments)
    return tuple((x.shape, _strides(x)) if isinstance(x, Tensor) else x for x in leaves if isinstance(x, Tensor | int))


def _strides(tensor: Tensor) -> Any:
    return tensor.stride() if tensor.layout is torch.strided else None
