"""Cuts a batch into micro-batches: any nested tuple, list, dict or dataclass of tensors."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

Batch = Any
_PLAIN = (bool, int, float, str, type(None))


def batch_size(batch: Batch) -> int:
    """The common first dimension of all tensors in `batch`."""
    sizes = {path: leaf.shape[0] for path, leaf in _leaves(batch, "batch") if _is_sliced(leaf)}
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


def split(batch: Batch, parts: int) -> list[Batch]:
    """Cut `batch` into `parts` views whose sizes differ by at most one; fewer when it has fewer samples.

    Numbers, None and tensors without dimensions go whole into each part. What a dataclass derives from its fields in
    `__post_init__`, a count say, is derived anew for each part.
    """
    size = batch_size(batch)
    parts = min(parts, size)
    if parts == 1:
        return [batch]
    base, longer = divmod(size, parts)
    pieces, start = [], 0
    for part in range(parts):
        length = base + (part < longer)
        pieces.append(_map(batch, _narrowing(start, length, size), is_part=True))
        start += length
    return pieces


def map_tensors(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    """The same structure with `function` applied to each tensor."""
    return _map(batch, function, is_part=False)


def _map(batch: Batch, function: Callable[[Tensor], Tensor], *, is_part: bool) -> Batch:
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        mapped = {key: _map(value, function, is_part=is_part) for key, value in batch.items()}
        return mapped if type(batch) is dict else _filled(batch, mapped)
    if _is_dataclass(batch):
        clone = copy.copy(batch)  # not made anew: it may have been changed since it was made
        for name, value in _held(batch).items():
            object.__setattr__(clone, name, _map(value, function, is_part=is_part))
        if is_part and hasattr(batch, "__post_init__"):
            _derive_anew(clone, batch)
        return clone
    if isinstance(batch, tuple | list):
        items = [_map(item, function, is_part=is_part) for item in batch]
        # A named tuple takes its fields one by one.
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch


def _is_dataclass(batch: Batch) -> bool:
    return dataclasses.is_dataclass(batch) and not isinstance(batch, type)


def _derive_anew(part: Any, whole: Any) -> None:
    """What a dataclass makes of its fields itself is made of the part's; but not what somebody has set since."""
    try:
        made, expected = dataclasses.replace(part), dataclasses.replace(whole)
    except ValueError:  # it takes more than its fields to make one
        return
    given = {name for name, _ in _given(whole)}
    for name, value in _held(made).items():
        is_derived = name not in given and type(value) in _PLAIN and _held(expected).get(name) == _held(whole).get(name)
        if is_derived:
            object.__setattr__(part, name, value)


def _filled(original: Mapping, values: dict[str, Any]) -> Any:
    """A dict of a class of its own (model libraries have many) keeps its class; other mappings become dicts."""
    if not isinstance(original, dict):
        return values
    clone = copy.copy(original)
    for key, value in values.items():
        clone[key] = value
    return clone


def _given(batch: Any) -> list[tuple[str, Any]]:
    """The fields of a dataclass that it is made of."""
    return [(f.name, getattr(batch, f.name)) for f in dataclasses.fields(batch) if f.init and hasattr(batch, f.name)]


def _held(batch: Any) -> dict[str, Any]:
    """All that a dataclass holds: its fields, and what else was set."""
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if hasattr(batch, f.name)}
    return fields | getattr(batch, "__dict__", {})


def _narrowing(start: int, length: int, size: int) -> Callable[[Tensor], Tensor]:
    return lambda leaf: leaf.narrow(0, start, length) if _is_sliced(leaf) and len(leaf) == size else leaf


def _is_sliced(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _leaves(batch: Batch, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _leaves(value, f"{path}[{key!r}]")
    elif isinstance(batch, tuple | list):
        for index, value in enumerate(batch):
            yield from _leaves(value, f"{path}[{index}]")
    elif _is_dataclass(batch):
        for name, value in _given(batch):
            yield from _leaves(value, f"{path}.{name}")
    elif batch is None or isinstance(batch, Tensor | bool | int | float):
        yield path, batch
    else:
        raise TypeError(
            f"{path} is a {type(batch).__name__}, which cannot be cut into micro-batches: a batch holds tensors, "
            "numbers and None in tuples, lists, dicts and dataclasses. Convert arrays with torch.as_tensor."
        )
