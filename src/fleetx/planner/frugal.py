"""The least memory for which a chain has a choice of states, where the host has room for all that is sent."""

import numpy as np

from fleetx.planner.chain import Chain
from fleetx.planner.states import Ints, Mask, at_the_turn

_AT_ONCE = 31  # amounts of memory that are tried together


class Frugal:
    """What can be done with little memory, if the host has enough for all that is sent.

    Of all partial choices that end with the same option, the one that keeps least is then the best in every respect.
    """

    def __init__(self, chain: Chain, host_memory: int | None) -> None:
        table = self._table = chain.table
        impossible = table.sent > (np.inf if host_memory is None else host_memory)
        self._local = np.where(impossible, np.inf, table.local)
        # Neighbours, as segments × own options × the following one's.
        too_late = table.sent[:-1, :, None] > chain.bandwidth * table.seconds[1:, None, :]
        held = np.minimum(table.holds[:-1, :, None], table.released[1:, None, :])
        self._between = np.where(too_late, np.inf, held)
        turn = at_the_turn(chain)
        self._end = np.where(table.sent[-1] > chain.bandwidth * chain.tail_backward_seconds, np.inf, turn)
        kept, most = table.kept + table.holds, [table.local.max(), turn]
        self._plenty = int(kept.max(axis=1).sum() + sum(most) + table.sent.max())

    def least_memory(self, at_least: int) -> int | None:
        """The fewest bytes, without the fixed ones; None if no amount is enough."""
        low, high = at_least - 1, max(at_least, self._plenty)  # the one is too little, the other enough if any is
        if not self._ended(np.array([high])).any():
            return None
        while high - low > 1:
            tried = np.unique(np.linspace(low, high, _AT_ONCE + 2).astype(np.int64).clip(low + 1, high - 1))
            enough = tried[self._ended(tried).any(axis=1)]
            high = int(enough.min(initial=high))
            low = int(tried[tried < high].max(initial=low))
        return high

    def choice(self, memory: int) -> tuple[int, ...] | None:
        """One that fits into so many bytes, without the fixed ones; None if there is none."""
        came_from: list[Ints] = []
        ended = self._ended(np.array([memory]), came_from)[0]
        if not ended.any():
            return None
        options = [int(ended.argmax())]
        for previous in reversed(came_from):
            options.append(int(previous[0, options[-1]]))
        return tuple(reversed(options))

    def _ended(self, budgets: Ints, came_from: list[Ints] | None = None) -> Mask:
        """With which last options a choice can be completed within each of the budgets."""
        table, budget = self._table, budgets[:, None, None]
        kept = np.where(self._local[0] <= budgets[:, None], table.kept[0], np.inf)
        for i in range(1, len(self._local)):
            needs = (kept + table.sent[i - 1])[:, :, None] + self._local[i]
            grown = np.where(needs <= budget, kept[:, :, None] + self._between[i - 1], np.inf)
            if came_from is not None:
                came_from.append(grown.argmin(axis=1))
            kept = grown.min(axis=1) + table.kept[i]
        return kept + table.sent[-1] + self._end <= budgets[:, None]
