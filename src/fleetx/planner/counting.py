"""What each segment takes in each state: bytes on the device and to the host, counted at two micro-batches or four."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fleetx.clock import host_seconds
from fleetx.planner.chain import State
from fleetx.planner.costs import OptionCost, SegmentCost
from fleetx.planner.lines import NOTHING, Line
from fleetx.planner.observing import Bytes, bytes_of
from fleetx.planner.trials import MOST_SAMPLES, Trials, all_worth_moving, steps_before

EVERYTHING = State("everything")
_MOST = 8  # samples in the smaller trial: bytes grow in straight lines
_OUTWEIGH = 2  # times the weights: then the peak is where many samples have it
_LONG = 0.1  # seconds of a forward on a CPU: with more samples measuring would take too long
_WORKING = 1.5  # times what is saved: a guess of what a step takes that keeps everything


class Counted(NamedTuple):
    """A state at one size."""

    here: Bytes
    away: Bytes | None  # with all of it on the host


class Counting:
    """The trials in which bytes are counted.

    `saved` are those that few samples save for the backward, for each of them; `grows` those that one more adds.
    """

    def __init__(self, trials: Trials, saved: float, grows: float, sends: bool) -> None:
        self.trials = trials
        self.saved = saved
        self.grows = grows
        self.sends = sends and len(trials.cuts) > 1
        parameters = trials.feeding.model.parameters()
        self._weights = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
        self.states: list[State] = []  # that could be counted
        self.notes: list[str] = []
        self.is_apart = trials.compile and not trials.on_gpu  # bytes are those of code that is not compiled
        self._tails: dict[State, list[int]] = {}  # bytes of the tail by state, at all sizes

    def sizes(self) -> tuple[int, int]:
        """Two samples and four; on a device with plenty of room more, where what is constant stands out less."""
        size = 2
        while self.trials.on_gpu and size < _MOST and self.trials.agreement.everywhere(self._keeps_all(4 * size)):
            size *= 2
        return size, 2 * size

    def with_many(self, sizes: tuple[int, int]) -> tuple[int, ...]:
        """These sizes, and two larger ones where weights are large beside what a few samples need.

        With few samples the peak of a backward is where gradients of weights come into being; with many somewhere else.
        """
        size = sizes[0]
        everywhere = self.trials.agreement.everywhere
        while everywhere(self._is_light(size) and self._keeps_all(4 * size)) and self._is_quick(size):
            size *= 2
        return sizes if size <= sizes[1] else (*sizes, size, 2 * size)

    def _is_light(self, size: int) -> bool:
        return 4 * size <= MOST_SAMPLES and self.grows * size < _OUTWEIGH * self._weights

    def _is_quick(self, size: int) -> bool:
        """Whether a forward takes no longer than measuring should, on all workers; a GPU is quick."""
        if self.trials.on_gpu:
            return True
        batch, began = self.trials.batch(size), host_seconds()
        with torch.enable_grad():
            self.trials.feeding.loss(batch)
        return self.trials.agreement.everywhere(host_seconds() - began < _LONG)

    def segments(
        self, states: Sequence[State], sizes: Sequence[int], say: Callable[[str], None]
    ) -> tuple[SegmentCost, ...]:
        """All segments with the states that could be counted, as yet without times."""
        found: dict[State, list[Counted]] = {}
        for state in states:
            say(f"counting bytes: {state}")
            counts = self._at_all(state, sizes)
            if counts is not None:
                found[state] = counts
        if not found:
            raise self.trials.no_room(sizes[0])
        self.states = list(found)
        self._tails = {state: [one.here.tail_bytes for one in counts] for state, counts in found.items()}
        costs = [
            SegmentCost(
                name, NOTHING, tuple(o for state, counts in found.items() for o in _options(state, counts, sizes, i))
            )
            for i, name in enumerate(self.trials.cuts)
        ]
        return tuple(costs)

    def tail(self, sizes: Sequence[int]) -> Line:
        """The bytes of the tail, in the state in which it takes most."""
        return Line.bent(sizes, self._most_of_tail())

    def tail_of_many(self, sizes: Sequence[int], many: int, state: State) -> Line:
        """The same, with what the tail takes for far more samples in a state for which there is room.

        A loss that goes through its positions in chunks takes little more for many than for a few.
        """
        few = self._most_of_tail()
        counted = self._bytes(state, many)
        if not self.trials.agreement.everywhere(counted is not None) or counted is None:
            return self.tail(sizes)
        beyond = Line.through(sizes[-2:], [a - b for a, b in zip(few[-2:], self._tails[state][-2:], strict=True)])
        last = counted.tail_bytes + beyond.at(many)
        if len(sizes) > 2:
            return Line.bent((*sizes[:2], sizes[-1], many), (*few[:2], few[-1], last))
        return Line.through((sizes[1], many), (few[1], last))._replace(least=few[0])

    def _most_of_tail(self) -> list[int]:
        return [max(at_all) for at_all in zip(*self._tails.values(), strict=True)]

    def _at_all(self, state: State, sizes: Sequence[int]) -> list[Counted] | None:
        counts: list[Counted] = []
        for size in reversed(sizes):  # what the larger one had on the host serves the smaller one
            counted = self._counted(state, size) if self._may_try(state, size) else None
            if counted is None:
                self.notes.append(
                    f"{state} could not be measured: {size} samples do not fit now: free memory to have it too."
                )
                return None
            counts.insert(0, counted)
        return counts

    def _may_try(self, state: State, size: int) -> bool:
        """Whether there is room; a model without cuts has no other state, and is tried at all events."""
        return state != EVERYTHING or not self.trials.cuts or self.trials.agreement.everywhere(self._keeps_all(size))

    def _keeps_all(self, size: int) -> bool:
        return self.trials.has_room(_WORKING * self.saved * size)

    def _counted(self, state: State, size: int) -> Counted | None:
        """All segments in one state; None if that does not fit.

        After each trial the workers agree on whether it fitted, so that none of them runs a further one alone.
        """
        here = self._bytes(state, size)
        if not self.trials.agreement.everywhere(here is not None) or here is None:
            return None
        if not self.sends:
            return Counted(here, None)
        with all_worth_moving():
            away = self._bytes(state._replace(home="host"), size, here)
        return Counted(here, away if self.trials.agreement.everywhere(away is not None) else None)

    def _bytes(self, state: State, size: int, here: Bytes | None = None) -> Bytes | None:
        trials, batch = self.trials.for_counting(), self.trials.batch(size)
        with trials.watched([state] * len(trials.cuts)) as (watch, applied):
            try:
                for _ in range(steps_before(sends=here is not None, is_compiled=trials.compile)):
                    watch.step(batch)
                if here is not None and applied is not None:
                    watch.sent = lambda: applied.statistics()["bytes_to_host"]
                return bytes_of(trials.metered(watch, batch), len(trials.cuts), state.save, here)
            except torch.OutOfMemoryError:
                return None


def _options(state: State, counts: list[Counted], sizes: Sequence[int], i: int) -> list[OptionCost]:
    """A state of segment i on the device, and on the host."""
    made = [_cost(state, sizes, [one.here for one in counts], i)]
    away = [one.away for one in counts if one.away is not None]
    if len(away) == len(counts) and away[-1].sent[i] > 0:
        made.append(_cost(state._replace(home="host"), sizes, away, i))
    return made


def _cost(state: State, sizes: Sequence[int], counts: list[Bytes], i: int) -> OptionCost:
    def line(values: list[int]) -> Line:
        return Line.bent(sizes, values)

    return OptionCost(
        state,
        NOTHING,
        kept=line([one.kept[i] for one in counts]),
        forward_bytes=line([one.forward_bytes[i] for one in counts]),
        backward_bytes=line([one.backward_bytes[i] for one in counts]),
        sent=line([one.sent[i] for one in counts]),
        holds=line([one.holds[i] for one in counts]),
        released=line([min(one.sent[i], one.entering[i]) for one in counts]),
    )
