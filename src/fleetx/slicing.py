"""Cuts a batch into micro-batches: any nested tuple, list, dict or dataclass of tensors."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Batch = Any


def batch_size(batch: Batch) -> int:
    """The common first dimension of all tensors in `batch`."""
    sizes = _sizes(batch)
    if not sizes:
        raise ValueError("a batch needs at least one tensor with a first dimension to cut along; this one has none.")
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{path}: {size}" for path, size in sizes.items())
        raise ValueError(
            f"all tensors of a batch must share their first dimension, but they have {listed}. "
            "Pass what does not belong to single samples outside the batch, or as a number."
        )
    (size,) = set(sizes.values())
    if size == 0:
        raise ValueError("the batch is empty (first dimension 0). Leave it out, on all workers alike.")
    return size


def is_empty(batch: Batch) -> bool:
    """Whether it has the form of a batch, and no samples."""
    return set(_sizes(batch).values()) == {0}


def split(batch: Batch, parts: int) -> list[Batch]:
    """Cut `batch` into `parts` views whose sizes differ by at most one; fewer when it has fewer samples.

    Numbers, None and tensors without dimensions go whole into each part.
    """
    size = batch_size(batch)
    parts = min(parts, size)
    if parts == 1:
        return [batch]
    _require_nothing_derived(batch, size, "batch")
    _require_no_rows_of_numbers(batch, size, "batch")
    _require(batch, _has_rows, "cannot be cut into micro-batches")
    base, longer = divmod(size, parts)
    pieces, start = [], 0
    for part in range(parts):
        length = base + (part < longer)
        pieces.append(map_tensors(batch, _narrowing(start, length)))
        start += length
    return pieces


def require_dense(batch: Batch, what: str) -> None:
    """Refuse sparse, nested and similar tensors, of which `what` is said."""
    _require(batch, lambda leaf: leaf.layout is torch.strided and not leaf.is_nested, what)


def _require(batch: Batch, accepts: Callable[[Tensor], bool], what: str) -> None:
    for path, leaf in _leaves(batch, "batch"):
        if isinstance(leaf, Tensor) and not accepts(leaf):
            kind, dense = str(leaf.layout), "to_dense()"
            if leaf.is_nested:
                kind, dense = "nested", "to_padded_tensor(), and lengths"
            raise TypeError(
                f"{path} is a {kind} tensor, which {what}: give a dense one ({dense}), and convert it in the model or "
                "in compute."
            )


def _has_rows(leaf: Tensor) -> bool:
    """Whether samples can be taken out of it."""
    return leaf.layout in (torch.strided, torch.sparse_coo) and not leaf.is_nested


def map_tensors(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    """The same structure with `function` applied to each tensor."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        mapped = {key: map_tensors(value, function) for key, value in batch.items()}
        return mapped if type(batch) is dict else _filled(batch, mapped, function)
    if _is_dataclass(batch):
        clone = copy.copy(batch)  # not made anew: it may have been changed since, or change what it is given
        for name, value in (_given(batch) | _derived(batch)).items():
            object.__setattr__(clone, name, map_tensors(value, function))
        return clone
    if isinstance(batch, tuple | list):
        items = [map_tensors(item, function) for item in batch]
        if type(batch) is list:
            return items
        return _with_attributes(_refilled(batch, items), batch, {}, function)
    return batch


def _is_dataclass(batch: Batch) -> bool:
    return dataclasses.is_dataclass(batch) and not isinstance(batch, type)


def _given(batch: Any) -> dict[str, Any]:
    """The fields of a dataclass that it is made of."""
    return {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.init and hasattr(batch, f.name)}


def _attributes(batch: Any) -> dict[str, Any]:
    """What an object of a class of its own holds beside its items; what it holds as items too is left to these."""
    own = getattr(batch, "__dict__", {})
    items = batch if isinstance(batch, Mapping) else {}
    return {name: value for name, value in own.items() if items.get(name, own) is not value}


def _derived(batch: Any) -> dict[str, Any]:
    """What else a dataclass holds: fields that it makes itself, and other attributes."""
    own = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if hasattr(batch, f.name)}
    given = _given(batch)
    return {name: value for name, value in (own | getattr(batch, "__dict__", {})).items() if name not in given}


def _require_nothing_derived(batch: Batch, size: int, path: str) -> None:
    """What a class makes of a whole batch is not what it would make of a part: a count, a sum.

    To make the parts anew would not do either: it may change what it is given, and would do so twice. Tensors with a
    row for each sample are cut, whoever made them.
    """
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            _require_nothing_derived(value, size, f"{path}[{key!r}]")
    elif isinstance(batch, tuple | list):
        for index, value in enumerate(batch):
            _require_nothing_derived(value, size, f"{path}[{index}]")
    if isinstance(batch, dict | tuple | list):  # other mappings become dicts
        for name, value in _attributes(batch).items():
            if _is_of_all(value, size):
                raise TypeError(
                    f"{path}.{name} is an attribute of a {type(batch).__name__} and may say something of the whole "
                    "batch, and its parts need others: make it a property, or an item."
                )
    elif _is_dataclass(batch):
        for name, value in _given(batch).items():
            _require_nothing_derived(value, size, f"{path}.{name}")
        for name, value in _derived(batch).items() if hasattr(batch, "__post_init__") else ():
            if _is_of_all(value, size):
                raise TypeError(
                    f"{path}.{name} is made by {type(batch).__name__} itself, of the whole batch, and its parts need "
                    "others: make it a property, or a field that is given."
                )


def _require_no_rows_of_numbers(batch: Batch, size: int, path: str) -> None:
    """A list with as many numbers as there are samples is one for each sample, and would go whole into each part."""
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            _require_no_rows_of_numbers(value, size, f"{path}[{key!r}]")
    elif _is_dataclass(batch):
        for name, value in _given(batch).items():
            _require_no_rows_of_numbers(value, size, f"{path}.{name}")
    elif isinstance(batch, tuple | list):
        leaves = [leaf for _, leaf in _leaves(batch, path)]
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            rows = len(batch) == size > 1 and not hasattr(batch, "_fields")
            if rows and any(leaf is not None for leaf in leaves):
                raise TypeError(
                    f"{path} is a {type(batch).__name__} of {size} entries without tensors, as many as there are "
                    "samples, and would go whole into each micro-batch: give a tensor, which is cut. What belongs to "
                    "no sample goes outside of the batch."
                )
            return
        for index, value in enumerate(batch):
            _require_no_rows_of_numbers(value, size, f"{path}[{index}]")


def _is_of_all(value: Any, size: int) -> bool:
    """Whether it may say something of a batch as a whole."""
    if isinstance(value, Tensor):
        return value.dim() == 0 or len(value) != size
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


def _filled(original: Mapping, values: dict[str, Any], function: Callable[[Tensor], Tensor]) -> Any:
    """A dict of a class of its own (model libraries have many) keeps its class; other mappings become dicts."""
    if not isinstance(original, dict):
        return values
    clone = copy.copy(original)
    for key, value in values.items():
        clone[key] = value
    return _with_attributes(clone, original, values, function)


def _refilled(original: Any, items: list[Any]) -> Any:
    """A tuple or list of a class of its own with other items; to make a list anew may change what it is given."""
    if isinstance(original, list):
        clone = copy.copy(original)
        list.__setitem__(clone, slice(None), items)
        return clone
    # A named tuple takes its fields one by one.
    return type(original)(*items) if hasattr(original, "_fields") else type(original)(items)


def _with_attributes(clone: Any, original: Any, values: dict[str, Any], function: Callable[[Tensor], Tensor]) -> Any:
    """The clone, whose attributes are mapped like its items; what is an item too stays the same object."""
    own = getattr(clone, "__dict__", {})
    for name, value in getattr(original, "__dict__", {}).items():
        mirrored = isinstance(original, Mapping) and original.get(name, own) is value
        own[name] = values[name] if mirrored else map_tensors(value, function)
    return clone


def _narrowing(start: int, length: int) -> Callable[[Tensor], Tensor]:
    def narrowed(leaf: Tensor) -> Tensor:
        if not _is_sliced(leaf):
            return leaf
        # Sparse tensors have no views.
        return leaf.narrow_copy(0, start, length) if leaf.is_sparse else leaf.narrow(0, start, length)

    return narrowed


def _is_sliced(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _sizes(batch: Batch) -> dict[str, int]:
    _require(batch, lambda leaf: str(leaf.layout) != "torch._mkldnn", "cannot be copied to a device")
    return {path: leaf.size(0) for path, leaf in _leaves(batch, "batch") if _is_sliced(leaf)}


def _leaves(batch: Batch, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(batch, PackedSequence):
        raise TypeError(
            f"{path} is a PackedSequence, which lies in memory by time and not by sample, and cannot be cut into "
            "micro-batches: give padded sequences and their lengths, and pack them in the model or in compute."
        )
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _leaves(value, f"{path}[{key!r}]")
    elif isinstance(batch, tuple | list):
        for index, value in enumerate(batch):
            yield from _leaves(value, f"{path}[{index}]")
    elif _is_dataclass(batch):
        for name, value in _given(batch).items():
            yield from _leaves(value, f"{path}.{name}")
    elif batch is None or isinstance(batch, Tensor | bool | int | float):
        yield path, batch
    else:
        raise TypeError(
            f"{path} is a {type(batch).__name__}, which cannot be cut into micro-batches: a batch holds tensors, "
            "numbers and None in tuples, lists, dicts and dataclasses. Convert arrays with torch.as_tensor."
        )
