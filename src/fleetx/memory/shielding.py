"""Functions into which torch's compiler does not look."""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch


def shielded(function: Callable[..., Any], is_compiled: bool) -> Callable[..., Any]:
    """The function; if compiled code comes to call it, one into which the compiler does not look.

    Only then: to go through the compiler's door costs time at each call.
    """
    return torch.compiler.disable(function) if is_compiled else function


def shielded_from_tracing(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function; compiled autograd, which traces a backward and calls it there, does not look into it.

    Elsewhere it is called at no cost. Importing the compiler takes seconds: what did not, traces nothing.
    """
    if "torch._dynamo" not in sys.modules:
        return function
    disabled = _disabled(function)

    def call(value: Any) -> Any:
        return disabled(value) if torch.compiler.is_dynamo_compiling() else function(value)

    return call


_disabled = cache(torch.compiler.disable)
