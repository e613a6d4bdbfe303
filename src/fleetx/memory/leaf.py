"""A module that is not cut inside: it is called, noted and repeated as a whole."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from fleetx.memory.buffers import Snapshot
from fleetx.memory.compiling import SharedCompilations
from fleetx.memory.dear import Noted, Saving
from fleetx.memory.states import Segment
from fleetx.memory.surroundings import Surroundings
from fleetx.memory.tape import version_of


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
        self._inside = ExitStack()

    def enter(self, state: Segment, compilations: SharedCompilations | None) -> None:
        """Until it is left, the module saves what the segment's state asks for."""
        if compilations is not None:
            self.callee = compilations.callee(self.module, state)
            self._inside.enter_context(compilations.saving(state))
        elif self.dear is not None:
            self._inside.enter_context(Saving(self.dear))

    def leave(self) -> None:
        """Undo what was done for the module."""
        self._inside.close()
