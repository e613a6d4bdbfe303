"""The state of the random generators: noted before a segment, put back while it is repeated."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

State = tuple[Tensor, Tensor | None]


def state(device: torch.device) -> State:
    """torch's generators that a segment on this device may use: the host's and the device's. Nobody waits."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_device


def restore(states: State, device: torch.device) -> None:
    """Put the generators back."""
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)


@contextmanager
def replaying(states: State, device: torch.device) -> Iterator[None]:
    """Inside, the same random numbers are drawn again; afterwards the generators go on as if nothing had been drawn."""
    present = state(device)
    restore(states, device)
    try:
        yield
    finally:
        restore(present, device)


def python_state() -> tuple[Any, Any]:
    """Python's own generator, and numpy's if it is in use."""
    numpy = sys.modules.get("numpy")
    drawn = None if numpy is None else numpy.random.get_state()
    return random.getstate(), drawn and (drawn[0], drawn[1].tobytes(), *drawn[2:])


def restore_python(states: tuple[Any, Any]) -> None:
    """Put them back."""
    random.setstate(states[0])
    if states[1] is not None:
        numpy = sys.modules["numpy"]
        kind, words, *rest = states[1]
        numpy.random.set_state((kind, numpy.frombuffer(words, dtype=numpy.uint32), *rest))
