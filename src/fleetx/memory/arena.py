"""Host memory for offloaded tensors: pinned once, used again in every step, never more than the largest step needed.

torch's own pinned allocator rounds sizes up to powers of two, and pinning takes more than half a second per GiB. So
slabs are made to measure, registered once, and handed out in blocks.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fleetx.units import format_bytes

ALIGNMENT = 512
SMALL_SLAB = 16 * 2**20


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
    is_pinned: bool
    free: list[tuple[int, int]] = field(default_factory=list)  # (start, size), sorted, never adjacent

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

    def __init__(self, *, pin: bool, limit: int | None = None) -> None:
        self.pin = pin
        self.limit = limit
        self.slabs: list[Slab] = []
        self.in_use = 0
        self.most_in_use = 0

    @property
    def reserved(self) -> int:
        """Bytes that the arena holds, in use or not."""
        return sum(slab.memory.numel() for slab in self.slabs)

    def take(self, size: int) -> Block:
        """A block of `size` bytes."""
        size = -(-size // ALIGNMENT) * ALIGNMENT
        # The tightest slab first, so that large places stay for large tensors.
        for slab in sorted(self.slabs, key=lambda slab: slab.memory.numel()):
            block = slab.take(size)
            if block is not None:
                break
        else:
            block = self._grow(size).take(size)
            assert block is not None
        self.in_use += size
        self.most_in_use = max(self.most_in_use, self.in_use)
        return block

    def give_back(self, block: Block) -> None:
        """Take a block back; the memory stays pinned for the next step."""
        self.in_use -= block.size
        block.slab.give_back(block)

    def release(self) -> None:
        """Give all memory back to the system; blocks in use keep theirs alive."""
        for slab in self.slabs:
            self._unpin(slab)
        self.slabs = []

    def _grow(self, size: int) -> Slab:
        # Tensors of another size came: what the old ones left behind would only add up.
        for slab in [slab for slab in self.slabs if slab.is_idle]:
            self._unpin(slab)
            self.slabs.remove(slab)
        amount = max(size, SMALL_SLAB) if size < SMALL_SLAB // 4 else size
        self._require_room(amount)
        memory = torch.empty(amount, dtype=torch.uint8)
        if self.pin:
            _register(memory)
        slab = Slab(memory, self.pin, [(0, amount)])
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

    def _unpin(self, slab: Slab) -> None:
        if slab.is_pinned:
            torch.cuda.synchronize()  # a copy may still be under way
            torch.cuda.cudart().cudaHostUnregister(slab.memory.data_ptr())
            slab.is_pinned = False


def _register(memory: Tensor) -> None:
    failure = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(failure) != 0:
        raise MemoryError(
            f"the system would not pin {format_bytes(memory.numel())} of host memory (CUDA error {int(failure)}): "
            "lower host_memory, or raise the limit on locked memory (ulimit -l)."
        )


def _available() -> int | None:
    """Bytes of host memory that can be had without swapping, where the system says."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return None
    for line in info.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
