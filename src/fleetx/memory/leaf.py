"""A module that is not cut inside, while it runs: it is called, noted and repeated as a whole."""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from fleetx.comm.exchanges import noting
from fleetx.memory import dear as dear_outputs
from fleetx.memory import randomness
from fleetx.memory.buffers import Snapshot
from fleetx.memory.compiling import Kinds, Saving, SharedCompilations
from fleetx.memory.generators import Drawn
from fleetx.memory.recompute import Frame
from fleetx.memory.statistics import is_counting, may_read_statistics
from fleetx.memory.structures import hidden_in
from fleetx.memory.surroundings import Surroundings
from fleetx.memory.tape import External, Made, version_of

PLAIN = frozenset({External, Made, Drawn, bool, int, float, str, type(None)})
"""Of what is noted of arguments: these hold no tensors that nobody sees."""


class Inputs:
    """The tensors that a module is given, as they are before it runs."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors, self._versions = tensors, [version_of(tensor) for tensor in tensors]

    def written(self) -> set[int]:
        """Which of them were written to since."""
        return {i for i, (t, v) in enumerate(zip(self.tensors, self._versions, strict=True)) if version_of(t) != v}


class Hidden:
    """The tensors in arguments into which nobody can look when they are noted, as they are before a module runs.

    It does not keep them alive: whoever holds them may let go of them.
    """

    def __init__(self, values: list[Any]) -> None:
        self._values = values
        self._before = [(weakref.ref(tensor), version_of(tensor)) for tensor in hidden_in(values)]

    def changed(self) -> str:
        """What kinds of arguments hold other tensors now; the module could not be repeated with these."""
        now = hidden_in(self._values)
        is_same = len(now) == len(self._before) and all(
            before() is tensor and version_of(tensor) == version
            for tensor, (before, version) in zip(now, self._before, strict=True)
        )
        return "" if is_same else " or ".join(dict.fromkeys(type(value).__name__ for value in self._values))

    def complaint(self) -> str:
        """What is said of a segment in which that happened."""
        changed = self.changed()
        return changed and f"a {changed} was changed, into which nobody can look"


class Leaf:
    """A module that runs as a whole."""

    def __init__(self, module: nn.Module, tensors: list[Tensor]) -> None:
        self.module = module
        self.inputs = Inputs(tensors)
        self.compiled: Saving | None = None
        self.inside = ExitStack()

    def enter_compiled(self, compilations: SharedCompilations, dear: Kinds | None, frame: Frame) -> None:
        """Until it is left, it runs compiled, and the compiler sees to what it saves."""
        compiled = self.inside.enter_context(compilations.saving(dear, frame))
        self.compiled = compiled if compilations.is_installed(self.module) else None
        compiled.refused = compilations.why_undivided(self.module, frame.state.dear)

    def leave(self) -> None:
        """Undo what was done for the module."""
        self.inside.close()

    def why_undivided(self, after: Snapshot | None) -> str:
        """Why its dear outputs cannot be saved alone; `after`: what it held before that it changed, None if unknown.

        The compiler computes the rest again from the inputs and from what the module holds, which must still be there.
        """
        name = f"a {type(self.module).__name__}"
        if self.compiled is None:
            return f"{name} has a forward of its own, which is not compiled"
        if self.compiled.refused is not None:
            return f"{name} does not compile as a whole ({self.compiled.refused})"
        return f"{name} writes to its inputs, or to what it holds" if self.writes(after) else ""

    def writes(self, after: Snapshot | None) -> bool:
        """Whether it wrote to something that it may have read: batch norms only count."""
        if self.inputs.written() or after is None or after.attributes.is_written:
            return True
        if all(is_counting(slot.owner) for slot, _ in after.copies):
            return bool(after.copies) and may_read_statistics(after.modules)
        return True


class FreeLeaf(Leaf):
    """A module that runs as if the model were not cut."""

    def __init__(self, module: nn.Module, tensors: list[Tensor], snapshot: Snapshot | None) -> None:
        super().__init__(module, tensors)
        self.snapshot = snapshot  # of what it may change, if that matters


class NotedLeaf(Leaf):
    """A module that is noted, to be repeated."""

    def __init__(
        self,
        module: nn.Module,
        tensors: list[Tensor],
        noted: Any,
        snapshot: Snapshot,
        where: Surroundings,
        first: int,
        dear: dear_outputs.Noted | None,
    ) -> None:
        super().__init__(module, tensors)
        self.noted, self.snapshot, self.where = noted, snapshot, where
        opaque = [one for one in noted[0] if type(one) not in PLAIN]
        self.hidden = Hidden(opaque) if opaque else None
        self.first = first  # number of the first tensor that is saved
        self.dear = dear
        self.random: randomness.State | None = None  # where generators were before, if that is noted
        self.callee: Callable[..., Any] = module
        self.exchanged = self.inside.enter_context(noting())

    def enter(self) -> None:
        """Until it is left, its dear outputs are noted, if it has such."""
        if self.dear is not None:
            self.inside.enter_context(dear_outputs.Saving(self.dear))

    def enter_compiled(self, compilations: SharedCompilations, dear: Kinds | None, frame: Frame) -> None:
        """The same, and so it will run when it is repeated."""
        super().enter_compiled(compilations, dear, frame)
        self.callee = compilations.callee(self.module, dear)
