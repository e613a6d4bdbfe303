"""What modules keep in plain attributes: all of it is noted before a forward, and put back while that is repeated.

Notes are shallow: an attribute is what it was, but what was changed inside of an object is not undone. Tensors that an
attribute holds, itself or in a tuple, list or dict, are looked after: no graph is kept alive, and writes are noticed.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fleetx.memory.checking import bits
from fleetx.memory.generators import Drawn, is_generator
from fleetx.memory.tape import pointer_of, version_of

_TORCHS_OWN = (frozenset(vars(nn.Module())) | {"forward"}) - {"training"}
"""Of parameters, buffers and submodules others take care; hooks stay as they are, and compiled forwards."""
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_CONTAINERS = frozenset({tuple, list, dict, OrderedDict})
_LONGEST = 256
"""Longer lists are not searched for tensors: they are vocabularies and the like, and a forward must not be slow."""

Noted = dict[str, Any]


class Plain(NamedTuple):
    """What was noted of a module that holds nothing but plain values; it knows neither the module nor its tensors."""

    names: list[str]  # also torch's own
    values: Callable[[Noted], Any]  # of a module with these names: all but torch's own
    noted: Noted

    @classmethod
    def of(cls, present: Noted, noted: Noted) -> "Plain | None":
        """Of a module that holds this; None if there is something in it that might hold a tensor."""
        if "training" not in noted or not _PLAIN.issuperset(map(type, noted.values())):
            return None
        return cls(list(present), itemgetter(*noted, "training"), noted)  # at least two: else it gives no tuple

    def is_still(self, present: Noted) -> bool:
        """Whether a module that holds this holds the very same."""
        return list(present) == self.names and all(map(is_, self.values(present), self.values(self.noted)))


@dataclass(eq=False)
class Past:
    """A tensor that an attribute held before a forward."""

    owner: nn.Module
    name: str
    tensor: Tensor  # without its graph, which may come to know the segment
    version: int
    copy: Tensor | None = None  # if a forward writes to it

    @classmethod
    def of(cls, owner: nn.Module, name: str, tensor: Tensor, *, is_copied: bool) -> "Past":
        """The tensor as it is."""
        held = tensor if tensor.is_leaf else tensor.detach().requires_grad_()
        return cls(owner, name, held, version_of(held), held.detach().clone() if is_copied else None)

    def was_written(self) -> bool:
        """Whether somebody wrote to it, as far as can be seen."""
        if version_of(self.tensor) != self.version:
            return True
        return self.copy is not None and not has_same_values(self.tensor, self.copy)

    def again(self) -> Tensor:
        """A tensor that is what it was."""
        if self.copy is not None:
            with torch.enable_grad():  # what is written to must not be a leaf
                return self.copy.detach().requires_grad_(self.tensor.requires_grad).clone()
        if self.was_written():
            raise RuntimeError(
                f"{self.name!r} of a {type(self.owner).__name__} was written to between the forward and the backward, "
                "so the segment cannot be repeated as it was. Write to it inside of forward, or after the backward; or "
                "leave this module out of recompute."
            )
        return self.tensor


class Nested(NamedTuple):
    """An attribute that holds tensors."""

    values: list[Any]
    tree: pytree.TreeSpec

    def again(self, drawn: "Generators") -> Any:
        """What it was, in new containers."""
        return pytree.tree_unflatten([_again(value, drawn) for value in self.values], self.tree)


Generators = dict[Drawn, Any]
"""Those that were made again: modules may share one, and then draw from it in turns."""


@dataclass(eq=False)
class Attributes:
    """The attributes of some modules before a forward."""

    held: list[tuple[nn.Module, Noted]] = field(default_factory=list)
    pasts: list[Past] = field(default_factory=list)
    _drawn: dict[int, Drawn] = field(default_factory=dict)  # by generator

    @classmethod
    def of(
        cls, modules: list[nn.Module], is_copied: Callable[[nn.Module, str], bool], last: list[Plain | None]
    ) -> "Attributes":
        """As they are; `is_copied` says whose tensors a forward may write to.

        What is still as it was in the `last` forward is not noted anew; the list is brought up to date.
        """
        made = cls()
        last += [None] * (len(modules) - len(last))
        for place, module in enumerate(modules):
            present, before = vars(module), last[place]
            if before is not None and before.is_still(present):
                noted = before.noted
            else:
                noted = made._noted_of(module, is_copied)
                last[place] = Plain.of(present, noted)
            made.held.append((module, noted))
        return made

    def _noted_of(self, module: nn.Module, is_copied: Callable[[nn.Module, str], bool]) -> Noted:
        return {
            name: value if type(value) in _PLAIN else self._noted(module, name, value, is_copied)
            for name, value in vars(module).items()
            if name not in _TORCHS_OWN
        }

    def _noted(self, module: nn.Module, name: str, value: Any, is_copied: Callable[[nn.Module, str], bool]) -> Any:
        if is_generator(value):
            return self._noted_generator(value)
        if not _holds_tensors(value):
            return value
        flat, tree = pytree.tree_flatten(value)
        copied = is_copied(module, name)
        for place, one in enumerate(flat):
            if isinstance(one, Tensor):
                flat[place] = Past.of(module, name, one, is_copied=copied)
                self.pasts.append(flat[place])
            elif is_generator(one):
                flat[place] = self._noted_generator(one)
        return Nested(flat, tree)

    def _noted_generator(self, generator: Any) -> Drawn:
        if id(generator) not in self._drawn:
            self._drawn[id(generator)] = Drawn.of(generator)
        return self._drawn[id(generator)]

    def written(self) -> set[tuple[nn.Module, str]]:
        """Whose tensors were written to since."""
        return {(past.owner, past.name) for past in self.pasts if past.was_written()}

    def drop_copies(self, but: set[tuple[nn.Module, str]]) -> None:
        """Only of these are copies needed."""
        for past in self.pasts:
            if (past.owner, past.name) not in but:
                past.copy = None

    @property
    def is_written(self) -> bool:
        """Whether there is a tensor among them that a forward writes to."""
        return any(past.copy is not None for past in self.pasts)

    @property
    def is_complete(self) -> bool:
        """Whether there is a copy of everything that was written to."""
        return all(past.copy is not None or not past.was_written() for past in self.pasts)

    def put_back(self) -> None:
        """Make the modules' attributes what they were."""
        drawn: Generators = {}
        for module, noted in self.held:
            put_back(vars(module), noted, drawn)


def is_unchanged(now: Noted, before: Noted) -> bool:
    """Whether all attributes are the very same objects, also those of torch."""
    return len(now) == len(before) and all(map(is_, now.values(), before.values())) and list(now) == list(before)


def put_back(now: Noted, before: Noted, drawn: Generators) -> None:
    """Make attributes what they were, one by one: most did not change.

    Other threads may install and remove compiled forwards meanwhile, so `forward` is left alone.
    """
    for name in [name for name in list(now) if name not in before and name not in _TORCHS_OWN]:
        del now[name]
    for name, value in before.items():
        if name != "forward" and (name not in now or now[name] is not value):
            now[name] = _again(value, drawn)


def _again(value: Any, drawn: Generators) -> Any:
    if isinstance(value, Nested):
        return value.again(drawn)
    if isinstance(value, Past):
        return value.again()
    if not isinstance(value, Drawn):
        return value
    if value not in drawn:
        drawn[value] = value.again()
    return drawn[value]


def has_same_values(tensor: Tensor, copy: Tensor) -> bool:
    """Whether both hold the same; of sparse ones the version says enough."""
    if tensor.shape != copy.shape or tensor.dtype != copy.dtype:
        return False
    return pointer_of(tensor) is None or torch.equal(tensor, copy) or torch.equal(bits(tensor), bits(copy))


def _holds_tensors(value: Any) -> bool:
    """Or generators of random numbers, which change in a forward too."""
    if isinstance(value, Tensor) or is_generator(value):
        return True
    kind = type(value)
    if kind not in _CONTAINERS and not (isinstance(value, tuple) and hasattr(value, "_fields")):
        return False
    if len(value) > _LONGEST:
        return False
    inner = value.values() if isinstance(value, dict) else value
    return any(type(one) not in _PLAIN and _holds_tensors(one) for one in inner)
