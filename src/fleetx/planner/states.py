"""Partial choices of a chain, many at once as columns of numbers, and which of them can be forgotten."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetx.planner.chain import Chain, Option

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

_FEW = 500  # so many are compared each with each
_MOST_LEVELS = 16


class States(NamedTuple):
    """Partial choices, one per column."""

    kept: Ints
    peak: Ints
    host: Ints
    seconds: Floats
    option: Ints
    previous: Ints
    sent: Ints  # by the last segment
    holds: Ints  # of the last segment

    @classmethod
    def first(cls) -> "States":
        """Nothing chosen yet."""
        zero = np.zeros(1, np.int64)
        return cls(zero, zero, zero, np.zeros(1), zero, zero, zero, zero)

    @classmethod
    def joined(cls, several: "list[States]") -> "States":
        """All of them."""
        return cls(*(np.concatenate(columns) for columns in zip(*several, strict=True)))

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.kept)

    def pick(self, chosen: Ints | Mask) -> "States":
        """Some of them."""
        columns: list[Any] = [column[chosen] for column in self]
        return States(*columns)

    def extended(self, option: Option, number: int, bandwidth: float, gradients: int = 0) -> "States":
        """Those that can have this option for the next segment, with it: their copies come back in its time.

        `gradients`: bytes that are there in its backward beside.
        """
        previous = np.flatnonzero(self.sent <= bandwidth * option.seconds)
        before = self.pick(previous)
        highest = before.kept + before.sent + max(option.forward_bytes, option.backward_bytes + gradients)
        return States(
            kept=before.kept + option.kept + np.minimum(before.holds, option.released),
            peak=np.maximum(before.peak, highest),
            host=before.host + option.sent,
            seconds=before.seconds + option.seconds + option.waiting,
            option=np.full(len(previous), number, np.int64),
            previous=previous.astype(np.int64),
            sent=np.full(len(previous), option.sent, np.int64),
            holds=np.full(len(previous), option.holds, np.int64),
        )

    def with_what_must_come(self, rest: int) -> "States":
        """A highest point below what must come anyway makes no difference: it is raised to that."""
        return self._replace(peak=np.maximum(self.peak, self.kept + rest))

    def without_worse(self, rest: int) -> "States":
        """Without those that another one beats, or equals, in everything that matters later; sorted by seconds.

        `rest`: beside what is kept so far, the least that the highest point to come takes.
        """
        states = self.with_what_must_come(rest)
        states = states.pick(np.lexsort((states.host, states.kept, states.peak, states.seconds)))
        alive = np.zeros(states.size, bool)
        for sent, holds in sorted(set(zip(states.sent.tolist(), states.holds.tolist(), strict=True))):
            own = (states.sent == sent) & (states.holds == holds)
            # What sends and holds less in the last segment may beat these too.
            less = (states.sent <= sent) & (states.holds <= holds)
            chosen = np.flatnonzero(own | (alive & less))
            alive[chosen] |= own[chosen] & ~beaten(states.pick(chosen), rest)
        return states.pick(alive)


def beaten(states: States, rest: int) -> Mask:
    """Which of these, sorted by seconds, an earlier one beats."""
    found = np.zeros(states.size, bool)
    if states.size > _FEW:
        found = _beaten_by_levels(states, rest)
        found[np.flatnonzero(~found)[_repeated(states.pick(~found))]] = True
    left = np.flatnonzero(~found)
    if len(left) <= _FEW:
        found[left] = _beaten_by_pairs(states.pick(left))
    return found


def _beaten_by_pairs(states: States) -> Mask:
    kept, peak, host = states.kept, states.peak, states.host
    better = (kept[:, None] <= kept) & (peak[:, None] <= peak) & (host[:, None] <= host)
    return np.any(np.triu(better, 1), axis=0)


def _beaten_by_levels(states: States, rest: int) -> Mask:
    """Level by level of host bytes: not all that are beaten, if there are many levels or high points in the past."""
    # Who needs no more for its highest point than the other one keeps anyway beats it in both figures at once.
    need = np.maximum(states.kept, states.peak - rest)
    levels, level = np.unique(states.host, return_inverse=True)
    is_coarse = len(levels) > _MOST_LEVELS
    if is_coarse:
        level = level * _MOST_LEVELS // len(levels)
    found = np.zeros(len(need), bool)
    for number in range(int(level.max()) + 1):
        lower = np.flatnonzero(level <= number)
        here = level[lower] == number
        sure = np.where(here, np.iinfo(np.int64).max, need[lower]) if is_coarse else need[lower]
        least = np.minimum.accumulate(sure)
        found[lower[1:]] |= here[1:] & (least[:-1] <= states.kept[lower[1:]])
    return found


def _repeated(states: States) -> Mask:
    """Which of these an earlier one equals in all but the time."""
    _, first = np.unique(np.stack([states.kept, states.peak, states.host]), axis=1, return_index=True)
    repeated = np.ones(states.size, bool)
    repeated[first] = False
    return repeated


def rest_of(chain: Chain) -> list[int]:
    """For each segment, and the tail: beside what is kept before it, the least that the highest point to come takes."""
    late = chain.gradients_from
    rest = [chain.tail_bytes + late[-1]]
    for stage, gradients in zip(reversed(chain.stages), reversed(late[:-1]), strict=True):
        here = min(max(option.forward_bytes, option.backward_bytes + gradients) for option in stage.options)
        rest.append(max(here, min(option.kept for option in stage.options) + rest[-1]))
    return rest[::-1]


def at_the_turn(chain: Chain) -> int:
    """Bytes while the tail runs, beside those of the segments."""
    return chain.tail_bytes + chain.gradients_from[-1]
