"""Hooks into which torch's compiler does not look."""

import sys
from collections.abc import Callable
from typing import Any

import torch


def shielded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, into which the compiler does not look when somebody's compiled code comes to call it."""
    return torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function
