"""What loaders and makers refuse about numbers, by type: rule, value, remedy."""

import operator
from typing import Any

from fleetx.notices import shown


def whole_number(name: str, value: Any, remedy: str) -> int:
    """The value as an int, whichever kind of integer it is; anything else is refused."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} must be a whole number, got {shown(value)} ({type(value).__name__}): {remedy}.")
