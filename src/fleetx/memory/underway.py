"""Which forward is under way in this thread, and whether it still is: nobody tells of some that are left."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fleetx.memory.recording import drop_deaf

if TYPE_CHECKING:
    from fleetx.memory.running import Run

_active = threading.local()


def active_run() -> "Run | None":
    """The forward that is under way in this thread."""
    return getattr(_active, "run", None)


def set_active(run: "Run | None") -> None:
    """From now on it is this one."""
    _active.run = run


def end_stale() -> None:
    """End forwards of this thread that were left without a word."""
    drop_deaf()
    while (run := active_run()) is not None and run.is_stale():
        run.end(failed=True)
        drop_deaf()


@contextmanager
def no_run() -> Iterator[None]:
    """Inside, modules run as if they were not cut."""
    outer = active_run()
    set_active(None)
    try:
        yield
    finally:
        # Of a model within that has a plan of its own: it is not told if it is left because enough was computed.
        while (left := active_run()) is not None:
            left.end(failed=True)
        set_active(outer)


def calls_of(model: nn.Module) -> int:
    """How many calls of the model are under way in this thread, as far as Python's stack tells."""
    frame, calls = sys._getframe(), 0
    while frame is not None:
        calls += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is model
        frame = frame.f_back
    return calls


def hooks_on_saved() -> Any:
    """The innermost hooks on what autograd saves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
