"""Moves tensors to the host and back beside the computation.

To the host as soon as they are made, on a stream of its own; back on another one, ahead of their use. When they must
have left and when they are asked for is counted in segments, over all forwards, so that every step takes the same
memory. Whatever order the backward takes, each tensor is found by its own handle. On a machine without a GPU the same
code copies at once, so that tests see its logic.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fleetx.memory.arena import Block, HostArena

SMALLEST = 2**20
"""Smaller tensors stay: their copies would cost more than the memory they free."""
MOST_WAITS = 4096


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
    storage: StorageWeakRef  # of the source, which others may use for longer
    stream: Any = None  # on which its memory on the device is used
    copied: Any = None  # event
    is_spoiled: bool = False  # written to before the copy had been made
    back: Tensor | None = None  # the memory on the device again
    arrived: Any = None  # event
    awaited: set[int] = field(default_factory=set)  # streams that know of its arrival
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
    _waited_ms: float = 0.0
    _waits: list[tuple[Any, Any]] = field(default_factory=list)  # events before and after, that may lie in the future

    def note_wait(self, begin: Any, end: Any) -> None:
        """The computation waits between these events."""
        self._waits.append((begin, end))
        if len(self._waits) > MOST_WAITS and self._waits[MOST_WAITS // 2][1].query():
            self._count(MOST_WAITS // 2)

    def exposed_ms(self) -> float:
        """How long the computation waited for copies; waits for the device."""
        if self._waits:
            self._waits[-1][1].synchronize()
        self._count(len(self._waits))
        return self._waited_ms

    def _count(self, number: int) -> None:
        self._waited_ms += sum(begin.elapsed_time(end) for begin, end in self._waits[:number])
        del self._waits[:number]


class Offloader:
    """The copies of one model's activations."""

    def __init__(self, device: torch.device, *, limit: int | None = None, arena: HostArena | None = None) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.arena = arena or HostArena(pin_for=device if self.on_gpu else None, limit=limit)
        self.traffic = Traffic()
        self.out_stream: Any = torch.cuda.Stream(device) if self.on_gpu else None
        self.in_stream: Any = torch.cuda.Stream(device) if self.on_gpu else None
        self._leaving: weakref.WeakSet[Parked] = weakref.WeakSet()  # what nobody asks for any more is forgotten
        self._by_storage: dict[int, weakref.ref[Parked]] = {}
        self._segments: dict[int, list[weakref.ref[Parked]]] = {}
        self._reached = -1  # the segment to which the backward came last
        self._lead = 0  # how many segments ahead something is asked for, at most

    def park(self, tensor: Tensor, trip: Trip, *, at_once: bool = False) -> View:
        """Send the tensor's memory to the host. `at_once` holds the computation until it has left."""
        storage = tensor.untyped_storage()
        self._lead = max(self._lead, trip.asked_for - trip.segment)
        parked = self._known(storage, tensor._version)
        if parked is None:
            parked = self._send(tensor, storage, trip)
        elif parked.trip.segment < trip.segment:  # the backward needs it earlier
            self._deregister(parked)
            parked.trip = trip._replace(due=parked.trip.due)
            self._segments.setdefault(trip.segment, []).append(weakref.ref(parked))
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
        if parked.is_spoiled or (parked.source is not None and _is_written(parked)):
            raise RuntimeError(
                "a tensor was written in place while its copy was on the way to the host, so the copy may be wrong. "
                "Such writes are found in the first forward; this one came later. Leave this segment on the device."
            )
        if parked.source is not None:  # it has not left yet
            storage = parked.source.untyped_storage()
        else:
            if parked.back is None:
                self._bring(parked)
            assert parked.back is not None
            self._await_arrival(parked)
            storage = parked.back.untyped_storage()
        parked.fetched += 1
        if parked.fetched >= parked.views:  # whoever asked has it now
            parked.back, parked.arrived, parked.fetched = None, None, 0
        return storage

    def prefetch(self, segment: int) -> None:
        """The backward comes to this segment: ask for what it and the next ones need, in this order."""
        if segment == self._reached:
            return
        self._reached = segment
        for number in self._near(segment):
            for reference in list(self._segments.get(number, ())):  # it gets shorter as tensors are forgotten
                parked = reference()
                is_away = parked is not None and parked.back is None and parked.source is None
                if parked is not None and is_away and parked.trip.asked_for >= segment:
                    try:
                        self._bring(parked)
                    except torch.OutOfMemoryError:
                        return  # nobody needs it yet; there may be room when somebody does

    def _near(self, segment: int) -> Iterable[int]:
        """This segment and those before it that may have to ask now, the next one first."""
        if self._lead < len(self._segments):  # not all of them, in each of them
            return range(segment, segment - self._lead - 1, -1)
        return sorted((number for number in list(self._segments) if number <= segment), reverse=True)

    def forget(self, parked: Parked) -> None:
        """A tensor that nobody can ask for any more: its memory is the next one's when no copy uses it any longer."""
        for event in (parked.copied, parked.arrived):
            if event is not None:
                parked.stream.wait_event(event)
        # The block on the host need not wait: whoever has it next writes to it later on the same stream.
        self.arena.give_back(parked.block)
        self._deregister(parked)

    def _deregister(self, parked: Parked) -> None:
        others = self._segments.get(parked.trip.segment, [])
        others[:] = [reference for reference in others if reference() is not None and reference() is not parked]
        if not others:
            self._segments.pop(parked.trip.segment, None)

    def _known(self, storage: torch.UntypedStorage, version: int) -> Parked | None:
        """What was parked of this very memory, if nobody wrote to it since."""
        reference = self._by_storage.get(storage.data_ptr())
        parked = None if reference is None else reference()
        if parked is None or parked.version != version or parked.is_spoiled:
            return None
        return parked if parked.storage == StorageWeakRef(storage) and not parked.storage.expired() else None

    def _send(self, tensor: Tensor, storage: torch.UntypedStorage, trip: Trip) -> Parked:
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        block = self.arena.take(storage.nbytes())
        parked = Parked(
            self,
            trip,
            block,
            tensor.device,
            storage.nbytes(),
            tensor.detach(),
            tensor._version,
            StorageWeakRef(storage),
        )
        target = block.memory[: storage.nbytes()]
        if self.on_gpu:
            parked.stream = torch.cuda.current_stream(self.device)
            self.out_stream.wait_stream(parked.stream)
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
        parked.is_spoiled = _is_written(parked)  # an error for whoever asks for it, if anybody does
        parked.source = None
        parked.copied = None
        self._leaving.discard(parked)

    def _bring(self, parked: Parked) -> None:
        back = torch.empty(parked.nbytes, dtype=torch.uint8, device=parked.device)
        source = parked.block.memory[: parked.nbytes]
        if self.on_gpu:
            parked.stream, parked.awaited = torch.cuda.current_stream(self.device), set()
            # The memory may have been another tensor's, which the computation still uses.
            self.in_stream.wait_stream(parked.stream)
            with torch.cuda.stream(self.in_stream):
                back.copy_(source, non_blocking=True)
                parked.arrived = self.in_stream.record_event()
        else:
            back.copy_(source)
        parked.back = back
        self.traffic.to_device += parked.nbytes

    def _await_arrival(self, parked: Parked) -> None:
        """Each stream that uses the memory waits for it, once."""
        if parked.arrived is not None:
            stream = torch.cuda.current_stream(self.device).cuda_stream
            if stream not in parked.awaited:
                self._wait(parked.arrived)
                parked.awaited.add(stream)

    def _wait(self, event: Any) -> None:
        stream = torch.cuda.current_stream(self.device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        stream.wait_event(event)
        end.record(stream)
        self.traffic.note_wait(begin, end)


def _is_written(parked: Parked) -> bool:
    """Whether somebody wrote to what is on its way to the host."""
    return parked.source is not None and parked.source._version != parked.version


def is_worth_moving(tensor: Tensor) -> bool:
    """Whether parking frees memory worth the trouble; a view of something far larger would take all of it along."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    size, held = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    return size >= SMALLEST and _reach(tensor) <= held <= 4 * size


def _reach(tensor: Tensor) -> int:
    """Bytes of its storage up to its last number: more than there are where others manage the memory, as FSDP does."""
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    last = int(tensor.storage_offset()) + sum((size - 1) * stride for size, stride in steps)
    return (last + 1) * tensor.element_size()
