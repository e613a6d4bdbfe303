"""One training step of a model that is cut into segments, watched at every cut: bytes and times."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fleetx import clock
from fleetx.memory.states import Save
from fleetx.memory.structures import tensors_in
from fleetx.planner.feeding import Feeding
from fleetx.planner.meter import Meter
from fleetx.planner.tracing import dropped
from fleetx.slicing import Batch


class Mark(NamedTuple):
    """A moment of a step."""

    moment: Any  # seconds, or a CUDA event
    bytes: int = 0
    peak: int = 0  # since the mark before
    passing: int = 0  # bytes of the output, or of its gradient, that is handed over here
    sent: int = 0  # to the host so far
    fleeting: int = 0  # bytes of arguments that only whoever called the module still holds


class _Argument(NamedTuple):
    """Memory that a module was given."""

    memory: StorageWeakRef
    size: int


@dataclass(eq=False)
class Step:
    """What was seen: marks after each segment's forward, and before each segment's backward."""

    start: Mark
    forward: list[Mark] = field(default_factory=list)
    turn: Mark | None = None
    backward: dict[int, Mark] = field(default_factory=dict)
    end: Mark | None = None
    arguments: list[_Argument] = field(default_factory=list)  # of the module at whose end the last mark was made

    def settle(self) -> None:
        """At the next mark it shows what of the last one's arguments was there for the call only."""
        if self.arguments:
            gone = sum(one.size for one in self.arguments if one.memory.expired())
            self.forward[-1] = self.forward[-1]._replace(fleeting=gone)
            self.arguments = []


class Watch:
    """Hooks on a model that mark when its cuts are passed."""

    def __init__(self, feeding: Feeding, cuts: Sequence[str]) -> None:
        self.feeding = feeding
        self.meter: Meter | None = None
        self.sent: Callable[[], int] | None = None  # how many bytes went to the host so far
        self._step: Step | None = None
        self._cuts = list(cuts)
        self._handles = [
            feeding.model.get_submodule(name).register_forward_pre_hook(self._beginning(number))
            for number, name in enumerate(cuts)
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def step(self, batch: Batch, meter: Meter | None = None) -> Step:
        """One forward and backward; on a GPU it may still be under way."""
        self.meter = meter
        with torch.enable_grad(), meter or nullcontext():
            if meter is not None:
                meter.take_peak()
            step = self._step = Step(self._mark())
            try:
                loss = self.feeding.loss(batch)
            finally:
                self._step = None  # segments that are repeated are not marked
            self._require_all(step)
            step.settle()
            step.turn = self._mark()
            loss.backward()
            step.end = self._mark()
        del loss
        return step

    def _require_all(self, step: Step) -> None:
        """Of a segment that did not end, nothing could be said."""
        if len(step.forward) < len(self._cuts):
            raise ValueError(dropped(self._cuts[len(step.forward)]))

    def steps(self, batch: Batch, count: int) -> list[Step]:
        """Several, one right after the other as in a training: the host is ahead of the device, if it can be."""
        steps = [self.step(batch) for _ in range(count)]
        clock.wait_for(self.feeding.device)
        return steps

    def _mark(self, passing: int = 0) -> Mark:
        if self.meter is not None:
            sent = 0 if self.sent is None else self.sent()
            return Mark(0.0, self.meter.bytes(), self.meter.take_peak(), passing, sent)
        return Mark(clock.moment(self.feeding.device))

    def _beginning(self, number: int) -> Callable[..., None]:
        def begin(module: nn.Module, _args: Any) -> None:
            step = self._step
            if step is None:
                return

            def end(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                handle.remove()
                if len(step.forward) != number:  # it ran before, or one that comes first did not
                    return
                step.settle()
                given = [t for t in tensors_in(output) if t.requires_grad]
                sizes = {t.untyped_storage().data_ptr(): _size(t) for t in given}
                step.forward.append(self._mark(sum(sizes.values())))
                if self.meter is not None:
                    step.arguments = _arguments(tensors_in((args, kwargs)), besides=set(sizes))
                if given:
                    given[0].register_hook(partial(self._arrived, step, number))

            # Only now, so that it is the last of all hooks: what ends a segment is done by then.
            handle = module.register_forward_hook(end, with_kwargs=True)

        return begin

    def _arrived(self, step: Step, number: int, gradient: Tensor) -> None:
        """The gradient of a cut's output is there: the segment's backward begins."""
        if number not in step.backward:
            step.backward[number] = self._mark(_size(gradient))


def _arguments(tensors: Sequence[Tensor], besides: set[int]) -> list[_Argument]:
    """The memory of these tensors, but for those places."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.layout is torch.strided}
    return [_Argument(StorageWeakRef(s), s.nbytes()) for place, s in storages.items() if place not in besides]


def _size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0


def seconds_between(first: Mark, second: Mark) -> float:
    """How long it took from one mark to the next."""
    return clock.seconds_between(first.moment, second.moment)


class Figures(NamedTuple):
    """What a step showed, per segment and for the tail."""

    forward_seconds: list[float]
    backward_seconds: list[float]
    tail_seconds: tuple[float, float]


def seconds_of(step: Step, count: int) -> Figures:
    """The times of a step."""
    assert step.turn is not None
    assert step.end is not None
    ends = [step.start, *step.forward]
    befores = _backward_marks(step, count)
    return Figures(
        [seconds_between(a, b) for a, b in pairwise(ends)],
        [seconds_between(befores[i], befores[i - 1] if i else step.end) for i in range(count)],
        (seconds_between(ends[-1], step.turn), seconds_between(step.turn, befores[-1] if count else step.end)),
    )


class Bytes(NamedTuple):
    """The bytes of a step, beyond those before it; see `chain` for what they mean."""

    kept: list[int]
    sent: list[int]
    holds: list[int]
    entering: list[int]
    forward_bytes: list[int]
    backward_bytes: list[int]
    tail_bytes: int


def bytes_of(step: Step, count: int, save: Save = "everything", here: Bytes | None = None) -> Bytes:
    """The bytes of a step all of whose segments save this; `here`: those on the device, if this is on the host."""
    assert step.turn is not None
    assert step.end is not None
    base = step.start.bytes
    after, before = step.forward, _backward_marks(step, count)
    if here is None:  # on the host, what is there for a while is known from the marks that follow
        after = [mark._replace(bytes=mark.bytes - mark.fleeting) for mark in after]
    sent = _sent_by_each(step.start, after)
    entering = [0, *(mark.passing for mark in after[:-1])] if count else []
    leaving = _still_leaving(sent, entering, save)
    twice = [0] * count if here is None else here.holds
    through = _kept_up_to_each(after, base, leaving, twice)
    if here is not None:
        # Whether all that left is gone, or somebody still has hold of it, shows when the next segment has ended. (The
        # last one is never sent, so that the end of the one before says nothing new.)
        through = [*through[1:-1], *through[-2:]]
    # What is there for a while only, a shortcut on its way, belongs to the points that it passes.
    below = [0, *(min(through[i:]) for i in range(count))]
    holds = _outputs_held(after, before)
    met = _met_by_each_backward(before, base, holds, sent, below)
    peaks, tail_peak = _backward_peaks(step, count)
    return Bytes(
        kept=[b - a for a, b in pairwise(below)],
        # As in what is kept, an output that two segments need is counted with the later one.
        sent=[max(0, sent[i] - twice[i] + _previous(twice, i)) for i in range(count)],
        holds=holds if here is None else [0] * count,
        entering=entering,
        forward_bytes=[max(0, after[i].peak - base - below[i] - _previous(leaving, i)) for i in range(count)],
        # While one is repeated, the one before is being fetched.
        backward_bytes=[max(0, peaks[i] - base - met[i] - _previous(sent, i)) for i in range(count)],
        tail_bytes=max(0, max(_peak_of_turn(step), tail_peak) - base - below[-1]),
    )


def _peak_of_turn(step: Step) -> int:
    """Of the tail's forward, without what was there for the last call only.

    If that was more than the tail took, this is the least that the tail took; it shows in other states, which keep it.
    """
    assert step.turn is not None
    if step.forward and step.turn.peak <= step.forward[-1].bytes:
        return max(step.turn.bytes, step.turn.peak - step.forward[-1].fleeting)
    return step.turn.peak


def _previous(values: list[int], number: int) -> int:
    """That of the segment before; the first one has none."""
    return values[number - 1] if number else 0


def _sent_by_each(start: Mark, after: list[Mark]) -> list[int]:
    totals = [start.sent, *(mark.sent for mark in after)]
    return [b - a for a, b in pairwise(totals)]


def _still_leaving(sent: list[int], entering: list[int], save: Save) -> list[int]:
    """Of what each segment sends, what is on its way when its forward ends.

    Inputs are sent when the segment begins and have left when it ends; the rest leaves while the next one runs.
    """
    gone = {"everything": [0] * len(sent), "dear": entering, "inputs": sent}[save]
    return [max(0, a - b) for a, b in zip(sent, gone, strict=True)]


def _kept_up_to_each(after: list[Mark], base: int, leaving: list[int], twice: list[int]) -> list[int]:
    """What segments up to each keep.

    After a segment's forward there are that; its output, which is the next one's input; and what is leaving. The output
    may be among that: then (`twice`) it is not subtracted twice.
    """
    return [
        max(0, mark.bytes - base - away - (mark.passing - min(both, away)))
        for mark, away, both in zip(after, leaving, twice, strict=True)
    ]


def _outputs_held(after: list[Mark], before: list[Mark]) -> list[int]:
    """Of each segment's output, the bytes that it needs in its own backward.

    Before that there is the gradient of the output in the output's place; what is there beyond that is the output.
    """
    return [
        min(end.passing, max(0, mark.bytes - mark.passing - end.bytes + end.passing))
        for end, mark in zip(after, before, strict=True)
    ]


def _met_by_each_backward(
    before: list[Mark], base: int, holds: list[int], sent: list[int], below: list[int]
) -> list[int]:
    """What earlier segments keep when the backward comes to each.

    That may be less than its forward met (`below`): autocast keeps its copies of weights until the forward ends. Beside
    it there is, of the last of them, the gradient of its output, the output if it holds that, and what was fetched.
    """
    beside = zip(before[:-1], holds, sent, strict=False)
    met = [max(0, mark.bytes - base - mark.passing - held - fetched) for mark, held, fetched in beside]
    return [min(a, b) for a, b in zip([0, *met], below, strict=False)][: len(before)]


def _backward_peaks(step: Step, count: int) -> tuple[list[int], int]:
    """Of each segment's backward, which ends where that of the segment before begins; and of the tail's."""
    assert step.end is not None
    begins = {number: mark.peak for number, mark in step.backward.items()}
    *peaks, tail = [begins.get(number - 1, step.end.peak) for number in range(count + 1)]
    return peaks, tail


def _backward_marks(step: Step, count: int) -> list[Mark]:
    """For each segment the mark before its backward; one that has none shares that of the segment before it."""
    assert step.end is not None
    marks: list[Mark] = []
    for number in range(count):
        below = marks[-1] if marks else step.end
        marks.append(step.backward.get(number, below))
    return marks
