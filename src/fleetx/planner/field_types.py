"""Checks of values that were read from a file against the types of the class that they became."""

import math
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fleetx.notices import shown

_INT_LIMIT = 2**63


def require_types(made: Any) -> None:
    """Raise if a field of a dataclass or named tuple holds what its annotation does not allow."""
    _require_fields(made, "")


def _require_fields(made: Any, path: str) -> None:
    for name, hint in get_type_hints(type(made)).items():
        _require(getattr(made, name), hint, f"{path}{name}")


def _require(value: Any, hint: Any, path: str) -> None:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is tuple and isinstance(value, tuple):  # tuple[X, ...], which is the only kind here
        for index, item in enumerate(value):
            _require(item, inner[0], f"{path}[{index}]")
    elif origin is Mapping and isinstance(value, Mapping):
        for key, item in value.items():
            _require(item, inner[1], f"{path}[{key!r}]")
    elif origin in (Union, UnionType):
        options = [option for option in inner if option is not type(None)]
        if value is not None or len(options) == len(inner):
            _require(value, options[0], path)
    elif isinstance(hint, type) and hasattr(hint, "_fields") and isinstance(value, hint):
        _require_fields(value, f"{path}.")
    elif not _fits(value, hint):
        raise ValueError(f"{path} must be {_in_words(hint)}, got {shown(value)}")


def _fits(value: Any, hint: Any) -> bool:
    if hint is float:
        return (type(value) is float and math.isfinite(value)) or _fits(value, int)
    if hint is int:
        return type(value) is int and abs(value) < _INT_LIMIT
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    return type(value) is hint


def _in_words(hint: Any) -> str:
    words = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}
    return words.get(hint) or f"{getattr(hint, '__name__', hint)}"
