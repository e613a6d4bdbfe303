"""Hooks into which torch's compiler does not look."""

from collections.abc import Callable
from typing import Any

import torch


def shielded(function: Callable[..., Any], is_compiled: bool) -> Callable[..., Any]:
    """The function; if compiled code comes to call it, one into which the compiler does not look.

    Only then: to go through the compiler's door costs time at each call.
    """
    return torch.compiler.disable(function) if is_compiled else function
