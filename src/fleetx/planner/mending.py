"""Choices of states that need too much memory are made to fit; those that leave room are made faster."""

import numpy as np

from fleetx.planner.chain import Chain, Costs, evaluate_exchanges
from fleetx.planner.states import Floats, Ints

Budgets = tuple[float, float]  # bytes on the device and on the host
EQUAL = 1e-9  # relative: such differences in time are rounding
_TINY = 1e-30  # seconds, for chains that take none


def relieved(chain: Chain, choice: Ints, budgets: Budgets) -> Ints | None:
    """The same choice, one segment after the other made to need less until all fits; None if that does not succeed."""
    choice, rows = choice.copy(), np.arange(len(choice))
    for _ in rows:
        costs = evaluate_exchanges(chain, choice)
        excess = _excess(costs, budgets)
        now = excess[0, choice[0]]
        if not now:
            return choice
        relief = np.where(costs.waits, 0.0, now - excess)
        slower = costs.seconds - costs.seconds[0, choice[0]]
        worth = np.where(relief > 0, relief / np.maximum(slower, EQUAL * costs.seconds + _TINY), 0.0)
        if not worth.any():
            return None
        segment, option = np.unravel_index(int(worth.argmax()), worth.shape)
        choice[segment] = option
    return None


def filled(chain: Chain, choice: Ints, budgets: Budgets) -> Ints:
    """The same choice, one segment after the other made faster as long as there is room, what gains most first."""
    choice, rows = choice.copy(), np.arange(len(choice))
    for _ in rows:
        costs = evaluate_exchanges(chain, choice)
        seconds = np.where((_excess(costs, budgets) > 0) | costs.waits, np.inf, costs.seconds)
        segment, option = np.unravel_index(int(seconds.argmin()), seconds.shape)
        if seconds[segment, option] >= costs.seconds[0, choice[0]] * (1 - EQUAL):
            break
        choice[segment] = option
    return choice


def _excess(costs: Costs, budgets: Budgets) -> Floats:
    """By which part the budgets are exceeded, both together."""
    memory, host_memory = budgets
    on_device = np.maximum(0.0, costs.peak - memory) / max(1.0, memory)
    return on_device + np.maximum(0.0, costs.host - host_memory) / max(1.0, host_memory)
