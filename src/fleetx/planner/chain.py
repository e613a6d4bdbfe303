"""The model of a step: a chain of segments at one micro-batch size, and what a choice of states costs.

This is the specification that the solver is checked against. Segments 0 … n-1 run one after the other, then the tail
(what follows the last cut: heads, loss), which keeps everything; the backward runs the same way back. For each segment
one option is chosen. With K(i) the bytes that the segments before i keep, the device holds at most

- while segment i runs forward:   fixed + K(i) + forward_bytes(i) + sent(i-1), whose copy may still be leaving;
- while segment i runs backward:  fixed + K(i) + backward_bytes(i) + G(i) + sent(i-1), which is being fetched meanwhile;
- while the tail runs:            fixed + K(n) + tail_bytes + G(n) + sent(n-1);
- while the weights are updated:  fixed + update_bytes + G(0).

G(i) are the gradients of segments i … n-1 and of the tail, if there is one micro-batch: then they come into being one
after the other. Merged gradients are there all the time, and are among what is fixed.

The peak is the largest of these. K(i) is the sum over j < i of kept(j) + min(holds(j-1), released(j)): the input that
segment j sent away stays on the device nevertheless if the segment before holds it as its own output.

The time of a step is the sum of all forwards, of the chosen options' seconds and of the tail's two halves; and of what
the forward waits for copies. What segment i sends must have left when segment i+1 ends, so that the memory of every
step is the same: the forward waits for as long as its copy takes more time than that segment's forward. In the backward
nothing is waited for, because only choices are allowed in which

- fetching fits:    for every i, sent(i)  <=  bandwidth × seconds of option(i+1).

Here segment n is the tail, with its forward seconds and its backward seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fleetx.memory import DEAR_KINDS
from fleetx.memory.states import Home, Save

T = TypeVar("T")


class State(NamedTuple):
    """What is saved of a segment and where: see `fleetx.memory.Segment`."""

    save: Save = "everything"
    home: Home = "device"
    dear: tuple[str, ...] = DEAR_KINDS

    def __str__(self) -> str:
        what = f"dear ({', '.join(self.dear)})" if self.save == "dear" else self.save
        return f"{what} on the {self.home}"


@dataclass(frozen=True)
class Option:
    """One way to treat a segment."""

    state: State
    seconds: float  # of the backward, with what is computed again
    kept: int  # bytes on the device from the segment's forward to its backward
    forward_bytes: int  # while it runs forward, beside what earlier segments keep; its own kept ones included
    backward_bytes: int  # while it runs backward, likewise
    sent: int = 0  # bytes to the host
    holds: int = 0  # bytes of its output that it saves itself, though they are counted in the next segment's `kept`
    released: int = 0  # bytes of its input that go to the host
    waiting: float = 0.0  # seconds that the forward waits until all that was sent has left

    def highest(self, gradients: int) -> int:
        """The most bytes while it runs, beside what earlier segments keep and send: with so many of gradients."""
        return max(self.forward_bytes, self.backward_bytes + gradients)


@dataclass(frozen=True)
class Stage:
    """A segment: what runs until the output of this name is there."""

    name: str
    forward_seconds: float
    options: tuple[Option, ...]


def equally_many(rows: Sequence[Sequence[T]]) -> list[list[T]]:
    """The same rows, the shorter ones with their last entry repeated."""
    most = max((len(row) for row in rows), default=1)
    return [[*row, *[row[-1]] * (most - len(row))] for row in rows]


_MUCH = 2**52  # more bytes than there are anywhere: so many can be added up


class Table(NamedTuple):
    """The options of all segments as numbers, segments × options; a segment that has fewer repeats its last one."""

    seconds: NDArray[np.float64]
    waiting: NDArray[np.float64]
    kept: NDArray[np.int64]
    local: NDArray[np.int64]  # the most beside what earlier segments keep and send
    sent: NDArray[np.int64]
    holds: NDArray[np.int64]
    released: NDArray[np.int64]


@dataclass(frozen=True)
class Chain:
    """A step at one micro-batch size."""

    stages: tuple[Stage, ...]
    fixed: Mapping[str, int] = field(default_factory=dict)  # bytes that are always there, by kind
    tail_bytes: int = 0
    tail_forward_seconds: float = 0.0
    tail_backward_seconds: float = 0.0
    update_bytes: int = 0
    bandwidth: float = 0.0  # bytes per second between device and host, in each direction
    gradients: tuple[int, ...] = ()  # bytes of each segment and of the tail; empty if they are among the fixed ones

    @cached_property
    def gradients_from(self) -> tuple[int, ...]:
        """G(0) … G(n): bytes of all gradients from a segment on."""
        if not self.gradients:
            return (0,) * (len(self.stages) + 1)
        return tuple(accumulate(reversed(self.gradients)))[::-1]

    @cached_property
    def table(self) -> Table:
        """For those who look at all segments at once."""
        late = self.gradients_from  # of the tail, too
        rows = [
            [(o.seconds, o.waiting, o.kept, o.highest(late[i]), o.sent, o.holds, o.released) for o in options]
            for i, options in enumerate(equally_many([stage.options for stage in self.stages]))
        ]
        seconds, waiting, *sizes = np.array(rows, np.float64).transpose(2, 0, 1)
        return Table(seconds, waiting, *(np.minimum(size, _MUCH).astype(np.int64) for size in sizes))

    @cached_property
    def common_seconds(self) -> float:
        """What every choice takes: all forwards, and the tail's backward."""
        return sum(self.forward_seconds()) + self.tail_backward_seconds

    @property
    def fixed_bytes(self) -> int:
        """All bytes that are always there."""
        return sum(self.fixed.values())

    def forward_seconds(self) -> list[float]:
        """Of every segment and, at the end, of the tail."""
        return [*(stage.forward_seconds for stage in self.stages), self.tail_forward_seconds]


class Point(NamedTuple):
    """A part of the step, and the most bytes that the device holds during it."""

    name: str  # of the segment; "tail" and "update" at the turn and at the end
    phase: str  # "forward", "backward" or "update"
    seconds: float
    kept: int
    working: int
    moving: int  # leaving or being fetched
    gradients: int = 0  # that are there so far

    @property
    def bytes(self) -> int:
        """Beside the fixed ones."""
        return self.kept + self.working + self.moving + self.gradients


@dataclass(frozen=True)
class Evaluation:
    """What a choice costs."""

    points: tuple[Point, ...]
    fixed: Mapping[str, int]
    seconds: float
    host_bytes: int
    waits: tuple[str, ...]  # segments whose copies the backward would wait for; must be empty

    @property
    def highest(self) -> Point:
        """The point where the most memory is needed; the first of several."""
        return max(self.points, key=lambda point: point.bytes)

    @property
    def peak(self) -> int:
        """The most bytes on the device."""
        return sum(self.fixed.values()) + self.highest.bytes

    @property
    def peak_by_kind(self) -> dict[str, int]:
        """What the peak is made of."""
        point = self.highest
        working = "update" if point.phase == "update" else "working"
        kinds = {"activations kept": point.kept, working: point.working, "in flight": point.moving}
        return {**self.fixed, "gradients": self.fixed.get("gradients", 0) + point.gradients, **kinds}


def evaluate(chain: Chain, choice: Sequence[int]) -> Evaluation:
    """The cost of choosing option `choice[i]` for segment i: the formulas above, one by one."""
    stages = chain.stages
    chosen = [stage.options[number] for stage, number in zip(stages, choice, strict=True)]
    kept = [0]
    for i, option in enumerate(chosen):
        held = min(chosen[i - 1].holds, option.released) if i else 0
        kept.append(kept[-1] + option.kept + held)
    moving = [0, *(option.sent for option in chosen)]  # beside segment i, of the one before
    late = chain.gradients_from
    forward = [
        Point(
            stage.name,
            "forward",
            stage.forward_seconds + chosen[i].waiting,
            kept[i],
            chosen[i].forward_bytes,
            moving[i],
        )
        for i, stage in enumerate(stages)
    ]
    backward = [
        Point(stage.name, "backward", chosen[i].seconds, kept[i], chosen[i].backward_bytes, moving[i], late[i])
        for i, stage in enumerate(stages)
    ]
    tail_seconds = chain.tail_forward_seconds + chain.tail_backward_seconds
    tail = Point("tail", "forward", tail_seconds, kept[-1], chain.tail_bytes, moving[-1], late[-1])
    update = Point("update", "update", 0.0, 0, chain.update_bytes, 0, late[0])
    return Evaluation(
        points=(*forward, tail, *reversed(backward), update),
        fixed=chain.fixed,
        seconds=sum(chain.forward_seconds()) + sum(o.seconds + o.waiting for o in chosen) + chain.tail_backward_seconds,
        host_bytes=sum(option.sent for option in chosen),
        waits=tuple(_waits(chain, chosen)),
    )


class Costs(NamedTuple):
    """What several choices cost."""

    seconds: NDArray[np.float64]
    peak: NDArray[np.int64]
    host: NDArray[np.int64]
    waits: NDArray[np.bool_]


def evaluate_all(chain: Chain, choices: NDArray[np.int64]) -> Costs:
    """What matters of `evaluate`, for many choices at once, one in each row; there must be segments."""
    table, rows = chain.table, np.arange(len(chain.stages))
    seconds, waiting, own, local, sent, holds, released = (column[rows, choices] for column in table)
    own[:, 1:] += np.minimum(holds[:, :-1], released[:, 1:])
    kept = np.cumsum(own, axis=1)
    local[:, 1:] += kept[:, :-1] + sent[:, :-1]
    turn = kept[:, -1] + sent[:, -1] + chain.tail_bytes + chain.gradients_from[-1]
    highest = np.maximum(local.max(axis=1), turn)
    lasting = np.append(seconds[:, 1:], np.full((len(choices), 1), chain.tail_backward_seconds), axis=1)
    return Costs(
        seconds=chain.common_seconds + (seconds + waiting).sum(axis=1),
        peak=chain.fixed_bytes + np.maximum(highest, chain.update_bytes + chain.gradients_from[0]),
        host=sent.sum(axis=1),
        waits=np.any(sent > chain.bandwidth * lasting, axis=1),
    )


def evaluate_exchanges(chain: Chain, choice: NDArray[np.int64]) -> Costs:
    """What a choice costs if one segment has another option: tables of segments × options, as in `Chain.table`.

    `waits` says whether the backward waits at that segment or at the one before.
    """
    table, rows = chain.table, np.arange(len(choice))
    seconds, waiting, _, local, sent, holds, released = (column[rows, choice] for column in table)
    sent_before, holds_before = np.concatenate([[0], sent[:-1]]), np.concatenate([[0], holds[:-1]])
    released_after = np.concatenate([released[1:], [0]])
    lasting_after = np.concatenate([seconds[1:], [chain.tail_backward_seconds]])
    # What each option keeps itself, and makes the next segment keep.
    keeps = table.kept + np.minimum(holds_before[:, None], table.released)
    makes_keep = np.minimum(table.holds, released_after[:, None])
    kept = np.cumsum(keeps[rows, choice])
    before = np.concatenate([[0], kept[:-1]])
    turn = kept[-1] + sent[-1] + chain.tail_bytes + chain.gradients_from[-1]
    needs = np.concatenate([before + local + sent_before, [turn]])
    lowest = chain.update_bytes + chain.gradients_from[0]
    earlier = np.maximum.accumulate(np.concatenate([[lowest], needs[:-2]]))
    later = np.concatenate([np.maximum.accumulate(needs[:1:-1])[::-1], [-(2**60)]])
    more = keeps - keeps[rows, choice][:, None]
    more_later = more + makes_keep - makes_keep[rows, choice][:, None]
    more_sent = table.sent - sent[:, None]
    own = (before + sent_before)[:, None] + table.local
    following = needs[1:, None] + more + more_sent
    peak = np.maximum(np.maximum(earlier[:, None], own), np.maximum(following, later[:, None] + more_later))
    each = table.seconds + table.waiting
    now = chain.common_seconds + float((seconds + waiting).sum())
    return Costs(
        seconds=now + each - each[rows, choice][:, None],
        peak=chain.fixed_bytes + peak,
        host=sent.sum() + more_sent,
        waits=(table.sent > chain.bandwidth * lasting_after[:, None])
        | (sent_before[:, None] > chain.bandwidth * table.seconds),
    )


def _waits(chain: Chain, chosen: list[Option]) -> list[str]:
    backward = [*(option.seconds for option in chosen), chain.tail_backward_seconds]
    return [stage.name for i, stage in enumerate(chain.stages) if chosen[i].sent > chain.bandwidth * backward[i + 1]]
