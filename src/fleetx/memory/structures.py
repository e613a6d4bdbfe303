"""Structures that hold tensors: nested as torch knows them, or in the attributes of objects."""

import dataclasses
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_WITHOUT = (
    *(Tensor, nn.Module, torch.Generator, torch.dtype, torch.device, str, bytes, int, float, complex, type, type(None)),
    *(FunctionType, MethodType, BuiltinFunctionType),
)
_DATA = (Tensor, torch.dtype, torch.device, str, bytes, int, float, complex, type(None))
_DEEPEST = 3
"""Objects in objects are looked into so far, and no further: some know the whole program."""


class Structure(NamedTuple):
    """How flat values were nested."""

    tree: pytree.TreeSpec
    objects: dict[int, tuple[type, list[str], "Structure", int]]  # by place: class, attributes, their structure, count


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of a structure."""
    return [one for one in flatten(value)[0] if isinstance(one, Tensor)]


def flatten(value: Any, depth: int = 0) -> tuple[list[Any], Structure]:
    """The values of a structure in a row. Objects that hold neither tensors nor only data are values too."""
    flat, tree = pytree.tree_flatten(value)
    if all(isinstance(one, _WITHOUT) for one in flat):
        return flat, Structure(tree, {})
    values: list[Any] = []
    objects = {}
    for place, one in enumerate(flat):
        held = _attributes(one) if depth < _DEEPEST else {}
        if not held or not (_has_tensors(held, depth, {id(one)}) or _is_data(held, depth, {id(one)})):
            values.append(one)
            continue
        inner, structure = flatten(list(held.values()), depth + 1)
        objects[place] = (type(one), list(held), structure, len(inner))
        values += inner
    return values, Structure(tree, objects)


def unflatten(values: list[Any], structure: Structure) -> Any:
    """The structure again, made of new containers and objects."""
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
        made = object.__new__(kind)
        for name, value in zip(names, unflatten(values[position : position + count], inner), strict=True):
            object.__setattr__(made, name, value)
        flat.append(made)
        position += count
    return pytree.tree_unflatten(flat, structure.tree)


def _attributes(value: Any) -> dict[str, Any]:
    """What an object holds, if a new one can be made of it."""
    if isinstance(value, _WITHOUT) or type(value).__new__ is not object.__new__:
        return {}
    slots = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})


def _has_tensors(held: dict[str, Any], depth: int, seen: set[int]) -> bool:
    for one in pytree.tree_leaves(list(held.values())):
        if isinstance(one, Tensor):
            return True
        if depth < _DEEPEST and id(one) not in seen:
            seen.add(id(one))
            if _has_tensors(_attributes(one), depth + 1, seen):
                return True
    return False


def _is_data(held: dict[str, Any], depth: int, seen: set[int]) -> bool:
    """Whether there is nothing but data in it: a counter or an empty cache, which a module may come to fill."""
    for one in pytree.tree_leaves(list(held.values())):
        if isinstance(one, _DATA):
            continue
        inner = _attributes(one) if depth < _DEEPEST and id(one) not in seen else {}
        seen.add(id(one))
        if not inner or not _is_data(inner, depth + 1, seen):
            return False
    return True
