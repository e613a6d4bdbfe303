"""Who reads which memory in a forward: before somebody writes to it, whoever needs it again has a copy."""

import weakref
from collections.abc import Iterable

from torch import Tensor

from fleetx.memory.recompute import Frame
from fleetx.memory.tape import External, pointer_of


class Readers:
    """The inputs of all segments so far, by where their memory is."""

    def __init__(self) -> None:
        self._readers: dict[int, list[tuple[Frame, weakref.ref[External]]]] = {}

    def add(self, tensor: Tensor, frame: Frame, external: External) -> None:
        """A segment reads this tensor, which it knows as `external`."""
        pointer = pointer_of(tensor)
        if pointer is not None:
            self._readers.setdefault(pointer, []).append((frame, weakref.ref(external)))

    def read_any(self, tensors: Iterable[Tensor]) -> bool:
        """Whether somebody read the memory of one of these."""
        return any(self._readers.get(pointer_of(tensor) or 0) for tensor in tensors)

    def copy_before(self, written: list[Tensor], is_sure: bool, without: Frame | None) -> None:
        """These will, or may, be written to; the segment `without` takes its chance."""
        for pointer in pointers(written):
            for frame, external in self._of(pointer):
                if frame is not without:
                    external.copy(is_sure)

    def uncopy(self, tensors: list[Tensor]) -> None:
        """These may not be written to any more: copies that were made in vain are given back."""
        for tensor in tensors:
            for _, external in self._of(pointer_of(tensor)):
                external.uncopy()

    def share(self, written: list[Tensor], frame: Frame) -> bool:
        """Whether several inputs of a segment lie in memory that was written to: copies do not see each other."""
        return any(sum(one is frame for one, _ in self._of(pointer)) > 1 for pointer in pointers(written))

    def give_copy(self, buffer: Tensor, copy: Tensor, present: Frame) -> None:
        """A module changed a buffer in the present segment; who read it before needs it as it was."""
        for frame, external in self._of(pointer_of(buffer)):
            if frame is present:
                frame.tape.forget(external)  # who reads it from now on reads something else
            if external.tensor is not None and not external.is_copy:
                old = external.tensor
                offset = old.storage_offset() - buffer.storage_offset()
                external.replace(copy.as_strided(old.size(), old.stride(), offset).clone())

    def _of(self, pointer: int | None) -> list[tuple[Frame, External]]:
        readers = self._readers.get(pointer or 0, ())
        return [(frame, external) for frame, reference in readers if (external := reference()) is not None]


def pointers(tensors: list[Tensor]) -> set[int]:
    """Where the memory of these begins."""
    return {pointer for tensor in tensors if (pointer := pointer_of(tensor)) is not None}
