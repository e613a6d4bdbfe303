"""The fastest choice of states for the segments of a chain, within budgets of device and host memory.

Dynamic programming over the segments. After each one a partial choice is described by four numbers: bytes kept so far,
highest point so far, bytes sent so far, seconds so far. A partial choice that is no better than another one in any of
them cannot become better later and is dropped; so is one that cannot fit, or cannot be completed in less time than a
plan that is known already (see `bounds`). Nothing is rounded, so no budget is exceeded.

First only the most promising partial choices are followed, which gives a good plan quickly; then all that may still be
faster than that. If these become too many, the most promising are followed again, and whether something faster might
have been among the others is known: `Solution.is_exact`.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fleetx.planner.bounds import Bound, bound
from fleetx.planner.chain import Chain, evaluate
from fleetx.planner.states import Ints, States, rest_of

Steps = list[tuple[Ints, Ints]]  # per segment: option and previous state of each state

WIDTHS = (120, 800)  # partial choices that are followed, in the first and in the second search
_CELLS = 12
_EQUAL = 1e-9  # relative: such differences in time are rounding


class Solution(NamedTuple):
    """One choice: an option's number for each segment, and what that costs."""

    choice: tuple[int, ...]
    peak: int
    host_bytes: int
    seconds: float
    at_least: float  # seconds that every choice within the budgets takes

    @property
    def is_exact(self) -> bool:
        """Whether nothing faster fits; else there may be something a little faster."""
        return self.seconds <= self.at_least * (1 + _EQUAL)


def solve(
    chain: Chain,
    memory: int,
    host_memory: int | None = None,
    *,
    faster_than: float = np.inf,
    widths: tuple[int, ...] = WIDTHS,
) -> Solution | None:
    """The fastest choice within so many bytes, or None if there is none, or none that is `faster_than` so many seconds.

    `widths`: how many partial choices each search follows.
    """
    if not _may_fit(chain, memory):
        return None
    if not chain.stages:
        return _solution(chain, (), np.inf)  # the only one there is
    limits = bound(chain, memory, host_memory)
    if _common_seconds(chain) + limits.least >= faster_than:
        return None
    found, at_least = None, 0.0
    for width in widths:
        better, bounded = _search(chain, limits, width, faster_than if found is None else found.seconds)
        found, at_least = better or found, max(at_least, bounded)
        if found is None and faster_than == np.inf:
            found = _most_frugal(chain, limits)
        if found is None and at_least >= faster_than:
            break
        if found is None:
            continue  # among what this width left out there may be one
        found = found._replace(at_least=min(at_least, found.seconds))
        if found.is_exact:
            break
    return found


def least_memory(chain: Chain, host_memory: int | None = None) -> int | None:
    """The fewest bytes for which there is a choice; None if the host has too little for any."""
    if not chain.stages:
        return evaluate(chain, ()).peak
    everything = sum(max(option.kept for option in stage.options) for stage in chain.stages)
    highest = max(max(o.forward_bytes, o.backward_bytes) + o.sent for s in chain.stages for o in s.options)
    others = chain.fixed_bytes + chain.tail_bytes + chain.update_bytes + chain.gradients_from[0]
    plenty = 2 * (others + everything + highest)
    found = _most_frugal(chain, bound(chain, plenty, host_memory))
    return None if found is None else found.peak


def _most_frugal(chain: Chain, limits: Bound, width: int = 300) -> Solution | None:
    """The choice that needs the least memory, if it fits."""

    def followed(states: States, _segment: int, rest: int) -> States:
        # All are equally fast, so that only bytes count.
        states = states._replace(seconds=np.zeros(states.size)).without_worse(rest)
        order = np.lexsort((states.host, np.maximum(states.kept, states.peak)))
        return states if states.size <= width else states.pick(_chosen(states, order, width))

    states, steps = _run(chain, followed)
    ended = _ended(chain, states, limits)
    return _solution(chain, _choice(int(ended[0]), steps), 0.0) if len(ended) else None


def least_seconds(chain: Chain, memory: int, host_memory: int | None = None) -> float:
    """A bound that no choice within these bytes is faster than, quickly found; infinite if nothing fits for sure."""
    if not _may_fit(chain, memory):
        return np.inf
    least = bound(chain, memory, host_memory, roughly=True).least if chain.stages else 0.0
    return _common_seconds(chain) + max(0.0, least)


def _search(chain: Chain, limits: Bound, width: int, most: float) -> tuple[Solution | None, float]:
    """The fastest among the most promising choices, as far as they take at most so many seconds.

    And how long every choice takes at least, or all that are no faster than `most`.
    """
    common = _common_seconds(chain)
    beam = _Beam(limits, width, (most - common) * (1 + _EQUAL))
    states, steps = _run(chain, beam.followed)
    ended = _ended(chain, states, limits)
    if not len(ended):
        return None, min(common + beam.left_out, most)
    found = _solution(chain, tidy(chain, _choice(int(ended[0]), steps)), 0.0)
    return found, min(common + beam.left_out, found.seconds)


def _run(chain: Chain, followed: Callable[[States, int, int], States]) -> tuple[States, Steps]:
    """Segment by segment; `followed` says which partial choices are worth it."""
    states, steps = States.first(), []
    rest = rest_of(chain)
    for i, stage in enumerate(chain.stages):
        late = chain.gradients_from[i]
        grown = [states.extended(option, n, chain.bandwidth, late) for n, option in enumerate(stage.options)]
        states = followed(States.joined(grown).with_what_must_come(rest[i + 1]), i + 1, rest[i + 1])
        steps.append((states.option, states.previous))
    return states, steps


class _Beam:
    """Follows what is most promising."""

    def __init__(self, limits: Bound, width: int, most: float) -> None:
        self.limits = limits
        self.width = width
        self.most = most  # seconds
        self.left_out = np.inf  # the best promise that was not followed

    def followed(self, states: States, segment: int, rest: int) -> States:
        """Those worth following."""
        states = states.pick(self.limits.priced(states, segment) <= self.most)
        states = self._trimmed(states, segment, 4 * self.width)
        return self._trimmed(states.without_worse(rest), segment, self.width)

    def _trimmed(self, states: States, segment: int, width: int) -> States:
        if states.size <= width:
            return states
        priced = self.limits.priced(states, segment)
        order = np.argsort(priced, kind="stable")
        chosen = _chosen(states, order, width)
        others = np.ones(states.size, bool)
        others[chosen] = False
        self.left_out = min(self.left_out, float(priced[others].min(initial=np.inf)))
        return states.pick(chosen)


def _chosen(states: States, order: Ints, width: int) -> Ints:
    """The most promising ones; and, since promises may be broken, some of each kind: little memory, little sent."""
    need = np.maximum(states.kept, states.peak)[order]
    cells = _cells(need) * _CELLS + _cells(states.host[order])
    _, best = np.unique(cells, return_index=True)  # the first of each cell is its most promising
    careful = np.argsort(need, kind="stable")[: width // 10]
    return np.unique(np.concatenate([order[:width], order[best], order[careful]]))


def _cells(values: Ints) -> Ints:
    low, high = int(values.min()), int(values.max())
    return (values - low) * _CELLS // (high - low + 1)


def _ended(chain: Chain, states: States, limits: Bound) -> Ints:
    """The states after the last segment that fit with the tail too, the fastest first."""
    highest = np.maximum(states.peak, states.kept + states.sent + chain.tail_bytes + chain.gradients_from[-1])
    fits = (highest <= limits.memory) & (states.host <= limits.host_memory)
    fits &= states.sent <= chain.bandwidth * chain.tail_backward_seconds
    found = np.flatnonzero(fits)
    return found[np.lexsort((states.host[found], highest[found], states.seconds[found]))]


def _choice(state: int, steps: Steps) -> tuple[int, ...]:
    options = []
    for option, previous in reversed(steps):
        options.append(int(option[state]))
        state = int(previous[state])
    return tuple(reversed(options))


def _may_fit(chain: Chain, memory: int) -> bool:
    return max(rest_of(chain)[0], chain.update_bytes + chain.gradients_from[0]) + chain.fixed_bytes <= memory


def _common_seconds(chain: Chain) -> float:
    return sum(chain.forward_seconds()) + chain.tail_backward_seconds


def _solution(chain: Chain, choice: tuple[int, ...], at_least: float) -> Solution:
    cost = evaluate(chain, choice)
    return Solution(choice, cost.peak, cost.host_bytes, cost.seconds, min(at_least, cost.seconds))


def tidy(chain: Chain, choice: tuple[int, ...]) -> tuple[int, ...]:
    """The same number of each option among equal segments, those that keep least first, if that is no worse.

    Equally good choices are many; this is the one that people can read.
    """
    places: dict[object, list[int]] = {}
    for i, stage in enumerate(chain.stages):
        places.setdefault((stage.forward_seconds, stage.options), []).append(i)
    sorted_choice = list(choice)
    for alike in places.values():
        options = chain.stages[alike[0]].options
        numbers = sorted((choice[i] for i in alike), key=lambda number: (options[number].kept, number))
        for i, number in zip(alike, numbers, strict=True):
            sorted_choice[i] = number
    before, after = evaluate(chain, choice), evaluate(chain, sorted_choice)
    is_as_good = not after.waits and after.peak <= before.peak and after.host_bytes <= before.host_bytes
    return tuple(sorted_choice) if is_as_good else choice
