"""The fastest states for the segments of a chain, within budgets of device and host memory.

1. **Walks.** A byte kept gets a price in seconds. The cheapest choice is then a shortest walk from segment to segment
   over their states, for what one costs depends on its neighbours only. Walks at many prices are found at once. None
   of them exceeds a budget: a walk carries the bytes that it keeps so far, and leaves room for the least to come.
2. **Fill.** Where a walk leaves room, single segments get faster states, those that gain most first.
3. **Exchange.** One segment gets a faster state and another one a smaller, as long as that gains.

The result is not always the fastest choice. `tests/planner/test_solver.py` states how far off it may be.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetx.planner.chain import Chain, Costs, evaluate, evaluate_all, evaluate_exchanges

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_PRICES = 16  # of a byte on the device, that are tried at once
_HOST_PRICES = (0.0, 0.3, 0.6, 0.8, 0.9, 0.97)  # of a byte on the host, as parts of that
_BUDGETS = 31  # that are tried at once, when looking for the least memory
_IMPROVED = 3  # walks of which better choices are made
_FIRST_EXCHANGES = 24
_ROUNDING = 1e-9  # relative: smaller differences in time are none


class Solution(NamedTuple):
    """A choice: an option's number for each segment, and what that costs."""

    choice: tuple[int, ...]
    peak: int
    host_bytes: int
    seconds: float


def solve(chain: Chain, memory: int, host_memory: int | None = None) -> Solution | None:
    """A fast choice within so many bytes; None if none is found, which means that there is none or hardly any."""
    if not chain.stages:
        cost = evaluate(chain, ())
        return None if cost.peak > memory else Solution((), cost.peak, 0, cost.seconds)
    if chain.fixed_bytes + chain.update_bytes + chain.gradients_from[0] > memory:
        return None
    walks = _Walks(chain, host_memory)
    found = walks.within(memory - chain.fixed_bytes)
    if not len(found):
        return None
    limits = float(memory), np.inf if host_memory is None else float(host_memory)
    seconds = evaluate_all(chain, found).seconds
    fastest = found[int(seconds.argmin())]
    if not walks.is_quickest(fastest):
        filled = [_filled(chain, found[i], limits) for i in np.argsort(seconds, kind="stable")[:_IMPROVED]]
        fastest = _exchanged(chain, filled[int(evaluate_all(chain, np.stack(filled)).seconds.argmin())], limits)
    choice = tidy(chain, tuple(fastest.tolist()))
    cost = evaluate(chain, choice)
    return Solution(choice, cost.peak, cost.host_bytes, cost.seconds)


def least_memory(chain: Chain, host_memory: int | None = None) -> int | None:
    """The fewest bytes for which `solve` finds a choice; None if no amount is enough.

    With a limit for the host a little less may be enough.
    """
    around = chain.update_bytes + chain.gradients_from[0]
    if not chain.stages:
        return evaluate(chain, ()).peak
    walks = _Walks(chain, host_memory)
    least = walks.least_memory()
    return None if least is None else chain.fixed_bytes + max(least, around)


def fits(chain: Chain, memory: int, host_memory: int | None = None) -> bool:
    """Whether `solve` finds a choice within so many bytes."""
    if not chain.stages:
        return evaluate(chain, ()).peak <= memory
    if chain.fixed_bytes + chain.update_bytes + chain.gradients_from[0] > memory:
        return False
    return bool(_Walks(chain, host_memory).smallest(np.array([memory - chain.fixed_bytes])).any())


class _Prices(NamedTuple):
    """Of walks, one in each row: seconds for one second, one byte kept by each segment, and one byte on the host."""

    time: Floats
    kept: Floats  # rows × segments
    host: Floats


class _Walks:
    """Shortest walks through the states of a chain."""

    def __init__(self, chain: Chain, host_memory: int | None) -> None:
        table = self._table = chain.table
        self._cap = np.inf if host_memory is None else float(host_memory)
        self._seconds = table.seconds + table.waiting
        # Neighbours, as segments × own states × the following one's: copies must be back in time.
        too_late = table.sent[:-1, :, None] > chain.bandwidth * table.seconds[1:, None, :]
        self._barred = np.where(too_late, np.inf, 0.0)
        self._held = np.minimum(table.holds[:-1, :, None], table.released[1:, None, :])
        self._end = np.where(table.sent[-1] > chain.bandwidth * chain.tail_backward_seconds, np.inf, 0.0)
        self._turn = chain.tail_bytes + chain.gradients_from[-1]
        # Beside what is kept before a segment: the least that the highest point from there on takes.
        self._rest = [self._turn]
        for local, kept in zip(table.local.min(axis=1)[::-1], table.kept.min(axis=1)[::-1], strict=True):
            self._rest.append(max(int(local), int(kept) + self._rest[-1]))
        self._rest.reverse()

    def within(self, room: int) -> Ints:
        """Walks that stay within so many bytes, without the fixed ones: the quickest, or those at many prices."""
        prices = self._prices(np.zeros(1))
        walks, costs = self.shortest(prices, np.full(len(prices.time), room))
        if costs[0] < np.inf and self.is_quickest(walks[0]):
            return walks[:1]
        rates, found = np.concatenate([[0.0], self._rates(), [np.inf]]), []
        while True:
            prices = self._prices(rates)
            walks, costs = self.shortest(prices, np.full(len(prices.time), room))
            found.append(walks[costs < np.inf])
            best = int(np.where(costs < np.inf, self._seconds_of(walks), np.inf).argmin()) * len(rates) // len(costs)
            if len(found) == 2 or not 0 < best < len(rates) - 1:
                return np.unique(np.concatenate(found), axis=0)
            # Once more, with prices around the best one.
            low, high = max(rates[best - 1], rates[best] / 2), min(rates[best + 1], rates[best] * 2)
            rates = np.geomspace(low, high, _PRICES)

    def smallest(self, room: Ints) -> NDArray[np.bool_]:
        """Whether the walk that keeps least stays within each of these rooms."""
        hosts = (0.0,) if self._cap == np.inf else (0.0, *_HOST_PRICES[1:], 2.0)
        rows = len(hosts) * len(room)
        kept = np.ones((rows, len(self._seconds)))
        prices = _Prices(np.zeros(rows), kept, np.repeat(hosts, len(room)))
        _, costs = self.shortest(prices, np.tile(room, len(hosts)))
        return np.minimum.reduce(costs.reshape(len(hosts), -1)) < np.inf

    def least_memory(self) -> int | None:
        """The fewest bytes, without the fixed ones, in which there is room for a walk."""
        table = self._table
        most = table.local.max() + table.sent.max() + self._turn + (table.kept + table.holds).max(axis=1).sum()
        low, high = -1, int(most)  # too little; enough, if anything is
        if not self.smallest(np.array([high]))[0]:
            return None
        while high - low > 1:
            tried = np.unique(np.linspace(low, high, _BUDGETS + 2).astype(np.int64).clip(low + 1, high - 1))
            enough = tried[self.smallest(tried)]
            high = int(enough.min(initial=high))
            low = int(tried[tried < high].max(initial=low))
        return high

    def shortest(self, prices: _Prices, room: Ints) -> tuple[Ints, Floats]:
        """The cheapest walk in each row and its cost, which is infinite where there is no room for any."""
        table, rows, states = self._table, np.arange(len(room))[:, None], np.arange(self._seconds.shape[1])
        room = room[:, None, None]
        cost, came_from = self._own(prices, 0), []
        kept = np.broadcast_to(table.kept[0], cost.shape)
        host = np.broadcast_to(table.sent[0], cost.shape)
        cost = np.where(
            (table.local[0] <= room[:, 0]) & (kept + self._rest[1] <= room[:, 0]) & (host <= self._cap), cost, np.inf
        )
        for i in range(1, len(self._seconds)):
            held = self._held[i - 1]
            grown = kept[:, :, None] + (held + table.kept[i])
            needs = kept[:, :, None] + (table.sent[i - 1][:, None] + table.local[i])
            total = cost[:, :, None] + self._barred[i - 1] + prices.kept[:, i, None, None] * held
            total = np.where(np.maximum(needs, grown + self._rest[i + 1]) > room, np.inf, total)
            if self._cap < np.inf:
                total = np.where(host[:, :, None] + table.sent[i] > self._cap, np.inf, total)
            before = total.argmin(axis=1)
            came_from.append(before)
            cost = total[rows, before, states] + self._own(prices, i)
            kept = grown[rows, before, states]
            host = host[rows, before] + table.sent[i]
        cost = np.where(kept + table.sent[-1] + self._turn <= room[:, 0], cost + self._end, np.inf)
        walk = [cost.argmin(axis=1)]
        for before in reversed(came_from):
            walk.append(before[rows[:, 0], walk[-1]])
        return np.stack(walk[::-1], axis=1), cost.min(axis=1)

    def _own(self, prices: _Prices, i: int) -> Floats:
        own = prices.time[:, None] * self._seconds[i] + prices.kept[:, i, None] * self._table.kept[i]
        return own + prices.host[:, None] * self._table.sent[i]

    def _rates(self) -> Floats:
        """Seconds per byte at which states of a segment can be exchanged: prices between these make a difference."""
        seconds, kept = self._seconds, self._table.kept
        gained = seconds[:, :, None] - seconds[:, None, :]
        given = kept[:, None, :] - kept[:, :, None]
        rates = gained[(given > 0) & (gained > 0)] / given[(given > 0) & (gained > 0)]
        if not rates.size:
            return np.ones(1)
        distinct = np.unique(rates)
        between = np.sqrt(distinct[1:] * distinct[:-1])
        known = np.concatenate([[distinct[0] / 2], between, [distinct[-1] * 2]])
        return known if len(known) <= _PRICES else np.quantile(known, np.linspace(0, 1, _PRICES))

    def _prices(self, rates: Floats) -> _Prices:
        """Rows for all of them, where bytes count before the tail, and where they count before the tightest segment."""
        count = len(self._seconds)
        table = self._table
        before = np.cumsum(table.kept.min(axis=1)) - table.kept.min(axis=1)
        tightest = int((before + table.local.min(axis=1)).argmax())
        rows = []
        for rate in rates:
            for pivot in {count, tightest}:
                for part in _HOST_PRICES if self._cap < np.inf else (0.0,):
                    time = 0.0 if rate == np.inf else 1.0
                    price = 1.0 if rate == np.inf else rate
                    rows.append((time, np.where(np.arange(count) < pivot, price, 0.0), part * price))
        time, kept, host = zip(*rows, strict=True)
        return _Prices(np.array(time), np.stack(kept), np.array(host))

    def is_quickest(self, walk: Ints) -> bool:
        """Whether no choice is faster, however much memory there is."""
        return bool(self._seconds_of(walk[None])[0] <= self._seconds.min(axis=1).sum() * (1 + _ROUNDING))

    def _seconds_of(self, walks: Ints) -> Floats:
        return self._seconds[np.arange(len(self._seconds)), walks].sum(axis=1)


def _filled(chain: Chain, choice: Ints, limits: tuple[float, float]) -> Ints:
    """The same choice, one segment after the other made faster as long as there is room, what gains most first."""
    choice = choice.copy()
    for _ in range(2 * len(choice)):
        costs = evaluate_exchanges(chain, choice)
        seconds = np.where(_is_allowed(costs, limits), costs.seconds, np.inf)
        segment, option = np.unravel_index(int(seconds.argmin()), seconds.shape)
        if seconds[segment, option] >= costs.seconds[0, choice[0]] * (1 - _ROUNDING):
            break
        choice[segment] = option
    return choice


def _exchanged(chain: Chain, choice: Ints, limits: tuple[float, float]) -> Ints:
    """The same choice, as long as two exchanges at once make it faster: one gains time, the other gives it room."""
    for _ in choice:
        costs = evaluate_exchanges(chain, choice)
        now = float(costs.seconds[0, choice[0]])
        limit = now * (1 - _ROUNDING)
        gaining = np.flatnonzero(((costs.seconds < limit) & ~costs.waits).ravel())
        # Of those that do the same in equal segments one is enough.
        alike = np.stack([costs.seconds.ravel()[gaining], costs.peak.ravel()[gaining]])
        gaining = gaining[np.unique(alike, axis=1, return_index=True)[1]] if len(gaining) else gaining
        best = limit, choice
        for first in gaining[np.argsort(costs.seconds.ravel()[gaining])][:_FIRST_EXCHANGES]:
            tried = choice.copy()
            tried[first // costs.seconds.shape[1]] = first % costs.seconds.shape[1]
            both = evaluate_exchanges(chain, tried)
            seconds = np.where(_is_allowed(both, limits), both.seconds, np.inf)
            segment, option = np.unravel_index(int(seconds.argmin()), seconds.shape)
            if seconds[segment, option] < best[0]:
                tried[segment] = option
                best = float(seconds[segment, option]), tried
        if best[1] is choice:
            break
        choice = _filled(chain, best[1], limits)
    return choice


def _is_allowed(costs: Costs, limits: tuple[float, float]) -> NDArray[np.bool_]:
    return (costs.peak <= limits[0]) & (costs.host <= limits[1]) & ~costs.waits


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
