"""A module that is not cut inside: it is called, noted and repeated as a whole."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from fleetx.memory.buffers import Snapshot
from fleetx.memory.compiling import Kinds, SharedCompilations
from fleetx.memory.dear import Noted, Saving
from fleetx.memory.recompute import Frame, Kept, Saved
from fleetx.memory.surroundings import Surroundings
from fleetx.memory.tape import pointer_of, version_of


class Inputs:
    """The tensors that a module is given, as they are before it runs."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors, self._versions = tensors, [version_of(tensor) for tensor in tensors]

    def written(self) -> set[int]:
        """Which of them were written to since."""
        return {i for i, (t, v) in enumerate(zip(self.tensors, self._versions, strict=True)) if version_of(t) != v}


class FreeRun:
    """A module that runs as if the model were not cut, while it runs."""

    def __init__(self, module: nn.Module, tensors: list[Tensor]) -> None:
        self.module = module
        self.inputs = Inputs(tensors)
        self.under: Any = None  # the hooks of others that see what it saves


class Leaf:
    """A module that runs as a whole, while it runs."""

    def __init__(
        self,
        module: nn.Module,
        tensors: list[Tensor],
        noted: Any,
        snapshot: Snapshot,
        where: Surroundings,
        first: int,
        dear: Noted | None,
    ) -> None:
        self.module, self.noted, self.snapshot, self.where = module, noted, snapshot, where
        self.inputs = Inputs(tensors)
        self.first = first  # number of the first tensor that is saved
        self.dear = dear
        self.callee: Callable[..., Any] = module
        self.refused: list[str] = []  # why the compiler would not save dear outputs alone
        self.originals: Originals | None = None
        self._inside = ExitStack()

    def enter(self) -> None:
        """Until it is left, its dear outputs are noted, if it has such."""
        if self.dear is not None:
            self._inside.enter_context(Saving(self.dear))

    def enter_compiled(self, compilations: SharedCompilations, dear: Kinds | None, frame: Frame) -> None:
        """Until it is left, it runs compiled, and the compiler sees to what it saves."""
        self.callee = compilations.callee(self.module, dear)
        self.refused = self._inside.enter_context(compilations.saving(dear, frame))

    def original_of(self, tensor: Tensor, frame: Frame) -> Kept | Saved | None:
        """What is saved in place of a tensor to which it writes."""
        return None if self.originals is None else self.originals.of(tensor, frame)

    def leave(self) -> None:
        """Undo what was done for the module."""
        self._inside.close()
        if self.originals is not None:
            self.originals.put_back()


class Originals:
    """What a compiled module saves although it writes to it: as it was when the module began.

    A compilation that saves dear outputs alone computes the rest from its inputs and buffers. Inputs it writes to after
    it saved them, so that copies are saved in their place; buffers before, but of these there are copies already.
    """

    def __init__(self, may_be_written: list[Tensor], buffers: list[tuple[Tensor, Tensor]]) -> None:
        self._inputs = {pointer_of(tensor) for tensor in may_be_written} - {None}
        self._buffers = {pointer_of(buffer): (buffer, copy) for buffer, copy in buffers}
        self._copied: list[tuple[Saved, Tensor, int]] = []

    def of(self, tensor: Tensor, frame: Frame) -> Kept | Saved | None:
        """What is saved in place of this tensor; None if the module does not write to it."""
        pointer = pointer_of(tensor)
        if pointer in self._buffers:
            buffer, copy = self._buffers[pointer]
            offset = tensor.storage_offset() - buffer.storage_offset()
            original = copy.as_strided(tensor.size(), tensor.stride(), offset)
            return Kept(original, version_of(original))
        if pointer not in self._inputs:
            return None
        saved = frame.pack(tensor.detach().clone())
        self._copied.append((saved, tensor.detach(), version_of(tensor)))
        return saved

    def put_back(self) -> None:
        """The module is over: inputs to which it did not write need no copy."""
        for saved, tensor, version in self._copied:
            if version_of(tensor) == version and saved.tensor is not None:
                saved.tensor, saved.version = tensor, version
