"""The fastest choice of states for the segments of a chain, within budgets of device and host memory.

Dynamic programming over the segments. After each one a partial choice is described by four numbers: bytes kept so far,
highest point so far, bytes sent so far, seconds so far. A partial choice that is no better than another one in any of
them cannot become better later and is dropped; so is one that cannot fit, or cannot be completed in less time than a
plan that is known already (see `bounds`). Nothing is rounded, so no budget is exceeded.

The prices of the bound give a good plan at once: the cheapest choice at prices just high enough, and then whatever else
fits. Then only the most promising partial choices are followed; then all that may still be faster. If these become too
many, the most promising are followed again, and whether something faster might have been among the others is known:
`Solution.is_exact`.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fleetx.planner.bounds import Bound, bound
from fleetx.planner.chain import Chain, evaluate, evaluate_all
from fleetx.planner.frugal import Frugal
from fleetx.planner.mending import EQUAL, filled, relieved
from fleetx.planner.states import Ints, States, at_the_turn, rest_of

Steps = list[tuple[Ints, Ints]]  # per segment: option and previous state of each state

WIDTHS = (120, 800)  # partial choices that are followed, in the first and in the second search
_NARROW = (20,)  # the same where prices gave no plan, and no search was asked for
_PLENTY = 2**62
_HINTS = 4  # choices that prices gave, of which plans are made
_CELLS = 12


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
        return self.seconds <= self.at_least * (1 + EQUAL)


def solve(
    chain: Chain,
    memory: int,
    host_memory: int | None = None,
    *,
    faster_than: float = np.inf,
    widths: tuple[int, ...] = WIDTHS,
    proof: int | None = None,
) -> Solution | None:
    """The fastest choice within so many bytes; None if there is none, or surely none `faster_than` so many seconds.

    Where that is not sure, a slower one is returned. `widths`: how many partial choices each search follows; without
    any, none is made if prices give a plan. `proof`: so many may be followed at last to prove that nothing is faster;
    where there are more, that is given up at once.
    """
    if not _may_fit(chain, memory):
        return None
    if not chain.stages:
        return _solution(chain, (), np.inf)  # the only one there is
    limits = bound(chain, memory, host_memory)
    at_least = chain.common_seconds + limits.least
    if at_least >= faster_than:
        return None
    found = _by_prices(chain, memory, limits)
    searches = [(width, False) for width in widths or (() if found else _NARROW)]
    for width, or_nothing in [*searches, *([(proof, True)] if proof else [])]:
        if found is not None and found.is_exact:
            break
        most = faster_than if found is None else min(faster_than, found.seconds)
        better, bounded = _search(chain, limits, width, most, or_nothing=or_nothing)
        at_least = max(at_least, bounded)
        if at_least >= faster_than:
            return None
        found = better or found or _most_frugal(chain, host_memory)
        if found is None or found.peak > memory:
            return None
        found = found._replace(at_least=min(at_least, found.seconds))
    return found


def least_memory(chain: Chain, host_memory: int | None = None) -> int | None:
    """The fewest bytes for which there is a choice; None if the host has too little for any."""
    if not chain.stages:
        return evaluate(chain, ()).peak
    found = _most_frugal(chain, host_memory)
    return None if found is None else found.peak


def fits(chain: Chain, memory: int, host_memory: int | None = None) -> bool:
    """Whether there is a choice within so many bytes; sooner known than the least memory."""
    if not _may_fit(chain, memory):
        return False
    if not chain.stages:
        return True
    frugal = Frugal(chain, host_memory).choice(memory - chain.fixed_bytes)
    if frugal is None:
        return False
    if host_memory is None or evaluate(chain, frugal).host_bytes <= host_memory:
        return True
    least = least_memory(chain, host_memory)
    return least is not None and least <= memory


def _most_frugal(chain: Chain, host_memory: int | None) -> Solution | None:
    """The choice that needs the least memory on the device."""
    frugal = Frugal(chain, host_memory)
    least = frugal.least_memory(rest_of(chain)[0])
    choice = None if least is None else frugal.choice(least)
    if choice is None:
        return None
    if host_memory is None or evaluate(chain, choice).host_bytes <= host_memory:
        return _solution(chain, choice, 0.0)
    return _most_frugal_of_many(chain, host_memory)


def _most_frugal_of_many(chain: Chain, host_memory: int, width: int = 300) -> Solution | None:
    """The same where the host has too little for all that the most frugal choice would send."""

    def followed(states: States, _segment: int, rest: int) -> States:
        # All are equally fast, so that only bytes count.
        states = states.pick(states.host <= host_memory)
        states = states._replace(seconds=np.zeros(states.size)).without_worse(rest)
        order = np.lexsort((states.host, np.maximum(states.kept, states.peak)))
        return states if states.size <= width else states.pick(_chosen(states, order, width))

    states, steps = _run(chain, followed)
    ended = _ended(chain, states, _PLENTY, host_memory)
    return _solution(chain, _choice(int(ended[0]), steps), 0.0) if len(ended) else None


def _search(
    chain: Chain, limits: Bound, width: int, most: float, *, or_nothing: bool = False
) -> tuple[Solution | None, float]:
    """The fastest among the most promising choices, as far as they take at most so many seconds.

    And how long every choice takes at least, or all that are no faster than `most`. `or_nothing`: where there are more
    promising ones than can be followed, none is.
    """
    common = chain.common_seconds
    beam = _Beam(limits, width, (most - common) * (1 + EQUAL), or_nothing)
    states, steps = _run(chain, beam.followed)
    ended = _ended(chain, states, limits.memory, limits.host_memory)
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

    def __init__(self, limits: Bound, width: int, most: float, or_nothing: bool) -> None:
        self.limits = limits
        self.width = width
        self.most = most  # seconds
        self.or_nothing = or_nothing
        self.left_out = np.inf  # the best promise that was not followed

    def followed(self, states: States, segment: int, rest: int) -> States:
        """Those worth following."""
        states = states.pick(self.limits.priced(states, segment) <= self.most)
        states = self._trimmed(states, segment, 4 * self.width)
        return self._trimmed(states.without_worse(rest), segment, self.width)

    def _trimmed(self, states: States, segment: int, width: int) -> States:
        if states.size <= width:
            return states
        if self.or_nothing:
            self.left_out = -np.inf
            return states.pick(np.zeros(states.size, bool))
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


def _ended(chain: Chain, states: States, memory: int, host_memory: float) -> Ints:
    """The states after the last segment that fit with the tail too, the fastest first."""
    highest = np.maximum(states.peak, states.kept + states.sent + at_the_turn(chain))
    within = (highest <= memory) & (states.host <= host_memory)
    within &= states.sent <= chain.bandwidth * chain.tail_backward_seconds
    found = np.flatnonzero(within)
    return found[np.lexsort((states.host[found], highest[found], states.seconds[found]))]


def _choice(state: int, steps: Steps) -> tuple[int, ...]:
    options = []
    for option, previous in reversed(steps):
        options.append(int(option[state]))
        state = int(previous[state])
    return tuple(reversed(options))


def _may_fit(chain: Chain, memory: int) -> bool:
    return max(rest_of(chain)[0], chain.update_bytes + chain.gradients_from[0]) + chain.fixed_bytes <= memory


def _solution(chain: Chain, choice: tuple[int, ...], at_least: float) -> Solution:
    cost = evaluate(chain, choice)
    return Solution(choice, cost.peak, cost.host_bytes, cost.seconds, min(at_least, cost.seconds))


def _by_prices(chain: Chain, memory: int, limits: Bound) -> Solution | None:
    """A choice that fits and is about as fast as any: what prices gave, mended where that needs too much or little."""
    costs = evaluate_all(chain, limits.hints)
    lacking = limits.kept_price * np.maximum(0, costs.peak - memory)
    if limits.host_price:
        lacking += limits.host_price * np.maximum(0, costs.host - limits.host_memory)
    likely = np.argsort(costs.seconds + lacking, kind="stable")[:_HINTS]
    budgets = float(memory), limits.host_memory
    fitting = [relieved(chain, hint, budgets) for hint in limits.hints[likely]]
    mended = [filled(chain, choice, budgets) for choice in fitting if choice is not None]
    if not mended:
        return None
    best = mended[int(evaluate_all(chain, np.stack(mended)).seconds.argmin())]
    found = _solution(chain, tidy(chain, tuple(best.tolist())), chain.common_seconds + limits.least)
    return found if found.peak <= memory else None  # rounding, of absurd amounts


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
