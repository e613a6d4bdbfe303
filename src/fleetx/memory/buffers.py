"""Buffers that a segment changes, such as running statistics: kept as they were, for when the segment is repeated.

While it is repeated the modules see copies of the old values, so that the real ones are written once. Which buffers a
module changes is learned from its first forward, by value: batch norms write theirs behind autograd's back.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class Slot(NamedTuple):
    """Where a module keeps a buffer."""

    owner: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor | None:
        """What is there now."""
        return self.owner._buffers[self.name]


class Snapshot(NamedTuple):
    """Values from before a module ran, and what was there afterwards but was thought never to change."""

    before: list[tuple[Slot, Tensor]]
    untouched: list[tuple[Slot, Tensor, int]]


class BufferWatch:
    """Knows which buffers of a module change in a forward."""

    def __init__(self) -> None:
        self._changing: dict[tuple[int, bool], set[Slot]] = {}

    def before(self, module: nn.Module) -> Snapshot | None:
        """Copies of the buffers that a forward of this module may change."""
        slots = [
            Slot(owner, name)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        if not slots:
            return None
        changing = self._changing.get(_key(module))
        chosen = [s for s in slots if changing is None or s in changing or _is_counting(s.owner)]
        kept = [] if changing is None else [(s, s.tensor, s.tensor._version) for s in slots if s not in changing]
        return Snapshot(list(zip(chosen, _copies([s.tensor for s in chosen]), strict=True)), kept)

    def after(self, module: nn.Module, snapshot: Snapshot) -> Snapshot | None:
        """What must be kept of the copies; None if something changed that had not been seen to change before."""
        key = _key(module)
        if key not in self._changing:
            changed = [(slot, copy) for slot, copy in snapshot.before if not _is_same(slot.tensor, copy)]
            self._changing[key] = {slot for slot, _ in changed}
            still = [(s, s.tensor, s.tensor._version) for s, _ in snapshot.before if s not in self._changing[key]]
            return Snapshot(changed, still)
        if all(slot.tensor is tensor and tensor._version == version for slot, tensor, version in snapshot.untouched):
            return snapshot
        del self._changing[key]  # learn anew
        return None


@contextmanager
def replaced(snapshots: Iterable[Snapshot]) -> Iterator[list[Tensor]]:
    """Inside, modules have copies of their buffers as these were; gives the copies."""
    snapshots = list(snapshots)
    for slot, tensor, version in (entry for snapshot in snapshots for entry in snapshot.untouched):
        if slot.tensor is not tensor or tensor._version != version:
            raise RuntimeError(
                f"the buffer {slot.name!r} of a {type(slot.owner).__name__} was changed between the forward and the "
                "backward, so the segment cannot be repeated as it was. Change buffers inside of forward, or after "
                "the backward; or leave this module out of recompute."
            )
    # A module that ran twice in the segment begins with what it had before the first time.
    before: dict[Slot, Tensor] = {}
    for snapshot in snapshots:
        for slot, copy in snapshot.before:
            before.setdefault(slot, copy)
    present = {slot: slot.tensor for slot in before}
    copies = dict(zip(before, _copies(list(before.values())), strict=True))
    shared: dict[int, Tensor] = {}
    try:
        for slot, copy in copies.items():
            slot.owner._buffers[slot.name] = shared.setdefault(id(present[slot]), copy)
        yield list(shared.values())
    finally:
        for slot, tensor in present.items():
            slot.owner._buffers[slot.name] = tensor


def _key(module: nn.Module) -> tuple[int, bool]:
    return id(module), module.training


def _is_counting(owner: nn.Module) -> bool:
    return isinstance(owner, _NormBase) and owner.training and owner.track_running_stats


def _is_same(tensor: Tensor | None, copy: Tensor) -> bool:
    return tensor is not None and tensor.shape == copy.shape and torch.equal(tensor, copy)


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of many small tensors in few kernels."""
    copies = [torch.empty_like(tensor) for tensor in tensors]
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    for indices in groups.values():
        torch._foreach_copy_([copies[i] for i in indices], [tensors[i].detach() for i in indices])
    return copies
