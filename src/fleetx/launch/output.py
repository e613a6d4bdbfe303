"""What a worker prints when it cannot be written, because a disk is full say: it is lost, and training goes on."""

import contextlib
import io
import os
import sys
from functools import partial
from pathlib import Path

from fleetx.standard_streams import LossyFile, rewrapped

# Where a worker notes why its log cannot be written. The launcher looks there, and says so.
TROUBLE = "FLEETX_LOG_TROUBLE"


def forgive_lost_output() -> None:
    """From here on `print` and tracebacks do not fail because the log or the console cannot be written."""
    trouble = os.environ.pop(TROUBLE, None)  # unset where a worker prints on the console: the launcher notices itself
    note = None if trouble is None else partial(note_trouble, Path(trouble))
    for name in ("stdout", "stderr"):
        before = getattr(sys, name)
        if isinstance(before, io.TextIOWrapper):
            setattr(sys, name, rewrapped(before, LossyFile(before.fileno(), note)))


def note_trouble(path: Path, error: OSError) -> None:
    """Once: the file that is there says that the launcher knows, or soon will."""
    with contextlib.suppress(OSError), path.open("x", encoding="utf-8") as file:
        file.write(os.strerror(error.errno or 0))
