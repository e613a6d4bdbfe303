"""How long each segment takes in each state, timed in trials at micro-batches that keep the device busy.

With few samples a GPU waits for its next kernel most of the time, which says nothing about many: the micro-batch is
doubled until twice the samples take almost twice as long; this is found without the compiler, which would have to
compile for each size. By then a model all of whose segments keep everything may
take more memory than trials should: so only some segments of each kind are in the state that is timed, and all others
save their inputs. Segments that are alike share their median times.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn.utils.parametrize import type_before_parametrizations

from fleetx.planner.chain import State, evaluate
from fleetx.planner.costs import OptionCost, Profile, SegmentCost
from fleetx.planner.counting import EVERYTHING
from fleetx.planner.lines import Line
from fleetx.planner.observing import Figures, Watch, seconds_of
from fleetx.planner.tracing import Trace
from fleetx.planner.trials import MOST_SAMPLES, Trials
from fleetx.slicing import Batch

_WARM_UP, _ROUNDS = 2, 3
_LONG, _FEW_ROUNDS = 0.2, 2  # seconds of a step from which on fewer are as good
_ALMOST_TWICE = 1.93  # times as long for twice the samples: the device is busy


class Seconds(NamedTuple):
    """Of a state at one size, for each kind of segment; and of the tail."""

    forward: dict[int, float]
    backward: dict[int, float]
    tail: tuple[float, float]


class Timing:
    """The trials in which times are taken; `counted` says what they will need, and has all but times."""

    def __init__(self, trials: Trials, seen: Trace, counted: Profile, states: Sequence[State]) -> None:
        self.trials = trials
        self.counted = counted
        self.states = list(states)
        self.kinds = kinds_of(seen, trials.cuts)
        self.frugal = State("inputs") if State("inputs") in states else states[-1]  # what the others do
        self._frugal_rounds: dict[int, list[Figures] | None] = {}  # by size, without the compiler

    def profile(self, sizes: tuple[int, ...], say: Callable[[str], None]) -> Profile:
        """What was counted, with times from these sizes: two, and maybe a far smaller one before them."""
        taken = self._taken(sizes, say)
        if not taken and sizes != self.counted.sizes:
            return self.profile(self.counted.sizes, say)
        if not taken:
            raise self.trials.no_room(sizes[0])
        plain = _plain(taken)
        segments = [
            _timed(segment, kind, sizes, taken) for segment, kind in zip(self.counted.segments, self.kinds, strict=True)
        ]
        left_out = [
            f"{state} could not be timed: {sizes[-1]} samples do not fit now: free memory to have it too."
            for state in self.states
            if state not in taken
        ]
        return replace(
            self.counted,
            segments=tuple(segments),
            tail_forward_seconds=Line.of_time(sizes, [one.tail[0] for one in plain]),
            tail_backward_seconds=Line.of_time(sizes, [one.tail[1] for one in plain]),
            sizes=(sizes[-2], sizes[-1]),
            notes=(*self.counted.notes, *left_out),
        )

    def sizes(self) -> tuple[int, ...]:
        """Those at which bytes were counted; larger ones too, if the device is not yet busy with these and has room."""
        smallest, size = self.counted.sizes
        while self._may_grow_to(2 * size) and self._waits_at(size) and self._step_seconds(2 * size) is not None:
            size *= 2
        if self.trials.compile:  # each size is compiled; and compiled code is quicker, so that more samples are needed
            return (size, 2 * size) if self._may_grow_to(2 * size) else (size // 2, size)
        return self.counted.sizes if size == self.counted.sizes[1] else (smallest, size // 2, size)

    def _may_grow_to(self, size: int) -> bool:
        return size <= MOST_SAMPLES and all(self._members(state, size) is not None for state in self.states)

    def _waits_at(self, size: int) -> bool:
        """Whether the device waits for its next kernel: on some worker half the samples take clearly more than half."""
        half, whole = self._step_seconds(size // 2), self._step_seconds(size)
        if half is None or whole is None:
            return False
        return not self.trials.agreement.everywhere(whole >= _ALMOST_TWICE * half)

    def _step_seconds(self, size: int) -> float | None:
        """Of a frugal step; None if it did not fit on some worker."""
        rounds = self._frugal(size)
        fits = self.trials.agreement.everywhere(rounds is not None)
        return min(map(_whole_step, rounds)) if fits and rounds is not None else None

    def _frugal(self, size: int) -> list[Figures] | None:
        """The times of steps in which all segments are frugal, taken once."""
        if size not in self._frugal_rounds:
            states = [self.frugal] * len(self.kinds)
            self._frugal_rounds[size] = _rounds(self.trials.uncompiled(), states, size, self._count(size // 2))
        return self._frugal_rounds[size]

    def _count(self, size: int) -> int:
        """How many steps are timed, the same on all workers; by those that were taken with so many samples before."""
        if size not in self._frugal_rounds:
            return _ROUNDS
        known = self._frugal_rounds[size]
        is_long = known is not None and min(map(_whole_step, known)) > _LONG
        return _FEW_ROUNDS if self.trials.agreement.everywhere(is_long) else _ROUNDS

    def _taken(self, sizes: tuple[int, ...], say: Callable[[str], None]) -> dict[State, list[Seconds]]:
        """The states that there was room for at all sizes."""
        taken: dict[State, list[Seconds]] = {}
        for state in self.states:
            say(f"timing: {state}")
            at_all = self._at_all(state, sizes)
            if at_all is not None:
                taken[state] = at_all
        return taken

    def _at_all(self, state: State, sizes: tuple[int, ...]) -> list[Seconds] | None:
        found = []
        for size in sizes:
            seconds = self._seconds(state, size)
            if not self.trials.agreement.everywhere(seconds is not None) or seconds is None:
                return None
            found.append(seconds)
        return found

    def _seconds(self, state: State, size: int) -> Seconds | None:
        """Of the segments that have the state; None if there is no room."""
        members = self._members(state, size)
        if members is None:
            return None
        is_known = state == self.frugal and size in self._frugal_rounds and not self.trials.compile
        if is_known:
            rounds = self._frugal(size)
        else:
            rounds = _rounds(self.trials, self._states(state, members), size, self._count(size))
        if rounds is None:
            return None
        halves = [statistics.median_low(one.tail_seconds[half] for one in rounds) for half in (0, 1)]
        return Seconds(
            self._medians(members, [one.forward_seconds for one in rounds]),
            self._medians(members, [one.backward_seconds for one in rounds]),
            (halves[0], halves[1]),
        )

    def _members(self, state: State, size: int) -> list[int] | None:
        """Numbers of the segments that get the state, of each kind as many as there is room for; None if for none."""
        everyone = list(range(len(self.kinds)))
        if size <= self.counted.sizes[1]:
            return everyone  # as in counting, where that has just fitted
        if state == self.frugal:  # with fewer members the step is the same
            return everyone if self._has_room(state, everyone, size) else None
        every, least = 1, len(set(self.kinds))
        while True:
            members = [number for number, place in enumerate(self._places()) if place % every == 0]
            if self._has_room(state, members, size):
                return members
            if len(members) == least:
                return None
            every *= 2

    def _has_room(self, state: State, members: Sequence[int], size: int) -> bool:
        needed = self._needed(self._states(state, members), size)
        return self.trials.agreement.everywhere(self.trials.has_room(needed))

    def _places(self) -> list[int]:
        """For each segment how many of its kind come before it."""
        return [self.kinds[:number].count(kind) for number, kind in enumerate(self.kinds)]

    def _states(self, state: State, members: Sequence[int]) -> list[State]:
        return [state if number in members else self.frugal for number in range(len(self.kinds))]

    def _needed(self, states: Sequence[State], size: int) -> int:
        """Bytes beside those that are there already; trials do not update the weights."""
        chain = replace(self.counted.chain(size), update_bytes=0)
        options = [[option.state for option in stage.options] for stage in chain.stages]
        choice = [there.index(state) for there, state in zip(options, states, strict=True)]
        return evaluate(chain, choice).peak - chain.fixed_bytes

    def _medians(self, members: Sequence[int], rounds: Sequence[Sequence[float]]) -> dict[int, float]:
        values: dict[int, list[float]] = {}
        for figures in rounds:
            for number in members:
                values.setdefault(self.kinds[number], []).append(figures[number])
        return {kind: statistics.median_low(one) for kind, one in values.items()}


def _rounds(trials: Trials, states: Sequence[State], size: int, count: int) -> list[Figures] | None:
    """The times of so many steps; None if they do not fit."""
    try:
        with trials.watched(states) as (watch, _):
            return _timed_rounds(watch, trials.batch(size), len(states), count)
    except torch.OutOfMemoryError:
        return None


def _timed_rounds(watch: Watch, batch: Batch, segments: int, count: int) -> list[Figures]:
    """The times of all segments in so many steps, after others that are not as all that follow."""
    return [seconds_of(step, segments) for step in watch.steps(batch, _WARM_UP + count)[_WARM_UP:]]


def _whole_step(figures: Figures) -> float:
    return sum(figures.forward_seconds) + sum(figures.backward_seconds) + sum(figures.tail_seconds)


def _plain(taken: dict[State, list[Seconds]]) -> list[Seconds]:
    """Those of the state that does nothing beside the forward and the backward, if it was timed."""
    return taken.get(EVERYTHING) or next(iter(taken.values()))


def _timed(segment: SegmentCost, kind: int, sizes: tuple[int, ...], taken: dict[State, list[Seconds]]) -> SegmentCost:
    """A segment with times; states that were not timed are left out.

    Where the device waits for launches, it does so in a whole step: in the backward, which has larger kernels, the host
    gets ahead, and the next forward lives on that. So of launches only the sum of both is known.
    """
    forward = [one.forward[kind] for one in _plain(taken)]
    of_forward = Line.of_time(sizes, forward)

    def timed(option: OptionCost) -> OptionCost:
        at_all = taken[option.state._replace(home="device")]
        # What the state costs in the forward already is counted with its backward.
        seconds = [
            one.backward[kind] + max(0.0, one.forward[kind] - plain) for one, plain in zip(at_all, forward, strict=True)
        ]
        both = [sum(pair) for pair in zip(forward, seconds, strict=True)]
        of_backward = Line.of_time(sizes, seconds)
        waits = any(line.least for line in (of_forward, of_backward, Line.of_time(sizes, both)))
        return replace(option, seconds=of_backward._replace(least=0.0), launches=min(both) if waits else 0.0)

    known = [option for option in segment.options if option.state._replace(home="device") in taken]
    return SegmentCost(segment.name, of_forward._replace(least=0.0), tuple(timed(option) for option in known))


def kinds_of(seen: Trace, cuts: Sequence[str]) -> list[int]:
    """For each segment the number of its kind: the same modules with the same shapes."""
    kinds: dict[Any, int] = {}
    return [kinds.setdefault(_signature(seen, cuts, i), len(kinds)) for i in range(len(cuts))]


def _signature(seen: Trace, cuts: Sequence[str], number: int) -> Any:
    """What ran in a segment."""
    ends = {call.name: call.ends for call in seen.calls}
    start = ends[cuts[number - 1]] if number else -1
    inside = [call for call in seen.calls if start < call.ends <= ends[cuts[number]]]
    parts = []
    for call in inside:
        weights = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in call.module.parameters())
        # Of frozen modules, and of those behind them, the backward is shorter or there is none.
        differentiated = len(call.reads), len(call.gives)
        kind = (type_before_parametrizations(call.module), call.module.extra_repr(), call.module.training)
        parts.append((kind, call.shapes, weights, differentiated))
    return tuple(parts)
