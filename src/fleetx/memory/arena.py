"""Host memory for offloaded tensors: pinned once, used again in every step, little more than the largest step needed.

torch's own pinned allocator rounds sizes up to powers of two, and pinning takes its time. So slabs are made to measure,
registered once, and handed out in blocks.
"""

import contextlib
import mmap
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fleetx.notices import tell_once
from fleetx.units import format_bytes

ALIGNMENT = 512
SMALL_SLAB = 16 * 2**20  # which small tensors share
_LARGE = 2 * 2**20  # as large pages are: from here on a tensor has a slab to its measure
_WIPE_ON_FORK = 18 if sys.platform == "linux" else None  # Python has no name for it

_registered: list[tuple[Tensor, torch.device]] = []  # memory that nobody uses any more
_kept: list[Tensor] = []  # which CUDA would not let go of


@dataclass(eq=False)
class Block:
    """A part of a slab that is in use."""

    slab: "Slab"
    start: int
    size: int

    @property
    def memory(self) -> Tensor:
        """Its bytes."""
        return self.slab.memory[self.start : self.start + self.size]


@dataclass(eq=False)
class Slab:
    """One piece of host memory."""

    memory: Tensor
    free: list[tuple[int, int]] = field(default_factory=list)  # (start, size), sorted, never adjacent
    is_shared: bool = False  # by small tensors
    unpin: Callable[[], None] | None = None
    used_in: int = 0  # the last step
    is_listed: bool = False  # among those that are idle
    is_dropped: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it is in use."""
        return self.free == [(0, self.memory.numel())]

    def take(self, size: int) -> Block | None:
        """The tightest free place that is large enough."""
        fitting = [(length, start) for start, length in self.free if length >= size]
        if not fitting:
            return None
        length, start = min(fitting)
        self.free.remove((start, length))
        if length > size:
            self.free.append((start + size, length - size))
            self.free.sort()
        return Block(self, start, size)

    def give_back(self, block: Block) -> None:
        """Free a block; free neighbours become one."""
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self.free, (block.start, block.size)]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self.free = merged


class HostArena:
    """Blocks of host memory, at most `limit` bytes of it."""

    def __init__(self, *, pin_for: torch.device | None, limit: int | None = None) -> None:
        self.pin_for = pin_for
        self.limit = limit
        self.slabs: list[Slab] = []
        self._idle: dict[int, list[Slab]] = {}  # by size; some may be in use again
        self.most_in_use = 0
        self._in_use = 0
        self._step = 0  # a step begins where nothing is in use
        self._returned: deque[Block] = deque()
        self._lock = threading.Lock()

    @property
    def in_use(self) -> int:
        """Bytes of the blocks that are out."""
        with self._lock:
            self._take_back()
            return self._in_use

    @property
    def reserved(self) -> int:
        """Bytes that the arena holds, in use or not."""
        return sum(slab.memory.numel() for slab in self.slabs)

    def take(self, size: int) -> Block:
        """A block of `size` bytes."""
        size = -(-size // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._take_back()
            if self._in_use == 0:
                self._begin_step()
            block = self._place_for(size)
            block.slab.used_in = self._step
            self._in_use += size
            self.most_in_use = max(self.most_in_use, self._in_use)
        return block

    def _place_for(self, size: int) -> Block:
        """A block of the tightest slab that has room, so that large places stay for large tensors.

        Small tensors stay among themselves: in a slab that was made to measure one would drive out whom it is for.
        """
        waiting = self._idle.get(size, [])
        while waiting:  # mostly there is one to measure, of the last step
            slab = waiting.pop()
            slab.is_listed = False
            if slab.is_idle:
                return _taken(slab, size)
        alike = [slab for slab in self.slabs if slab.is_shared == _is_small(size)]
        block = _in_tightest(alike, size)
        if block is None and self.limit is not None and self.reserved + size > self.limit:
            block = _in_tightest(self.slabs, size)
        return block or _taken(self._grow(size), size)

    def give_back(self, block: Block) -> None:
        """Take a block back; the memory stays pinned for the next step."""
        # Later: a tensor may be forgotten at any moment, in the middle of `take` and in any thread.
        self._returned.append(block)

    def _take_back(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            slab = block.slab
            self._in_use -= block.size
            slab.give_back(block)
            if slab.is_idle and not (slab.is_listed or slab.is_dropped or slab.is_shared):
                slab.is_listed = True
                self._idle.setdefault(slab.memory.numel(), []).append(slab)

    def _begin_step(self) -> None:
        """The first forward moves more than the others, which know their last segment: give that memory back.

        Once only: batches may be larger again, and pinning takes its time.
        """
        self._step += 1
        if self._step == 3:
            self._drop([slab for slab in self.slabs if slab.used_in < 2])

    def _drop(self, slabs: list[Slab]) -> None:
        for slab in slabs:
            _unpin(slab)
            slab.is_dropped = True
        self.slabs = [slab for slab in self.slabs if not slab.is_dropped]
        self._idle = {
            size: kept for size, idle in self._idle.items() if (kept := [s for s in idle if not s.is_dropped])
        }

    def release(self) -> None:
        """Give all memory back to the system; blocks in use keep theirs alive."""
        self._drop(list(self.slabs))

    def _grow(self, size: int) -> Slab:
        # Tensors of another size came: what the old ones left behind would only add up. Not that of the other kind:
        # it may be wanted again in every step, as this one.
        self._drop([slab for slab in self.slabs if slab.is_idle and slab.is_shared == _is_small(size)])
        amount = SMALL_SLAB if _is_small(size) else size
        if self.limit is not None and self.reserved + amount > self.limit:
            self._drop([slab for slab in self.slabs if slab.is_idle])
            amount = max(size, min(amount, self.limit - self.reserved))
        self._require_room(amount)
        slab = Slab(_pages(amount), [(0, amount)], is_shared=_is_small(size))
        if self.pin_for is not None:
            _unregister_all()  # what could not be before
            slab.memory.zero_()  # on all cores: CUDA would ask for the pages one by one
            _register(slab.memory)
            # Also when nobody releases the arena: memory that is given back registered can never be registered again.
            slab.unpin = weakref.finalize(slab, _unregister, slab.memory, self.pin_for)
        self.slabs.append(slab)
        return slab

    def _require_room(self, amount: int) -> None:
        wanted = self.reserved + amount
        if self.limit is not None and wanted > self.limit:
            raise MemoryError(
                f"offload needs {format_bytes(wanted)} of host memory, and may use {format_bytes(self.limit)}. Raise "
                "host_memory, offload fewer segments, or lower the batch size."
            )
        available = _available()
        if available is not None and amount > available:
            raise MemoryError(
                f"offload needs {format_bytes(amount)} more of host memory, and {format_bytes(available)} are free. "
                "Offload fewer segments, or lower the batch size."
            )


def _is_small(size: int) -> bool:
    return size < _LARGE


def _in_tightest(slabs: list[Slab], size: int) -> Block | None:
    """A block of the smallest slab that has room."""
    for slab in sorted(slabs, key=lambda slab: slab.memory.numel()):
        block = slab.take(size)
        if block is not None:
            return block
    return None


def _taken(slab: Slab, size: int) -> Block:
    block = slab.take(size)
    assert block is not None
    return block


def _pages(amount: int) -> Tensor:
    """Memory on pages of its own: CUDA registers pages, and refuses one that another slab has a part of.

    Large pages where the system has them, since each page is pinned by itself. Processes that are forked find zeros
    there: what they shared with this one the system might move when it is written to.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return torch.frombuffer(mmap.mmap(-1, amount), dtype=torch.uint8)
    pages = mmap.mmap(-1, amount, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (getattr(mmap, "MADV_HUGEPAGE", None), _WIPE_ON_FORK):
        if advice is not None:
            with contextlib.suppress(OSError, ValueError):  # a system that was built without
                pages.madvise(advice)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _cudart() -> Any:
    return torch.cuda.cudart()


def _register(memory: Tensor) -> None:
    failure = _cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(failure) != 0:
        _cudart().cudaGetLastError()  # else the next kernel would be blamed
        raise MemoryError(
            f"the system would not pin {format_bytes(memory.numel())} of host memory (CUDA error {int(failure)}): "
            "lower host_memory, or raise the limit on locked memory (ulimit -l)."
        )


def _unpin(slab: Slab) -> None:
    if slab.unpin is not None:
        slab.unpin()


def _unregister(memory: Tensor, device: torch.device) -> None:
    """Before the memory is given back: pages that come to lie where others are still registered cannot be copied to."""
    _registered.append((memory, device))
    _unregister_all()


def _unregister_all() -> None:
    """All that nobody uses any more; later, if that cannot be done now.

    The garbage collector may ask for this at any moment; while a CUDA graph is captured nobody may wait for the device.
    """
    if torch.cuda.is_current_stream_capturing():
        return
    while _registered:
        memory, device = _registered.pop()
        try:
            torch.cuda.synchronize(device)  # a copy may still be under way
        except RuntimeError:  # somebody else captures a graph
            _registered.append((memory, device))
            return
        if int(_cudart().cudaHostUnregister(memory.data_ptr())) != 0:
            _cudart().cudaGetLastError()  # else the next kernel would be blamed
            _kept.append(memory)
            held = format_bytes(sum(one.numel() for one in _kept))
            tell_once("arena.kept", f"CUDA would not unpin {held} of host memory, which stay pinned until the end.")


def _available() -> int | None:
    """Bytes of host memory that can be had without swapping, where the system says; a container may have less."""
    known = [free for free in (_free_of_machine(), _free_of_container()) if free is not None]
    return min(known, default=None)


def _free_of_machine() -> int | None:
    info = Path("/proc/meminfo")
    if not info.exists():
        return None
    for line in info.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _free_of_container(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    try:
        limit, used = ((folder / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        return max(0, int(limit) - int(used))
    except (OSError, ValueError):  # no such files, or "max"
        return None
