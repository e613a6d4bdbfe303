"""Times rivals in turns, so that a machine that slows down slows all of them."""

import statistics
import time
from collections.abc import Callable, Mapping

Rivals = Mapping[str, Callable[[], object]]


def interleaved(rivals: Rivals, *, rounds: int, calls: int, warmup: int = 3) -> dict[str, list[float]]:
    """Seconds per call of each rival: one figure per round, the mean of `calls` calls; rounds take turns."""
    for run in rivals.values():
        for _ in range(warmup):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for number in range(rounds):
        # Who goes first changes, so that nobody always runs on a machine warmed by the same rival.
        names = list(rivals)
        for name in names if number % 2 == 0 else reversed(names):
            began = time.perf_counter()
            for _ in range(calls):
                rivals[name]()
            seconds[name].append((time.perf_counter() - began) / calls)
    return seconds


def ratio(seconds: Mapping[str, list[float]], ours: str, peer: str) -> float:
    """How many times as fast as the peer, by the medians over all rounds."""
    return statistics.median(seconds[peer]) / statistics.median(seconds[ours])
