"""The loop over micro-batch × merge around the solver: the fastest ways to train with one profile. Pure; no device."""

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from fleetx.planner.chain import Chain, State, evaluate
from fleetx.planner.costs import Profile
from fleetx.planner.solve import WIDTHS, Solution, least_memory, least_seconds, solve

_MANY = 60  # segments, from which on only promising slicings are searched thoroughly
_QUICK, _LONG = (20,), (120, 300)  # widths of searches in long chains: of all slicings, and of the fastest
_WIDE = (120, 3000, 12000)  # and in others, of slicings that may hold something faster
_ROUNDED = 1 + 1e-9
_FINER = 1.25  # ratio of neighbouring micro-batches among those that do not divide the global batch


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


def cuts_of(global_batch: int, *, even: bool = False) -> list[Cut]:
    """Ways to slice a global batch: all that are even, and some with slices that differ by one sample."""
    small = [d for d in range(1, math.isqrt(global_batch) + 1) if global_batch % d == 0]
    sizes = {*small, *(global_batch // d for d in small)}
    counts = {global_batch // size for size in sizes}
    if not even:
        size = 2.0
        while size < global_batch:
            counts.add(math.ceil(global_batch / size))
            size *= _FINER
    cuts = {Cut(math.ceil(global_batch / k), k, -global_batch % k) for k in counts}
    largest: dict[int, Cut] = {}
    for cut in sorted(cuts, key=lambda cut: -cut.k_steps):
        largest[cut.micro_batch] = cut  # of the same micro-batch the fewest slices
    return sorted(largest.values())


class Search:
    """All plans of one profile and global batch."""

    def __init__(self, profile: Profile, global_batch: int, host_memory: int | None, cuts: list[Cut]) -> None:
        self.profile = profile
        self.global_batch = global_batch
        self.host_memory = host_memory
        self.cuts = cuts
        self.is_long = len(profile.segments) > _MANY
        self.merges = cuts != [Cut(global_batch, 1)]
        self.chain = cache(lambda micro_batch: profile.chain(micro_batch, merged=micro_batch < global_batch))

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
            one = self.at(cut, memory, faster_than=fastest if len(found) >= wanted else math.inf)
            if one is not None:
                found.append(one)
        return _sorted(found)

    def thoroughly(self, found: list[Found], memory: int) -> list[Found]:
        """The same slicings, those searched on in which something faster than all these may be left."""
        fastest, improved = found[0].seconds, []
        for number, one in enumerate(found):
            is_open = self.at_least(one) < fastest / _ROUNDED
            if is_open and not (self.is_long and number):
                one = self._improved(one, memory)
                fastest = min(fastest, one.seconds)
            improved.append(one)
        return _sorted(improved)

    def _improved(self, one: Found, memory: int) -> Found:
        better = self.at(one.cut, memory, widths=_LONG if self.is_long else _WIDE)
        if better is None or better.seconds > one.seconds * _ROUNDED:
            return one
        return better

    def at(
        self, cut: Cut, memory: int, faster_than: float = math.inf, widths: tuple[int, ...] | None = None
    ) -> Found | None:
        """The best states for one slicing; None if they do not fit, or would not be faster than so many seconds."""
        chain = self.chain(cut.micro_batch)
        most = (faster_than - self.profile.update_seconds) / self._slices(cut)
        widths = widths or (_QUICK if self.is_long else WIDTHS)
        solution = solve(chain, self.usable(memory), self.host_memory, faster_than=most, widths=widths)
        return None if solution is None else Found(cut, solution, self._seconds(cut, chain, solution))

    def at_least(self, found: Found) -> float:
        """Seconds that every plan with this slicing takes."""
        if found.solution.is_exact:
            return found.seconds
        return found.solution.at_least * self._slices(found.cut) + self.profile.update_seconds

    def gap(self, found: list[Found]) -> float:
        """By which part another plan might be faster than the first of these; 0 if none is."""
        gap = found[0].seconds / min(self.at_least(one) for one in found) - 1
        return gap if gap > _ROUNDED - 1 else 0.0

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
        full = least_seconds(self.chain(cut.micro_batch), usable, self.host_memory)
        return full * self._slices(cut) + self.profile.update_seconds

    def _slices(self, cut: Cut) -> float:
        """How many whole slices take at most as long as these: time shrinks no faster than samples do."""
        return self.global_batch / cut.micro_batch * (1 - 1e-12)

    def least_memory(self) -> int | None:
        """The smallest budget for which there is a plan."""
        least = [least_memory(self.chain(cut.micro_batch), self.host_memory) for cut in self.cuts]
        known = [one for one in least if one is not None]
        return self.profile.reserve.of(min(known)) if known else None

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
        least = least_memory(self.profile.chain(micro_batch, merged=self.merges), self.host_memory)
        return least is not None and least <= self.usable(memory)


def _sorted(found: list[Found]) -> list[Found]:
    return sorted(found, key=lambda one: (one.seconds, one.cut.k_steps))
