"""Compilations that share nothing with others of the same function."""

import inspect
import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from fleetx.compiler_paths import check_compiler_paths

_numbers = itertools.count()


def compiled_apart(function: Callable[..., Any], mode: str | None = None) -> Callable[..., Any]:
    """The function compiled by itself: torch keeps compilations by code object, and stops after the eighth of one."""

    check_compiler_paths()

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    # A number in the name too: torch remembers by file, line and name which sizes have varied.
    code = call.__code__.replace(co_name=f"call_{next(_numbers)}")
    apart = FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
    options: dict[str, Any] = {"mode": mode}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        # torch 2.13 can also keep what is compiled separately behind a graph break apart.
        options["isolate_recompiles"] = True
    return torch.compile(apart, **options)
