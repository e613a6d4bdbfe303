"""A lower bound on the time of every way to complete a partial choice: what cannot beat a known plan is not followed.

Lagrange's trick: memory and host memory get a price per byte. With the prices every segment chooses for itself, which
is quickly summed up; and whatever the prices are, no completion within the budgets is faster than that sum less the
price of the budgets.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fleetx.planner.chain import Chain, Option
from fleetx.planner.states import Floats, Ints, Mask, States


@dataclass(frozen=True)
class Bound:
    """What the rest of a chain takes at least, within budgets."""

    memory: int  # without what is fixed
    host_memory: float
    pivot: int  # bytes that segments before this one keep have a price
    kept_most: float  # of these
    kept_price: float
    host_most: float
    host_price: float
    rest: Floats  # for each segment: at these prices, the least of all from there on
    quickest: Floats  # for each segment: the seconds of all from there on, if bytes cost nothing
    least: float  # seconds of options that every choice takes

    def priced(self, states: States, next_segment: int) -> Floats:
        """The seconds that completions of these partial choices take at least; infinite if none fits."""
        seconds = states.seconds + self.rest[next_segment] + self.host_price * (states.host - self.host_most)
        if next_segment <= self.pivot:
            seconds = seconds + self.kept_price * (states.kept - self.kept_most)
        # Where there are bytes to spare, prices promise too much.
        seconds = np.maximum(seconds, states.seconds + self.quickest[next_segment])
        return np.where(self._fits(states), seconds, np.inf)

    def _fits(self, states: States) -> Mask:
        return (states.peak <= self.memory) & (states.host <= self.host_memory)


def bound(chain: Chain, memory: int, host_memory: int | None, *, roughly: bool = False) -> Bound:
    """The best bound among a few, for plans within `memory` and `host_memory` bytes; `roughly`: the first of them."""
    available = memory - chain.fixed_bytes
    cap = np.inf if host_memory is None else float(host_memory)
    host_most = min(cap, chain.bandwidth * _longest_backward(chain))
    if roughly:
        return _at(chain, len(chain.stages), available, cap, host_most, host_has_price=False)
    found = [_at(chain, pivot, available, cap, host_most) for pivot in sorted(_pivots(chain))]
    return max(found, key=lambda made: made.least)


def _longest_backward(chain: Chain) -> float:
    """Seconds in which copies can come back, at most."""
    return sum(max(o.seconds for o in stage.options) for stage in chain.stages) + chain.tail_backward_seconds


def _pivots(chain: Chain) -> set[int]:
    """Segments, or the tail, at which memory is probably tightest."""
    kept, needs = 0, []
    for stage in chain.stages:
        needs.append(kept + _least_local(chain, len(needs)))
        kept += min(option.kept for option in stage.options)
    return {len(chain.stages), len(chain.stages) - 1, int(np.argmax(needs))}


def _least_local(chain: Chain, segment: int) -> int:
    late = chain.gradients_from[segment]
    if segment == len(chain.stages):
        return chain.tail_bytes + late
    return min(max(option.forward_bytes, option.backward_bytes + late) for option in chain.stages[segment].options)


class _Kinds(NamedTuple):
    """The distinct segments of a chain, by their options: tables of kinds × options."""

    seconds: Floats
    kept: Floats
    sent: Floats
    counts: Ints
    kind: Ints  # of each segment


def _at(
    chain: Chain, pivot: int, available: int, cap: float, host_most: float, *, host_has_price: bool = True
) -> Bound:
    kinds = _kinds(chain, pivot)
    kept_most = float(available - _least_local(chain, pivot))

    def chosen(kept_price: float, host_price: float) -> tuple[Floats, float, float]:
        """The least of each kind, and how much more than allowed is then kept and sent."""
        priced = kinds.seconds + kept_price * kinds.kept + host_price * kinds.sent
        best = priced.argmin(axis=1)
        rows = np.arange(len(best))
        kept = float(kinds.counts @ kinds.kept[rows, best]) - kept_most
        sent = float(kinds.counts @ kinds.sent[rows, best]) - host_most
        return priced[rows, best], kept, sent

    def best_kept(host_price: float) -> float:
        return _crossing(lambda price: chosen(price, host_price)[1], _dearest(kinds, kinds.kept), 20)

    dearest = _dearest(kinds, kinds.sent) if host_has_price else 0.0
    host_price = _crossing(lambda price: chosen(best_kept(price), price)[2], dearest, 16)
    kept_price = best_kept(host_price)
    least, _, _ = chosen(kept_price, host_price)
    rest, quickest = (_from_each_on(one[kinds.kind]) for one in (least, kinds.seconds.min(axis=1)))
    value = max(float(rest[0]) - kept_price * kept_most - host_price * host_most, float(quickest[0]))
    return Bound(available, cap, pivot, kept_most, kept_price, host_most, host_price, rest, quickest, value)


def _from_each_on(values: Floats) -> Floats:
    """The sums of all that follow, each included; and 0 at the end."""
    return np.append(np.cumsum(values[::-1])[::-1], 0.0)


def _kinds(chain: Chain, pivot: int) -> _Kinds:
    numbers: dict[tuple[tuple[Option, ...], bool], int] = {}
    kind = [numbers.setdefault((stage.options, i < pivot), len(numbers)) for i, stage in enumerate(chain.stages)]
    most = max(len(options) for options, _ in numbers)
    seconds, kept, sent = (np.zeros((len(numbers), most)) for _ in range(3))
    for (options, has_price), row in numbers.items():
        for column in range(most):
            option = options[min(column, len(options) - 1)]
            seconds[row, column] = option.seconds + option.waiting
            kept[row, column] = option.kept if has_price else 0
            sent[row, column] = option.sent
    return _Kinds(seconds, kept, sent, np.bincount(kind), np.array(kind))


def _dearest(kinds: _Kinds, amounts: Floats) -> float:
    """A price at which every segment takes as little as it can."""
    gain = (kinds.seconds.max(axis=1) - kinds.seconds.min(axis=1)).max()
    steps = np.diff(np.sort(amounts, axis=1), axis=1)
    return float(2 * gain / steps[steps > 0].min()) if (steps > 0).any() else 0.0


def _crossing(excess: Callable[[float], float], most: float, rounds: int) -> float:
    """The price from which on there is no excess: there the bound is highest. Found by its order of magnitude."""
    if most == 0.0 or excess(0.0) <= 0:
        return 0.0
    low, high = most * 1e-12, most
    for _ in range(rounds):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high
