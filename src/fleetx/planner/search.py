"""From a profile and budgets to a plan: the loop over micro-batch × merge around the solver. Pure; no device."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeVar

from fleetx.planner.chain import Chain, State, evaluate
from fleetx.planner.costs import Profile
from fleetx.planner.plan import Plan, Purchase, RunnerUp
from fleetx.planner.solve import WIDTHS, Solution, least_memory, least_seconds, solve
from fleetx.planner.table import summary
from fleetx.units import format_bytes, parse_bytes

GIB = 2**30
_RUNNERS_UP = 3
_MANY = 60  # segments, from which on only promising slicings are searched thoroughly
_QUICK, _LONG = (20,), (120, 300)  # widths of searches in long chains: of all slicings, and of the fastest
_WIDE = (120, 3000, 12000)  # and in others, of slicings that may hold something faster
_ROUNDED = 1 + 1e-9
_SHOWN = 5e-4  # the least gain that does not read as 0.0%
_FINER = 1.25  # ratio of neighbouring micro-batches among those that do not divide the global batch


class DoesNotFit(ValueError):  # noqa: N818 - it reads as what it says
    """No plan is within the budget; says the least memory that would do, and the largest batch."""

    def __init__(self, message: str, least_memory: int | None, largest_micro_batch: int) -> None:
        super().__init__(message)
        self.least_memory = least_memory
        self.largest_micro_batch = largest_micro_batch  # 0 if not even one sample fits


T = TypeVar("T")


def first_that_fits(ways: Iterable[list[str]], attempt: Callable[[list[str]], T]) -> T:
    """What `attempt` makes of the first way to cut a model that has a plan; else why the most frugal way has none."""
    failures = []
    for cuts in ways:
        try:
            return attempt(cuts)
        except DoesNotFit as error:
            failures.append(error.with_traceback(None))  # it would hold the batch
    raise min(failures, key=lambda error: math.inf if error.least_memory is None else error.least_memory)


class Words(NamedTuple):
    """What the settings are called where the question comes from: remedies speak of these."""

    memory: str = "memory"
    whole: str = "one_forward=True keeps it whole"


OF_PLAN = Words()


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


def plan_for(
    profile: Profile,
    *,
    memory: int,
    global_batch: int,
    host_memory: int | None = None,
    one_forward: bool = False,
    k_steps: int | None = None,
    even: bool = False,
    curve: bool = True,
    words: Words = OF_PLAN,
) -> Plan:
    """The fastest plan that fits: `memory` is what the device may reserve, `host_memory` what offload may use.

    `one_forward` keeps the batch whole, for losses that couple its samples. `k_steps` cuts it into so many
    micro-batches, neither more nor fewer. `even` allows only micro-batches of equal size. `curve=False` leaves out what
    other budgets would give. `words` are for messages.
    """
    whole = Cut(global_batch, 1)
    if k_steps is not None:
        k_steps = min(k_steps, global_batch)  # fewer samples than slices: one in each, as batches are cut
    one_forward = one_forward or k_steps == 1
    if one_forward:
        cuts = [whole]
    elif k_steps is not None:
        cuts = [Cut(math.ceil(global_batch / k_steps), k_steps, -global_batch % k_steps)]
    else:
        cuts = [cut for cut in cuts_of(global_batch, even=even) if cut == whole or cut.least >= profile.smallest]
    search = Search(profile, global_batch, host_memory, cuts)
    found = search.best(memory, wanted=1 + _RUNNERS_UP)
    if not found:
        raise _does_not_fit(search, memory, one_forward, k_steps, words)
    found = search.thoroughly(found, memory)
    best = found[0]
    alone = None
    if k_steps is None:
        alone = next((one for one in found if one.cut == whole), None) or search.at(whole, memory)
    chain = search.chain(best.cut.micro_batch)
    cost = evaluate(chain, best.solution.choice)
    peak = profile.reserve.of(cost.peak)
    by_kind = cost.peak_by_kind | {"allocator": peak - cost.peak}
    return Plan(
        micro_batch=best.cut.micro_batch,
        k_steps=best.cut.k_steps,
        global_batch=global_batch,
        names=tuple(stage.name for stage in chain.stages),
        states=_states(chain, best.solution),
        memory=memory,
        host_memory=host_memory,
        peak=peak,
        peak_by_kind={kind: size for kind, size in by_kind.items() if size},
        host_bytes=cost.host_bytes,
        seconds=best.seconds,
        samples_per_s=global_batch / best.seconds,
        reason=_reason(search, best, alone, found, one_forward, k_steps),
        one_forward=one_forward,
        compile=profile.compiled,
        is_exact=_gap(search, found) == 0,
        runners_up=tuple(_runner_up(search, one) for one in found[1 : 1 + _RUNNERS_UP]),
        curve=_curve(search, memory, best) if curve else (),
        timeline=cost.points,
        fixed_bytes=chain.fixed_bytes,
        device=profile.device,
        notes=_notes(profile, best, _gap(search, found), words),
    )


def _sorted(found: list[Found]) -> list[Found]:
    return sorted(found, key=lambda one: (one.seconds, one.cut.k_steps))


def _states(chain: Chain, solution: Solution) -> tuple[State, ...]:
    return tuple(stage.options[n].state for stage, n in zip(chain.stages, solution.choice, strict=True))


def _runner_up(search: Search, found: Found) -> RunnerUp:
    chain, cut = search.chain(found.cut.micro_batch), found.cut
    words = summary(_states(chain, found.solution))
    peak = search.profile.reserve.of(found.solution.peak)
    return RunnerUp(cut.micro_batch, cut.k_steps, search.global_batch / found.seconds, peak, words)


def _gap(search: Search, found: list[Found]) -> float:
    """By which part another plan might be faster than the first of these; 0 if none is."""
    gap = found[0].seconds / min(search.at_least(one) for one in found) - 1
    return gap if gap > _ROUNDED - 1 else 0.0


def _notes(profile: Profile, best: Found, gap: float, words: Words) -> tuple[str, ...]:
    notes = list(profile.notes)
    if best.cut.k_steps > 1 and profile.couples_samples:
        notes.append(f"batch norms see {best.cut.micro_batch:,} samples at a time, not the whole batch; {words.whole}.")
    if gap:
        notes.append(f"the search was cut short: a plan up to {gap:.2%} faster might exist.")
    return tuple(notes)


def _reason(
    search: Search, best: Found, alone: Found | None, found: list[Found], one_forward: bool, k_steps: int | None
) -> str:
    """Merge or one forward, and why."""
    batch, cut = f"{search.global_batch:,}", best.cut
    if one_forward:
        return f"one forward of {batch} was asked for; {_repeats(search, best)}."
    if k_steps is not None:
        return f"micro-batches of {cut.micro_batch:,} were asked for; {_repeats(search, best)}."
    if cut.k_steps == 1:
        merged = next((one for one in found if one.cut.k_steps > 1), None)
        if merged is None:
            return f"one forward; {_repeats(search, best)}."
        how_fast = _compared(merged.seconds / best.seconds - 1)
        return (
            f"one forward is {how_fast} merging {merged.cut.micro_batch:,} × {merged.cut.k_steps:,}; "
            f"{_repeats(search, best)}."
        )
    if alone is None:
        least = least_memory(search.chain(search.global_batch), search.host_memory)
        needed = "is not possible" if least is None else f"needs {_amount(search, least)}"
        return f"merged, because one forward of {batch} {needed}; {_repeats(search, best)}."
    how_fast = _compared(alone.seconds / best.seconds - 1)
    return f"merged, {how_fast} one forward of {batch}, for which {_repeats(search, alone)}."


def _compared(gain: float) -> str:
    """Nothing is "0.0% faster"."""
    return f"{gain:.1%} faster than" if gain >= _SHOWN else "as fast as"


def _amount(search: Search, least: int) -> str:
    return f"at least {format_bytes(search.profile.reserve.of(least))}"


def _repeats(search: Search, found: Found) -> str:
    states = _states(search.chain(found.cut.micro_batch), found.solution)
    again = sum(state.save != "everything" for state in states)
    away = sum(state.home == "host" for state in states)
    if not again and not away:
        return "all activations are kept"
    said = [f"{again} of {len(states)} segments are computed again"] if again else []
    return " and ".join([*said, *([f"{away} wait on the host"] if away else [])])


def _curve(search: Search, memory: int, best: Found) -> tuple[Purchase, ...]:
    """What less and more memory would give; budgets double their distance until nothing is gained any more."""
    step = GIB if memory >= 8 * GIB else max(1, memory // 8)
    gain = 0.02 if search.is_long else 0.002
    plenty = search.best(2**60, gain=gain)
    limit = plenty[0].seconds if plenty else 0.0
    bought: list[Purchase] = []
    like = best.cut
    for factor in (-4, -2, -1, 0, 1, 2, 4, 8, 16, 32, 64, 128):
        budget = memory + factor * step
        found = [best] if factor == 0 else search.best(budget, gain=gain, like=like)
        fastest = found[0] if found else None
        if fastest is not None:
            like = fastest.cut
            speed = search.global_batch / fastest.seconds
            if factor < 0:  # less memory is not faster, only searched in another way
                speed = min(speed, search.global_batch / best.seconds)
            if bought and speed < bought[-1].samples_per_s:  # a search that was cut short
                bought.append(bought[-1]._replace(memory=budget))
            else:
                bought.append(Purchase(budget, speed, fastest.cut.micro_batch, fastest.cut.k_steps))
            if factor >= 0 and fastest.seconds <= limit * 1.0005:
                break
    return tuple(bought)


def _enough(least: int) -> str:
    """An amount to write down: no less than this, in spite of rounding."""
    text, unit = format_bytes(least), 1
    while parse_bytes(text) < least:
        least += unit
        text, unit = format_bytes(least), unit * 2
    return text


def _does_not_fit(
    search: Search,
    memory: int,
    one_forward: bool,
    k_steps: int | None = None,
    words: Words = OF_PLAN,
) -> DoesNotFit:
    least, largest = search.least_memory(), search.largest_micro_batch(memory)
    whole = f"{search.global_batch:,} samples in one forward need" if one_forward else "one sample at a time needs"
    if not one_forward and (k_steps is not None or search.cuts[0].micro_batch > 1):
        whole = f"micro-batches of {search.cuts[0].micro_batch:,} samples need"
    if least is None:
        rule = "no plan is possible within this host memory"
    else:
        rule = f"{whole} at least {format_bytes(least)} on the device"
    remedies = [] if least is None else [f"give {words.memory}={_enough(least)!r} or more"]
    if one_forward and largest:
        remedies.append(f"take at most {largest:,} samples in one forward")
        if k_steps is None:
            remedies.append("leave out one_forward, so that smaller micro-batches are merged")
        else:
            remedies.append(f"merge micro-batches, with k_steps={math.ceil(search.global_batch / largest):,} or more")
    elif k_steps is not None and largest:
        remedies.append(
            f"take at most {largest:,} samples per micro-batch, by a larger k_steps "
            f"({math.ceil(search.global_batch / largest):,} or more)"
        )
    elif not one_forward:
        remedies.append("take a smaller model or shorter inputs")
    message = f"{rule}, and the budget is {format_bytes(memory)}: {', or '.join(remedies)}."
    return DoesNotFit(message, least, largest)
