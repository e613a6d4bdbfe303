"""Moves tensors to the host and back beside the computation.

To the host as soon as they are made, on a stream of its own; back on another one, ahead of their use. When they must
have left and when they are asked for is counted in segments, over all forwards, so that every step takes the same
memory. Whatever order the backward takes, each tensor is found by its own handle. On a machine without a GPU the same
code copies at once, so that tests see its logic.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fleetx.memory.arena import Block, HostArena

SMALLEST = 2**20
"""Smaller tensors stay: their copies would cost more than the memory they free."""


class View(NamedTuple):
    """A tensor whose memory is parked: what it looked like."""

    parked: "Parked"
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def fetch(self) -> Tensor:
        """The tensor, on its device again."""
        storage = self.parked.owner.fetch(self.parked)
        empty = torch.empty(0, dtype=self.dtype, device=self.parked.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class Trip(NamedTuple):
    """When a tensor leaves and returns, in numbers of segments."""

    segment: int  # whose backward needs it
    due: int  # at whose end it must have left
    asked_for: int  # at whose backward it is asked for


@dataclass(eq=False)
class Parked:
    """One storage on the host: all tensors that share it share its copy."""

    owner: "Offloader"
    trip: "Trip"
    block: Block
    device: torch.device
    nbytes: int
    source: Tensor | None  # until the copy has been made
    version: int
    copied: Any = None  # event
    back: Tensor | None = None  # the memory on the device again
    arrived: Any = None  # event
    views: int = 0
    fetched: int = 0

    def __del__(self) -> None:
        self.owner.forget(self)


@dataclass
class Traffic:
    """What offload did so far."""

    to_host: int = 0
    to_device: int = 0
    tensors: int = 0
    waits: list[tuple[Any, Any]] = field(default_factory=list)

    def exposed_ms(self) -> float:
        """How long the computation waited for copies; waits for the device."""
        done = [(begin, end) for begin, end in self.waits if begin is not None]
        if done:
            done[-1][1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end in done)


class Offloader:
    """The copies of one model's activations."""

    def __init__(self, device: torch.device, *, limit: int | None = None) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.arena = HostArena(pin=self.on_gpu, limit=limit)
        self.traffic = Traffic()
        self.out_stream: Any = torch.cuda.Stream(device) if self.on_gpu else None
        self.in_stream: Any = torch.cuda.Stream(device) if self.on_gpu else None
        self._leaving: weakref.WeakSet[Parked] = weakref.WeakSet()  # what nobody asks for any more is forgotten
        self._by_storage: dict[int, weakref.ref[Parked]] = {}
        self._segments: dict[int, list[weakref.ref[Parked]]] = {}
        self._reached = -1  # the segment to which the backward came last

    def park(self, tensor: Tensor, trip: Trip, *, at_once: bool = False) -> View:
        """Send the tensor's memory to the host. `at_once` holds the computation until it has left."""
        storage = tensor.untyped_storage()
        parked = self._known(storage.data_ptr(), tensor._version)
        if parked is None:
            parked = self._send(tensor, storage, trip)
        parked.views += 1
        if at_once:
            self._let_go(parked)
        return View(parked, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def release_due(self, segment: int) -> None:
        """A segment ends: free the device memory of what had to leave by now; if a copy is late the computation waits.

        By number and not by what has arrived, so that the memory of every step is the same.
        """
        for parked in list(self._leaving):
            if parked.trip.due <= segment:
                self._let_go(parked)

    def finish(self, pointer: int) -> None:
        """The memory that begins here will be written to: its copy comes before that."""
        reference = self._by_storage.get(pointer)
        parked = None if reference is None else reference()
        if parked is not None:
            self._let_go(parked)

    def fetch(self, parked: Parked) -> torch.UntypedStorage:
        """The memory on the device again."""
        if parked.source is not None:  # it has not left yet
            return _unwritten(parked).untyped_storage()
        if parked.back is None:
            self._bring(parked)
        assert parked.back is not None
        if parked.arrived is not None:
            self._wait(parked.arrived)
            parked.arrived = None
        storage = parked.back.untyped_storage()
        parked.fetched += 1
        if parked.fetched >= parked.views:  # whoever asked has it now
            parked.back, parked.fetched = None, 0
        return storage

    def prefetch(self, segment: int) -> None:
        """The backward comes to this segment: ask for what it and the next ones need, in this order."""
        if segment == self._reached:
            return
        self._reached = segment
        for number in sorted((n for n in list(self._segments) if n <= segment), reverse=True):
            for reference in list(self._segments.get(number, ())):  # it gets shorter as tensors are forgotten
                parked = reference()
                is_away = parked is not None and parked.back is None and parked.source is None
                if parked is not None and is_away and parked.trip.asked_for >= segment:
                    self._bring(parked)

    def forget(self, parked: Parked) -> None:
        """A tensor that nobody can ask for any more."""
        if parked.arrived is not None:  # asked for and never used: its memory is the next tensor's after the copy
            torch.cuda.current_stream(self.device).wait_event(parked.arrived)
        # To the host it may still be under way: whoever has the block next writes to it later on the same stream.
        self.arena.give_back(parked.block)
        others = self._segments.get(parked.trip.segment, [])
        others[:] = [reference for reference in others if reference() is not None and reference() is not parked]
        if not others:
            self._segments.pop(parked.trip.segment, None)

    def _known(self, pointer: int, version: int) -> Parked | None:
        reference = self._by_storage.get(pointer)
        parked = None if reference is None else reference()
        if parked is None or parked.source is None or parked.version != version:
            return None
        return parked

    def _send(self, tensor: Tensor, storage: torch.UntypedStorage, trip: Trip) -> Parked:
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        block = self.arena.take(storage.nbytes())
        parked = Parked(self, trip, block, tensor.device, storage.nbytes(), tensor.detach(), tensor._version)
        target = block.memory[: storage.nbytes()]
        if self.on_gpu:
            self.out_stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.out_stream):
                target.copy_(source, non_blocking=True)
                parked.copied = self.out_stream.record_event()
        else:
            target.copy_(source)
        self.traffic.to_host += parked.nbytes
        self.traffic.tensors += 1
        self._leaving.add(parked)
        self._by_storage[storage.data_ptr()] = weakref.ref(parked)
        self._segments.setdefault(trip.segment, []).append(weakref.ref(parked))
        return parked

    def _let_go(self, parked: Parked) -> None:
        """Drop the device memory, once the copy has been made as far as the computation is concerned."""
        if parked.source is None:
            return
        if parked.copied is not None:
            self._wait(parked.copied)
        self._by_storage.pop(_unwritten(parked).untyped_storage().data_ptr(), None)
        parked.source = None
        parked.copied = None
        self._leaving.discard(parked)

    def _bring(self, parked: Parked) -> None:
        back = torch.empty(parked.nbytes, dtype=torch.uint8, device=parked.device)
        source = parked.block.memory[: parked.nbytes]
        if self.on_gpu:
            # The memory may have been another tensor's, which the computation still uses.
            self.in_stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.in_stream):
                back.copy_(source, non_blocking=True)
                parked.arrived = self.in_stream.record_event()
        else:
            back.copy_(source)
        parked.back = back
        self.traffic.to_device += parked.nbytes

    def _wait(self, event: Any) -> None:
        stream = torch.cuda.current_stream(self.device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        stream.wait_event(event)
        end.record(stream)
        del self.traffic.waits[:-4096]
        self.traffic.waits.append((begin, end))


def _unwritten(parked: Parked) -> Tensor:
    """What is on its way to the host, if it is still what it was."""
    source = parked.source
    assert source is not None
    if source._version != parked.version:
        raise RuntimeError(
            "a tensor was written in place while its copy was on the way to the host, so the copy may be wrong. "
            "Such writes are found in the first forward; this one came later. Leave this segment on the device."
        )
    return source


def is_worth_moving(tensor: Tensor) -> bool:
    """Whether parking frees memory worth the trouble; a view of something far larger would take all of it along."""
    if tensor.layout is not torch.strided:
        return False
    size = tensor.numel() * tensor.element_size()
    return size >= SMALLEST and tensor.untyped_storage().nbytes() <= 4 * size
