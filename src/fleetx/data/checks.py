"""What loaders and makers refuse about numbers and files: rule, value, remedy."""

import operator
import stat
from pathlib import Path
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


def require_plain_file(path: Path) -> None:
    """Raise for a pipe, which would block, and a device, which may never end; also behind a link."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} must be a plain file, and is a folder, a pipe or a device: give a file")
