"""The loop over micro-batch × merge around the solver: the fastest ways to train with one profile. Pure; no device."""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from fleetx.notices import shown
from fleetx.planner.chain import Chain, State, equally_many, evaluate
from fleetx.planner.costs import Profile
from fleetx.planner.lines import Lines
from fleetx.planner.solver import Floats, Solution, fits, least_memory, solve

MOST_SAMPLES = 2**31  # of an update
_FINER = 1.25  # ratio of neighbouring micro-batches among those that do not divide the global batch
_PRICES = 24  # of a byte, in the estimate of a slicing


class Cut(NamedTuple):
    """How a global batch is sliced: `k_steps` slices, of which some are one sample shorter."""

    micro_batch: int
    k_steps: int
    shorter: int = 0

    @property
    def least(self) -> int:
        """Samples in the shortest slice."""
        return self.micro_batch - (self.shorter > 0)


@dataclass(frozen=True)
class Found:
    """A way to train: a slicing with the best states for it."""

    cut: Cut
    solution: Solution
    seconds: float  # of an update


def check_batch(global_batch: object) -> None:
    """Raise for what is no number of samples, or one that nobody trains with: its slicings could not be listed."""
    rule = f"global_batch must be a number of samples, from 1 to {MOST_SAMPLES:,}"
    remedy = "write for example global_batch=4096, or leave it out for the sample's own size"
    if isinstance(global_batch, bool) or not isinstance(global_batch, int):
        raise TypeError(f"{rule}, got {shown(global_batch)}: {remedy}.")
    if not 1 <= global_batch <= MOST_SAMPLES:
        raise ValueError(f"{rule}, got {shown(global_batch)}: {remedy}.")


def cuts_of(global_batch: int, *, even: bool = False) -> list[Cut]:
    """Ways to slice a global batch: all that are even, and some with slices that differ by one sample.

    No more slices than their size takes.
    """
    small = [d for d in range(1, math.isqrt(global_batch) + 1) if global_batch % d == 0]
    sizes = {*small, *(global_batch // d for d in small)}
    counts = {global_batch // size for size in sizes}
    if not even:
        size = 2.0
        while size < global_batch:
            counts.add(math.ceil(global_batch / size))
            size *= _FINER
    fewest = {math.ceil(global_batch / math.ceil(global_batch / k)) for k in counts}
    return sorted(Cut(math.ceil(global_batch / k), k, -global_batch % k) for k in fewest)


class Estimate:
    """How fast a slicing is at best, before its chain is made, which takes longer.

    Each segment chooses for itself, as if only the bytes that all of them keep mattered, at the best of some prices.
    """

    def __init__(self, profile: Profile) -> None:
        self._bandwidth = profile.bandwidth
        self._without_segments = replace(profile, segments=())
        self._forward = Lines(segment.forward_seconds for segment in profile.segments)
        options = [o for row in equally_many([segment.options for segment in profile.segments]) for o in row]
        self._shape = len(profile.segments), len(options) // max(1, len(profile.segments))
        self._seconds, self._kept = Lines(o.seconds for o in options), Lines(o.kept for o in options)
        self._sent = Lines(o.sent for o in options)
        self._launches = np.array([o.launches for o in options], np.float64).reshape(self._shape)
        self._is_away = np.array([o.state.home == "host" for o in options], bool).reshape(self._shape)

    def least_seconds(self, micro_batch: int, memory: int, *, merged: bool) -> float:
        """A bound that no choice of states is faster than; infinite if nothing fits for sure."""
        around = self._without_segments.chain(micro_batch, merged=merged)
        forward = self._forward.at(micro_batch)
        least = float(forward.sum()) + around.tail_forward_seconds + around.tail_backward_seconds
        if not len(forward):
            return least
        kept = self._kept.at(micro_batch).reshape(self._shape)
        seconds = self._option_seconds(micro_batch, forward, around.tail_forward_seconds)
        most = memory - around.fixed_bytes + 1 - around.tail_bytes - around.gradients_from[-1]  # a byte for rounding
        if np.where(seconds < math.inf, kept, math.inf).min(axis=1).sum() > most:
            return math.inf
        # What all segments could gain at most by what they keep at most is the scale of a byte's price.
        scale = np.where(seconds < math.inf, seconds, 0.0).max() / max(1.0, float(kept.max()))
        prices = np.concatenate([[0.0], scale * np.geomspace(1e-3, 1e3, _PRICES)])
        values = (seconds + prices[:, None, None] * kept).min(axis=2).sum(axis=1) - prices * most
        return least + float(values.max())

    def _option_seconds(self, micro_batch: int, forward: Floats, tail: float) -> Floats:
        """Seconds of each, with what the forward waits for its copy, which may take as long as the next segment."""
        seconds = self._seconds.at(micro_batch).reshape(self._shape)
        seconds = np.maximum(seconds, self._launches - forward[:, None])
        if self._bandwidth <= 0:
            return np.where(self._is_away, math.inf, seconds)
        windows = np.append(forward[1:], tail)
        sent = self._sent.at(micro_batch).reshape(self._shape)
        return seconds + np.maximum(0.0, sent / self._bandwidth - windows[:, None])


class Search:
    """All plans of one profile and global batch."""

    def __init__(self, profile: Profile, global_batch: int, host_memory: int | None, cuts: list[Cut]) -> None:
        self.profile = profile
        self.global_batch = global_batch
        self.host_memory = host_memory
        self.cuts = cuts
        self.merges = cuts != [Cut(global_batch, 1)]
        self.chain = cache(lambda micro_batch: profile.chain(micro_batch, merged=micro_batch < global_batch))
        self._estimate = Estimate(profile)

    def best(self, memory: int, wanted: int = 1, gain: float = 0.0, like: Cut | None = None) -> list[Found]:
        """The fastest plan within a budget, and others until there are as many as wanted; the fastest first.

        With a `gain`, what is not faster by more than this part is not looked for; `like` is a slicing to begin with,
        for the sooner a good plan is known, the sooner others are ruled out.
        """
        usable = self.usable(memory)
        bounds = sorted((self._least_seconds(cut, usable), -cut.micro_batch, cut) for cut in self.cuts)
        found: list[Found] = []
        bounds.sort(key=lambda bound: bound[2] != like)
        for least, _, cut in bounds:
            fastest = min((one.seconds for one in found), default=math.inf) * (1 - gain)
            if least == math.inf or (len(found) >= wanted and least >= fastest):
                continue
            one = self.at(cut, memory)
            if one is not None:
                found.append(one)
        return sorted(found, key=lambda one: (one.seconds, one.cut.k_steps))

    def at(self, cut: Cut, memory: int) -> Found | None:
        """The best states for one slicing; None if none fit."""
        chain = self.chain(cut.micro_batch)
        solution = solve(chain, self.usable(memory), self.host_memory)
        return None if solution is None else Found(cut, solution, self._seconds(cut, chain, solution))

    def states(self, found: Found) -> tuple[State, ...]:
        """What each segment does."""
        stages = self.chain(found.cut.micro_batch).stages
        return tuple(stage.options[n].state for stage, n in zip(stages, found.solution.choice, strict=True))

    def usable(self, memory: int) -> int:
        """What tensors may take of a budget that the allocator is to reserve."""
        return self.profile.reserve.leaves(memory)

    def _seconds(self, cut: Cut, chain: Chain, solution: Solution) -> float:
        longer = (cut.k_steps - cut.shorter) * evaluate(chain, solution.choice).seconds
        if not cut.shorter:
            return longer + self.profile.update_seconds
        shorter = evaluate(self.chain(cut.micro_batch - 1), solution.choice).seconds
        return longer + cut.shorter * shorter + self.profile.update_seconds

    def _least_seconds(self, cut: Cut, usable: int) -> float:
        full = self._estimate.least_seconds(cut.micro_batch, usable, merged=cut.micro_batch < self.global_batch)
        # Time shrinks no faster than samples do: so many whole slices take at most as long.
        return full * (self.global_batch / cut.micro_batch) * (1 - 1e-12) + self.profile.update_seconds

    def least_memory(self) -> int | None:
        """The smallest budget for which there is a plan."""
        least: int | None = None
        for cut in self.cuts:
            chain = self.chain(cut.micro_batch)
            if least is None or fits(chain, least - 1, self.host_memory):
                least = least_memory(chain, self.host_memory)
        return None if least is None else self.profile.reserve.of(least)

    def needed_to_update(self) -> int:
        """The smallest budget in which the optimizer can update the weights."""
        chain = self.chain(self.cuts[0].micro_batch)
        return self.profile.reserve.of(chain.fixed_bytes + chain.update_bytes + chain.gradients_from[0])

    def largest_micro_batch(self, memory: int) -> int:
        """How many samples fit in one forward, at most."""
        low, high = 0, 1
        while high < 2**40 and self._fits(high, memory):
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(middle, memory) else (low, middle)
        return low

    def _fits(self, micro_batch: int, memory: int) -> bool:
        return fits(self.profile.chain(micro_batch, merged=self.merges), self.usable(memory), self.host_memory)
