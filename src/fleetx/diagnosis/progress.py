"""Notices workers that stop making progress, and finds out which of them keeps the others waiting."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fleetx.comm.beats import Beat, Wait
from fleetx.diagnosis.ending import STUCK, Ending
from fleetx.diagnosis.stacks import Stack


class Stall(NamedTuple):
    """For how long a worker has stood still, and the limit that is over."""

    seconds: float
    limit: float
    is_start: bool = False
    is_missed: bool = False  # the others wait for it in fleet.init()

    def __str__(self) -> str:
        if self.is_missed:
            return (
                f"it has not joined the others, who have waited for {self.seconds:.0f} s in fleet.init(), the limit is "
                f"{self.limit:g} s (--start_timeout)"
            )
        step, flag = ("first step", "--start_timeout") if self.is_start else ("step", "--progress_timeout")
        return f"no {step} for {self.seconds:.0f} s, the limit is {self.limit:g} s ({flag})"


class Progress:
    """Remembers when each worker last made a step. A limit of 0 is none.

    `limit` is that of workers that have made a step, `start_limit` that of workers whose first one is due. Others are
    left alone: who reads data before there is a model may take any time, and some scripts never train.
    """

    def __init__(self, limit: float, start_limit: float = 0.0) -> None:
        self.limit, self.start_limit = limit, start_limit
        self._seen: dict[int, tuple[Beat, float]] = {}

    def note(self, beats: Mapping[int, Beat], now: float) -> None:
        """Take in the latest beats."""
        for rank, beat in beats.items():
            if rank not in self._seen or _steps(self._seen[rank][0]) != _steps(beat):
                self._seen[rank] = (beat, now)

    def stalled(self, ranks: Iterable[int], now: float) -> dict[int, Stall]:
        """Those of the workers that have been still for longer than their limit."""
        seen = {rank: self._seen[rank] for rank in ranks if rank in self._seen}
        stalls = {rank: self._stall(beat, now - since) for rank, (beat, since) in seen.items()}
        return {rank: stall for rank, stall in stalls.items() if 0 < stall.limit < stall.seconds}

    def _stall(self, beat: Beat, seconds: float) -> Stall:
        if beat.count:
            return Stall(seconds, self.limit)
        return Stall(seconds, self.start_limit if beat.due else 0.0, is_start=True)


def _steps(beat: Beat) -> tuple[int, bool]:
    return beat.count, beat.due


def culprits(beats: Mapping[int, Beat], stacks: Mapping[int, Stack]) -> list[int]:
    """Who keeps the others waiting: when one worker stands still, soon all of them do.

    Workers note when they wait. Only messages that a script sends by itself are known by the stack.
    """
    ranks = sorted(stacks)
    stopped = [rank for rank in ranks if stacks[rank].stopped]
    if stopped:
        return stopped
    at_work = [rank for rank in ranks if not (beats[rank].wait or stacks[rank].in_message)]
    if at_work:
        ranks = at_work
    least = min(beats[rank].count for rank in ranks)
    return [rank for rank in ranks if beats[rank].count == least]


def misses_the_start(rank: int, beats: Mapping[int, Beat]) -> bool:
    """Whether others are in `fleet.init()`, and this worker has not come that far."""
    joining = [other for other, beat in beats.items() if beat.wait == Wait.TO_JOIN]
    return bool(joining) and rank not in joining and beats[rank].count == 0


def stuck_ending(rank: int, host: str, stall: Stall, stack: Stack, moment: float) -> Ending:
    """The end of a worker that is going to be ended because it stood still."""
    state = "it is stopped (SIGSTOP or a debugger)" if stack.stopped else f"its process is {stack.state or 'unknown'}"
    where = f", in {stack.lines[0]}" if stack.lines else ", and it gave no stack"
    return Ending(
        rank=rank,
        host=host,
        code=STUCK,
        time=moment,
        lines=["its stack, the innermost call first:", *stack.lines] if stack.lines else [],
        stuck=f"{stall}; {state}{where}",
    )
