"""Structures that hold tensors: nested as torch knows them, or in the attributes of objects."""

import dataclasses
import gc
from collections import OrderedDict, defaultdict
from functools import cache
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_WITHOUT = (
    *(Tensor, nn.Module, torch.Generator, torch.dtype, torch.device, str, bytes, int, float, complex, type, type(None)),
    *(FunctionType, MethodType, BuiltinFunctionType),
)
_NOT_SEARCHED = (*_WITHOUT, ModuleType)
_DATA = (Tensor, torch.dtype, torch.device, str, bytes, int, float, complex, type(None))
_DEEPEST = 3
"""Objects in objects are looked into so far, and no further: some know the whole program."""
_ATOMS = frozenset({Tensor, nn.Parameter, bool, int, float, str, type(None)})
_MOST_KNOWN = 200  # things that are looked at in a value that cannot be flattened: some know the whole program
_LONGEST = 256  # a dict or list of a class of its own that is looked into: longer ones are vocabularies and the like
_MOST_VALUES = 64  # of a structure that is remembered
_MOST_REMEMBERED = 64


class Structure(NamedTuple):
    """How flat values were nested."""

    tree: pytree.TreeSpec
    objects: dict[int, tuple[type, list[Any], "Structure", int]]  # by place: class, parts, their structure, count
    arguments: tuple[int, tuple[str, ...]] | None = None  # if it is those of a call: how many have no name, and names


_common: dict[Any, Structure] = {}
"""Of the structures that modules are given and give most often: torch's own way to flatten them takes longer."""


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of a structure."""
    return [one for one in flatten(value)[0] if isinstance(one, Tensor)]


def flatten(value: Any, depth: int = 0) -> tuple[list[Any], Structure]:
    """The values of a structure in a row. Objects that hold neither tensors nor only data are values too."""
    quickly = _flatten_common(value)
    if quickly is not None:
        return quickly
    flat, tree = pytree.tree_flatten(value)
    if all(isinstance(one, _WITHOUT) for one in flat):
        return flat, Structure(tree, {})
    values: list[Any] = []
    objects = {}
    for place, one in enumerate(flat):
        held = _parts(one) if depth < _DEEPEST else None
        if held is None or not (_has_tensors(held, depth, {id(one)}) or _is_data(held, depth, {id(one)})):
            values.append(one)
            continue
        inner, structure = flatten(list(held.values()), depth + 1)
        objects[place] = (type(one), list(held), structure, len(inner))
        values += inner
    return values, Structure(tree, objects)


def hidden_in(values: list[Any]) -> list[Tensor]:
    """The tensors in values that could not be flattened: objects with slots, or made in ways of their own, or too deep.

    As far as they are among the first things that such a value knows.
    """
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, _WITHOUT):
            continue
        waiting, seen = [value], {id(value)}
        for one in waiting:  # it grows
            if isinstance(one, Tensor):
                found.append(one)
            elif not isinstance(one, _NOT_SEARCHED) and len(waiting) < _MOST_KNOWN:
                known = [inner for inner in gc.get_referents(one) if id(inner) not in seen]
                seen.update(map(id, known))
                waiting += known
    return found


def _flatten_common(value: Any) -> tuple[list[Any], Structure] | None:
    """One value, a tuple of them, or the arguments of a call, if there is nothing in it to be looked into."""
    shape: Any = None
    if type(value) in _ATOMS:
        flat = [value]
    elif type(value) is not tuple:
        return None
    elif len(value) == 2 and type(value[0]) is tuple and type(value[1]) is dict:
        flat, shape = [*value[0], *value[1].values()], (len(value[0]), tuple(value[1]))
    else:
        flat, shape = list(value), len(value)
    if len(flat) > _MOST_VALUES or not _ATOMS.issuperset(map(type, flat)):
        return None
    structure = _common.get(shape)
    if structure is None:
        arguments = shape if isinstance(shape, tuple) else None
        if len(_common) >= _MOST_REMEMBERED or (arguments and not {str}.issuperset(map(type, arguments[1]))):
            return None  # what is remembered is remembered for ever
        structure = _common[shape] = Structure(pytree.tree_flatten(value)[1], {}, arguments)
    return flat, structure


def unflatten(values: list[Any], structure: Structure) -> Any:
    """The structure again, made of new containers and objects."""
    if structure.arguments is not None:
        unnamed, names = structure.arguments
        return tuple(values[:unnamed]), dict(zip(names, values[unnamed:], strict=True))
    if not structure.objects:
        return pytree.tree_unflatten(values, structure.tree)
    flat: list[Any] = []
    position = 0
    for place in range(structure.tree.num_leaves):
        if place not in structure.objects:
            flat.append(values[position])
            position += 1
            continue
        kind, names, inner, count = structure.objects[place]
        parts = unflatten(values[position : position + count], inner)
        flat.append(_made_of(kind, dict(zip(names, parts, strict=True))))
        position += count
    return pytree.tree_unflatten(flat, structure.tree)


class Item(NamedTuple):
    """A part of an object that is no attribute, but an item of the dict or list that it is too."""

    key: Any


_ITSELF = "__dict__"
"""A part of dicts whose items are their attributes."""


def _parts(value: Any) -> dict[Any, Any] | None:
    """What an object holds, attributes by name and items; None if no new one can be made of it.

    One that holds nothing is what it is, a mark perhaps; but a dict or list may come to be filled.
    """
    if isinstance(value, _WITHOUT):
        return None
    base = _base_of(type(value))
    if base is None or (base is not object and base.__len__(value) > _LONGEST):
        return None
    if base is not object:
        return _items(value, base) | _attributes(value)
    slots = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | _attributes(value) or None


def _items(value: Any, base: type) -> dict[Any, Any]:
    pairs = enumerate(list.__iter__(value)) if base is list else base.items(value)
    return {Item(key): item for key, item in pairs}


def _attributes(value: Any) -> dict[str, Any]:
    held = getattr(value, "__dict__", {})
    return {_ITSELF: True} if held is value else dict(held)


@cache
def _base_of(kind: type) -> Any:
    """What objects of this class are made by: object, or dict or list for those of a class of their own; else None."""
    base = next((base for base in (OrderedDict, dict, list) if issubclass(kind, base)), object)
    own = kind.__mro__[: kind.__mro__.index(base)]
    if kind.__new__ is not base.__new__ or defaultdict in own:
        return None
    # Slots have no names here, but for those of dataclasses.
    return base if base is object or not any(vars(one).get("__slots__") for one in own) else None


def _made_of(kind: type, parts: dict[Any, Any]) -> Any:
    """A new object of this class, without its own ways to be made and changed."""
    base = _base_of(kind)
    made = base.__new__(kind)
    for name, part in parts.items():
        if name == _ITSELF:
            object.__setattr__(made, name, made)
        elif not isinstance(name, Item):
            _set(made, name, part)
        elif base is list:
            list.append(made, part)
        else:
            base.__setitem__(made, name.key, part)
    return made


def _set(made: Any, name: str, part: Any) -> None:
    """Where it is kept: there may be a property of this name."""
    if hasattr(made, "__dict__") and not isinstance(getattr(type(made), name, None), MemberDescriptorType):
        vars(made)[name] = part
    else:
        object.__setattr__(made, name, part)


def _has_tensors(held: dict[str, Any], depth: int, seen: set[int]) -> bool:
    for one in pytree.tree_leaves(list(held.values())):
        if isinstance(one, Tensor):
            return True
        if depth < _DEEPEST and id(one) not in seen:
            seen.add(id(one))
            if _has_tensors(_parts(one) or {}, depth + 1, seen):
                return True
    return False


def _is_data(held: dict[str, Any], depth: int, seen: set[int]) -> bool:
    """Whether there is nothing but data in it: a counter or an empty cache, which a module may come to fill."""
    for one in pytree.tree_leaves(list(held.values())):
        if isinstance(one, _DATA):
            continue
        inner = _parts(one) if depth < _DEEPEST and id(one) not in seen else None
        seen.add(id(one))
        if inner is None or not _is_data(inner, depth + 1, seen):
            return False
    return True
