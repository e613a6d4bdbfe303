"""A tape of what a segment did: calls of modules and of torch functions, to be repeated in the backward.

The tape is made anew in each forward, so shapes and control flow may change freely. Modules are called as a whole;
operations that a container does between its modules are noted one by one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

Fetch = Callable[["External"], Tensor]


class Surroundings(NamedTuple):
    """What else decides how torch computes."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls, devices: tuple[str, ...]) -> "Surroundings":
        """The present ones."""
        autocast = tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices)
        return cls(torch.is_grad_enabled(), autocast)

    def restore(self) -> None:
        """Make them the present ones."""
        torch.set_grad_enabled(self.grad)
        for device, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)


class Made(NamedTuple):
    """A tensor that an earlier call of the tape gave."""

    number: int


@dataclass(eq=False)
class External:
    """A tensor that a segment reads but did not make: it must be there when the segment is repeated."""

    number: int
    tensor: Tensor | None
    version: int
    requires_grad: bool
    is_kept: bool  # a parameter or buffer, which lives anyway
    is_written: bool = False  # the segment writes to it, so it must be copied before
    parked: Any = None  # where it waits, if not here


@dataclass(eq=False)
class Call:
    """One call: of a module, or of a function of torch."""

    function: Callable[..., Any]
    inputs: list[Any]
    structure: pytree.TreeSpec
    outputs: list[tuple[int, int]]  # (place among the flat outputs, number)
    surroundings: Surroundings
    dear: Any = None  # outputs inside of the call that need not be computed again


@dataclass(eq=False)
class Tape:
    """The calls of one segment, and what they read from outside."""

    devices: tuple[str, ...]
    calls: list[Call] = field(default_factory=list)
    externals: list[External] = field(default_factory=list)
    _known: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    _made: int = 0

    def note_inputs(
        self, args: Any, kwargs: Any, external: Callable[[Tensor, int], External]
    ) -> tuple[list[Any], pytree.TreeSpec]:
        """Where the tensors among the arguments come from; `external` notes one that was not made here."""
        flat, structure = pytree.tree_flatten((args, kwargs))
        return [self._place(value, external) if isinstance(value, Tensor) else value for value in flat], structure

    def note_call(
        self,
        function: Callable[..., Any],
        inputs: list[Any],
        structure: pytree.TreeSpec,
        output: Any,
        where: Surroundings,
    ) -> Call:
        """A call that has just given `output`."""
        numbers = []
        for place, value in enumerate(pytree.tree_leaves(output)):
            if isinstance(value, Tensor):
                self._known[value] = (Made(self._made), value.requires_grad)
                numbers.append((place, self._made))
                self._made += 1
        call = Call(function, inputs, structure, numbers, where)
        self.calls.append(call)
        return call

    def _place(self, tensor: Tensor, external: Callable[[Tensor, int], External]) -> Made | External:
        known = self._known.get(tensor)
        # A function of torch.autograd changes a tensor that its own operations made: then it is not theirs any more.
        if known is not None and (isinstance(known[0], External) or known[1] == tensor.requires_grad):
            return known[0]
        noted = external(tensor, len(self.externals))
        self.externals.append(noted)
        self._known[tensor] = (noted, tensor.requires_grad)
        return noted

    def repeat(self, fetch: Fetch, around: Callable[[Call], Any], is_done: Callable[[], bool]) -> None:
        """Do all of it again, until `is_done`; `around` gives a context for each call."""
        made: dict[int, Tensor] = {}
        read: dict[int, Tensor] = {}

        def value(place: Any) -> Any:
            if isinstance(place, Made):
                return made[place.number]
            if isinstance(place, External):
                if place.number not in read:
                    read[place.number] = _as_input(place, fetch(place))
                return read[place.number]
            return place

        last_use = _last_uses(self.calls)
        for position, call in enumerate(self.calls):
            args, kwargs = pytree.tree_unflatten([value(place) for place in call.inputs], call.structure)
            call.surroundings.restore()
            with around(call):
                output = call.function(*args, **kwargs)
            del args, kwargs
            flat = pytree.tree_leaves(output)
            made.update((number, flat[place]) for place, number in call.outputs)
            del output, flat
            for number in last_use.get(position, ()):
                made.pop(number, None)
            if is_done():
                return


def _last_uses(calls: list[Call]) -> dict[int, list[int]]:
    """After which call each tensor can go."""
    last: dict[int, int] = {}
    for position, call in enumerate(calls):
        for _, number in call.outputs:
            last[number] = position
        for place in call.inputs:
            if isinstance(place, Made):
                last[place.number] = position
    uses: dict[int, list[int]] = {}
    for number, position in last.items():
        uses.setdefault(position, []).append(number)
    return uses


def _as_input(external: External, tensor: Tensor) -> Tensor:
    """The tensor as the segment met it: with a gradient to come, but no past."""
    if external.is_kept and isinstance(tensor, nn.Parameter):
        return tensor
    fresh = tensor.detach()
    if external.requires_grad:
        fresh.requires_grad_()
    # What the segment writes to must be a copy, for another backward, and not a leaf, which may not be written.
    with torch.enable_grad():
        return fresh.clone() if external.is_written else fresh
