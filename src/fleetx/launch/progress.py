"""Notices workers that stop making progress, and finds out which of them keeps the others waiting."""

from collections.abc import Mapping

from fleetx.launch.ending import STUCK, Ending
from fleetx.launch.stacks import Stack


class Progress:
    """Remembers when each worker's count last changed. A worker that has not begun to count is left alone."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._seen: dict[int, tuple[int, float]] = {}

    def note(self, counts: Mapping[int, int], now: float) -> None:
        """Take in the latest counts."""
        for rank, count in counts.items():
            if self._seen.get(rank, (-1, now))[0] != count:
                self._seen[rank] = (count, now)

    def stalled(self, counts: Mapping[int, int], now: float) -> dict[int, float]:
        """The workers that have been still for longer than the limit, and for how long."""
        if self.limit <= 0:
            return {}
        still = {rank: now - self._seen[rank][1] for rank, count in counts.items() if count and rank in self._seen}
        return {rank: seconds for rank, seconds in still.items() if seconds > self.limit}


def culprits(counts: Mapping[int, int], stacks: Mapping[int, Stack]) -> list[int]:
    """Who keeps the others waiting: when one worker stands still, soon all of them do."""
    ranks = sorted(stacks)
    stopped = [rank for rank in ranks if stacks[rank].stopped]
    if stopped:
        return stopped
    at_work = [rank for rank in ranks if not stacks[rank].waits_for_others]
    if at_work:
        ranks = at_work
    least = min(counts[rank] for rank in ranks)
    return [rank for rank in ranks if counts[rank] == least]


def stuck_ending(rank: int, host: str, seconds: float, limit: float, stack: Stack, moment: float) -> Ending:
    """The end of a worker that is going to be ended because it stood still."""
    state = "it is stopped (SIGSTOP or a debugger)" if stack.stopped else f"its process is {stack.state or 'unknown'}"
    where = f", in {stack.lines[0]}" if stack.lines else ", and it gave no stack"
    return Ending(
        rank=rank,
        host=host,
        code=STUCK,
        time=moment,
        lines=["its stack, the innermost call first:", *stack.lines] if stack.lines else [],
        stuck=f"no step for {seconds:.0f} s, the limit is {limit:g} s; {state}{where}",
    )
