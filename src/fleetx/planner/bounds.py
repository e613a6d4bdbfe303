"""A lower bound on the time of every way to complete a partial choice: what cannot beat a known plan is not followed.

Lagrange's trick: memory and host memory get a price per byte. With the prices a choice is the cheapest walk through the
segments, for what one costs depends on its neighbours only; and whatever the prices are, no completion within the
budgets is faster than that walk less the price of the budgets. At the best prices such walks are almost plans, too.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fleetx.planner.chain import Chain, evaluate_all
from fleetx.planner.states import Floats, Ints, Mask, States


@dataclass(frozen=True)
class Bound:
    """What the rest of a chain takes at least, within budgets."""

    memory: int  # without what is fixed
    host_memory: float
    pivot: int  # bytes that are there while this segment runs, or the tail, have a price
    most: float  # of these
    kept_price: float
    host_price: float
    rest: Floats  # for each segment and option: at these prices, the least of all that follow
    quickest: Floats  # the same if bytes cost nothing
    least: float  # seconds of options that every choice takes
    hints: Ints  # the cheapest choices at prices around these: some of them may fit

    def priced(self, states: States, next_segment: int) -> Floats:
        """The seconds that completions of these partial choices take at least; infinite if none fits."""
        last = next_segment - 1
        seconds = states.seconds + self.rest[last][states.option]
        if self.host_price:
            seconds += self.host_price * (states.host - self.host_memory)
        if next_segment <= self.pivot:
            there = states.kept + states.sent if next_segment == self.pivot else states.kept
            seconds += self.kept_price * (there - self.most)
        # Where there are bytes to spare, prices promise too much.
        seconds = np.maximum(seconds, states.seconds + self.quickest[last][states.option])
        return np.where(self._fits(states), seconds, np.inf)

    def _fits(self, states: States) -> Mask:
        return (states.peak <= self.memory) & (states.host <= self.host_memory)


class _Prices(NamedTuple):
    """Of a byte on the device and of one on the host; several of each, to be tried at once."""

    kept: Floats
    host: Floats


_NOTHING = _Prices(np.zeros(1), np.zeros(1))
_UNEVEN = 0.005  # part of the time
_DEARER = np.array([1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0, 16.0, 256.0])  # times the best price


def bound(chain: Chain, memory: int, host_memory: int | None) -> Bound:
    """The best bound that is quickly found, for plans within `memory` and `host_memory` bytes."""
    available = memory - chain.fixed_bytes
    cap = np.inf if host_memory is None else float(host_memory)
    rough = [(rough_bound(walks.seconds, walks.there, walks.most), walks) for walks in _all_walks(chain, available)]
    (_, price), walks = max(rough, key=lambda one: one[0][0])
    prices, rest = _NOTHING, walks.rest(_NOTHING)
    quickest, hints = rest[:, 0], walks.choices(prices, rest)
    least = float(walks.values(prices, rest, cap)[0])
    costs = evaluate_all(chain, hints)
    if least < np.inf and (costs.peak[0] > memory or costs.host[0] > cap):
        prices, rest = walks.best_prices(price, np.inf)
        hints = walks.choices(prices, rest)
        if (evaluate_all(chain, hints).host > cap).any():
            prices, rest = walks.best_prices(price, cap)
            hints = np.concatenate([hints, walks.choices(prices, rest)])
    values = walks.values(prices, rest, cap)
    best = int(values.argmax())
    if prices is not _NOTHING:
        dearer = _dearer(float(prices.kept[best]), float(prices.host[best]))
        uneven = walks.uneven()
        hints = np.concatenate(
            [hints, walks.choices(dearer, walks.rest(dearer)), uneven.choices(prices, uneven.rest(prices))]
        )
    return Bound(
        memory=available,
        host_memory=cap,
        pivot=walks.pivot,
        most=walks.most,
        kept_price=float(prices.kept[best]),
        host_price=float(prices.host[best]),
        rest=rest[:, best],
        quickest=quickest,
        least=max(least, float(values[best])),
        hints=np.unique(np.minimum(hints, [len(stage.options) - 1 for stage in chain.stages]), axis=0),
    )


def rough_bound(seconds: Floats, kept: Floats, most: float) -> tuple[float, float]:
    """The least that segments take of which each chooses for itself, if all keep at most so much; and a byte's price.

    From tables of segments × options; infinite if they cannot keep so little.
    """
    quickest = float(seconds.min(axis=1).sum())
    if np.take_along_axis(kept, seconds.argmin(axis=1)[:, None], axis=1).sum() <= most:
        return quickest, 0.0
    if quickest == np.inf or np.where(seconds < np.inf, kept, np.inf).min(axis=1).sum() > most:
        return np.inf, 0.0

    def values(prices: _Prices) -> Floats:
        price = prices.kept
        return (seconds + price[:, None, None] * kept).min(axis=2).sum(axis=1) - price * most

    prices = _highest(values, _price_range(seconds, kept), None, points=24, rounds=2)
    found = values(prices)
    best = int(found.argmax())
    return max(quickest, float(found[best])), float(prices.kept[best])


def rough_bound_with_cap(seconds: Floats, kept: Floats, most: float, sent: Floats, cap: float) -> float:
    """The same if these may also send no more than the host has room for."""
    least, price = rough_bound(seconds, kept, most)
    if least == np.inf or cap == np.inf:
        return least
    chosen = (seconds + price * kept).argmin(axis=1)[:, None]
    if np.take_along_axis(sent, chosen, axis=1).sum() <= cap:
        return least

    def values(prices: _Prices) -> Floats:
        costs = seconds + prices.kept[:, None, None] * kept + prices.host[:, None, None] * sent
        return costs.min(axis=2).sum(axis=1) - prices.kept * most - prices.host * cap

    low, high = _price_range(seconds, kept)
    prices = _highest(values, (low / 1000, high), (low / 8, high * 8), points=8, rounds=4)
    return max(least, float(values(prices).max()))


def _all_walks(chain: Chain, available: int) -> "list[_Walks]":
    """For each segment, or the tail, at which memory is probably tightest; the most probable first."""
    table = chain.table
    before = np.cumsum(table.kept.min(axis=1)) - table.kept.min(axis=1)
    tightest = int((before + table.local.min(axis=1)).argmax())
    count = len(chain.stages)
    return [_Walks(chain, pivot, available) for pivot in sorted({count, count - 1, tightest}, reverse=True)]


class _Walks:
    """All choices, as walks from segment to segment whose cost is added up.

    Left out is what memory forbids, but for the bytes at the pivot and on the host: these have prices.
    """

    def __init__(self, chain: Chain, pivot: int, available: int) -> None:
        table, count = chain.table, len(chain.stages)
        self.pivot = pivot
        others = 0 if pivot < count else chain.tail_bytes + chain.gradients_from[-1]
        self.most = float(available - others)
        before = np.cumsum(table.kept.min(axis=1)) - table.kept.min(axis=1)
        fits = before[:, None] + table.local <= available
        self.seconds = np.where(fits, table.seconds + table.waiting, np.inf)
        self.there = table.kept.astype(np.float64)
        if pivot:
            self.there[pivot - 1] += table.sent[pivot - 1]
        if pivot < count:
            self.there[pivot] = table.local[pivot]
            self.there[pivot + 1 :] = 0.0
        self.sent = table.sent.astype(np.float64)
        # Neighbours, as segments × the following one's options × the own ones.
        too_late = table.sent[:-1, None, :] > chain.bandwidth * table.seconds[1:, :, None]
        too_much = table.sent[:-1, None, :] + (before[1:, None] + table.local[1:])[:, :, None] > available
        self._barred = np.where(too_late | too_much, np.inf, 0.0)
        held = np.minimum(table.holds[:-1, None, :], table.released[1:, :, None]).astype(np.float64)
        held[max(0, pivot - 1) :] = 0.0
        self._held = held if held.any() else None
        self._end = np.where(table.sent[-1] > chain.bandwidth * chain.tail_backward_seconds, np.inf, 0.0)

    def uneven(self) -> "_Walks":
        """The same, with times that differ a little: or else segments that are alike all do the same at any price."""
        made = copy(self)
        noise = np.random.default_rng(0).uniform(-_UNEVEN, _UNEVEN, self.seconds.shape)
        made.seconds = self.seconds * (1 + noise)
        return made

    def rest(self, prices: _Prices) -> Floats:
        """The least cost of all that follow: for each segment, each of the prices and each of its options."""
        count, options = self.seconds.shape
        own, between = self._own(prices), self._between(prices)
        rest = np.empty((count, len(prices.kept), options))
        rest[-1] = self._end
        for i in range(count - 2, -1, -1):
            rest[i] = np.minimum.reduce(between[i] + (own[i + 1] + rest[i + 1]).T[:, :, None], axis=0)
        return rest

    def choices(self, prices: _Prices, rest: Floats) -> Ints:
        """The cheapest walk at each of the prices."""
        own, between = self._own(prices), self._between(prices)
        each = np.arange(len(prices.kept))
        now = (own[0] + rest[0]).argmin(axis=1)
        found = [now]
        at = each if between.shape[2] > 1 else np.zeros_like(each)
        for i in range(len(rest) - 1):
            now = (between[i][:, at, now].T + own[i + 1] + rest[i + 1]).argmin(axis=1)
            found.append(now)
        return np.stack(found, axis=1)

    def values(self, prices: _Prices, rest: Floats, cap: float) -> Floats:
        """The seconds that every choice takes, by each of the prices."""
        spent = prices.kept * self.most + (prices.host * cap if cap < np.inf else 0.0)
        return (self._own(prices)[0] + rest[0]).min(axis=1) - spent

    def best_prices(self, price: float, cap: float) -> tuple[_Prices, Floats]:
        """Prices around those at which the bound is highest, and the rest by them.

        `price`: of a byte on the device, roughly. Bytes on the host have one only if there is a cap.
        """

        simpler = copy(self)  # about as good for this, and faster
        simpler._held = None

        def values(prices: _Prices) -> Floats:
            return simpler.values(prices, simpler.rest(prices), cap)

        low, high = (price / 8, price * 8) if price else _price_range(self.seconds, self.there)
        if cap == np.inf:
            prices = _highest(values, (low, high), None, points=16, rounds=3)
        else:
            prices = _highest(values, (low / 1000, high), (low / 8, high * 8), points=6, rounds=6)
        return prices, self.rest(prices)

    def _own(self, prices: _Prices) -> Floats:
        own = self.seconds[:, None] + prices.kept[:, None] * self.there[:, None]
        return own + prices.host[:, None] * self.sent[:, None] if prices.host.any() else own

    def _between(self, prices: _Prices) -> Floats:
        if self._held is None:
            return self._barred[:, :, None]
        return self._barred[:, :, None] + prices.kept[:, None] * self._held[:, :, None]


def _dearer(kept: float, host: float) -> _Prices:
    """Prices at which choices fit that are not only too large at the pivot."""
    if not host:
        return _Prices(kept * _DEARER, 0 * _DEARER)
    same = np.ones_like(_DEARER)
    return _Prices(
        kept * np.concatenate([_DEARER, same, _DEARER]),
        host * np.concatenate([same, _DEARER, _DEARER]),
    )


def _price_range(seconds: Floats, amounts: Floats) -> tuple[float, float]:
    """The least and the most seconds per byte for which two options of a segment can be exchanged."""
    seconds = np.where(seconds < np.inf, seconds, np.nan)
    gained, given = seconds[:, :, None] - seconds[:, None, :], amounts[:, None, :] - amounts[:, :, None]
    rates = gained[(given > 0) & (gained > 0)] / given[(given > 0) & (gained > 0)]
    return (float(rates.min()) / 2, float(rates.max()) * 2) if rates.size else (1e-12, 1.0)


def _highest(
    values: Callable[[_Prices], Floats],
    more: tuple[float, float],
    host: tuple[float, float] | None,
    points: int,
    rounds: int,
) -> _Prices:
    """Prices around the best ones: grids, each finer than the one before and around its best point.

    `more` is what a byte on the device costs more than one on the host: often they cost almost the same.
    """
    for left in reversed(range(rounds)):
        axes = [np.geomspace(*more, points), np.zeros(1) if host is None else np.geomspace(*host, points)]
        all_more, all_host = (axis.ravel() for axis in np.meshgrid(*axes, indexing="ij"))
        prices = _Prices(all_more + all_host, all_host)
        if not left:
            break
        best_more, best_host = np.unravel_index(int(values(prices).argmax()), (points, len(axes[1])))
        more = _around(axes[0], int(best_more))
        host = None if host is None else _around(axes[1], int(best_host))
    return prices


def _around(axis: Floats, best: int) -> tuple[float, float]:
    """From the neighbour below to the one above; far beyond the end, if the best is there."""
    low = axis[best - 1] if best else axis[0] / 100
    high = axis[best + 1] if best + 1 < len(axis) else axis[-1] * 100
    return float(low), float(high)
