"""The state of the random generators: noted before a segment, put back while it is repeated."""

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

Devices = torch.device | tuple[torch.device, ...]


class State(NamedTuple):
    """Where torch's generators were: the host's, and those of devices."""

    host: Tensor
    on_devices: tuple[tuple[torch.device, Tensor], ...]

    def is_same(self, other: "State") -> bool:
        """Whether nothing was drawn between them."""
        return self._words() == other._words()

    def _words(self) -> list[bytes]:
        """Read without a word to those who listen to torch's operations."""
        with torch._C._DisableTorchDispatch():
            return [one.numpy().tobytes() for one in (self.host, *(state for _, state in self.on_devices))]


def devices_of(tensors: Iterable[Tensor]) -> tuple[torch.device, ...]:
    """The devices on which parameters and buffers lie, accelerators first; the host, if there are none."""
    found = dict.fromkeys(tensor.device for tensor in tensors)
    found = {device: None for device in found if device.type != "meta"} or {torch.device("cpu"): None}
    return tuple(sorted(found, key=lambda device: device.type == "cpu"))


def state(devices: Devices) -> State:
    """torch's generators that a segment on these devices may use: the host's and the devices'. Nobody waits."""
    cuda = [device for device in _several(devices) if device.type == "cuda"]
    return State(torch.get_rng_state(), tuple((device, torch.cuda.get_rng_state(device)) for device in cuda))


def restore(states: State, devices: Devices) -> None:
    """Put the generators of these devices back."""
    torch.set_rng_state(states.host)
    wanted = _several(devices)
    for device, noted in states.on_devices:
        if device in wanted:
            torch.cuda.set_rng_state(noted, device)


@contextmanager
def replaying(states: State, devices: Devices) -> Iterator[None]:
    """Inside, the same random numbers are drawn again; afterwards the generators go on as if nothing had been drawn."""
    present = state(devices)
    restore(states, devices)
    try:
        yield
    finally:
        restore(present, devices)


def _several(devices: Devices) -> tuple[torch.device, ...]:
    return (devices,) if isinstance(devices, torch.device) else devices


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
