"""A tape of what a segment did: calls of modules and of torch functions, to be repeated in the backward.

The tape is made anew in each forward, so shapes and control flow may change freely. Modules are called as a whole;
operations that a container does between its modules are noted one by one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fleetx.memory import randomness
from fleetx.memory.generators import Drawn, is_generator
from fleetx.memory.structures import Structure, flatten, unflatten
from fleetx.memory.surroundings import Surroundings

_PLAIN_TENSORS = frozenset({Tensor, nn.Parameter})
"""Others may consist of several tensors, and know themselves what it means to detach them."""


def version_of(tensor: Tensor) -> int:
    """How often the tensor was written to; -1 where torch does not count."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def pointer_of(tensor: Tensor) -> int | None:
    """Where the tensor's memory begins; None if it has none, or several as sparse and sharded ones have."""
    if tensor.layout is not torch.strided:
        return None
    try:
        begins = tensor.data_ptr()  # not by its storage, for which Python would have to make an object each time
        if begins:
            offset = int(tensor.storage_offset())
            return begins - offset * tensor.element_size() if offset else begins
        return tensor.untyped_storage().data_ptr() or None  # it may be a part without numbers of one that has some
    except RuntimeError:  # a tensor that consists of others, such as DTensor
        return None


def detached(tensor: Tensor) -> Tensor:
    """The tensor without its past. Who listens to all operations, as dear outputs do, is not told: that takes long."""
    if torch._C._len_torch_dispatch_stack() == 0 or type(tensor) not in _PLAIN_TENSORS:
        return tensor.detach()
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


class Made(NamedTuple):
    """A tensor that an earlier call of the tape gave."""

    number: int


@dataclass(eq=False)
class External:
    """A tensor that a segment reads but did not make: it must be there when the segment is repeated."""

    tensor: Tensor | None
    version: int
    requires_grad: bool
    is_kept: bool  # a parameter or buffer, which lives anyway
    is_copy: bool = False  # of one that was written to since
    original: tuple[Tensor, int] | None = None  # and its version, as long as it is not sure that it is written to
    parked: Any = None  # where it waits, if not here

    def copy(self, is_sure: bool) -> None:
        """Keep a copy, since the tensor will, or may, be written to; not if that was done before: it must show."""
        if self.tensor is None:
            self.is_copy = True  # what waits elsewhere is one
        elif not self.is_copy and not self.was_written():
            self.original = None if is_sure else (self.tensor, self.version)
            self.replace(self.tensor.detach().clone())

    def uncopy(self) -> None:
        """Nobody can write to the tensor any more; if nobody did, the copy was in vain."""
        if self.original is not None and version_of(self.original[0]) == self.original[1]:
            (self.tensor, self.version), self.is_copy = self.original, False
        self.original = None

    def replace(self, copy: Tensor) -> None:
        """Keep this one, which has the values that the tensor had."""
        self.tensor, self.version, self.is_copy = copy, version_of(copy), True

    def was_written(self) -> bool:
        """Whether somebody wrote to the tensor, and no copy was made before."""
        if self.parked is not None:
            source = self.parked.parked.source
            return source is not None and version_of(source) != self.parked.parked.version
        return self.tensor is not None and not self.is_copy and version_of(self.tensor) != self.version


@dataclass(eq=False)
class Call:
    """One call: of a module, or of a function of torch."""

    function: Callable[..., Any]
    inputs: list[Any]
    structure: Structure
    outputs: list[tuple[int, int]]  # (place among the flat outputs, number)
    surroundings: Surroundings
    saves: range  # numbers of the tensors that autograd saved meanwhile
    dear: Any = None  # outputs inside of the call that need not be computed again
    snapshot: Any = None  # what the module held before
    random: randomness.State | None = None  # where generators were before, if it draws and somebody may have moved them
    hidden: Any = None  # of a module: tensors in arguments into which nobody can look
    sums: list[Any] | None = None  # of a module: checksums of what it gave
    exchanged: list[Tensor] = field(default_factory=list)  # what it learned from other workers, for it is asked once


@dataclass(eq=False)
class Tape:
    """The calls of one segment, and what they read from outside."""

    kinds: tuple[str, ...]  # of devices
    calls: list[Call] = field(default_factory=list)
    externals: list[External] = field(default_factory=list)
    _known: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    _made: int = 0

    def note_inputs(
        self, args: Any, kwargs: Any, external: Callable[[Tensor], External]
    ) -> tuple[list[Any], Structure]:
        """Where the tensors among the arguments come from; `external` notes one that was not made here."""
        flat, structure = flatten((args, kwargs))
        return [self._place(value, external) for value in flat], structure

    def note_call(
        self,
        function: Callable[..., Any],
        noted: tuple[list[Any], Structure],
        output: Any,
        where: Surroundings,
        saves: range,
    ) -> Call:
        """A call that has just given `output`."""
        numbers = []
        for place, value in enumerate(flatten(output)[0]):
            if isinstance(value, Tensor):
                self._known[value] = (Made(self._made), value.requires_grad)
                numbers.append((place, self._made))
                self._made += 1
        call = Call(function, *noted, numbers, where, saves)
        self.calls.append(call)
        return call

    def note_written(self, tensors: Iterable[Tensor]) -> None:
        """A call of the tape wrote to these; they may have come to require a gradient by that."""
        for tensor in tensors:
            for changed in (tensor, tensor if tensor._base is None else tensor._base):
                known = self._known.get(changed)
                if known is not None:
                    self._known[changed] = (known[0], changed.requires_grad)

    def forget(self, external: External) -> None:
        """The tensor that this was made of has other values from now on: whoever reads it, reads another one."""
        for tensor in [tensor for tensor, (place, _) in self._known.items() if place is external]:
            del self._known[tensor]

    def _place(self, value: Any, external: Callable[[Tensor], External]) -> Any:
        if not isinstance(value, Tensor):
            return Drawn.of(value) if is_generator(value) else value
        known = self._known.get(value)
        # A function of torch.autograd changes a tensor that its own operations made: then it is not theirs any more.
        if known is not None and (isinstance(known[0], External) or known[1] == value.requires_grad):
            return known[0]
        noted = external(value)
        self.externals.append(noted)
        self._known[value] = (noted, value.requires_grad)
        return noted

    def repeat(
        self,
        fetch: Callable[[External], Tensor],
        around: Callable[[Call], Any],
        check: Callable[[Call, list[Tensor]], None],
        is_done: Callable[[], bool],
    ) -> None:
        """Do all of it again, until `is_done`; `around` gives a context for each call, `check` sees what it gave."""
        made: dict[Any, Tensor] = {}

        def value(place: Any) -> Any:
            if isinstance(place, External) and place not in made:
                made[place] = fetch(place)
            if isinstance(place, Made | External):
                return made[place]
            return place.again() if isinstance(place, Drawn) else place

        last_uses = self._last_uses()
        for position, call in enumerate(self.calls):
            args, kwargs = unflatten([value(place) for place in call.inputs], call.structure)
            call.surroundings.restore()
            with around(call):
                output = call.function(*args, **kwargs)
            del args, kwargs
            flat, _ = flatten(output)
            made.update((Made(number), flat[place]) for place, number in call.outputs)
            check(call, [flat[place] for place, _ in call.outputs])
            del output, flat
            for place in last_uses.get(position, ()):
                made.pop(place, None)
            if is_done():
                return

    def _last_uses(self) -> dict[int, list[Any]]:
        """After which call each tensor can go."""
        last: dict[Any, int] = {}
        for position, call in enumerate(self.calls):
            last.update((Made(number), position) for _, number in call.outputs)
            last.update((place, position) for place in call.inputs if isinstance(place, Made | External))
        uses: dict[int, list[Any]] = {}
        for place, position in last.items():
            uses.setdefault(position, []).append(place)
        return uses
